"""What the real server's texts mean for its contents. A text that nobody knows must never count as harmless."""

import json
from typing import Any

import pytest

from refitd.engine.http import CallFailure, NoReply, Reply
from refitd.engine.replies import Loaded, Loading, Unclear, Untouched
from refitd.engine.sglang.info import what_happened

SUCCEEDED = "Succeeded to update model weights."
LABELLED = "Succeeded to update model weights. Weight version updated to 7."
NO_FILES = "Failed to get weights iterator: Cannot find any model weights with `/root/exp/v000007`."
ROLLING_BACK = (
    "Failed to update weights: Attempted to load weight (torch.Size([32])) into parameter (torch.Size([64])).\n"
    "Rolling back to original weights."
)
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
NO_UPDATES = (
    "Online weight updates are not supported with packed FP8 GDN input projections: captured graphs retain a derived "
    "weight/scale buffer. Restart with SGLANG_QWEN35_PACKED_IN_PROJ=0 before updating weights."
)
NO_LOADER = "Failed to get model loader: <sglang.srt.model_loader.loader.DummyModelLoader object at 0x7f>."
VALIDATION = {"object": "error", "message": "1 validation error", "type": "Bad Request", "param": None, "code": 400}


def said(status: int, message: str) -> Reply:
    """A reply of the update route."""
    return replied(status, {"success": status == 200, "message": message, "num_paused_requests": 0})


def replied(status: int, data: dict[str, Any]) -> Reply:
    return Reply(status=status, body=json.dumps(data).encode())


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (said(200, SUCCEEDED), Loaded),
        (said(200, LABELLED), Loaded),
        (said(200, f"{SUCCEEDED} | {SUCCEEDED}"), Loaded),
        (said(400, NO_FILES), Untouched),
        (said(400, f"{NO_FILES} | {NO_FILES}"), Untouched),
        (said(400, NO_UPDATES), Untouched),
        (said(400, f"{NO_UPDATES} | {NO_UPDATES}"), Untouched),
        (said(400, f"{NO_UPDATES} | {SUCCEEDED}"), Unclear),
        (replied(400, VALIDATION), Untouched),
        (replied(422, VALIDATION), Untouched),
        (replied(401, {"error": "Unauthorized"}), Untouched),
        (replied(403, {"error": "Forbidden"}), Untouched),
        (replied(404, {"detail": "Not Found"}), Untouched),
        (replied(405, {"detail": "Method Not Allowed"}), Untouched),
        (said(400, NOT_FLUSHED), Unclear),
        (said(400, ROLLING_BACK), Unclear),
        (said(400, NO_LOADER), Unclear),
        (said(400, ""), Unclear),
        (said(400, f"{NO_FILES} | {SUCCEEDED}"), Unclear),
        (said(400, f"{NO_FILES} | {NOT_FLUSHED}"), Unclear),
        (said(400, f"{ROLLING_BACK} | {NOT_FLUSHED}"), Unclear),
        (replied(200, {"success": False, "message": "?"}), Unclear),
        (replied(200, {"success": "true"}), Unclear),
        (replied(500, {"detail": "Internal Server Error"}), Unclear),
        (Reply(status=200, body=b"null"), Unclear),
        (Reply(status=200, body=b"<html>Welcome</html>"), Unclear),
        (Reply(status=302, body=b""), Unclear),
        (Reply(status=502, body=b"<html>Bad Gateway</html>"), Unclear),
        (NoReply(CallFailure.NEVER_SENT, "http://e cannot be reached"), Untouched),
        (NoReply(CallFailure.NO_ANSWER, "http://e broke off"), Unclear),
        (NoReply(CallFailure.TIMED_OUT, "http://e did not answer within 600 s"), Unclear),
    ],
)
def test_each_reply_says_what_became_of_the_contents(reply: Reply | NoReply, kind: type[Loading]) -> None:
    assert type(what_happened(reply)) is kind


def test_a_draft_model_that_takes_no_updates_may_come_after_a_model_that_was_written() -> None:
    assert isinstance(what_happened(said(400, NO_UPDATES), drafts=True), Unclear)


def test_only_a_request_that_was_never_sent_leaves_the_engine_unreachable() -> None:
    never = what_happened(NoReply(CallFailure.NEVER_SENT, "http://e cannot be reached"))
    refused = what_happened(said(400, NO_FILES))
    assert isinstance(never, Untouched)
    assert isinstance(refused, Untouched)
    assert (never.reachable, refused.reachable) == (False, True)


@pytest.mark.parametrize(
    ("reply", "names"),
    [
        (replied(401, {}), "--engine-key-file"),
        (replied(403, {}), "--engine-admin-key-file"),
        (replied(404, {}), "gateway"),
        (said(400, NO_FILES), "Cannot find any model weights with `/root/exp/v000007`"),
        (said(400, ROLLING_BACK), "Rolling back to original weights"),
        (NoReply(CallFailure.TIMED_OUT, "no answer"), "it may have loaded, in part or in full"),
    ],
)
def test_the_reason_names_what_to_look_at(reply: Reply | NoReply, names: str) -> None:
    happened = what_happened(reply)
    assert isinstance(happened, Untouched | Unclear)
    assert names in happened.reason


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (said(400, "why"), "why"),
        (replied(500, {"detail": "why"}), "why"),
        (replied(401, {"error": "why"}), "why"),
        (replied(500, {"error": {"message": "why"}}), "why"),  # as vLLM nests it
        (Reply(status=502, body=b"  <html>\n"), "<html>"),
        (Reply(status=502, body=b""), "nothing"),
        (said(400, "x" * 9000), "x" * 500),
    ],
)
def test_the_sentence_in_a_reply_is_found_and_kept_short(reply: Reply, message: str) -> None:
    assert reply.short_message == message


def test_ranks_that_refuse_at_length_are_all_heard() -> None:
    long = NO_FILES.replace("/root", "/root" + "/deep" * 100)
    assert isinstance(what_happened(said(400, " | ".join([long] * 8))), Untouched)
    assert isinstance(what_happened(said(400, " | ".join([long] * 7 + [SUCCEEDED]))), Unclear)
