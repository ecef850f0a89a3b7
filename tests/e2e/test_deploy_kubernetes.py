"""deploy/kubernetes: manifests by Kubernetes' own schemas, whose parts fit each other and refitd's settings."""

import copy
import re
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from refitd.api.health import router
from refitd.settings import Settings
from support.checkpoints import write_model
from support.kubernetes_hosts import (
    ALONE,
    FLEET,
    FOLDER,
    KUBERNETES,
    NAMES,
    RELEASES,
    WORKLOADS,
    Document,
    containers,
    documents,
    of_kind,
    pods,
    policy_of,
    refitd,
    selects,
)

EVERY = (*ALONE, *NAMES)
SECRETS = ("write", "read", "engines")
SAMPLES = KUBERNETES / "samples"


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", EVERY)
def test_every_manifest_fits_the_schemas(name: str, release: str) -> None:
    for document in documents(name):
        kubernetes_validate.validate(document, release, strict=True)


@pytest.mark.parametrize("name", EVERY)
def test_refitd_is_no_root_writes_beside_its_volumes_nowhere_and_gains_no_rights(name: str) -> None:
    pod, container = refitd(name)
    user = pod["spec"]["securityContext"] | container["securityContext"]
    assert (user["runAsNonRoot"], user["runAsUser"], user["fsGroup"]) == (True, 10001, 10001)
    assert user["readOnlyRootFilesystem"] is True
    written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert written <= {"/data", "/state", "/tmp"}  # noqa: S108
    for pod_, each in containers(name):
        assert each["securityContext"]["allowPrivilegeEscalation"] is False
        assert each["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert pod_["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod_["spec"]["automountServiceAccountToken"] is False
        assert pod_["spec"]["enableServiceLinks"] is False, "a service called refitd would set REFITD_PORT"
        assert "memory" in each["resources"]["limits"]
    added = [each["name"] for _, each in containers(name) if "add" in each["securityContext"]["capabilities"]]
    assert added == (["owner"] if name == "daemonset" else []), "who gives a folder of the node to refitd"


@pytest.mark.parametrize("name", ALONE)
def test_refitd_starts_with_these_settings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each path put where the test can have it; a name that is no setting, or a value that is none, is refused."""
    _, container = refitd(name)
    model = write_model(tmp_path / "models/model")
    places = {"/data": tmp_path, "/state": tmp_path, "/models/model": model}
    for secret in SECRETS:
        (tmp_path / secret).write_text(secret)
    for variable in container["env"]:
        if "value" in variable:
            value = variable["value"].replace("/run/secrets/refitd", str(tmp_path))
            monkeypatch.setenv(variable["name"], str(places.get(value, value)))
            assert variable["name"].removeprefix("REFITD_").lower() in Settings.model_fields
    settings = Settings()  # pyright: ignore[reportCallIssue]
    assert (settings.tokens().write, settings.tokens().read) == (("write",), ("read",))
    assert settings.engines or settings.discover
    assert container["args"] == ["serve"]


@pytest.mark.parametrize("name", ALONE)
def test_probes_ask_what_is_there(name: str) -> None:
    routes = {getattr(route, "path", None) for route in router.routes}
    for _, container in containers(name):
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe"):
            asked = container[probe]["httpGet"]
            assert asked["port"] in ports
            assert asked["path"] in (routes if container["name"] == "refitd" else {"/ping"})
    assert refitd(name)[1]["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert refitd(name)[1]["livenessProbe"]["httpGet"]["path"] == "/healthz", "a full disk is no reason for a restart"


@pytest.mark.parametrize("name", EVERY)
def test_volumes_and_claims_that_are_named_are_there(name: str) -> None:
    claims = {claim["metadata"]["name"] for of in {name, "hub"} for claim in of_kind(of, "PersistentVolumeClaim")}
    for workload in of_kind(name, *WORKLOADS):
        pod = workload["spec"]["template"]["spec"]
        templates = {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        used = {m["name"] for c in [*pod.get("initContainers", []), *pod["containers"]] for m in c["volumeMounts"]}
        assert used == volumes.keys() | templates
        named = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
        assert named <= claims


@pytest.mark.parametrize("name", ALONE)
def test_the_secret_that_is_named_is_made_by_the_command_of_the_head(name: str) -> None:
    told = (FOLDER / name / "kustomization.yaml").read_text()
    ((_, secret),) = [(v["name"], v["secret"]) for v in refitd(name)[0]["spec"]["volumes"] if "secret" in v]
    assert f"create secret generic {secret['secretName']} " in told
    assert tuple(re.findall(r"--from-literal=(\w+)=", told)) == SECRETS
    assert secret["defaultMode"] == 0o440


@pytest.mark.parametrize("name", EVERY)
def test_services_select_pods_and_ports_that_there_are(name: str) -> None:
    for service in of_kind(name, "Service"):
        chosen = [pod for pod in pods(name) if selects(pod["metadata"]["labels"], service["spec"]["selector"])]
        assert len(chosen) == 1
        ports = {port["name"] for pod, each in containers(name) if pod is chosen[0] for port in each.get("ports", [])}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


@pytest.mark.parametrize("name", ALONE)
def test_policies_select_pods_and_ports_that_there_are(name: str) -> None:
    ports = {port["name"] for _, container in containers(name) for port in container["ports"]}
    policies = of_kind(name, "NetworkPolicy")
    assert all(policy_of(name, pod) in policies for pod in pods(name))
    assert len(policies) == len(pods(name))
    for policy in policies:
        assert all(port["port"] in ports for rule in policy["spec"]["ingress"] for port in rule["ports"])
        assert all(rule["from"] for rule in policy["spec"]["ingress"])


def test_engines_read_the_root_where_refitd_has_it() -> None:
    """Else a path map would be needed; and they cannot write into it."""
    for name in ALONE:
        for pod, container in containers(name):
            if container["name"] == "sglang":
                (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == "/data"]
                assert mount["readOnly"] is True
                assert pod is not None


@pytest.mark.parametrize("name", ALONE)
def test_weights_are_changed_with_a_key_that_refitd_alone_has_beside_the_engine(name: str) -> None:
    """Pods that may ask for tokens reach the same port, and a network policy knows no routes."""
    (engine,) = [container for _, container in containers(name) if container["name"] == "sglang"]
    (key,) = [each for each in engine["env"] if each["name"] == "ADMIN_KEY"]
    assert key["valueFrom"]["secretKeyRef"] == {"name": "refitd-tokens", "key": "engines"}
    assert engine["args"][-2:] == ["--admin-api-key", "$(ADMIN_KEY)"]
    settings = {variable["name"]: variable.get("value") for variable in refitd(name)[1]["env"]}
    assert settings["REFITD_ENGINE_ADMIN_KEY_FILE"] == "/run/secrets/refitd/engines"


def sample(name: str) -> Document:
    return yaml.safe_load((SAMPLES / f"{name}.yaml").read_text())


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["owner", "models", "trainer"])
def test_every_sample_fits_the_schemas_and_the_claims_of_both_layouts(name: str, release: str) -> None:
    kubernetes_validate.validate(sample(name), release, strict=True)
    pod = sample(name)["spec"]["template"]["spec"]
    named = {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
    for layout in ALONE:
        assert named <= {claim["metadata"]["name"] for claim in of_kind(layout, "PersistentVolumeClaim")}
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("release", RELEASES)
def test_the_sample_of_a_gate_fits_the_schemas_and_asks_the_fleets_service_for_each_pods_engine(release: str) -> None:
    patch, service, policy = yaml.safe_load_all((SAMPLES / "gate.yaml").read_text())
    (engines,) = copy.deepcopy(of_kind(FLEET, "StatefulSet"))
    (mine,), (patched,) = (each["spec"]["template"]["spec"]["containers"] for each in (engines, patch))
    assert (patch["metadata"]["name"], patched["name"]) == (engines["metadata"]["name"], mine["name"])
    mine["env"] += patched["env"]
    mine["readinessProbe"] = patched["readinessProbe"]
    for document in (engines, service, policy):
        kubernetes_validate.validate(document, release, strict=True)
    assert service["spec"]["selector"] == engines["spec"]["selector"]["matchLabels"]
    (refitds,) = [each for each in of_kind(FLEET, "Service") if each["metadata"]["name"] == "refitd"]
    *_, command = patched["readinessProbe"]["exec"]["command"]
    assert f'"http://refitd:{refitds["spec"]["ports"][0]["port"]}/v1/gate?engine=$POD_IP:30000&max_behind=1"' in command
    assert {"name": "REFITD_DISCOVER", "value": "dns:sglang?port=30000"} in refitd(FLEET)[1]["env"]
    assert policy["spec"]["podSelector"] == {"matchLabels": refitds["spec"]["selector"]}


@cache
def front() -> dict[str, Document]:
    """The sample of the front for AReaL, by kind."""
    found = {each["kind"]: each for each in yaml.safe_load_all((SAMPLES / "areal.yaml").read_text())}
    assert found.keys() == {"PersistentVolumeClaim", "Service", "Deployment", "NetworkPolicy"}
    return found


def front_pod() -> tuple[Document, Document]:
    pod = front()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


@pytest.mark.parametrize("release", RELEASES)
def test_the_sample_of_the_front_fits_the_schemas_and_the_fleets_claims_and_services(release: str) -> None:
    for document in front().values():
        kubernetes_validate.validate(document, release, strict=True)
    pod, container = front_pod()
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    named = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
    claims = [*of_kind(FLEET, "PersistentVolumeClaim"), front()["PersistentVolumeClaim"]]
    assert named <= {claim["metadata"]["name"] for claim in claims}
    assert (
        f"create secret generic {volumes['front']['secret']['secretName']} --from-literal=token="
        in (SAMPLES / "areal.yaml").read_text()
    )


def test_the_fronts_user_is_not_the_services_and_writes_into_the_root_alone() -> None:
    """It has the group by which refitd may delete what it publishes, and no state."""
    pod, container = front_pod()
    user, service = pod["securityContext"], refitd(FLEET)[0]["spec"]["securityContext"]
    assert user["runAsNonRoot"] is True
    assert user["runAsUser"] not in (0, service["runAsUser"])
    assert (user["runAsGroup"], user["fsGroup"]) == (service["runAsGroup"], service["fsGroup"])
    assert container["command"] == ["sh", "-c", 'umask 002 && exec refitd front "$@"', "areal"]
    written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert written == {"/data", "/tmp"}  # noqa: S108
    contained = refitd(FLEET)[1]["securityContext"]
    assert container["securityContext"] == contained
    assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
    assert {"requests", "limits"} <= container["resources"].keys()
