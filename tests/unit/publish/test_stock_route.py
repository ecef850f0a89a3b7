"""To engines without refitd inside: where a trainer names the transport, the operator allows it, and files follow."""

from typing import Any

import pytest
import torch

from refitd_client.contract.receivers import Receiver, Receivers, StockReceiver
from refitd_client.errors import TransportRefusedError
from refitd_client.http import publisher_client
from refitd_client.http.connection import Connection
from refitd_client.http.publisher_client import ReceiversQuery
from refitd_client.publish.durability import DurabilityPolicy
from refitd_client.publish.route import PublishRoute, route_of
from refitd_client.transport.group.choice import TrainerPlace, Transport, hinders_stock

STOCK = [StockReceiver(engine=name, url=f"http://{name}", ranks=1, device="cpu") for name in ("b", "a")]
INSIDE = Receiver(engine="c", rank=0, name="c-0", host="h", boot="b", backends=["gloo"])


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Receivers:
    """What the service says there is; tests change it."""
    there = Receivers(receivers=[], others=["a", "b"], stock=list(STOCK))

    class Client:
        def __enter__(self) -> "Client":
            return self

        def __exit__(self, *_: object) -> None: ...

        def receivers(self, run: str) -> Receivers:
            return there

    monkeypatch.setattr(publisher_client, "open_client", lambda *_, **__: Client())
    return there


def asks() -> ReceiversQuery:
    return ReceiversQuery(Connection(url="http://s:1"), "run")


def of(transport: Transport, durable: str = "always") -> PublishRoute:
    weights: Any = {"w": torch.zeros(2)}
    return route_of(transport, weights, asks(), DurabilityPolicy.of(durable))


def test_it_goes_to_all_of_them_by_their_urls(found: Receivers) -> None:
    taken = of("gloo")
    assert taken.handover
    assert taken.destination is not None
    assert (taken.destination.engines, taken.destination.receivers) == (("http://a", "http://b"), ())
    assert (taken.metadata["transport"], "without refitd inside" in taken.metadata["transport_why"]) == ("gloo", True)


def test_auto_never_goes_there(found: Receivers) -> None:
    taken = of("auto")
    assert (taken.handover, taken.choice.transport) == (False, "delta")


@pytest.mark.parametrize("durable", ["never", "every=2"])
def test_without_files_that_follow_it_is_refused_with_what_to_do(found: Receivers, durable: str) -> None:
    with pytest.raises(TransportRefusedError, match=r"use durable='always', or install refitd"):
        of("gloo", durable)


def test_where_an_engine_has_refitd_inside_that_one_receives_and_the_others_load_files(found: Receivers) -> None:
    found.receivers.append(INSIDE)
    taken = of("gloo")
    assert taken.destination is not None
    assert (taken.destination.engines, taken.destination.receivers) == ((), ("c-0",))


def test_where_the_operator_allows_none_it_goes_by_files(found: Receivers) -> None:
    found.stock.clear()
    assert "no engine of the run (a, b) has refitd inside" in (of("gloo").instead or "")
    assert "--sglang-stock-transfers" in (of("gloo").instead or ""), "what would let them receive"


def test_where_the_operator_allows_it_and_an_engine_cannot_its_reason_is_said(found: Receivers) -> None:
    found.stock.clear()
    found.refusals["b"] = "it has no /init_weights_update_group"
    said = of("gloo").instead or ""
    assert "without it b takes no version over a process group: it has no /init_weights_update_group" in said
    assert "--sglang-stock-transfers" not in said, "it is allowed"


@pytest.mark.parametrize("transport", ["auto", "handover"])
def test_what_no_switch_of_the_service_makes_possible_does_not_name_one(found: Receivers, transport: Transport) -> None:
    found.stock.clear()
    taken = of(transport)
    said = taken.instead or taken.choice.why
    assert ("has refitd inside" in said, "--sglang-stock-transfers" in said) == (True, False)


def test_a_hand_over_that_comes_to_files_alone_is_said_to_be_files(
    found: Receivers, caplog: pytest.LogCaptureFixture
) -> None:
    taken = of("handover")
    assert (taken.handover, taken.metadata["transport"]) == (False, "disk")
    assert f"the version goes by its files: {taken.instead}" in caplog.text
    found.receivers.append(INSIDE)
    assert "put them into SharedTensors" in (of("handover").instead or "")


@pytest.mark.parametrize("transport", ["handover", "nccl", "gloo"])
def test_a_folder_goes_by_its_files_and_what_was_asked_for_is_not_dropped_without_a_word(
    found: Receivers, transport: Transport
) -> None:
    def of_folder(transport: Transport) -> PublishRoute:
        return route_of(transport, "folder", asks())

    assert of_folder(transport).instead == f"transport={transport!r} takes tensors, and the weights are files"
    assert of_folder("auto").instead is None


def test_files_that_a_policy_would_not_write_are_written_where_engines_take_nothing_else_and_that_is_said(
    found: Receivers,
) -> None:
    assert of("auto").instead is None
    assert (of("auto", "never").instead or "").startswith("all versions get files, whatever durable='never' says")
    assert of("disk", "never").instead is None


@pytest.mark.parametrize(
    ("backend", "devices", "kind", "reason"),
    [
        ("nccl", {"GPU-1"}, "cpu", "use gloo"),
        ("nccl", set[str](), "cuda", "the tensors are in host memory: use gloo"),
        ("nccl", {"GPU-1", "GPU-2"}, "cuda", "one sends"),
        ("nccl", {"GPU-1"}, "cuda", None),
        ("gloo", {"GPU-1"}, "cuda", None),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_sent(
    backend: str, devices: set[str], kind: str, reason: str | None
) -> None:
    place = TrainerPlace(
        host="h", boot="b", devices=frozenset(devices), shared=True, backends=frozenset({"gloo", "nccl"})
    )
    said = hinders_stock(backend, place, [StockReceiver(engine="a", url="http://a", ranks=1, device=kind)])
    assert said == reason if reason is None else reason in (said or "")
    none = TrainerPlace(host="h", boot="b", devices=frozenset(), shared=True, backends=frozenset())
    assert "has no" in (hinders_stock(backend, none, STOCK) or "")
