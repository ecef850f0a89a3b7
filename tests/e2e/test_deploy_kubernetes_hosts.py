"""deploy/kubernetes/hosts: a hub, alone or as a group, and followers beside their engines or on their nodes."""

import re
from pathlib import Path

import pytest
import yaml

from refitd.api.health import router
from refitd.settings import Settings
from support.checkpoints import write_model
from support.kubernetes_hosts import (
    FOLDER,
    FOLLOWERS,
    HUBS,
    KUBERNETES,
    NAMES,
    Document,
    admitted,
    containers,
    pods,
    policy_of,
    refitd,
    settings_of,
)


@pytest.mark.parametrize("name", NAMES)
def test_every_file_of_a_layout_is_named_and_every_image_has_a_registry_and_a_tag(name: str) -> None:
    said = yaml.safe_load((FOLDER / name / "kustomization.yaml").read_text())
    named = {*said["resources"], *(patch["path"] for patch in said.get("patches", []) if "path" in patch)}
    assert {path.name for path in (FOLDER / name).iterdir()} - {"kustomization.yaml"} == named - {"../hub"}
    for _, container in containers(name):
        assert re.fullmatch(r"[\w.-]+\.[\w./-]+:v?\d+\.\d+\.\d+", container["image"])


@pytest.mark.parametrize("name", NAMES)
def test_refitd_of_many_hosts_starts_with_these_settings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"/data": tmp_path, "/state": tmp_path, "/models/model": write_model(tmp_path / "models/model")}
    (tokens,) = [each["secret"] for each in refitd(name)[0]["spec"]["volumes"] if each["name"] == "tokens"]
    for item in tokens["items"]:
        (tmp_path / item["path"]).write_text(item["key"])
    values = {"$(POD_IP)": "10.0.0.7", "$(POD_NAME)": "pod", "$(NODE_NAME)": "node"}
    for variable, value in settings_of(name).items():
        text = value.replace("/run/secrets/refitd", str(tmp_path))
        for word, stands_for in values.items():
            text = text.replace(word, stands_for)
        monkeypatch.setenv(variable, str(places.get(text, text)))
        assert variable == "PGPASSFILE" or variable.removeprefix("REFITD_").lower() in Settings.model_fields
    settings = Settings()  # pyright: ignore[reportCallIssue]
    assert refitd(name)[1]["args"] == ["serve"]
    assert (settings.follow == ["https://refitd:8700"]) == (name in FOLLOWERS)
    assert len(settings.engines) == (name in FOLLOWERS)
    assert settings.tls_files is not None
    assert (settings.client_tls.ca_file is not None) is (name in FOLLOWERS), "the hub calls no host"
    assert settings.tokens().read == ("read",)
    assert settings.tokens().follow == (("followers",) if name in HUBS else ())
    assert settings.tokens().write == (("write",) if name in HUBS else ("hosts",))
    assert (settings.database is not None) == (name == "hub-postgres")


@pytest.mark.parametrize("name", NAMES)
def test_secrets_are_files_and_no_variables_of_refitd(name: str) -> None:
    _, container = refitd(name)
    assert not [variable for variable in container["env"] if "secretKeyRef" in variable.get("valueFrom", {})]
    assert "REFITD_TOKEN" not in settings_of(name)
    told = "".join((FOLDER / hub / "kustomization.yaml").read_text() for hub in HUBS)
    for pod in pods(name):
        for volume in pod["spec"]["volumes"]:
            if "secret" in volume:
                secret = re.sub("refitd-(hub|host|client)-tls", "refitd-$one-tls", volume["secret"]["secretName"])
                assert f"create secret generic {secret} " in told
                assert volume["secret"]["defaultMode"] == 0o440


@pytest.mark.parametrize("name", NAMES)
def test_probes_of_refitd_ask_what_is_there(name: str) -> None:
    routes = {getattr(route, "path", None) for route in router.routes}
    _, container = refitd(name)
    ports = {port["name"] for port in container["ports"]}
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} <= ports
    assert {probe["path"] for probe in probes.values()} <= routes
    assert {probe["scheme"] for probe in probes.values()} == {"HTTPS"}
    assert probes["readiness"]["path"] == "/readyz", "only the leader of a group is ready"
    assert probes["liveness"]["path"] == "/healthz", "one that stands by is no reason for a restart"


def test_the_password_of_the_database_is_a_file_that_libpq_takes() -> None:
    pod, _ = refitd("hub-postgres")
    (first,) = pod["spec"]["initContainers"]
    *words, source, target = first["command"]
    assert words == ["install", "-m", "0600"]
    assert settings_of("hub-postgres")["PGPASSFILE"] == target
    (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == "pgpass"]
    assert volume["emptyDir"]["medium"] == "Memory"
    told = (FOLDER / "hub-postgres/kustomization.yaml").read_text()
    assert f"--from-literal={Path(source).name}=" in told
    (ca,) = re.findall(r"sslrootcert=(\S+)", settings_of("hub-postgres")["REFITD_STATE"])
    assert f"--from-file={Path(ca).name}" in told


@pytest.mark.parametrize("name", FOLLOWERS)
def test_an_engine_reads_the_root_of_its_follower_and_cannot_write_it(name: str) -> None:
    """Where both see it under one path no path map is needed."""
    roots: dict[str, tuple[Document, Document]] = {}
    for pod, container in containers(name):
        if container["name"] in {"refitd", "sglang"}:
            (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == "/data"]
            (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == mount["name"]]
            roots[container["name"]] = mount, volume
    assert roots["refitd"][1] == roots["sglang"][1]
    assert roots["sglang"][0].get("readOnly") is True
    assert not roots["refitd"][0].get("readOnly")


@pytest.mark.parametrize("follower", FOLLOWERS)
@pytest.mark.parametrize("hub", HUBS)
def test_policies_let_hub_followers_trainer_and_engines_reach_each_other(hub: str, follower: str) -> None:
    (hubs, at_hub), (follows, at_follower) = refitd(hub), refitd(follower)
    hub_port, follower_port = at_hub["ports"][0]["name"], at_follower["ports"][0]["name"]
    trainer = yaml.safe_load((KUBERNETES / "samples/trainer.yaml").read_text())["spec"]["template"]
    of_hub, of_follower = policy_of(hub, hubs), policy_of(follower, follows)
    assert hub_port in admitted(of_hub, follows) & admitted(of_hub, trainer)
    assert follower_port not in admitted(of_follower, hubs) | admitted(of_follower, follows), "nobody calls a host"
    assert follower_port not in admitted(of_follower, trainer), "a host that follows has one owner"
    assert not admitted(of_hub, follows, "egress")
    if "egress" in of_follower["spec"]:
        assert admitted(of_follower, hubs, "egress") == {8700}
    (engine,) = [pod for pod, each in containers(follower) if each["name"] == "sglang"]
    assert "http" in admitted(policy_of(follower, engine), trainer)
    if engine is not follows:
        assert "http" in admitted(policy_of(follower, engine), follows)
        assert 30000 in admitted(of_follower, engine, "egress")
