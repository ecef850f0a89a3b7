"""What docker-compose.yml and deploy/Dockerfile promise to whoever runs them, read from the files."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from refitd.cli.app import Group, app
from refitd.settings import Settings
from refitd_embedded.__main__ import _parser as engine_parser
from refitd_embedded.demo.__main__ import arguments as trainer_arguments

TREE = Path(__file__).resolve().parents[2]
ENGINES = ("engine-a", "engine-b", "sglang")
FOLLOWERS = ("follower-1", "follower-2", "follower-3")
FOLLOWING = ("engine-1", "engine-2", "engine-3")
OURS = ("refitd", "model", "engine-a", "engine-b", "trainer", "front", *FOLLOWERS, *FOLLOWING, "bucket")
OBSERVERS = ("prometheus", "grafana")


@cache
def services() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((TREE / "docker-compose.yml").read_text())["services"]


@cache
def stages() -> dict[str, str]:
    """The text of each stage of the Dockerfile, preceded by that of the stages it is built from: what holds in it."""
    text = re.sub(r"^#.*\n", "", (TREE / "deploy/Dockerfile").read_text(), flags=re.MULTILINE)
    found: dict[str, str] = {}
    for base, name, body in re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL):
        found[name] = found.get(base, f"FROM {base}\n") + body
    return found


def image(service: str) -> str:
    """The text of what the service's image is made by."""
    name = services()[service]["image"]
    (build,) = [other["build"] for other in services().values() if other.get("image") == name and "build" in other]
    return stages()[build["target"]]


def volumes(service: str) -> dict[str, tuple[str, str]]:
    """The mounts of a service: target to (source, mode)."""
    place = r"(\$\{[^}]*\}|[^:]+)"
    said = services()[service].get("volumes", [])
    mounts = [re.fullmatch(rf"{place}:{place}(?::(\w+))?", line) for line in said]
    assert all(mounts), said
    return {mount[2]: (mount[1], mount[3] or "rw") for mount in mounts if mount}


@pytest.mark.parametrize("name", [*OURS, *OBSERVERS])
def test_no_container_of_ours_can_write_beside_its_volumes_or_gain_rights(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert [mount.partition(":")[0] for mount in service["tmpfs"]] == ["/tmp"]  # noqa: S108
    assert not {"privileged", "user", "cap_add", "pid", "ipc"} & service.keys()


@pytest.mark.parametrize("name", OURS)
def test_every_image_runs_as_a_user_with_a_fixed_number_that_is_not_root(name: str) -> None:
    users = re.findall(r"^USER (.+)$", image(name), re.MULTILINE)
    assert users == ["10001:10001"]


@pytest.mark.parametrize("name", OURS)
def test_the_folders_that_volumes_are_mounted_on_belong_to_that_user_in_the_image(name: str) -> None:
    text = image(name)
    made = {folder for line in re.findall(r"install -d -o refitd -g refitd -m \d+ (.+?)(?: \\)?$", text, re.MULTILINE)
            for folder in line.split()}  # fmt: skip
    beside = {target for target, (source, mode) in volumes(name).items() if (source, mode) == (target, "ro")}
    assert volumes(name).keys() - beside <= made, "what lies beside is a folder of the host's, under its own name"


@pytest.mark.parametrize("name", OURS)
def test_an_image_of_ours_is_built_here_and_never_pulled_from_someone_who_took_its_name(name: str) -> None:
    service = services()[name]
    assert service["pull_policy"] == ("build" if "build" in service else "never")


def test_no_port_is_open_to_other_machines() -> None:
    published = [port for service in services().values() for port in service.get("ports", [])]
    assert published
    for port in published:
        assert re.fullmatch(r"127\.0\.0\.1:\$\{\w+:-\d+\}:\d+", port), f"{port}: loopback, from a variable"
    assert all(service.get("network_mode") != "host" for service in services().values())


def test_the_sidecars_environment_names_settings_that_exist() -> None:
    in_image = re.findall(r"REFITD_(\w+)=", stages()["service"])
    in_compose = [name.removeprefix("REFITD_") for name in services()["refitd"]["environment"]]
    assert {name.lower() for name in (*in_image, *in_compose)} <= Settings.model_fields.keys()


@pytest.mark.parametrize("name", ENGINES)
def test_engines_cannot_write_into_the_shared_root_or_the_model(name: str) -> None:
    mounts = volumes(name)
    assert mounts["/data"] == (volumes("refitd")["/data"][0], "ro")
    assert mounts["/model"][1] == "ro"


def test_the_sidecar_and_the_trainer_can_write_into_the_shared_root_where_the_engines_see_it() -> None:
    assert volumes("refitd")["/data"] == volumes("trainer")["/data"]
    assert volumes("refitd")["/data"][1] == "rw"


def test_the_trainers_command_names_this_stack() -> None:
    module, *words = services()["trainer"]["command"]
    assert module == "refitd_embedded.demo"
    trainer = trainer_arguments(words)
    assert trainer.service_url == "http://refitd:8700"
    assert ",".join(trainer.engines) in services()["refitd"]["environment"]["REFITD_ENGINES"]
    assert str(trainer.root) in volumes("trainer")
    assert engine_parser().parse_args(services()["engine-a"]["command"][1:]).model_path == trainer.model


def test_every_named_volume_is_declared() -> None:
    text = (TREE / "docker-compose.yml").read_text()
    sources = {
        re.sub(r"\$\{\w+:-([\w/]+)\}", r"\1", source) for name in services() for source, _ in volumes(name).values()
    }
    named = {source for source in sources if not source.startswith(("./", "/"))}
    assert named == yaml.safe_load(text)["volumes"].keys()


def test_the_front_waits_behind_a_profile_of_its_own_with_a_command_that_refitd_takes() -> None:
    assert [name for name, service in services().items() if service.get("profiles") == ["front"]] == ["front"]
    front = services()["front"]
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in front["command"]]
    command = get_command(app)
    assert isinstance(command, Group)
    given = command.get_command(None, words[0]).make_context("front", words[1:]).params
    assert (given["listen"], given["service"]) == ("0.0.0.0:8701", "http://refitd:8700")
    assert front["ports"] == ["127.0.0.1:${FRONT_PORT:-8701}:8701"]
    assert ":8701/ping" in front["healthcheck"]["test"][-1]
    assert "REFITD_FRONT_TOKEN" in front["environment"], "it listens beyond its own loopback"
    assert given["checkpoints"] == [Path("/tmp/checkpoints")]  # noqa: S108 - a default for a demo
    assert front["environment"]["REFITD_TOKEN"] == services()["refitd"]["environment"]["REFITD_TOKEN"]


@pytest.mark.parametrize("name", FOLLOWERS)
def test_a_follower_has_settings_that_exist_and_a_root_that_its_engine_alone_sees(name: str) -> None:
    service = services()[name]
    settings = {key.removeprefix("REFITD_").lower() for key in service["environment"] if key.startswith("REFITD_")}
    assert settings <= Settings.model_fields.keys()
    root, engine = volumes(name)["/data"][0], volumes(name.replace("follower", "engine"))["/data"]
    assert engine == (root, "ro")
    assert volumes(name)["/model"] == ("model", "ro"), "versions are held against the model that its engine starts on"
    assert [other for other in services() if root in {source for source, _ in volumes(other).values()}] == [
        name,
        name.replace("follower", "engine"),
    ]
