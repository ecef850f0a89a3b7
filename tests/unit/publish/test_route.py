"""How a publication goes: what its trainer asks for, held against the engines that are there."""

from pathlib import Path
from typing import Any

import pytest
import torch

from refitd_client.contract.plugin import Receiver, Receivers
from refitd_client.http import publisher_client
from refitd_client.http.connection import Connection
from refitd_client.http.publisher_client import ReceiversQuery
from refitd_client.publish.options import DurabilityPolicy
from refitd_client.publish.ports import PublishRoute
from refitd_client.publisher import route_of
from refitd_client.transport.handover import TrainerMemory
from refitd_client.transport.memory import boot_id, host_name
from refitd_client.ways import Transport

MEMORY = TrainerMemory(Path("/nowhere/run"))
INSIDE = Receiver(engine="c", rank=0, name="c-0", host=host_name(), boot=boot_id(), backends=["gloo"])


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Receivers:
    """What the service says there is; tests change it."""
    there = Receivers(receivers=[], others=["a", "b"])

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
    return route_of(transport, weights, MEMORY, asks(), DurabilityPolicy.of(durable))


@pytest.mark.parametrize(("transport", "goes"), [("auto", "delta"), ("nccl", "disk"), ("gloo", "disk")])
def test_where_no_engine_has_refitd_inside_it_goes_by_files_and_says_what_would_help(
    found: Receivers, transport: Transport, goes: str
) -> None:
    taken = of(transport)
    assert (taken.handover, taken.choice.transport) == (False, goes)
    said = taken.instead or taken.choice.why
    assert "no engine of the run (a, b) has refitd inside: install it there" in said


def test_where_an_engine_has_refitd_inside_that_one_receives_and_the_others_load_files(found: Receivers) -> None:
    found.receivers.append(INSIDE)
    taken = of("gloo")
    assert taken.destination is not None
    assert taken.destination.receivers == ("c-0",)


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
        return route_of(transport, "folder", MEMORY, asks())

    assert of_folder(transport).instead == f"transport={transport!r} takes tensors, and the weights are files"
    assert of_folder("auto").instead is None


def test_files_that_a_policy_would_not_write_are_written_where_engines_take_nothing_else_and_that_is_said(
    found: Receivers,
) -> None:
    assert of("auto").instead is None
    assert (of("auto", "never").instead or "").startswith("all versions get files, whatever durable='never' says")
    assert of("disk", "never").instead is None
