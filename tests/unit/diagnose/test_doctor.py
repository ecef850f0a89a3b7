"""`refitd doctor`: what it finds, what it proves, and what it says it cannot know."""

import errno
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import SecretStr

from refitd.engine.http import Reply
from refitd.engine.port import Reached
from refitd.root.ownership import mark_root
from refitd.settings import Settings
from refitd.state.records import EngineRecord
from refitd_client.contract.follow import HostEngines
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.plugin import ASIDE
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import Faults, Keeping
from refitd_client.http.publisher_client import root_name
from refitd_client.validation.foreign import MANIFESTS
from refitd_doctor import engines
from refitd_doctor.engines import EngineAnswers, judge_engine, judge_start_up_model, roster_of
from refitd_doctor.finding import CheckName, CheckVerdict, Finding
from refitd_doctor.root import RootFacts, RootUnusableError, judge_root, look_at_root, probed
from refitd_doctor.service import ask_overview, ask_service, judge_notice, judge_overview
from refitd_inside.client import NO_PLUGIN
from support.checkpoints import publish, tensors, write_model
from support.command_line import refitd
from support.records import engine as engine_record
from support.scripted_server import answer, problem, serve
from support.scripted_sglang import ScriptedSglang, scripted_sglang
from support.services import serving
from support.sockets import free_port
from support.stand_in_service import StandIn, make_engine, make_overview, make_run

GIB = 2**30
SEEN = Reached(
    model_path="/m", weight_version=None, server_version="0.5.23", configuration="", startup_path=None, server="SGLang"
)


def answers(**seen: Any) -> EngineAnswers:
    return EngineAnswers(name="e", url="http://10.0.0.7:30000", seen=replace(SEEN, **seen))


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
    assert ("files", "unknown") in found, "before the first load nothing proves that a stock engine sees the root"
    assert not list(Path(job[1]).glob(".refitd/doctor-*")), "what it wrote is gone"
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


def test_places_are_asked_before_a_service_ever_looked(job: list[str], sglang: ScriptedSglang) -> None:
    with serve(answer(200, {"workers": [{"url": sglang.url}]})) as router:
        _, found = examined(*job, "--discover", f"sglang-router+{router.url}")
    assert ("engines", "ok") in found
    _, found = examined(*job, "--discover", f"sglang-router+{router.url}")
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


@pytest.mark.parametrize("way", ["variable", "flag", "address"])
def test_the_service_is_asked_where_the_other_commands_find_it(job: list[str], way: str) -> None:
    """What is typed stands above the variable."""
    with serve(answer(401, {})) as service:
        url = service.url.replace("127.0.0.1", "localhost")
        if way == "variable":
            _, found = examined(*job[:4], url=url)
        elif way == "flag":
            _, found = examined(*job, "--url", url, url="http://127.0.0.1:1")
        else:
            examined(*job, url=url)
            assert service.seen == []
            return
    assert found["service", "failed"]["subject"] == url
    assert {seen.path for seen in service.seen} == {"/v1/versions", "/v1/overview"}
    code, found = examined(*job[:4], url=url)
    told = found["service", "unknown"]
    assert (code, told["subject"]) == (0, url)
    assert "connection refused (is the service running there?)" in told["text"]
    assert told["fix"].endswith("name its address: --url or REFITD_URL, or --host and --port")


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
    asked = answers(server_version=version, configuration=configuration)
    found = {each.check: each for each in judge_engine(asked)}
    assert found[CheckName.ENGINES].text == f"SGLang {said}"


async def test_what_the_running_service_says_is_wrong_is_a_finding_with_what_helps(tmp_path: Path) -> None:
    state = StandIn(engines=[make_engine("a"), make_engine("b", state=EngineState.UNREACHABLE)])
    state.runs = [make_run(run="well"), make_run(run="exp", trouble="Step 2 is REJECTED: layer.0.weight is missing")]
    overview = replace(make_overview(state), faults=Faults(disk="over the disk budget"))
    (tmp_path / "read").write_text("a-token-to-look")
    tokens: dict[str, Any] = {"token": SecretStr("a-token-to-change"), "read_token_file": tmp_path / "read"}
    with serve(answer(200, msgspec.to_builtins(overview))) as service:
        told = await ask_overview(Settings(root=Path("/root"), **tokens), service.url)
    assert [(seen.path, seen.headers["authorization"]) for seen in service.seen] == [
        ("/v1/overview", "Bearer a-token-to-look")
    ]
    assert not isinstance(told, Finding)
    found = [(each.check, each.verdict, each.text) for each in judge_overview(told)]
    says = "the service says"
    assert found == [
        (CheckName.SERVICE, CheckVerdict.WARNING, f"{says}: over the disk budget"),
        (CheckName.VERSIONS, CheckVerdict.WARNING, f"{says}: Step 2 is REJECTED: layer.0.weight is missing"),
        (CheckName.ENGINES, CheckVerdict.FAILED, f"{says} of its engines: 1 away, 1 in sync"),
    ]
    assert all(each.fix for each in judge_overview(told))
    well = replace(told, engines=told.engines[:1], faults=Faults(), runs=told.runs[:1])
    assert [each.verdict for each in judge_overview(well)] == [CheckVerdict.OK]


@pytest.mark.parametrize(("status", "said"), [(401, "answered with 401"), (200, "answered with something else")])
async def test_a_service_that_does_not_say_its_engines_is_no_failure(status: int, said: str) -> None:
    with serve(answer(status, {"items": 7})) as service:
        told = await ask_overview(Settings(root=Path("/root")), service.url)
    assert isinstance(told, Finding)
    assert (told.verdict, said in told.text) == (CheckVerdict.UNKNOWN, True)


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
    told = {each.check: each for each in judge_engine(answers(plugin=plugin, stock_reason=reason))}
    found = told[CheckName.PLUGIN]
    assert (found.verdict, said in found.text) == (verdict, True)
    sees = CheckVerdict.UNKNOWN if plugin is None else CheckVerdict.OK
    assert told[CheckName.FILES].verdict is sees, "a plugin answers at a socket in the root"


def test_that_an_engine_sees_the_root_is_proved_and_never_guessed() -> None:
    def judged(known: EngineRecord | None, **seen: Any) -> CheckVerdict | None:
        found = judge_engine(answers(**seen), known)
        return next((each.verdict for each in found if each.check is CheckName.FILES), None)

    loaded = engine_record(serving="run~v000001")
    assert judged(loaded) is CheckVerdict.OK
    assert judged(engine_record(serving="run~v000001", known=False)) is CheckVerdict.UNKNOWN, "what it has is not known"
    assert judged(None) is CheckVerdict.UNKNOWN
    assert judged(None, host=HostEngines(follower="host-1")) is None, "a host reads its own root"


def test_a_start_up_model_that_cannot_be_read_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_model(tmp_path / "base")
    asked = answers(startup_path=str(base))
    assert [found.verdict for found in judge_start_up_model(asked)] == [CheckVerdict.OK]
    elsewhere = answers(startup_path="Qwen/Qwen3-0.6B")
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
    assert "files" not in {check for check, _ in found}


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
    told = Keeping(last=1, slots=0, disk_budget=5 * GIB)
    (space,) = [each for each in judge_root(facts(free=3 * GIB), settings, told) if each.check == "space"]
    assert space.verdict is CheckVerdict.OK, "what the running service says stands above doctor's own settings"
    assert "1 kept, 0 slots, 1 being written; as the service keeps them" in space.text


def test_a_root_without_events_is_said_unless_it_is_polled() -> None:
    assert "no event" in judged(Settings(root=Path("/root")), event=False)["root"].text
    assert judged(Settings(root=Path("/root")), event=False, kind="nfs4")["root"].verdict is CheckVerdict.OK
    assert "differs by -90.0 s" in judged(Settings(root=Path("/root")), skew=-90.0)["root"].text


def test_versions_of_any_layout_are_measured_and_the_clock_before_the_wait_for_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "run/weight_v000001")
    adapter = tmp_path / "run/v000002/adapter_model.safetensors"
    adapter.parent.mkdir()
    adapter.write_bytes(bytes(7))
    monkeypatch.setattr("refitd_doctor.root._gives_event", lambda _: time.sleep(0.2))  # no event ever comes
    with probed(tmp_path) as probe:
        seen = look_at_root(tmp_path, probe, tmp_path / "nosuch")
    whole = (tmp_path / "run/weight_v000001/model.safetensors").stat().st_size
    assert (seen.version, seen.held) == (whole, whole + 7)
    assert abs(seen.skew) < 0.1


def test_manifests_that_the_service_cannot_keep_are_found_before_a_checkpoint_needs_one(tmp_path: Path) -> None:
    with probed(tmp_path) as probe:
        kept = tmp_path / SERVICE_FOLDER / MANIFESTS
        assert look_at_root(tmp_path, probe, None).keeps_manifests
        kept.mkdir()
        assert look_at_root(tmp_path, probe, None).keeps_manifests
        kept.rmdir()
        kept.write_bytes(b"")
        seen = look_at_root(tmp_path, probe, None)
    wrong = [each for each in judge_root(seen, Settings(root=tmp_path)) if each.verdict is CheckVerdict.FAILED]
    assert [".refitd/manifests cannot be written" in each.text for each in wrong] == [True]


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
