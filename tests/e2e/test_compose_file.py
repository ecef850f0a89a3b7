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
from refitd_embedded.demo.policy import main as write_model

TREE = Path(__file__).resolve().parents[2]
ENGINES = ("engine-a", "engine-b", "sglang")
FOLLOWERS = ("follower-1", "follower-2", "follower-3")
FOLLOWING = ("engine-1", "engine-2", "engine-3")
STOCK = ("postgres", "s3")
OURS = ("refitd", "model", "engine-a", "engine-b", "trainer", "areal", *FOLLOWERS, *FOLLOWING, "bucket")
LONG_RUNNING = ("refitd", "areal", *ENGINES, *FOLLOWERS, *FOLLOWING)
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


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_what_keeps_running_has_a_health_check_that_needs_nothing_but_python(name: str) -> None:
    service = services()[name]
    check = service.get("healthcheck", {}).get("test") or re.findall(
        r'^HEALTHCHECK .*?CMD \["(python)", "-c", ', image(name), re.MULTILINE | re.DOTALL
    )
    assert any(word.startswith("python") for word in check)
    assert "disable" not in service.get("healthcheck", {})


def test_no_port_is_open_to_other_machines() -> None:
    published = [port for service in services().values() for port in service.get("ports", [])]
    assert published
    for port in published:
        assert re.fullmatch(r"127\.0\.0\.1:\$\{\w+:-\d+\}:\d+", port), f"{port}: loopback, from a variable"
    assert all(service.get("network_mode") != "host" for service in services().values())


def test_the_sidecar_has_a_token_since_it_listens_beyond_its_own_loopback() -> None:
    environment = services()["refitd"]["environment"]
    assert environment["REFITD_HOST"] == "0.0.0.0"  # noqa: S104
    assert environment["REFITD_TOKEN"] == services()["trainer"]["environment"]["REFITD_TOKEN"]
    assert re.fullmatch(r"\$\{REFITD_TOKEN:-.+\}", environment["REFITD_TOKEN"])


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


def test_a_service_whose_neighbour_is_not_ready_is_started_again() -> None:
    assert {service["restart"].partition(":")[0] for service in services().values()} == {"on-failure"}


def test_images_of_others_have_a_tag_that_stays_and_kubernetes_names_the_same_sglang() -> None:
    named = {name: service["image"] for name, service in services().items() if name not in OURS}
    tags = {name: re.fullmatch(r"\$\{\w+_IMAGE:-([\w./-]+):v?(\d+\.\d+[\w.]*)\}", text) for name, text in named.items()}
    assert all(tags.values()), named
    assert tags["sglang"] is not None
    found = [yaml.safe_load(path.read_text()) for path in (TREE / "deploy/kubernetes").rglob("kustomization.yaml")]
    images = [image for each in found for image in each.get("images", [])]  # some only add to what others deploy
    engines = {image["newTag"] for image in images if image["name"] == "sglang"}
    assert engines == {f"v{tags['sglang'][2]}"}


def test_a_real_engine_waits_behind_a_profile_and_never_downloads() -> None:
    assert [name for name, service in services().items() if service.get("profiles") == ["sglang"]] == ["sglang"]
    sglang = services()["sglang"]
    assert sglang["environment"]["HF_HUB_OFFLINE"] == "1"
    assert sglang["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


@pytest.mark.parametrize("name", ["engine-a", "engine-b", *FOLLOWING])
def test_the_engines_command_is_one_that_the_engine_takes(name: str) -> None:
    module, *words = services()[name]["command"]
    assert module == "refitd_embedded"
    engine = engine_parser().parse_args(words)
    assert engine.host == "0.0.0.0"  # noqa: S104
    owner = name.replace("engine", "follower") if name in FOLLOWING else "refitd"
    assert f"http://{name}:{engine.port}" in services()[owner]["environment"]["REFITD_ENGINES"]
    assert f"127.0.0.1:{engine.port}/" in services()[name]["healthcheck"]["test"][-1]


@pytest.mark.parametrize("name", ["engine-a", "engine-b", *FOLLOWING])
def test_an_engine_waits_for_its_model_itself_and_then_is_the_process_that_signals_reach(name: str) -> None:
    service = services()[name]
    model = engine_parser().parse_args(service["command"][1:]).model_path
    *shell, script, _ = service["entrypoint"]
    assert shell == ["sh", "-c"]
    assert script == f'until [ -e {model}/config.json ]; do sleep 0.2; done; exec python -m "$$@"'
    assert "depends_on" not in service


def test_the_trainers_command_names_this_stack() -> None:
    module, *words = services()["trainer"]["command"]
    assert module == "refitd_embedded.demo"
    trainer = trainer_arguments(words)
    assert trainer.service_url == "http://refitd:8700"
    assert ",".join(trainer.engines) in services()["refitd"]["environment"]["REFITD_ENGINES"]
    assert str(trainer.root) in volumes("trainer")
    assert "${REFITD_PORT:-8700}" in trainer.then, "what to try next is on this machine, not in the container"
    assert "docker-compose.yml" in trainer.then
    assert engine_parser().parse_args(services()["engine-a"]["command"][1:]).model_path == trainer.model


def test_the_model_that_engines_and_trainer_start_on_is_written_where_they_look_for_it(tmp_path: Path) -> None:
    module, *words = services()["model"]["command"]
    assert module == "refitd_embedded.demo.policy"
    place = str(trainer_arguments(services()["trainer"]["command"][1:]).model)
    assert [word for word in words if place in word]
    assert write_model([word.replace(place, str(tmp_path)) for word in words]) == 0
    assert (tmp_path / "config.json").exists()


def test_every_named_volume_is_declared() -> None:
    text = (TREE / "docker-compose.yml").read_text()
    sources = {
        re.sub(r"\$\{\w+:-([\w/]+)\}", r"\1", source) for name in services() for source, _ in volumes(name).values()
    }
    named = {source for source in sources if not source.startswith(("./", "/"))}
    assert named == yaml.safe_load(text)["volumes"].keys()


def test_areal_s_facade_waits_behind_a_profile_of_its_own_with_a_command_that_refitd_takes() -> None:
    assert [name for name, service in services().items() if service.get("profiles") == ["areal"]] == ["areal"]
    facade = services()["areal"]
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in facade["command"]]
    command = get_command(app)
    assert isinstance(command, Group)
    given = command.commands[words[0]].make_context("areal", words[1:]).params
    assert (given["host"], given["url"]) == ("0.0.0.0", "http://refitd:8700")  # noqa: S104
    assert given["engine"] == ["http://sglang:30000=31000"]
    assert facade["ports"] == ["127.0.0.1:${AREAL_PORT:-31000}:31000"]
    assert ":31000/ping" in facade["healthcheck"]["test"][-1]
    assert "REFITD_FACADE_TOKEN" in facade["environment"], "it listens beyond its own loopback"
    assert given["checkpoints"] == Path("/tmp/areal")  # noqa: S108 - AReaL's default
    assert facade["environment"]["REFITD_TOKEN"] == services()["refitd"]["environment"]["REFITD_TOKEN"]


def test_areal_s_facade_publishes_into_the_root_and_finds_checkpoints_where_areal_says_they_are() -> None:
    mounts = volumes("areal")
    assert mounts["/data"] == volumes("refitd")["/data"]
    (files,) = mounts.keys() - {"/data"}
    assert mounts[files] == (files, "ro"), "AReaL names a folder, and deletes it itself"


def test_many_hosts_wait_behind_a_profile_of_their_own() -> None:
    waiting = {name for name, service in services().items() if service.get("profiles") == ["hosts"]}
    assert waiting == {*FOLLOWERS, *FOLLOWING, *STOCK, "bucket"}
    for name in (*STOCK, "bucket"):
        assert "ports" not in services()[name], "open to the stack's own network alone"


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


def test_a_follower_has_the_hub_s_token_in_a_file_in_memory() -> None:
    for name in FOLLOWERS:
        service = services()[name]
        assert service["environment"]["REFITD_TOKEN"] == services()["refitd"]["environment"]["REFITD_TOKEN"]
        (file,) = re.findall(
            r'\(umask 077 && printf %s "\$\$REFITD_TOKEN" > (\S+)\) && exec refitd serve$', service["entrypoint"][-1]
        )
        assert service["environment"]["REFITD_FOLLOW_TOKEN_FILE"] == file
        assert file.startswith("/tmp/")  # noqa: S108


def test_the_third_follower_follows_the_store_that_the_second_one_pushes_into() -> None:
    one, two, three = (services()[name]["environment"] for name in FOLLOWERS)
    assert one["REFITD_FOLLOW"] == two["REFITD_FOLLOW"] == "http://refitd:8700"
    assert two["REFITD_PUSH"] == three["REFITD_FOLLOW"]
    bucket = re.findall(r"^s3://(\w+)/", two["REFITD_PUSH"])
    assert re.findall(rf"'{two['AWS_ENDPOINT_URL']}/(\w+)'", services()["bucket"]["command"][0]) == bucket
    assert [two[key] == three[key] for key in two if key.startswith("AWS_")] == [True] * 5


def test_the_hub_s_journal_is_in_postgres_by_the_url_that_the_head_says() -> None:
    (url,) = re.findall(r"^#   REFITD_STATE=(\S+) ", (TREE / "docker-compose.yml").read_text(), re.MULTILINE)
    made = services()["postgres"]["environment"]
    assert url == f"postgresql://{made['POSTGRES_USER']}:{made['POSTGRES_PASSWORD']}@postgres/{made['POSTGRES_DB']}"
    assert services()["refitd"]["environment"]["REFITD_STATE"] == "${REFITD_STATE:-/state}"


def test_prometheus_and_grafana_wait_behind_a_profile_of_their_own() -> None:
    assert [name for name, service in services().items() if service.get("profiles") == ["observe"]] == [*OBSERVERS]


def test_what_the_observers_mount_from_here_is_there_and_where_they_look_for_it() -> None:
    for name in OBSERVERS:
        for target, (source, mode) in volumes(name).items():
            if source.startswith("./"):
                assert (TREE / source).exists(), f"{name} mounts {source} on {target}"
                assert mode == "ro"
    (provider,) = provisioned("dashboards/refitd.yml")["providers"]
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(provider["options"]["path"])
    assert home in volumes("grafana")
    assert f"--config.file={next(iter(volumes('prometheus')))}" in services()["prometheus"]["command"]


def test_grafana_asks_prometheus_and_prometheus_asks_the_sidecar() -> None:
    (source,) = provisioned("datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    scraped = yaml.safe_load((TREE / "deploy/prometheus/prometheus.yml").read_text())
    (job,) = scraped["scrape_configs"]
    assert job["job_name"] == "refitd"
    assert job["static_configs"] == [{"targets": ["refitd:8700"]}]
    assert set(scraped["rule_files"]) <= volumes("prometheus").keys()


def provisioned(name: str) -> dict[str, Any]:
    return yaml.safe_load((TREE / "deploy/grafana/provisioning" / name).read_text())


def test_the_sidecars_image_has_no_torch() -> None:
    assert "--from=build-service" in stages()["service"]
    assert "torch" not in stages()["build-service"]
    assert " -r deploy/locks/service.txt\n" in stages()["build-service"]


@pytest.mark.parametrize("name", ["refitd", "model"])
def test_the_image_that_ours_begin_with_can_be_named_by_its_digest(name: str) -> None:
    default = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", (TREE / "deploy/Dockerfile").read_text(), re.MULTILINE)
    assert [services()[name]["build"]["args"]] == [{"PYTHON_IMAGE": f"${{PYTHON_IMAGE:-{tag}}}"} for tag in default]
