"""The pure part of trying again: which outcome allows it, how long the pauses are, when it ends."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd_client.contract.wire import NewEngine, Notice
from refitd_client.http import routes
from refitd_client.http.exchange import HttpReply, LostReply, RetryPolicy, retry_after
from refitd_client.http.routes import Call

REPEATABLE = routes.announce(Notice(run="exp", step=1))
ONCE = routes.add_engine(NewEngine(url="http://engine:30000"))
URL = "http://service"


def answer(status: int, **headers: str) -> HttpReply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpReply(url=URL, status=status, headers=named, body=b"")


def pause(
    call: Call[Any], outcome: HttpReply | LostReply, *, policy: RetryPolicy | None = None, **seen: Any
) -> float | None:
    return (policy or RetryPolicy()).pause(call, outcome, **{"tried": 1, "elapsed": 0.0, "chance": 0.5, **seen})


@pytest.mark.parametrize(
    ("outcome", "repeatable", "once"),
    [
        (LostReply(url=URL, sent=False, reason="refused"), True, True),
        (LostReply(url=URL, sent=True, reason="reset"), True, False),
        (answer(429), True, True),
        (answer(503), True, True),
        (answer(502), True, False),
        (answer(504), True, False),
        (answer(200), False, False),
        (answer(307), False, False),
        (answer(404), False, False),
        (answer(409), False, False),
        (answer(500), False, False),
        (answer(507), False, False),  # a full disk: the trainer should hear of it now
    ],
)
def test_only_what_cannot_do_harm_twice_is_sent_twice(
    outcome: HttpReply | LostReply, repeatable: bool, once: bool
) -> None:
    assert (pause(REPEATABLE, outcome) is not None) is repeatable
    assert (pause(ONCE, outcome) is not None) is once


def test_a_rollback_without_a_goal_is_not_repeatable_since_twice_goes_back_two_versions() -> None:
    assert not routes.rollback("exp").repeatable
    assert routes.rollback("exp", to="exp~v000001").repeatable


@given(tried=st.integers(1, 10_000), chance=st.floats(0, 1, exclude_max=True))
def test_pauses_grow_to_a_limit_and_are_never_nothing(tried: int, chance: float) -> None:
    policy = RetryPolicy(first_pause=0.1, longest_pause=5.0)
    given_pause = pause(REPEATABLE, answer(503), tried=tried, chance=chance, policy=policy)
    assert given_pause is not None
    assert min(0.1 * 2 ** min(tried - 1, 30), 5.0) / 2 <= given_pause <= 5.0


def test_no_try_starts_after_the_deadline() -> None:
    policy = RetryPolicy(deadline=10.0, first_pause=1.0)
    assert pause(REPEATABLE, answer(503), elapsed=8.9, chance=0.99, policy=policy) is not None
    assert pause(REPEATABLE, answer(503), elapsed=9.6, chance=0.99, policy=policy) is None


def test_a_wait_cannot_lengthen_the_deadline() -> None:
    assert RetryPolicy(deadline=5).within(100).deadline == 5
    assert RetryPolicy(deadline=5).within(2).deadline == 2


def test_a_wait_goes_on_for_all_its_time_while_the_service_does_not_know_the_version_yet() -> None:
    policy = RetryPolicy(deadline=30.0).waiting(600.0)
    assert pause(REPEATABLE, answer(503, retry_after="1"), elapsed=500.0, policy=policy) is not None
    assert pause(REPEATABLE, answer(503, retry_after="1"), elapsed=599.5, policy=policy) is None
    assert pause(REPEATABLE, LostReply(url=URL, sent=True, reason="reset"), elapsed=500.0, policy=policy) is None
    assert pause(REPEATABLE, answer(503, retry_after="1"), policy=RetryPolicy().waiting(0)) is None


def test_retry_after_is_obeyed_over_the_own_pauses() -> None:
    got = pause(REPEATABLE, answer(503, retry_after="7"), chance=0.0)
    assert got == 7.0


def test_retry_after_beyond_the_deadline_gives_up_at_once() -> None:
    assert pause(REPEATABLE, answer(503, retry_after="31")) is None
    assert pause(REPEATABLE, answer(503, retry_after="9" * 400)) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("120", 120.0), (" 0 ", 0.0), ("Sat, 21 Nov 2026 12:00:30 GMT", None), ("-5", None), ("²", None), ("", None)],
)
def test_a_retry_after_that_is_no_number_of_seconds_counts_for_nothing(text: str, seconds: float | None) -> None:
    assert retry_after(answer(503, retry_after=text)) == seconds
