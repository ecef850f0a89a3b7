"""What an update's reply means where the plugin has carried it out: its words count, and the worst rank's."""

import json

import pytest

from refitd.engine.http import Reply
from refitd.engine.replies import Loaded, Loading, Unclear, Untouched
from refitd.engine.sglang.info import what_happened
from refitd_client.contract.plugin import MARK, Answer, UpdateOutcome

NOT_FLUSHED = "Weights were updated, but the cache was not flushed because requests are still running or queued."
VERSION = "run~v000007"


def answer(outcome: UpdateOutcome, reason: str = "", contents: str = "xxh3:1") -> str:
    """What the plugin has one data-parallel rank say."""
    return Answer(outcome=outcome, reason=reason, version=VERSION, contents=contents).message


SERVED, REFUSED, RESTORED, UNKNOWN = (answer(outcome, "so it is") for outcome in UpdateOutcome)


def happened(status: int, *said: str, ranks: int | None = None) -> Loading:
    data = {"success": status == 200, "message": " | ".join(said)}
    return what_happened(Reply(status, json.dumps(data).encode()), len(said) if ranks is None else ranks)


def test_what_was_served_is_told_with_version_and_fingerprint() -> None:
    assert happened(200, f"{SERVED} Weight version updated to 7.") == Loaded(VERSION, "plugin:xxh3:1")


def test_data_parallel_ranks_answer_in_any_order() -> None:
    some, other = answer(UpdateOutcome.SERVED, contents="xxh3:1"), answer(UpdateOutcome.SERVED, contents="xxh3:2")
    together = happened(200, some, other)
    assert together == happened(200, other, some)
    assert together != happened(200, some, some)
    assert isinstance(together, Loaded)


def test_contents_that_a_rank_does_not_tell_are_none() -> None:
    assert happened(200, SERVED, answer(UpdateOutcome.SERVED, contents="")) == Loaded(VERSION, None)


@pytest.mark.parametrize("said", [[REFUSED], [RESTORED], [REFUSED, REFUSED], [REFUSED, RESTORED]])
def test_what_was_refused_or_put_back_is_vouched_for(said: list[str]) -> None:
    found = happened(400, *said)
    assert isinstance(found, Untouched)
    assert (found.vouched, found.reachable) == (True, True)
    assert ("what was there is back" in found.reason) == (RESTORED in said)


@pytest.mark.parametrize(
    "said",
    [
        [UNKNOWN],
        [REFUSED, UNKNOWN],
        [SERVED, REFUSED],  # a mixture of two versions
        [SERVED, RESTORED],
        [f"{MARK}{{nonsense"],
        [REFUSED.replace('"protocol":1', '"protocol":2')],
        [REFUSED, "Failed to update weights: shape.\nRolling back to original weights."],
        [REFUSED, NOT_FLUSHED],
        [SERVED, NOT_FLUSHED],
        [NOT_FLUSHED],
        [SERVED],  # and the server says that it failed
    ],
)
def test_what_is_not_known_of_every_rank_is_not_known(said: list[str]) -> None:
    assert isinstance(happened(400, *said), Unclear)


def test_a_rank_that_says_nothing_is_missed() -> None:
    assert isinstance(happened(400, REFUSED, ranks=2), Unclear)


def test_a_reason_that_quotes_sglang_is_no_word_of_sglangs() -> None:
    """Names in a checkpoint are somebody's choice."""
    quoting = answer(UpdateOutcome.REFUSED, f"tensor '{NOT_FLUSHED} | Failed to get weights iterator' is too many")
    assert isinstance(happened(400, quoting, ranks=1), Untouched)
