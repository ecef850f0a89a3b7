"""A fuzzer on what other processes send: a member of the root's group an offer, a process of an engine's host lines and
replies of the plugin's channel, an engine its answers. Each is used, or refused in a sentence; nothing else is raised.
"""

import asyncio
import hmac
import json
import socket
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from refitd.engine.fingerprints import alike
from refitd.engine.http import Reply as HttpReply
from refitd.engine.port import Reached, Unreached
from refitd.engine.replies import Failed, Loaded, Unclear
from refitd.engine.vllm.contents import (
    Digests,
    Scores,
    fingerprint,
    read_digests,
    read_trial,
    said_by_extension,
    what_happened,
)
from refitd.engine.vllm.info import read_label, read_release, read_server_info
from refitd_client.contract.plugin import MAX_LINE, Answer, Handshake, PluginRequest, UpdateOutcome
from refitd_client.transport.offer import (
    DevicePlace,
    HostPlace,
    Offer,
    OfferedTensor,
    OfferLayout,
    OfferRefusedError,
    offer_with,
    seal,
    unseal,
)
from refitd_inside.client import read_handshake
from refitd_plugin.channel import Channel, Reply
from support.engines import sglang_engine
from support.fuzz import FUZZ, changed, check_sentence, within_bounds
from support.plugged_mini import wait_for
from support.scripted_server import answer
from support.scripted_sglang import scripted_sglang
from support.scripted_vllm import SHAPE, config
from support.sockets import reach

SECRET = b"s" * 32
TENSORS = (
    OfferedTensor("w", "BF16", (2, 3), HostPlace("/shm/x", 64)),
    OfferedTensor("v", "F32", (4,), DevicePlace("GPU-1", b"h" * 64, 3, 0)),
)
MARK = b"\nhmac-sha256:"
BODY = seal(
    offer_with(OfferLayout(host="a", boot="b", pid=1, life="c", tensors=TENSORS), "run~v000001", (1, 2)), SECRET
).rpartition(MARK)[0]

LINES = [b'{"do":"hello"}', b'{"do":"prepare","path":"run/v000001","offer":"run/.offer-1","check":"bytes"}']
HELLO = {
    "ok": True, "protocol": 1, "plugin": "0.1.0", "sglang": "0.5.23", "state": "on", "host": "a", "port": 1, "seed": 2,
    "rank": 0, "ranks": 1, "dp_rank": None, "kinds": ["delta"], "leads": True, "plan": {"replays": True, "loader": 2},
}  # fmt: skip
MODEL = {"model_path": "/base", "weight_version": "default"}
SERVER = {"version": "0.5.23", "model_path": "/base", "tp_size": 2, "port": 30000, "random_seed": 4, "startup_time": 1}

URL = "http://vllm:8000"
SERVED = Answer(outcome=UpdateOutcome.SERVED, version="run~v000001", how="load", contents="0" * 32, proved=4)
REFUSED = Answer(outcome=UpdateOutcome.REFUSED, reason="another service leads it", needs="leader")
CALLED = [
    {"results": [None, None]},
    {"results": [["generate"], ["generate"]]},
    {"results": [{"ok": True, "message": each.message} for each in (SERVED, REFUSED)]},
    {"results": [{"ok": True, "message": SERVED.message}] * 2},
    {"error": {"message": SHAPE, "type": "InternalServerError", "param": None, "code": 500}},
]
CHECKED = {"checksums": {"dp0:tp0:model.norm.weight": "ab" * 32, "dp0:tp0:model.qkv_proj.weight": "cd" * 32}}
SCORED = {"choices": [{"index": 0, "logprobs": {"token_logprobs": [None, *[-2.5] * 23]}, "finish_reason": "length"}]}


def written(*answers: dict[str, Any]) -> list[bytes]:
    return [json.dumps(each).encode() for each in answers]


@FUZZ
@given(body=changed([BODY]))
def test_no_bytes_under_the_right_secret_are_anything_but_an_offer_or_refused(body: bytes) -> None:
    """A member of the root's group can read the secret."""

    def read() -> Offer | None:
        try:
            return unseal(body + MARK + hmac.digest(SECRET, body, "sha256").hex().encode(), SECRET)
        except OfferRefusedError as refusal:
            check_sentence(refusal)
            return None

    offer = within_bounds(len(body), read)
    if offer is not None:
        assert len(offer.expected) == len(offer.fingerprints)
        assert all(tensor.nbytes >= 0 and tensor.place.offset >= 0 for tensor in offer.layout.tensors)


def echo(request: PluginRequest) -> Reply:
    return {"ok": True, "do": request.do, "path": request.path}


def test_no_line_ends_a_plugins_channel_or_is_left_without_a_reply(tmp_path: Path) -> None:
    (tmp_path / ".refitd").mkdir()
    channel = Channel(tmp_path, 0, echo)
    channel.open()
    path = tmp_path / ".refitd" / "engines" / channel.name
    wait_for(path)

    @FUZZ
    @given(line=changed(LINES))
    @example(line=b"[" * 60_000)
    def send(line: bytes) -> None:
        line = line.replace(b"\n", b" ")[: MAX_LINE - 1]  # a longer one is refused and ends the connection
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            reach(connection, path)
            connection.sendall(line + b'\n{"do":"hello"}\n')
            with connection.makefile("rb") as replies:
                assert isinstance(json.loads(replies.readline())["ok"], bool)
                assert json.loads(replies.readline()) == {"ok": True, "do": "hello", "path": ""}

    send()


@FUZZ
@given(data=changed(written(HELLO)))
def test_no_reply_is_anything_but_a_hello_or_a_sentence(data: bytes) -> None:
    try:
        reply = msgspec.json.decode(data)  # as a channel's line is read: it refuses lone surrogates
    except (ValueError, RecursionError):
        return
    handshake = read_handshake(reply) if isinstance(reply, dict) else ""
    assert isinstance(handshake, Handshake) or len(handshake) < 1500


def test_no_answer_of_an_engine_is_anything_but_read_or_said() -> None:
    """Through the service's own HTTP: what it is served from is a real connection."""
    with scripted_sglang() as sglang:

        async def probed(model: bytes, server: bytes) -> Reached | Unreached:
            sglang.on("/model_info", answer(200, model))
            sglang.on("/server_info", answer(200, server))
            async with aclosing(sglang_engine(sglang.url)) as engine:
                return await engine.probe()

        @FUZZ
        @given(model=changed(written(MODEL)), server=changed(written(SERVER)))
        def look(model: bytes, server: bytes) -> None:
            seen = asyncio.run(probed(model, server))
            if isinstance(seen, Unreached):
                check_sentence(seen.reason)

        look()


def replied(data: bytes, status: int = 200) -> HttpReply:
    return HttpReply(status, data)


@FUZZ
@given(
    release=changed(written({"version": "0.32.0"})),
    label=changed(written({"weight_version": "default"})),
    server=changed(written(config(tensor_parallel_size=2))),
)
@example(release=b"{}", label=b"{}", server=json.dumps(config()).replace("1795396894577821544", "9" * 5000).encode())
def test_no_answer_of_a_vllm_to_a_probe_is_anything_but_read_or_said(
    release: bytes, label: bytes, server: bytes
) -> None:
    routes: dict[str, bool] = dict.fromkeys(("/weight_checker", "/v1/load_lora_adapter"), True)
    for seen in (
        read_release(replied(release), URL),
        read_label(replied(label), URL),
        read_server_info("0.32.0", replied(server), routes, URL),
    ):
        if isinstance(seen, str):
            check_sentence(seen)


@FUZZ
@given(data=changed(written(*CALLED)), status=st.sampled_from([200, 200, 200, 400, 401, 404, 500, 503]))
def test_no_answer_of_a_vllms_ranks_is_taken_for_a_load_but_that_of_one(data: bytes, status: int) -> None:
    """A call of two ranks: what counts as loaded says so for each of them."""
    reply = replied(data, status)
    happened, by_extension = what_happened(reply, 2), said_by_extension(reply, 2)
    if isinstance(happened, Loaded):
        assert (reply.data or {}).get("results") == [None, None]
    if isinstance(by_extension, Loaded) and by_extension is not happened:
        assert str(reply.data).count("served") > 1
    for each in (happened, by_extension):
        if not isinstance(each, Loaded):
            check_sentence(each.reason)
    assert isinstance(happened, Loaded | Failed | Unclear) or status in {401, 404}


@FUZZ
@given(digests=changed(written(CHECKED)), scores=changed(written(SCORED)))
def test_no_digests_and_scores_of_a_vllm_are_anything_but_a_fingerprint_or_a_sentence(
    digests: bytes, scores: bytes
) -> None:
    """What is made of them is on record, and held against others later."""
    held, answered = read_digests(replied(digests)), read_trial(replied(scores))
    assert held is None or isinstance(held, Digests)
    if isinstance(answered, str):
        check_sentence(answered)
    found = fingerprint(held, answered if isinstance(answered, Scores) else None)
    if found is not None:
        check_sentence(found)
        assert alike(found, found) is True
