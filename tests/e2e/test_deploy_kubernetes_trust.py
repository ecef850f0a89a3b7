"""deploy/kubernetes/hosts: who has which token, which certificates there are, and the components mtls and monitor."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from support.kubernetes_hosts import (
    FOLDER,
    FOLLOWERS,
    HUBS,
    KUBERNETES,
    NAMES,
    documents,
    names_of,
    of_kind,
    refitd,
    selects,
    settings_of,
    tls_of,
)
from support.kustomize import overlay


def test_each_side_has_the_tokens_of_its_role_and_no_other() -> None:
    trainer = yaml.safe_load((KUBERNETES / "samples/trainer.yaml").read_text())["spec"]["template"]
    held: dict[str, set[str]] = {}
    for name, pod in (*((name, refitd(name)[0]) for name in NAMES), ("trainer", trainer)):
        (tokens,) = [each["secret"] for each in pod["spec"]["volumes"] if each["name"] == "tokens"]
        assert tokens["secretName"] == "refitd-tokens"
        held[name] = {item["key"] for item in tokens["items"]}
    hub, follower = {"write", "read", "followers"}, {"hosts", "read", "follow", "engines"}
    assert held == dict.fromkeys(HUBS, hub) | dict.fromkeys(FOLLOWERS, follower) | {"trainer": {"write"}}
    told = (FOLDER / "hub/kustomization.yaml").read_text()
    assert set(re.findall(r"--from-literal=(\w+)=", told)) == hub | follower
    assert '--from-literal=follow="$follow" --from-literal=followers="*:$follow"' in told


@pytest.mark.parametrize("name", ["hub-postgres"])
def test_each_pod_says_a_name_by_which_the_others_reach_it_and_which_its_certificate_has(
    name: str, tmp_path: Path
) -> None:
    """A pod's address is known at its start alone, and no certificate has it."""
    (tmp_path / "refitd").write_text('#!/bin/sh\necho "$REFITD_ADVERTISE $*"\n')
    (tmp_path / "refitd").chmod(0o755)
    for address, dashed in (("10.0.0.7", "10-0-0-7"), ("fd00::7", "fd00--7")):
        said = subprocess.run(
            [word.replace("$$", "$") for word in refitd(name)[1]["command"]] + refitd(name)[1]["args"],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "POD_IP": address},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert said == f"https://{dashed}.hubs.refitd.svc:8700 serve\n"
        assert "*.hubs.refitd.svc" in names_of(tls_of(name))
        (headless,) = [each for each in of_kind(name, "Service") if each["metadata"]["name"] == "hubs"]
        assert headless["spec"]["clusterIP"] == "None"
        assert headless["spec"]["publishNotReadyAddresses"] is True
        assert headless["spec"]["ports"][0]["port"] == 8700
        assert selects(refitd(name)[0]["metadata"]["labels"], headless["spec"]["selector"])


def test_the_certificates_of_both_ways_have_the_names_that_services_are_called_by(tmp_path: Path) -> None:
    """By cert-manager, and by the command of the hub's head, which is run here."""
    head = re.sub(r"^# *", "", (FOLDER / "hub/kustomization.yaml").read_text(), flags=re.MULTILINE)
    (words,) = re.findall(r"^deploy/make-certificates tls (.*\\\n.*?) +# ", head, re.MULTILINE)
    for _ in range(2):  # the second time with the authority that is there
        command = f"{KUBERNETES.parent / 'make-certificates'} tls {words}"
        subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    for secret in ("refitd-hub-tls", "refitd-host-tls", "refitd-client-tls"):
        file = tmp_path / "tls" / f"{secret.split('-')[1]}.crt"
        checked = subprocess.run(
            ["openssl", "verify", "-CAfile", tmp_path / "tls/ca.crt", file], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert file.with_suffix(".key").stat().st_mode & 0o077 == 0
        shown = subprocess.run(
            ["openssl", "x509", "-in", file, "-noout", "-ext", "subjectAltName"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert re.findall(r"(?:DNS|IP Address):([^,\s]+)", shown) == names_of(secret)
    (upstream,) = {re.sub(r"^https://|:\d+$", "", settings_of(name)["REFITD_FOLLOW"]) for name in FOLLOWERS}
    assert upstream in names_of(tls_of("hub"))
    for name in NAMES:
        assert "127.0.0.1" in names_of(tls_of(name)), "which doctor calls, in the pod"


@pytest.mark.parametrize("follower", FOLLOWERS)
@pytest.mark.parametrize("hub", HUBS)
def test_with_the_component_mtls_hub_and_followers_want_a_certificate_and_show_theirs(hub: str, follower: str) -> None:
    names = [f"../{name}" for name in (hub, follower)]
    with_it, without = (overlay(FOLDER / "mtls", names, components) for components in (["../mtls"], []))
    changed = [(one, other) for one, other in zip(with_it, without, strict=True) if one != other]
    assert len(changed) == 2
    for one, other in changed:
        ((ours, before),) = [
            pair
            for kind in ("initContainers", "containers")
            for pair in zip(*(each["spec"]["template"]["spec"].get(kind, []) for each in (one, other)), strict=True)
            if pair[0] != pair[1]
        ]
        assert ours["name"] == "refitd"
        (added,) = [each for each in ours["env"] if each not in before["env"]]
        settings = {each["name"]: each.get("value") for each in ours["env"]}
        assert added == {"name": "REFITD_TLS_CLIENT_CA", "value": "/run/secrets/tls/ca.crt"}
        assert settings.get("REFITD_CLIENT_CERT") in {None, settings["REFITD_TLS_CERT"]}


@pytest.mark.parametrize("name", NAMES)
def test_the_pod_monitor_finds_hub_and_followers_at_their_port_and_trusts_their_certificates(name: str) -> None:
    """Its schema is the operator's own (monitoring.coreos.com/v1), which Kubernetes' schemas do not have."""
    (monitor,) = overlay(FOLDER / "monitor", [], ["../monitor"])
    (chosen,) = monitor["spec"]["selector"]["matchExpressions"]
    pod, container = refitd(name)
    assert chosen["operator"] == "In"
    assert pod["metadata"]["labels"][chosen["key"]] in chosen["values"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert [port["containerPort"] for port in container["ports"]] == [endpoint["portNumber"]]
    (tokens,) = [each["secret"] for each in pod["spec"]["volumes"] if each["name"] == "tokens"]
    assert endpoint["authorization"]["credentials"]["name"] == tokens["secretName"]
    (job,) = yaml.safe_load((KUBERNETES.parent / "prometheus/kubernetes-hosts.yml").read_text())["scrape_configs"]
    assert endpoint["scheme"] == job["scheme"] == "https"
    assert endpoint["tlsConfig"]["serverName"] == job["tls_config"]["server_name"]
    assert endpoint["tlsConfig"]["serverName"] in names_of(tls_of(name))
    assert not of_kind(name, "PodMonitor"), "a cluster without the operator would refuse the layout"
    assert "prometheus.io" not in json.dumps(documents(name)), "annotations bring no token"
