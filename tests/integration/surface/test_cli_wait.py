"""`refitd wait` and `refitd publish`: what a script learns from their exit codes, and what a person sees meanwhile."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from refitd_client.contract.states import EngineState, WaitOutcome
from refitd_client.contract.wire import Problem, WaitResult
from support.command_line import answer, refitd
from support.stand_in_service import StandIn, make_engine, make_version, on_version, stand_in

ID = "exp~v000002"


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


class TestByStep:
    def test_a_run_and_a_step_name_a_version(self, service: StandIn) -> None:
        result = refitd("wait", "--run", "exp", "--step", "2", "--url", service.url)
        assert result.exit_code == 0
        assert f"GET /v1/versions/{ID}/wait" in service.asked[-1]

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

    def test_a_step_of_an_older_generation_is_not_taken_for_that_of_the_newest(self, service: StandIn) -> None:
        """A trainer that begins anew publishes the step again."""
        service.versions = [make_version(5), make_version(6), make_version(4, generation=2)]
        result = refitd("wait", "--run", "exp", "--step", "5", "--url", service.url, "--timeout", "0")
        assert result.exit_code == 5
        assert "still knows no step 5 of run exp: no version exp~v000005.g2" in result.stderr
        service.versions.append(make_version(5, generation=2))
        result = refitd("wait", "--run", "exp", "--step", "5", "--url", service.url)
        assert result.stdout.split()[0] == "exp~v000005.g2"


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
        published = answer(*command)
        assert published["id"] == "exp~trial~v000007"
        assert (published["outcome"], published["notice_error"]) == (None, None)
        assert (Path(published["path"]) / "refit.json").is_file()
        assert [(body.run, body.step, body.metadata, body.engines) for body in service.bodies] == [
            ("exp/trial", 7, {"loss": "0.1", "note": "a=b"}, None)
        ]

    def test_wait_returns_when_engines_serve_it(self, service: StandIn, checkpoint: Path) -> None:
        result = refitd(*self.publish(checkpoint, "--url", service.url, "--wait"))
        assert result.exit_code == 0, result.output
        assert "exp~trial~v000007 is served." in result.stdout

    def test_a_service_that_is_down_does_not_undo_it(self, checkpoint: Path) -> None:
        result = refitd(*self.publish(checkpoint, "--url", "http://127.0.0.1:1"))
        assert result.exit_code == 0, result.output
        assert (checkpoint.parent / "root/exp/trial/v000007/refit.json").is_file()
        assert "the service was not told" in result.stderr
        assert f"one that watches {checkpoint.parent / 'root'} finds the version by itself" in result.stderr

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

    def test_a_step_that_would_begin_a_generation_is_taken_for_a_slip(self, service: StandIn, checkpoint: Path) -> None:
        assert refitd(*self.publish(checkpoint, "--url", service.url)).stderr == ""
        result = refitd(*self.publish(checkpoint, "--url", service.url))
        assert result.exit_code == 1
        said = " ".join(result.stderr.split())
        assert "nothing is published: step 7 is not above 7" in said
        assert "which takes over, if you say --new-generation" in said
        assert not (checkpoint.parent / "root/exp/trial/v000007.g2").exists()
