"""What the answers of refitd's extension in vLLM's workers mean for the engine."""

import json
from typing import Any

import pytest

from refitd.engine.http import CallFailure, NoReply, Reply
from refitd.engine.replies import Loaded, Loading, Unclear, Untouched
from refitd.engine.vllm.contents import said_by_extension
from refitd_client.contract.plugin import NEEDS_FULL, NEEDS_LEADER, Answer, UpdateOutcome

SERVED = Answer(outcome=UpdateOutcome.SERVED, version="run~v000007", how="replay", contents="xxh3:1")
REFUSED = Answer(outcome=UpdateOutcome.REFUSED, reason="no such tensor")


def replied(*answers: Answer | dict[str, Any] | None, status: int = 200) -> Reply:
    each = [{"ok": True, "message": a.message, "reason": ""} if isinstance(a, Answer) else a for a in answers]
    data = {"results": each}
    return Reply(status=status, body=json.dumps(data).encode())


def test_all_ranks_that_serve_it_are_one_fingerprint() -> None:
    one = said_by_extension(replied(SERVED), 1)
    assert one == Loaded("run~v000007", "plugin:xxh3:1", "replay")
    two = said_by_extension(replied(SERVED, SERVED), 2)
    assert isinstance(two, Loaded)
    assert two.fingerprint != "plugin:xxh3:1"


@pytest.mark.parametrize("outcome", [UpdateOutcome.REFUSED, UpdateOutcome.RESTORED])
def test_a_rank_that_refused_or_has_put_back_what_was_there_holds_it(outcome: UpdateOutcome) -> None:
    answer = Answer(outcome=outcome, reason="no such tensor")
    happened = said_by_extension(replied(answer, REFUSED), 2)
    assert isinstance(happened, Untouched)
    assert "no such tensor" in happened.reason


def test_what_would_be_accepted_instead_is_passed_on() -> None:
    for needs in (NEEDS_FULL, NEEDS_LEADER):
        answer = Answer(outcome=UpdateOutcome.REFUSED, reason="no", needs=needs)
        happened = said_by_extension(replied(answer), 1)
        assert isinstance(happened, Untouched)
        assert (happened.needs_full, happened.led) == (needs == NEEDS_FULL, needs == NEEDS_LEADER)


@pytest.mark.parametrize(
    "reply",
    [
        replied(SERVED),  # of two ranks
        replied(SERVED, REFUSED),
        replied(SERVED, Answer(outcome=UpdateOutcome.UNKNOWN, reason="lost")),
        replied(SERVED, None),
        replied(None, None),
        replied(SERVED, {"ok": False, "message": "", "reason": "KeyError: 'weight'"}),
        replied(SERVED, {"ok": True, "message": "", "reason": ""}),
        replied(SERVED, SERVED, status=500),
        Reply(status=200, body=b"null"),
        NoReply(CallFailure.TIMED_OUT, "did not answer"),
        NoReply(CallFailure.NO_ANSWER, "broke off"),
    ],
)
def test_whatever_is_not_the_same_good_answer_of_every_rank_is_unclear(reply: Reply | NoReply) -> None:
    happened: Loading = said_by_extension(reply, 2)
    assert isinstance(happened, Unclear)


def test_a_call_that_was_never_sent_leaves_all_as_it_was() -> None:
    happened = said_by_extension(NoReply(CallFailure.NEVER_SENT, "connection refused"), 1)
    assert happened == Untouched("connection refused", reachable=False)
