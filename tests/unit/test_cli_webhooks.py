"""`refitd webhooks`: what was told to whom, and what waits."""

import msgspec

from refitd_client.contract.states import DeliveryState
from refitd_client.contract.wire import Delivery, Page
from support.command_line import refitd
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
    )
    with stand_in() as service:
        assert refitd("webhooks", "--url", service.url).exit_code == 0
        service.deliveries = [waiting]
        shown = refitd("webhooks", "--url", service.url).stdout
        told = refitd("webhooks", "--url", service.url, "--json").stdout
    for word in ("rejected", "https://ops.example.com/…", "WAITING", "3", "it answered 503"):
        assert word in shown
    assert msgspec.json.decode(told, type=Page[Delivery]).items == [waiting]
