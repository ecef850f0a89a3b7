"""`refitd wait` and `refitd publish`: what a script learns from their exit codes, and what a person sees meanwhile."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from refitd.cli.publish import PublishAnswer
from refitd.cli.wait import look_for, progress_of
from refitd_client.contract.states import EngineState, VersionState, WaitOutcome
from refitd_client.contract.wire import Problem, WaitResult
from refitd_client.http.client import RefitClient
from refitd_client.http.exchange import Served
from support.command_line import answer, refitd
from support.stand_in_service import StandIn, make_engine, make_run, make_version, on_version, stand_in

ID = "exp~v000002"
PAUSED_SINCE = "2026-01-01T00:00:00Z"


@pytest.fixture
def service() -> Iterator[StandIn]:
    with stand_in() as state:
        state.versions = [make_version(1), make_version(2, engines=[on_version(make_engine())])]
        yield state


class TestOutcomes:
    @pytest.mark.parametrize(
        ("outcome", "code", "words"),
        [
            (WaitOutcome.SERVED, 0, "exp~v000002 is served by 1/1 engines"),
            (WaitOutcome.SUPERSEDED, 0, "exp~v000002 was overtaken"),
            (WaitOutcome.FAILED, 1, "exp~v000002 will not be served"),
            (WaitOutcome.PENDING, 5, "exp~v000002 is not served after 0 s"),
        ],
    )
    def test_each_has_its_exit_code(self, service: StandIn, outcome: WaitOutcome, code: int, words: str) -> None:
        service.outcomes = [outcome]
        result = refitd("wait", ID, "--url", service.url, "--timeout", "0")
        assert result.exit_code == code
        assert words in (result.stderr if code else result.stdout)

    def test_a_pause_is_said_at_once_unless_all_engines_are_there_already(self, service: StandIn) -> None:
        service.runs = [make_run(run="exp", paused_since=PAUSED_SINCE)]
        assert refitd("wait", ID, "--url", service.url).stderr == ""
        assert refitd("wait", ID, "--for", "sealed", "--url", service.url).stderr == ""
        service.versions = [make_version(2, engines=[on_version(make_engine(version="exp~v000001"))])]
        assert "'refitd resume exp'" in refitd("wait", ID, "--url", service.url).stderr

    @pytest.mark.parametrize(
        ("outcome", "code"), [(WaitOutcome.SERVED, 0), (WaitOutcome.FAILED, 1), (WaitOutcome.PENDING, 5)]
    )
    def test_json_is_the_answer_whatever_it_is(self, service: StandIn, outcome: WaitOutcome, code: int) -> None:
        service.outcomes = [outcome]
        result = refitd("wait", ID, "--url", service.url, "--timeout", "0", "--json")
        assert result.exit_code == code
        assert msgspec.json.decode(result.stdout, type=WaitResult).outcome is outcome
        assert result.stderr == ""

    def test_engines_that_are_late_are_named_with_their_reasons(self, service: StandIn) -> None:
        late = make_engine("engine-7", state=EngineState.UNREACHABLE, step=1, reason="connection refused")
        service.versions = [make_version(2, engines=[on_version(make_engine()), on_version(late)])]
        service.outcomes = [WaitOutcome.PENDING]
        result = refitd("wait", ID, "--url", service.url, "--timeout", "0")
        assert "engine-7 is UNREACHABLE (connection refused)" in result.stderr
        assert "engine-0" not in result.stderr

    def test_engines_that_cannot_be_reached_are_named_also_while_there_is_no_verdict(self, service: StandIn) -> None:
        away = make_engine("engine-7", state=EngineState.UNREACHABLE, step=None, reason="connection refused")
        engines = [on_version(away), on_version(make_engine("engine-8", step=1))]
        service.versions = [make_version(2, state=VersionState.UNKNOWN, reason="no model", engines=engines)]
        service.outcomes = [WaitOutcome.PENDING]
        result = refitd("wait", ID, "--url", service.url, "--timeout", "0")
        assert result.exit_code == 5
        assert result.stderr == (
            f"version {ID} is still UNKNOWN after 0 s (no model); engine-7 is UNREACHABLE (connection refused)\n"
        )

    def test_engines_that_a_served_version_does_not_have_are_named(self, service: StandIn) -> None:
        away = make_engine("engine-7", state=EngineState.UNREACHABLE, step=1, reason="connection refused")
        service.versions = [make_version(2, engines=[on_version(make_engine()), on_version(away)])]
        result = refitd("wait", ID, "--url", service.url)
        assert result.stdout == f"{ID} is served by 1/2 engines; engine-7 is UNREACHABLE (connection refused).\n"

    def test_waiting_for_a_verdict_only(self, service: StandIn) -> None:
        service.outcomes = [WaitOutcome.SEALED]
        assert refitd("wait", ID, "--for", "sealed", "--url", service.url).stdout == f"{ID} is SEALED.\n"
        assert "for=sealed" in service.asked[-1]

    def test_nobody_there_ends_with_3(self) -> None:
        assert refitd("wait", ID, "--url", "http://127.0.0.1:1").exit_code == 3

    def test_an_id_that_nobody_knows_ends_at_once(self, service: StandIn) -> None:
        result = refitd("wait", "exp~v000077", "--url", service.url, "--timeout", "600")
        assert result.exit_code == 1
        assert "no version exp~v000077" in result.stderr
        assert service.asked == ["GET /v1/versions/exp~v000077"]


class TestByStep:
    def test_a_run_and_a_step_name_a_version(self, service: StandIn) -> None:
        result = refitd("wait", "--run", "exp", "--step", "2", "--url", service.url)
        assert result.exit_code == 0
        assert f"GET /v1/versions/{ID}/wait" in service.asked[-1]

    @pytest.mark.parametrize("args", [(), ("--run", "exp"), ("--step", "1")])
    def test_half_a_name_is_wrong_usage(self, args: tuple[str, ...]) -> None:
        result = refitd("wait", *args, "--url", "http://127.0.0.1:1")
        assert result.exit_code == 2
        assert "--run and --step" in result.stderr

    def test_a_step_that_is_not_published_yet_is_waited_for(
        self, service: StandIn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks = []

        def sleep(_: float) -> None:
            looks.append(1)
            service.versions.append(make_version(3))

        # In this module alone: other threads of the process sleep too.
        monkeypatch.setattr("refitd.cli.wait.time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
        assert refitd("wait", "--run", "exp", "--step", "3", "--url", service.url).exit_code == 0
        assert looks == [1]

    def test_a_step_that_never_comes_ends_with_5(self, service: StandIn) -> None:
        result = refitd("wait", "--run", "exp", "--step", "9", "--url", service.url, "--timeout", "0", "--json")
        assert result.exit_code == 5
        assert msgspec.json.decode(result.stdout, type=Problem).slug == "timed-out"

    @pytest.mark.parametrize(
        "state", [VersionState.REJECTED, VersionState.RETIRED, VersionState.DELETED, VersionState.LOST]
    )
    def test_a_step_that_only_an_older_generation_had_is_not_waited_for(
        self, service: StandIn, state: VersionState
    ) -> None:
        service.versions = [make_version(31, state=state, reason="NaN in w"), make_version(5, generation=2)]
        result = refitd("wait", "--run", "exp", "--step", "31", "--url", service.url, "--timeout", "600")
        assert result.exit_code == 1
        assert f"step 31 of run exp is known only as exp~v000031: {state}: NaN in w" in result.stderr

    @pytest.mark.parametrize("state", [VersionState.SEALED, VersionState.DELETED])
    def test_what_was_rolled_back_from_is_said_to_be_so_also_where_it_was_collected(
        self, service: StandIn, state: VersionState
    ) -> None:
        service.versions = [make_version(2, barred=True, state=state)]
        service.outcomes = [WaitOutcome.FAILED]
        result = refitd("wait", "exp~v000002", "--url", service.url)
        assert result.exit_code == 1
        assert "exp~v000002 will not be served: it was rolled back from" in result.stderr

    def test_a_step_that_is_good_in_an_older_generation_only_is_asked_about(self, service: StandIn) -> None:
        service.versions = [make_version(31), make_version(5, generation=2)]
        service.outcomes = [WaitOutcome.SUPERSEDED]
        result = refitd("wait", "--run", "exp", "--step", "31", "--url", service.url)
        assert (result.exit_code, result.stdout.split()[0]) == (0, "exp~v000031")

    def test_the_newest_generation_that_has_a_step_is_meant(self, service: StandIn) -> None:
        service.versions = [
            make_version(5),
            make_version(6),
            make_version(4, generation=2),
            make_version(5, generation=2),
        ]
        with RefitClient(service.url) as client:
            found = look_for(client, "exp", 5)
            assert found is not None
            assert found.generation == 2
            older = look_for(client, "exp", 6)
            assert older is not None
            assert older.generation == 1
            assert look_for(client, "exp", 3) is None
            assert look_for(client, "other", 3) is None
            bad = make_version(4, generation=2, state=VersionState.REJECTED)
            service.versions = [make_version(4), bad]
            assert look_for(client, "exp", 4) == bad

    def test_a_step_far_down_the_list_is_found(self, service: StandIn) -> None:
        service.versions = [make_version(step) for step in range(450)]
        with RefitClient(service.url) as client:
            found = look_for(client, "exp", 3)
        assert found is not None
        assert found.step == 3


class TestProgress:
    def test_a_person_sees_who_is_waited_for(self) -> None:
        late = make_engine("engine-7", state=EngineState.UPDATING, step=1)
        version = make_version(2, state=VersionState.SEALED, engines=[on_version(make_engine()), on_version(late)])
        assert progress_of(version, 12.4) == (
            "exp~v000002 SEALED · engines 1/2 · waiting for engine-7 UPDATING · 12 s left"
        )
        many = [make_engine(f"engine-{n}", state=EngineState.UNREACHABLE, step=1, reason="refused") for n in range(90)]
        shown = progress_of(make_version(2, engines=[on_version(each) for each in many]), 12.4)
        assert shown.endswith(" more · 12 s left · engine-0: refused"), "not the names of all"

    def test_an_engine_at_the_same_step_of_another_generation_is_waited_for(self) -> None:
        again = "exp~v000002.g2"
        other, there = make_engine("a"), make_engine("b", version=again)
        version = make_version(2, generation=2, engines=[on_version(engine, again) for engine in (other, there)])
        assert "engines 1/2 · waiting for a IN_SYNC · " in progress_of(version, 12.4)

    def test_on_a_terminal_it_looks_again_and_again(self, service: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("refitd.cli.wait._WAIT_LOOK_SECONDS", 0.0)
        service.outcomes = [WaitOutcome.PENDING, WaitOutcome.PENDING, WaitOutcome.SERVED]
        result = refitd("wait", ID, "--url", service.url, env={"FORCE_COLOR": "1"})
        assert result.exit_code == 0
        assert "exp~v000002 SEALED · engines 1/1" in result.stderr
        assert sum("/wait" in line for line in service.asked) == 3

    def test_an_id_with_brackets_is_shown_as_it_is(self, service: StandIn) -> None:
        service.versions = [make_version(2, id="[red]x")]
        result = refitd("wait", "[red]x", "--url", service.url, env={"FORCE_COLOR": "1"})
        assert result.exit_code == 0
        assert "looking at [red]x" in result.stderr

    def test_a_script_sees_none(self, service: StandIn) -> None:
        assert refitd("wait", ID, "--url", service.url).stderr == ""


class TestPublish:
    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        save_file({"w": np.ones((4, 4), np.float32)}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        (tmp_path / "root").mkdir()
        return folder

    def publish(self, checkpoint: Path, *more: str) -> tuple[str, ...]:
        root = checkpoint.parent / "root"
        return ("publish", str(checkpoint), "--root", str(root), "--run", "exp/trial", "--step", "7", *more)

    def test_a_folder_becomes_a_version_and_the_service_is_told(self, service: StandIn, checkpoint: Path) -> None:
        command = self.publish(checkpoint, "--url", service.url, "--metadata", "loss=0.1", "--metadata", "note=a=b")
        published = answer(*command, kind=PublishAnswer)
        assert (published.id, published.outcome, published.notice_error) == ("exp~trial~v000007", None, None)
        assert (Path(published.path) / "refit.json").is_file()
        assert [(body.run, body.step, body.metadata, body.engines) for body in service.bodies] == [
            ("exp/trial", 7, {"loss": "0.1", "note": "a=b"}, None)
        ]

    def test_engines_are_brought_to_the_run_where_that_is_asked_for(self, service: StandIn, checkpoint: Path) -> None:
        answer(*self.publish(checkpoint, "--url", service.url, "--engines", "mine"), kind=PublishAnswer)
        assert [body.engines for body in service.bodies] == ["mine"]

    def test_wait_returns_when_engines_serve_it(self, service: StandIn, checkpoint: Path) -> None:
        result = refitd(*self.publish(checkpoint, "--url", service.url, "--wait"))
        assert result.exit_code == 0, result.output
        assert "exp~trial~v000007 is served." in result.stdout

    def test_wait_names_the_engines_that_do_not_have_what_is_served(
        self, service: StandIn, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        id_ = "exp~trial~v000007"
        there = make_engine("host-1", run="exp/trial", version=id_, step=7)
        away = make_engine("host-2", state=EngineState.UNREACHABLE, step=None, reason="connection refused")
        version = make_version(7, id=id_, run="exp/trial", engines=[on_version(there, id_), on_version(away)])
        served = Served(outcome=WaitOutcome.SERVED, engines=version.engines, version=version)
        monkeypatch.setattr("refitd_client.publish.publication.Publication.wait", lambda *_: served)
        result = refitd(*self.publish(checkpoint, "--url", service.url, "--wait"))
        assert result.exit_code == 0
        last = result.stdout.splitlines()[-1]
        assert last == f"{id_} is served by 1/2 engines; host-2 is UNREACHABLE (connection refused)."

    def test_wait_says_at_once_that_updates_are_paused_and_what_resumes_them(
        self, service: StandIn, checkpoint: Path
    ) -> None:
        service.outcomes = [WaitOutcome.PENDING]
        service.runs = [make_run(run="exp/trial", paused_since=PAUSED_SINCE)]
        result = refitd(*self.publish(checkpoint, "--url", service.url, "--wait", "--timeout", "0"))
        assert result.exit_code == 5
        said, *_ = result.stderr.splitlines()
        assert said == (
            f"updates of exp/trial are paused since {PAUSED_SINCE}: "
            "no engine loads a newer version until 'refitd resume exp/trial'"
        )
        assert "paused" not in refitd(*self.publish(checkpoint, "--url", service.url, "--new-generation")).stderr

    def test_wait_ends_with_1_when_the_version_is_bad(self, service: StandIn, checkpoint: Path) -> None:
        service.outcomes = [WaitOutcome.FAILED]
        result = refitd(*self.publish(checkpoint, "--url", service.url, "--wait"))
        assert result.exit_code == 1
        assert "exp~trial~v000007 will not be served" in result.stderr

    def test_a_service_that_is_down_does_not_undo_it(self, checkpoint: Path) -> None:
        result = refitd(*self.publish(checkpoint, "--url", "http://127.0.0.1:1"))
        assert result.exit_code == 0, result.output
        assert (checkpoint.parent / "root/exp/trial/v000007/refit.json").is_file()
        assert "the service was not told" in result.stderr
        assert f"one that watches {checkpoint.parent / 'root'} finds the version by itself" in result.stderr

    def test_a_wait_for_a_service_that_is_down_says_that_the_version_is_written(self, checkpoint: Path) -> None:
        result = refitd(*self.publish(checkpoint, "--url", "http://127.0.0.1:1", "--wait", "--timeout", "0"))
        assert result.exit_code != 0
        assert f"exp~trial~v000007 is written to {checkpoint.parent / 'root/exp/trial/v000007'}" in result.stderr

    @pytest.mark.parametrize(
        ("typed", "said"),
        [
            ("abc", "it is not a whole number"),
            ("1.5", "it is not a whole number"),
            ("-1", "it has to be 0 or more"),
        ],
    )
    def test_a_step_that_cannot_be_one_is_refused_in_plain_words(self, checkpoint: Path, typed: str, said: str) -> None:
        result = refitd("publish", str(checkpoint), "--root", str(checkpoint.parent), "--run", "a", "--step", typed)
        assert (result.exit_code, said in result.stderr) == (2, True)
        assert "Input should be" not in result.stderr

    @pytest.mark.parametrize("json", [False, True])
    def test_a_wrong_token_does_not_undo_it_and_where_it_is_is_said(
        self, service: StandIn, checkpoint: Path, json: bool
    ) -> None:
        service.token = "secret"
        result = refitd(*self.publish(checkpoint, "--url", service.url, *(["--json"] if json else [])))
        assert result.exit_code == 4
        path = checkpoint.parent / "root/exp/trial/v000007"
        assert (path / "refit.json").is_file()
        said = msgspec.json.decode(result.stdout, type=Problem).detail if json else result.stderr
        finds = "a service that watches that root finds it by itself"
        assert f"exp~trial~v000007 is on disk at {path} all the same: {finds}" in said

    def test_a_root_that_is_not_there_is_refused_and_not_made(self, service: StandIn, checkpoint: Path) -> None:
        (checkpoint.parent / "root").rmdir()
        result = refitd(*self.publish(checkpoint, "--url", service.url))
        assert result.exit_code == 2
        assert "root is no folder: it is the one that the service watches ('refitd serve --root')" in result.stderr
        assert not (checkpoint.parent / "root").exists()

    @pytest.mark.parametrize("root", ["s3://bucket/prefix", "http://user:hidden@host"])
    def test_a_root_that_looks_like_a_url_is_refused_with_what_takes_one(
        self, service: StandIn, checkpoint: Path, root: str
    ) -> None:
        result = refitd("publish", str(checkpoint), "--root", root, "--run", "exp", "--step", "7", "--url", service.url)
        assert result.exit_code == 2
        assert "looks like a URL" in result.stderr
        assert "refitd serve --push" in result.stderr
        assert "hidden" not in result.stderr

    def test_a_root_that_the_service_does_not_watch_is_said_to_be_another(
        self, service: StandIn, checkpoint: Path
    ) -> None:
        missing = "/srv/weights/exp/trial/v000007 is not there"
        service.trouble = Problem(type="urn:refitd:problem:path-missing", title="No", status=422, detail=missing)
        result = refitd(*self.publish(checkpoint, "--url", service.url))
        assert result.exit_code == 1
        assert missing in result.stderr
        assert "where that is another folder the service never finds it" in result.stderr

    def test_a_host_that_follows_is_not_said_to_bring_engines_to_it(self, service: StandIn, checkpoint: Path) -> None:
        follows = "this service follows http://hub: publish run 'exp/trial' there"
        service.trouble = Problem(type="urn:refitd:problem:run-followed", title="No", status=409, detail=follows)
        result = refitd(*self.publish(checkpoint, "--url", service.url))
        assert result.exit_code == 1
        said = " ".join(result.stderr.split())
        assert "the service that watches that root brings no engine to it if it follows an upstream: delete it" in said
        assert "finds it by itself" not in said

    def test_a_step_that_would_begin_a_generation_is_taken_for_a_slip(self, service: StandIn, checkpoint: Path) -> None:
        assert refitd(*self.publish(checkpoint, "--url", service.url)).stderr == ""
        result = refitd(*self.publish(checkpoint, "--url", service.url))
        assert result.exit_code == 1
        said = " ".join(result.stderr.split())
        assert "nothing is published: step 7 is not above 7" in said
        assert "which takes over, if you say --new-generation" in said
        assert not (checkpoint.parent / "root/exp/trial/v000007.g2").exists()

    def test_a_step_that_begins_a_generation_says_so_in_one_line(self, service: StandIn, checkpoint: Path) -> None:
        assert refitd(*self.publish(checkpoint, "--url", service.url)).stderr == ""
        assert refitd(*self.publish(checkpoint, "--url", service.url, "--new-generation")).stderr == (
            "step 7 is not above 7, the last of run exp/trial: this begins generation 2, which takes over\n"
        )

    def test_a_file_that_is_no_checkpoint_is_named(self, service: StandIn, checkpoint: Path) -> None:
        (checkpoint / "model.safetensors").write_bytes(b"no safetensors at all")
        result = refitd(*self.publish(checkpoint, "--url", service.url, "--json"))
        assert result.exit_code == 1
        problem = msgspec.json.decode(result.stdout, type=Problem)
        assert problem.slug == "publish-failed"
        assert "model.safetensors" in problem.detail

    def test_metadata_that_is_no_pair_is_wrong_usage(self, checkpoint: Path) -> None:
        result = refitd(*self.publish(checkpoint, "--metadata", "loss"))
        assert result.exit_code == 2
        assert "KEY=VALUE" in result.stderr

    def test_on_a_terminal_bytes_are_shown_as_they_are_written(self, service: StandIn, checkpoint: Path) -> None:
        result = refitd(*self.publish(checkpoint, "--url", service.url), env={"FORCE_COLOR": "1"})
        assert result.exit_code == 0
        assert "writing" in result.stderr

    def test_neither_torch_nor_the_service_is_loaded_for_it(self) -> None:
        code = "import sys, refitd.cli.app; print([m for m in ('torch', 'fastapi', 'sqlalchemy') if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "[]\n"
