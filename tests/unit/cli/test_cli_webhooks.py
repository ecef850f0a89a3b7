"""`refitd webhooks`: what was told to whom, and what waits."""

import base64
import json
from pathlib import Path

import msgspec
import pytest
from standardwebhooks.webhooks import Webhook  # the convention's own library, as a receiver uses it

from refitd_client.contract.history import Delivery
from refitd_client.contract.states import DeliveryState
from refitd_client.contract.wire import Page
from support.command_line import refitd
from support.scripted_server import answer, serve
from support.stand_in_service import stand_in


def test_each_webhook_is_shown_with_how_far_it_is_and_why() -> None:
    waiting = Delivery(
        id="msg_1",
        topic="rejected",
        to="https://ops.example.com/…",
        state=DeliveryState.WAITING,
        tries=3,
        created_at="2026-11-21T12:00:00.000Z",
        reason="it answered 503",
        about="exp~v000007",
    )
    with stand_in() as service:
        assert refitd("webhooks", "--url", service.url).exit_code == 0
        service.deliveries = [waiting]
        shown = refitd("webhooks", "--url", service.url).stdout
        told = refitd("webhooks", "--url", service.url, "--json").stdout
    for word in ("rejected", "exp~v000007", "https://ops.example.com/…", "WAITING", "3", "it answered 503"):
        assert word in shown
    assert msgspec.json.decode(told, type=Page[Delivery]).items == [waiting]


@pytest.mark.parametrize(
    ("status", "code", "told"), [(204, 0, "took it"), (403, 1, "did not take it: it answered 403")]
)
def test_a_receiver_is_tried_with_a_message_that_it_can_verify(
    tmp_path: Path, status: int, code: int, told: str
) -> None:
    (tmp_path / "secret").write_text(secret := "whsec_" + base64.b64encode(b"k" * 32).decode())
    with serve(answer(status)) as receiver:
        result = refitd("webhooks", "--test", receiver.url, "--webhook-secret-file", str(tmp_path / "secret"))
    assert (result.exit_code, told in result.stdout) == (code, True), result.output
    (seen,) = receiver.seen
    assert Webhook(secret).verify(seen.body, seen.headers)["type"] == "refitd.test"


def test_a_test_message_wants_a_secret_that_can_be_one(tmp_path: Path) -> None:
    result = refitd("webhooks", "--test", "http://127.0.0.1:9")
    assert (result.exit_code, "--webhook-secret-file" in result.stderr) == (2, True)
    (tmp_path / "secret").write_text("abc")
    result = refitd("webhooks", "--test", "http://127.0.0.1:9", "--webhook-secret-file", str(tmp_path / "secret"))
    assert (result.exit_code, "whsec_" in result.stderr) == (2, True)
    (tmp_path / "secret").write_text("whsec_" + base64.b64encode(b"k" * 32).decode())
    told = refitd(
        "webhooks", "--test", "http://127.0.0.1:1", "--webhook-secret-file", str(tmp_path / "secret"), "--json"
    )
    assert told.exit_code == 1
    assert json.loads(told.stdout)["reason"].startswith("it cannot be reached")
