"""A fuzzer on what other processes send: a member of the root's group an offer, a process of an engine's host lines and
replies of the plugin's channel, an engine its answers. Each is used, or refused in a sentence; nothing else is raised.
"""

import asyncio
import hmac
import json
import socket
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import example, given

from refitd.engine.plugin.rank_group import read_handshake
from refitd.engine.port import Reached, Unreached
from refitd.engine.sglang.adapter import SglangEngine
from refitd_client.contract.plugin import MAX_LINE, Handshake, PluginRequest
from refitd_client.transport.ipc.offer import (
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
from refitd_plugin.channel import Channel, Reply
from support.fuzz import FUZZ, changed, check_sentence, within_bounds
from support.plugged_mini import wait_for
from support.scripted_server import answer
from support.scripted_sglang import scripted_sglang
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
            engine = SglangEngine(sglang.url)
            try:
                return await engine.probe()
            finally:
                await engine.aclose()

        @FUZZ
        @given(model=changed(written(MODEL)), server=changed(written(SERVER)))
        def look(model: bytes, server: bytes) -> None:
            seen = asyncio.run(probed(model, server))
            if isinstance(seen, Unreached):
                check_sentence(seen.reason)

        look()
