"""`refitd doctor`: what it finds, what it proves, and what it says it cannot know."""

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from pydantic import SecretStr
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from refitd.engine.http import Reply
from refitd.engine.port import Reached
from refitd.engine.registry import EngineSpec
from refitd.root.ownership import mark_root
from refitd.settings import Settings
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.plugin import ASIDE
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import Faults, Keeping
from refitd_client.http.publisher_client import root_name
from refitd_client.validation.foreign import MANIFESTS
from refitd_doctor import engines
from refitd_doctor.engines import (
    EngineAnswers,
    Sighting,
    judge_engine,
    judge_sharing,
    judge_start_up_model,
    plugin_answers,
    roster_of,
)
from refitd_doctor.finding import CheckName, CheckVerdict, Finding
from refitd_doctor.processes import Listeners, LocalProcess, is_engine
from refitd_doctor.root import Nonce, RootFacts, RootUnusableError, judge_root, look_at_root, probed
from refitd_doctor.service import (
    ask_overview,
    ask_service,
    judge_faults,
    judge_notice,
    judge_runs,
    judge_service_engines,
)
from refitd_inside.client import NO_PLUGIN
from support.checkpoints import publish, tensors, write_model
from support.command_line import refitd
from support.scripted_server import answer, problem, serve
from support.scripted_sglang import ScriptedSglang, scripted_sglang
from support.services import serving
from support.sockets import free_port
from support.stand_in_service import StandIn, make_engine, make_overview, make_run

GIB = 2**30
SPEC = EngineSpec(url="http://10.0.0.7:30000")
SEEN = Reached(
    model_path="/m", weight_version=None, server_version="0.5.23", configuration="", startup_path=None, server="SGLang"
)
NONCE = Nonce(path=".refitd/doctor-1/nonce", text="secret")


@pytest.fixture
def sglang() -> Iterator[ScriptedSglang]:
    """An engine in this very process, which refuses an update that names no model, as SGLang does."""
    with scripted_sglang() as engine:
        engine.on("/update_weights_from_disk", answer(400, {"object": "error", "message": "Field required"}))
        yield engine


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    root = tmp_path / "root"
    publish(root, "run", 1, tensors(1))
    nobody = str(free_port())  # who runs the tests may have a refitd at the port that it is found at
    return ["--root", str(root), "--state", str(tmp_path / "state"), "--port", nobody]


def examined(*flags: str, url: str | None = None) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """The exit code, and the findings by check and verdict. `url` is REFITD_URL."""
    shown = refitd("doctor", *flags, "--json", env=None if url is None else {"REFITD_URL": url})
    findings = msgspec.json.decode(shown.stdout)["findings"]
    return shown.exit_code, {(finding["check"], finding["verdict"]): finding for finding in findings}


def test_a_job_that_is_well_has_nothing_to_do(job: list[str], sglang: ScriptedSglang) -> None:
    code, found = examined(*job, "--engine", sglang.url)
    assert code == 0, found
    for check in ("root", "space", "journal", "engines", "plugin"):
        assert (check, "ok") in found, found
    assert found["service", "warning"]["text"].startswith("no service runs on this root")
    assert found["service", "warning"]["fix"] == f"'refitd serve --root {job[1]}' starts one"
    assert not [verdict for _, verdict in found if verdict == "failed"]
    assert not list(Path(job[1]).glob(".refitd/doctor-*")), "what it wrote is gone"
    shown = refitd("doctor", *job, "--engine", sglang.url).stdout
    assert "engines" in shown
    assert found["engines", "ok"]["text"].endswith("; the key opens changes")


def test_a_variable_that_is_nearly_a_setting_s_is_a_warning(job: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFITD_KEEPLAST", "4")
    _, found = examined(*job)
    assert found["settings", "warning"]["subject"] == "REFITD_KEEPLAST"


def test_two_names_of_one_engine_are_found(job: list[str], sglang: ScriptedSglang) -> None:
    other = sglang.url.replace("127.0.0.1", "localhost")
    assert other != sglang.url
    result = refitd("doctor", *job, "--engine", sglang.url, "--engine", other)
    assert result.exit_code != 0
    assert "are one server" in result.stdout


def test_who_merely_listens_on_the_port_is_not_taken_for_the_engine(job: list[str], sglang: ScriptedSglang) -> None:
    """Here a test; elsewhere the end of a tunnel, which sees this host's root and not the engine's."""
    _, found = examined(*job, "--engine", sglang.url)
    assert ("files", "unknown") in found


@pytest.mark.parametrize(
    ("command", "is_one"),
    [
        ("/venv/bin/python3.12 -m sglang.launch_server --port 30000", True),
        ("python -X dev -u -m sglang.launch_server", True),
        ("/usr/bin/python3 /opt/venv/bin/sglang serve --model-path /m", True),
        ("sglang::tokenizer_worker:77", True),
        ("python -m refitd_embedded --port 1", True),
        ("ssh -L 30000:localhost:30000 sglang", False),
        ("kubectl port-forward svc/sglang 30000", False),
        ("/usr/bin/docker-proxy -proto tcp -host-port 30000", False),
        ("python -m refitd areal --root /mnt/sglang", False),
        ("python train.py -m sglang.launch_server", False),
        ("python -m sglang_router.launch_router", False),
        ("", False),
    ],
)
def test_an_engine_s_process_was_started_as_one(command: str, is_one: bool) -> None:
    assert is_engine(command.split()) is is_one


def test_an_engines_file_that_is_missing_is_no_fault_of_the_root(job: list[str], tmp_path: Path) -> None:
    shown = refitd("doctor", *job, "--engines-file", str(tmp_path / "nowhere.yaml"), "--json")
    assert shown.exit_code != 0
    assert "nowhere.yaml" in shown.stdout
    assert "cannot be written" not in shown.stdout


def test_places_are_asked_before_a_service_ever_looked(job: list[str], sglang: ScriptedSglang, tmp_path: Path) -> None:
    entry = tmp_path / "trial/gen_servers/1/ENTRY"
    entry.parent.mkdir(parents=True)
    entry.write_text(sglang.url.removeprefix("http://"))
    _, found = examined(*job, "--discover", f"areal:{tmp_path / 'trial'}")
    assert ("engines", "ok") in found
    assert ("engines", "ok") in found
    _, found = examined(*job, "--discover", f"areal:{tmp_path / 'nowhere'}")
    assert ("engines", "failed") in found


async def test_keys_do_not_go_to_a_host_that_only_the_dns_names() -> None:
    settings = Settings(root=Path("/root"), engines=["http://10.0.0.1:1"])
    roster = roster_of(settings, {}, {"http://10.0.0.2:1"})
    assert sorted(roster.specs) == ["10.0.0.1:1", "10.0.0.2:1"]
    assert roster.guard("10.0.0.1", ip_address("10.0.0.1")) is None
    assert "--engine-allow" in (roster.guard("10.0.0.2", ip_address("10.0.0.2")) or "")
    allowing = Settings(root=Path("/root"), engine_allow=["10.0.0.2"])
    assert roster_of(allowing, {}, {"http://10.0.0.2:1"}).guard("10.0.0.2", ip_address("10.0.0.2")) is None


@pytest.mark.parametrize(
    ("status", "verdict"), [(422, "ok"), (400, "ok"), (401, "failed"), (403, "failed"), (404, "failed")]
)
async def test_the_running_service_is_asked_whether_it_takes_the_token(status: int, verdict: str) -> None:
    with serve(answer(status, {})) as service:
        settings = Settings(root=Path("/root"), token=SecretStr("a-token-long-enough"))
        assert judge_notice(service.url, await ask_service(settings, service.url)).verdict == verdict
    assert [seen.headers["authorization"] for seen in service.seen] == ["Bearer a-token-long-enough"]
    assert judge_notice(service.url, await ask_service(settings, service.url)).verdict == "unknown"


async def test_a_service_that_follows_an_upstream_takes_no_notices_and_nothing_is_wrong_with_that() -> None:
    with serve(problem(409, "run-followed", "its versions come from http://hub")) as service:
        found = judge_notice(service.url, await ask_service(Settings(root=Path("/root")), service.url))
    assert (found.verdict, "follows an upstream" in found.text) == ("ok", True)


@pytest.mark.parametrize("way", ["variable", "flag"])
def test_the_service_is_asked_where_the_other_commands_find_it(job: list[str], way: str) -> None:
    root = job[:4]
    with serve(answer(401, {})) as service:
        url = service.url.replace("127.0.0.1", "localhost")
        if way == "variable":
            _, found = examined(*root, url=url)
        else:
            _, found = examined(*job, "--url", url, url="http://127.0.0.1:1")
    assert found["service", "failed"]["subject"] == url
    assert {seen.path for seen in service.seen} == {"/v1/versions", "/v1/overview"}


def test_an_address_that_is_typed_stands_above_the_variable(job: list[str]) -> None:
    with serve(answer(401, {})) as service:
        examined(*job, url=service.url)
    assert service.seen == []


def test_a_service_that_cannot_be_reached_is_named_as_the_service_with_its_url(job: list[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    code, found = examined(*job[:4], url=url)
    assert code == 0
    told = found["service", "unknown"]
    assert told["subject"] == url
    assert told["text"] == (
        f"the service does not answer: {url} cannot be reached: connection refused (is the service running there?)"
    )
    assert told["fix"] == "start it with 'refitd serve', or name its address: --url or REFITD_URL, or --host and --port"


def test_a_url_that_is_none_is_wrong_usage(job: list[str]) -> None:
    result = refitd("doctor", *job, "--url", "ftp://x")
    assert result.exit_code == 2
    assert "names no HTTP service" in result.stderr


@pytest.mark.parametrize(
    ("version", "configuration", "said"),
    [
        (
            "0.5.23",
            "sglang 0.5.23 cuda bfloat16 unquantized tp1 None None None",
            "0.5.23, cuda bfloat16 unquantized tp1",
        ),
        ("", "sglang  None ? unquantized tp1 None", "of an unknown release, unquantized tp1"),
    ],
)
def test_what_an_engine_does_not_tell_is_left_out(version: str, configuration: str, said: str) -> None:
    seen = replace(SEEN, server_version=version, configuration=configuration)
    found = {each.check: each for each in judge_engine(EngineAnswers(name="e", spec=SPEC, root="/mnt", seen=seen))}
    assert found[CheckName.ENGINES].text == f"SGLang {said}"


async def test_the_running_service_says_the_state_of_each_engine_and_who_carries_out_its_loads(tmp_path: Path) -> None:
    engines = [
        make_engine("a", plugin="0.1.0"),
        make_engine("b", state=EngineState.UNREACHABLE, reason="connection refused", stock_reason=NO_PLUGIN),
        make_engine("c", state=EngineState.TAINTED, version=None, step=None),
        make_engine("d", state=EngineState.PROBING, run=None),
        make_engine("e", state=EngineState.CONTESTED, reason="another writer loads /other/v1 as '1'"),
    ]
    overview = msgspec.to_builtins(make_overview(StandIn(engines=engines)))
    with serve(answer(200, overview)) as service:
        (tmp_path / "read").write_text("a-token-to-look")
        tokens: dict[str, Any] = {"token": SecretStr("a-token-to-change"), "read_token_file": tmp_path / "read"}
        told = await ask_overview(Settings(root=Path("/root"), **tokens), service.url)
    assert [(seen.path, seen.headers["authorization"]) for seen in service.seen] == [
        ("/v1/overview", "Bearer a-token-to-look")
    ]
    assert not isinstance(told, Finding)
    found = {finding.subject: (finding.verdict, finding.text) for finding in judge_service_engines(told.engines)}
    assert found == {
        "a": (
            CheckVerdict.OK,
            "the service says IN_SYNC; it follows run exp and is on exp~v000002; "
            "refitd's plugin 0.1.0 carries out its loads",
        ),
        "b": (
            CheckVerdict.FAILED,
            "the service says UNREACHABLE (connection refused); it follows run exp and is on exp~v000002; "
            f"its loads are SGLang's own: {NO_PLUGIN}",
        ),
        "c": (
            CheckVerdict.WARNING,
            "the service says TAINTED; it follows run exp and serves no version of it; "
            "who carries out its loads is not known yet",
        ),
        "d": (
            CheckVerdict.OK,
            "the service says PROBING; it follows no run; who carries out its loads is not known yet",
        ),
        "e": (
            CheckVerdict.FAILED,
            "the service says CONTESTED (another writer loads /other/v1 as '1'); it follows run exp and is on "
            "exp~v000002; who carries out its loads is not known yet",
        ),
    }
    assert len(list(judge_service_engines([make_engine(state=state) for state in EngineState]))) == len(EngineState)


def test_a_run_whose_newest_step_was_rejected_is_a_finding_though_its_engines_are_well() -> None:
    trouble = "Step 2 is REJECTED: layer.0.weight is missing"
    runs = [make_run(run="well"), make_run(run="exp", trouble=trouble, newest="exp~v000002")]
    (found,) = judge_runs(runs)
    assert (found.check, found.subject, found.verdict) == (CheckName.VERSIONS, "exp", CheckVerdict.WARNING)
    assert found.text == f"the service says: {trouble}"
    assert "refitd explain exp'" in (found.fix or "")


def test_what_the_service_says_is_wrong_with_itself_is_a_finding_with_a_fix() -> None:
    faults = Faults(
        journal="it cannot be written",
        disk="over the disk budget",
        folders="3 folders are not taken in",
    )
    found = {finding.check: (finding.verdict, finding.text) for finding in judge_faults(faults)}
    assert found == {
        CheckName.JOURNAL: (CheckVerdict.WARNING, "the service says: it cannot be written"),
        CheckName.SPACE: (CheckVerdict.WARNING, "the service says: over the disk budget"),
        CheckName.ROOT: (CheckVerdict.WARNING, "the service says: 3 folders are not taken in"),
    }
    assert all(finding.fix for finding in judge_faults(faults))
    assert list(judge_faults(Faults())) == []


@pytest.mark.parametrize(("status", "said"), [(401, "answered with 401"), (200, "answered with something else")])
async def test_a_service_that_does_not_say_its_engines_is_no_failure(status: int, said: str) -> None:
    with serve(answer(status, {"items": 7})) as service:
        told = await ask_overview(Settings(root=Path("/root")), service.url)
    assert isinstance(told, Finding)
    assert (told.verdict, said in told.text) == (CheckVerdict.UNKNOWN, True)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Sighting(looked=True, read="secret", plugin=None, loaded=None), CheckVerdict.OK),
        (Sighting(looked=True, read="another", plugin=None, loaded=None), CheckVerdict.FAILED),
        (Sighting(looked=True, read=None, plugin=None, loaded="run~v000001"), CheckVerdict.FAILED),
        (Sighting(looked=False, read=None, plugin=True, loaded=None), CheckVerdict.OK),
        (Sighting(looked=False, read=None, plugin=None, loaded="run~v000001"), CheckVerdict.OK),
        (Sighting(looked=False, read=None, plugin=False, loaded=None), CheckVerdict.UNKNOWN),
        (Sighting(looked=False, read=None, plugin=None, loaded=None), CheckVerdict.UNKNOWN),
    ],
)
def test_shared_files_are_proved_and_never_guessed(found: Sighting, verdict: CheckVerdict) -> None:
    asked = EngineAnswers(name="e", spec=SPEC, root="/mnt", seen=SEEN)
    assert judge_sharing(asked, NONCE, found).verdict is verdict


@pytest.mark.parametrize(
    ("status", "fix"),
    [(401, "--engine-admin-key-file"), (403, "--engine-admin-key-file"), (404, "gateways"), (200, "SGLang")],
)
def test_a_key_that_does_not_open_changes_is_found_before_the_first_load(
    job: list[str], sglang: ScriptedSglang, status: int, fix: str
) -> None:
    sglang.script.clear()
    sglang.on("/update_weights_from_disk", answer(status, {"message": "no"}))
    code, found = examined(*job, "--engine", sglang.url)
    assert code == 1
    assert fix in found["engines", "failed"]["fix"]
    assert sglang.served["model_path"] == "/base"


@pytest.mark.parametrize(
    ("plugin", "reason", "verdict", "said"),
    [
        ("0.1.0", None, CheckVerdict.OK, "refitd 0.1.0 inside it"),
        (None, NO_PLUGIN, CheckVerdict.OK, "SGLang's own"),
        (None, "only 1 of its 2 ranks answer for the plugin", CheckVerdict.WARNING, "only 1 of its 2 ranks"),
        (None, f"{ASIDE}: --enable-lora", CheckVerdict.WARNING, "refitd is inside it, and yet"),
        (None, f"{ASIDE}: REFITD_SGLANG_STAGE is 'on': it may be auto or off", CheckVerdict.FAILED, "_STAGE is 'on'"),
    ],
)
def test_what_was_found_of_the_plugin_is_said(
    plugin: str | None, reason: str | None, verdict: CheckVerdict, said: str
) -> None:
    asked = EngineAnswers(name="e", spec=SPEC, root="/mnt", seen=replace(SEEN, plugin=plugin, stock_reason=reason))
    found = {each.check: each for each in judge_engine(asked)}[CheckName.PLUGIN]
    assert (found.verdict, said in found.text) == (verdict, True)
    assert plugin_answers(asked) is (plugin is not None)


def test_a_start_up_model_that_cannot_be_read_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_model(tmp_path / "base")
    asked = EngineAnswers(name="a", spec=SPEC, root="/", seen=replace(SEEN, startup_path=str(base)))
    assert [found.verdict for found in judge_start_up_model(asked)] == [CheckVerdict.OK]
    elsewhere = replace(asked, seen=replace(SEEN, startup_path="Qwen/Qwen3-0.6B"))
    assert [found.verdict for found in judge_start_up_model(elsewhere)] == [CheckVerdict.WARNING]
    denied = PermissionError(errno.EACCES, "Permission denied", str(base))

    def read(_: Path) -> None:
        raise denied

    monkeypatch.setattr(engines, "read_reference", read)
    (found,) = judge_start_up_model(asked)
    assert found.verdict is CheckVerdict.FAILED
    assert f"user id {os.geteuid()} cannot read {base}" in found.text
    assert "--base-model" in (found.fix or "")


def test_what_serve_would_refuse_is_found(job: list[str], tmp_path: Path) -> None:
    code, found = examined(*job, "--base-model", str(tmp_path / "root"))
    assert code == 1
    assert "--base-model (REFITD_BASE_MODEL)" in found["settings", "failed"]["text"]


def test_an_engine_that_is_not_there_is_one_finding(job: list[str]) -> None:
    code, found = examined(*job, "--engine", "http://127.0.0.1:1")
    assert code == 1
    assert found["engines", "failed"]["fix"].startswith("start it")
    assert not [check for check, _ in found if check in {"files", "hub"}]


@pytest.mark.parametrize(
    ("status", "fix"),
    [
        (401, "--engine-key-file"),
        (404, "not that of a gateway"),
        (503, "see its log"),
        (200, "name an SGLang server"),
    ],
)
def test_what_is_no_engine_is_not_told_to_start(job: list[str], status: int, fix: str) -> None:
    with serve(answer(status, {"detail": "no"})) as other:
        code, found = examined(*job, "--engine", other.url)
    assert code == 1
    assert fix in found["engines", "failed"]["fix"]
    assert "start it" not in found["engines", "failed"]["fix"]


def test_a_root_that_is_not_there_or_cannot_be_written_is_named_and_engines_are_looked_at(
    tmp_path: Path, sglang: ScriptedSglang
) -> None:
    code, found = examined("--root", str(tmp_path / "nowhere"), "--engine", sglang.url)
    assert code == 1
    assert "is no folder" in found["root", "failed"]["text"]
    assert ("engines", "ok") in found
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / ".refitd").write_text("a file in the way")
    assert "cannot be written" in examined("--root", str(tmp_path / "root"))[1]["root", "failed"]["text"]


def test_a_root_without_room_wants_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(RootUnusableError, match="No space left") as refused, probed(tmp_path):
        pass
    assert refused.value.fix == "make room there"


def test_a_token_that_everybody_can_read_and_a_corrupt_journal_are_found(job: list[str], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-that-is-long-enough\n")
    token.chmod(0o644)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "journal.db").write_text("this is no database, but long enough to be looked at " * 20)
    code, found = examined(*job, "--token-file", str(token))
    assert code == 1
    assert "chmod" in found["settings", "warning"]["fix"]
    assert "start the service again: it moves it aside" in found["journal", "failed"]["fix"]
    assert ("engines", "warning") in found


def facts(**other: Any) -> RootFacts:
    given = {"kind": "ext4", "event": True, "skew": 0.0, "free": 100 * GIB, "version": GIB, "held": 0}
    given |= {"keeps_manifests": True, **other}
    return RootFacts(path=Path("/root"), **given)


def judged(settings: Settings, **other: Any) -> dict[str, Finding]:
    return {finding.check: finding for finding in judge_root(facts(**other), settings)}


def test_room_is_held_against_what_is_kept() -> None:
    settings = Settings(root=Path("/root"), keep_last=3, slots=2)
    assert judged(settings)["space"].verdict is CheckVerdict.OK
    assert judged(settings, free=5 * GIB)["space"].verdict is CheckVerdict.FAILED
    assert judged(settings, free=5 * GIB, held=GIB)["space"].verdict is CheckVerdict.OK, (
        "what lies there is taken in turns"
    )
    assert judged(settings, version=None)["space"].verdict is CheckVerdict.UNKNOWN
    deltas = judged(settings, free=7 * GIB, has_deltas=True)["space"]
    assert deltas.verdict is CheckVerdict.FAILED, "two copies lie in the root as well"
    assert "2 copies" in deltas.text
    adapters = Settings(root=Path("/root"), keep_last=3, slots=2, lora="actor")
    assert judged(adapters, free=6 * GIB)["space"].text.startswith("6 adapters")
    tight = Settings(root=Path("/root"), keep_last=3, slots=2, disk_budget=2 * GIB)
    assert judged(tight)["space"].verdict is CheckVerdict.FAILED


def test_room_is_held_against_what_the_running_service_keeps_where_it_says_so() -> None:
    settings = Settings(root=Path("/root"), keep_last=9, slots=2)
    told = Keeping(last=1, slots=0, disk_budget=5 * GIB)
    (space,) = [each for each in judge_root(facts(free=3 * GIB), settings, told) if each.check == "space"]
    assert space.verdict is CheckVerdict.OK
    assert "1 kept, 0 slots, 1 being written; as the service keeps them" in space.text
    assert "by doctor's own settings" in judged(settings, free=3 * GIB)["space"].text
    assert settings.keeping == Keeping(last=9, slots=2)


def test_a_root_without_events_is_said_unless_it_is_polled() -> None:
    assert "no event" in judged(Settings(root=Path("/root")), event=False)["root"].text
    assert judged(Settings(root=Path("/root")), event=False, kind="nfs4")["root"].verdict is CheckVerdict.OK
    assert "differs by -90.0 s" in judged(Settings(root=Path("/root")), skew=-90.0)["root"].text


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"REFITD_SGLANG_ROOT": "{root}"}, []),
        ({"REFITD_SGLANG_ROOT": "{root}/nowhere"}, [(CheckVerdict.FAILED, "REFITD_SGLANG_ROOT is '{root}/nowhere'")]),
        ({"REFITD_SGLANG_ROOTT": "{root}"}, [(CheckVerdict.WARNING, "REFITD_SGLANG_ROOTT stands in its environment")]),
        ({"REFITD_VLLM_ROOT": "/of/another/kind", "REFITD_SGLANG_STAGE": "auto", "REFITD_SGLANG_ROOT": " "}, []),
        (None, []),
    ],
)
def test_variables_in_an_engine_s_environment_that_do_not_lead_to_this_root_are_named(
    tmp_path: Path, environment: dict[str, str] | None, found: list[tuple[CheckVerdict, str]]
) -> None:
    said = None if environment is None else {k: v.replace("{root}", str(tmp_path)) for k, v in environment.items()}
    asked = EngineAnswers(name="e", spec=SPEC, root="/mnt", seen=SEEN)
    with probed(tmp_path) as nonce:
        told = list(engines.judge_variables_inside(asked, LocalProcess(pid=os.getpid(), environment=said), nonce))
    assert [(each.check, each.verdict) for each in told] == [(CheckName.PLUGIN, verdict) for verdict, _ in found]
    assert all(text.replace("{root}", str(tmp_path)) in each.text for each, (_, text) in zip(told, found, strict=True))


def test_the_hub_is_known_only_of_what_can_be_seen() -> None:
    off = LocalProcess(pid=1, environment={"HF_HUB_OFFLINE": "1"})
    assert engines.judge_hugging_face("e", off).verdict is CheckVerdict.OK
    assert engines.judge_hugging_face("e", off).check == "files", "the hub is what hosts follow"
    assert engines.judge_hugging_face("e", LocalProcess(pid=1, environment={})).verdict is CheckVerdict.WARNING
    assert engines.judge_hugging_face("e", LocalProcess(pid=1, environment=None)).verdict is CheckVerdict.UNKNOWN
    assert engines.judge_hugging_face("e", None).verdict is CheckVerdict.UNKNOWN


def test_a_process_is_found_by_its_port_and_only_here(sglang: ScriptedSglang) -> None:
    here = Listeners()
    assert here.at(sglang.url) == os.getpid()
    assert here.at("http://192.0.2.1:30000") is None, "an address of nobody (RFC 5737)"
    assert here.at("http://127.0.0.1:1") is None


def test_the_sockets_of_all_processes_are_read_once_for_the_service_and_all_engines(
    job: list[str], sglang: ScriptedSglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes a second where there are many processes."""
    looks: list[str] = []
    look = psutil.net_connections

    def counted(kind: str) -> Any:
        looks.append(kind)
        return look(kind)

    monkeypatch.setattr(psutil, "net_connections", counted)
    with scripted_sglang() as another:
        _, found = examined(*job, "--engine", sglang.url, "--engine", another.url, url=sglang.url)
    assert ("engines", "ok") in found
    assert looks == ["tcp"]


def test_versions_of_any_layout_are_measured_and_the_clock_before_the_wait_for_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "run/weight_v000001")
    adapter = tmp_path / "run/v000002/adapter_model.safetensors"
    adapter.parent.mkdir()
    adapter.write_bytes(bytes(7))
    monkeypatch.setattr("refitd_doctor.root._gives_event", lambda _: time.sleep(0.2))  # no event ever comes
    with probed(tmp_path) as nonce:
        seen = look_at_root(tmp_path, nonce, None)
    whole = (tmp_path / "run/weight_v000001/model.safetensors").stat().st_size
    assert (seen.version, seen.held) == (whole, whole + 7)
    assert abs(seen.skew) < 0.1


def test_an_event_on_its_way_when_the_look_ends_leaves_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("watchdog.observers.inotify")

    def late() -> BaseObserver:
        observer = Observer()

        def stop(end: Callable[[], None] = observer.stop) -> None:
            log.error("InotifyEmitter.queue_events() called when the thread is inactive")
            end()

        monkeypatch.setattr(observer, "stop", stop)
        return observer

    monkeypatch.setattr("refitd_doctor.root.Observer", late)
    with probed(tmp_path) as nonce:
        assert look_at_root(tmp_path, nonce, None).event
    assert caplog.records == []
    log.error("something else")
    assert len(caplog.records) == 1, "and of others nothing is kept back afterwards"


def test_manifests_that_the_service_cannot_keep_are_found_before_a_checkpoint_needs_one(tmp_path: Path) -> None:
    with probed(tmp_path) as nonce:
        kept = tmp_path / SERVICE_FOLDER / MANIFESTS
        assert look_at_root(tmp_path, nonce, None).keeps_manifests
        kept.mkdir()
        assert look_at_root(tmp_path, nonce, None).keeps_manifests
        kept.rmdir()
        kept.write_bytes(b"")
        seen = look_at_root(tmp_path, nonce, None)
    wrong = [each for each in judge_root(seen, Settings(root=tmp_path)) if each.verdict is CheckVerdict.FAILED]
    assert [".refitd/manifests cannot be written" in each.text for each in wrong] == [True]


def test_a_base_model_without_weights_says_nothing_of_the_room_that_versions_need(tmp_path: Path) -> None:
    with probed(tmp_path) as nonce:
        assert look_at_root(tmp_path, nonce, tmp_path / "nosuch").version is None


async def test_a_service_knows_whether_who_asks_is_of_its_root(tmp_path: Path) -> None:
    """Also where no process shows it. What doctor asks it changes nothing."""
    other = tmp_path / "other"
    async with serving(tmp_path, run="first") as stage:
        for root in (other, stage.root):
            (root / ".refitd").mkdir(parents=True, exist_ok=True)
            mark = mark_root(root, None, has_versions=False, mounts="")
        stage.store.is_about(mark)
        for root, is_other in ((stage.root, False), (other, True)):
            body = {"run": "refitd-doctor", "step": 0, "root": root_name(root)}
            told = await stage.http.post("/v1/versions", json=body)
            reply = Reply(status=told.status_code, body=told.content)
            judged = judge_notice("http://127.0.0.1:8700", reply)
            assert judged.verdict is (CheckVerdict.FAILED if is_other else CheckVerdict.OK), judged
            assert (str(stage.root) in judged.text) is is_other
        assert not stage.store.versions
