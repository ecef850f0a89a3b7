"""Doctor asks the hub of a follower that does not run yet: does it answer, take the token, and have the run."""

from pathlib import Path

import msgspec
import pytest

from refitd.settings import Settings
from refitd_doctor.finding import CheckName, Finding
from refitd_doctor.stores import ask_hubs, judge_hub
from support.scripted_server import Step, answer, problem, serve
from support.stand_in_service import StandIn, make_overview, make_run


async def found(*steps: Step, **more: object) -> list[Finding]:
    """What doctor finds of a hub that answers so."""
    with serve(*steps) as hub:
        settings = Settings(root=Path("/root"), follow=[hub.url], **more)  # pyright: ignore[reportArgumentType]
        (asked,) = await ask_hubs(settings)
        assert [f"{seen.method} {seen.path}" for seen in hub.seen] == ["GET /v1/overview", "PUT /v1/hosts/doctor"]
        return list(judge_hub(asked, settings.run))


def overview(*runs: str) -> Step:
    state = StandIn()
    state.runs = [make_run(run=run) for run in runs]
    return answer(200, msgspec.to_builtins(make_overview(state)))


INCOMPLETE = problem(422, "bad-request")


async def test_a_hub_that_takes_the_token_and_has_the_run_is_good() -> None:
    answers, has = await found(overview("a"), INCOMPLETE)
    assert {each.check for each in (answers, has)} == {CheckName.UPSTREAM}
    assert (answers.verdict, has.verdict) == ("ok", "ok")
    assert has.text == "the hub has the run to follow: a"
    assert [each.verdict for each in await found(overview("a", "b"), INCOMPLETE, run="b")] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("runs", "run", "verdict", "text"),
    [
        ([], None, "warning", "the hub has no run yet"),
        (["a"], "b", "warning", "the hub has no run b: it has a"),
        (["a", "b"], None, "failed", "the hub has several runs: a, b"),
    ],
)
async def test_a_hub_without_the_run_or_with_several_is_named_with_what_to_do(
    runs: list[str], run: str | None, verdict: str, text: str
) -> None:
    _, has = await found(overview(*runs), INCOMPLETE, run=run)
    assert (has.verdict, has.text, has.fix is not None) == (verdict, text, True)


async def test_a_token_that_the_hub_does_not_take_fails_for_looks_and_for_reports_alike() -> None:
    (looks,) = await found(problem(401, "unauthorized"), problem(401, "unauthorized"))
    reports, _ = await found(overview("a"), problem(403, "forbidden"))
    assert (looks.verdict, "does not take this token" in looks.text) == ("failed", True)
    assert (reports.verdict, "a follower's reports (403)" in reports.text) == ("failed", True)
    assert all("--followers-token-file" in str(each.fix) for each in (looks, reports))


async def test_what_is_no_hub_or_does_not_say_is_not_called_good() -> None:
    (other,) = await found(answer(200, {"hello": 1}), INCOMPLETE)
    reports, _ = await found(overview("a"), problem(503, "not-ready"))
    assert (other.verdict, reports.verdict) == ("unknown", "unknown")


async def test_a_hub_that_does_not_answer_fails() -> None:
    with serve() as hub:
        url = hub.url
    (asked,) = await ask_hubs(Settings(root=Path("/root"), follow=[url, "s3://bucket/prefix"]))
    (gone,) = judge_hub(asked, None)
    assert (gone.verdict, "the hub does not answer" in gone.text) == ("failed", True)


async def test_of_a_hub_that_does_not_answer_it_is_said_that_no_proxy_of_the_environment_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    settings = Settings(root=Path("/root"), follow=["http://127.0.0.1:9"])
    (without,) = judge_hub((await ask_hubs(settings))[0], None)
    assert "It is called directly" not in (without.fix or "")
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    (named,) = judge_hub((await ask_hubs(settings))[0], None)
    assert (named.fix or "").endswith("It is called directly, whatever HTTPS_PROXY says")
