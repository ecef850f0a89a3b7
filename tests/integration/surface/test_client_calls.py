"""The client against a real server that misbehaves: lost replies, foreign answers, tokens, waits."""

import socket
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import msgspec
import pytest

from refitd_client.contract.states import Kind, VersionState, WaitOutcome
from refitd_client.contract.wire import NewEngine, Notice, Version, WaitResult
from refitd_client.errors import (
    ServiceUnreachableError,
)
from refitd_client.http.client import RefitClient
from refitd_client.http.exchange import RetryPolicy
from support.quick_client import run
from support.scripted_server import Step, answer, cut, hang_up, page, problem, serve

NOTICE = Notice(run="exp/trial", step=7, metadata={"loss": "0.1"})
VERSION = Version(
    id="exp~trial~v000007",
    run="exp/trial",
    generation=1,
    step=7,
    kind=Kind.FULL,
    state=VersionState.ANNOUNCED,
    path="exp/trial/v000007",
    created_at="2026-11-21T12:00:00Z",
)
TAKEN = answer(202, msgspec.to_builtins(VERSION))


def waited(outcome: WaitOutcome) -> Step:
    return answer(200, msgspec.to_builtins(WaitResult(outcome=outcome, version=VERSION)))


class TestRetries:
    @pytest.mark.parametrize(
        "fault",
        [hang_up, cut, page(502), page(504), problem(503, "not-ready", Retry_After="0"), problem(429, "slow-down")],
    )
    def test_a_notice_survives(self, fault: Step) -> None:
        with serve(fault, fault, TAKEN) as server:
            assert run(server.url, lambda client: client.announce(NOTICE)) == VERSION
        assert len(server.seen) == 3
        assert [msgspec.json.decode(seen.body, type=Notice) for seen in server.seen] == [NOTICE] * 3

    @pytest.mark.parametrize("fault", [hang_up, cut, page(502)])
    def test_what_may_have_happened_is_not_asked_for_again_where_twice_is_not_once(self, fault: Step) -> None:
        with serve(fault, TAKEN) as server:
            for use in (
                lambda client: client.rollback("exp/trial"),
                lambda client: client.add_engine(NewEngine(url="http://engine:30000")),
                lambda client: client.remove_engine("engine"),
            ):
                server.steps[:] = [fault, TAKEN]
                with pytest.raises(ServiceUnreachableError):
                    run(server.url, use)
        assert len(server.seen) == 3

    def test_a_service_that_is_still_starting_is_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as taken:  # bound and not listening: connections are refused
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        starts = iter([serve(TAKEN, port=port)])
        running = []

        def backoff(*_: float) -> float:
            for start in starts:
                running.append(start)
                start.__enter__()
            return 0.001

        monkeypatch.setattr("refitd_client.http.exchange.backoff", backoff)
        try:
            assert run(f"http://127.0.0.1:{port}", lambda client: client.announce(NOTICE)) == VERSION
        finally:
            running[0].__exit__(None, None, None)

    def test_it_gives_up_in_the_end_and_says_where_and_why(self) -> None:
        with serve(hang_up) as server:
            with pytest.raises(
                ServiceUnreachableError, match=f"POST {server.url}/v1/versions got no answer.* may have"
            ):
                run(server.url, lambda client: client.announce(NOTICE), retry=RetryPolicy(deadline=1.0))
            assert len(server.seen) > 1


class TestForeignAnswers:
    @pytest.mark.parametrize(
        ("step", "words"),
        [
            (page(200), "HTTP 200 in a form.*text/html.*nginx"),
            (page(404), "HTTP 404, but not as refitd does: text/html"),
            (page(500), "HTTP 500, but not as refitd"),
            (answer(200, {"hello": "world"}), "missing required field"),
            (answer(200, b""), "HTTP 200 in a form"),
            (answer(200, b"[" * 100_000), "HTTP 200 in a form"),
            (answer(200, b"\xff\xfe{"), "HTTP 200 in a form"),
            (answer(404, {"detail": "Not Found"}), "not as refitd does"),
            (answer(302, Location="http://127.0.0.1:1/elsewhere"), "redirects to http://127.0.0.1:1/elsewhere"),
        ],
    )
    def test_what_refitd_would_not_say_is_named_with_its_url(self, step: Step, words: str) -> None:
        with serve(step) as server:
            with pytest.raises(ServiceUnreachableError, match=words) as caught:
                run(server.url, lambda client: client.version("exp~v000007"))
            assert f"{server.url}/v1/versions/exp~v000007" in str(caught.value)
            assert len(server.seen) == 1


class TestConnection:
    def test_the_token_file_is_read_again_for_each_request(self, tmp_path: Path) -> None:
        file = tmp_path / "token"
        file.write_text("first\n")

        def rotate(handler: BaseHTTPRequestHandler) -> None:
            file.write_text("second\n")
            problem(503, "not-ready")(handler)

        with serve(rotate, TAKEN) as server:
            run(server.url, lambda client: client.announce(NOTICE), token_file=file)
        assert [seen.headers["authorization"] for seen in server.seen] == ["Bearer first", "Bearer second"]

    def test_proxies_of_the_environment_are_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        with serve(TAKEN) as server:
            assert run(server.url, lambda client: client.announce(NOTICE)) == VERSION

    @pytest.mark.parametrize(
        "url",
        [
            "ftp://host",
            "localhost:8700",
            "http://",
            "http://user:secret@host",
            "http://host/?q=1",
            "http://host:port",
            "\0",
        ],
    )
    def test_a_url_that_is_none_is_refused_before_anything_is_sent(self, url: str) -> None:
        with pytest.raises(ValueError, match="URL") as caught:
            RefitClient(url)
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize("token", ["", " \n", "two words", "line\nbreak", "schlüssel"])
    def test_a_token_that_is_none_is_refused_without_being_shown(self, token: str) -> None:
        with pytest.raises(ValueError, match="bearer token") as caught:
            RefitClient(token=token)
        assert "schl" not in str(caught.value)

    @pytest.mark.parametrize("bad", ["", ".", ".."])
    def test_an_id_that_would_be_another_route_is_refused(self, bad: str) -> None:
        with serve(TAKEN) as server, pytest.raises(ValueError, match="not the id"):
            run(server.url, lambda client: client.remove_engine(bad))
        assert not server.seen


class TestWait:
    def test_long_waits_are_cut_into_polls_until_the_outcome_is_there(self) -> None:
        with serve(waited(WaitOutcome.PENDING), waited(WaitOutcome.PENDING), waited(WaitOutcome.SERVED)) as server:
            result = run(server.url, lambda client: client.wait(VERSION.id, timeout=600))
        assert result == WaitResult(outcome=WaitOutcome.SERVED, version=VERSION)
        assert len(server.seen) == 3
        assert all(seen.path == f"/v1/versions/{VERSION.id}/wait?for=served&timeout=25.000" for seen in server.seen)

    def test_a_wait_survives_a_restart_of_the_service(self) -> None:
        with serve(hang_up, page(502), waited(WaitOutcome.SERVED)) as server:
            assert run(server.url, lambda client: client.wait(VERSION.id)).outcome is WaitOutcome.SERVED

    def test_a_version_that_the_service_does_not_know_yet_is_waited_for(self) -> None:
        not_yet = problem(503, "not-ready", "the root has not been listed yet", Retry_After="0")
        with serve(not_yet, not_yet, not_yet, waited(WaitOutcome.SERVED)) as server:
            result = run(server.url, lambda client: client.wait(VERSION.id), retry=RetryPolicy(deadline=0))
            assert result.outcome is WaitOutcome.SERVED
            server.steps[:] = [not_yet, TAKEN]
            assert run(server.url, lambda client: client.version(VERSION.id)) == VERSION
