"""A hand-over as the trainer sees it: what is offered and said of it, and what comes first after a failure."""

import errno
import gc
import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import torch

from refitd_client import InvalidWeightsError, NoSpaceError, PublishOptions, StorageError, WeightPublisher
from refitd_client.checkpoint.finite import NO_RULE
from refitd_client.contract.manifest import fitting_fingerprints
from refitd_client.contract.states import Kind, WaitOutcome
from refitd_client.fingerprint import fingerprints
from refitd_client.publish import attempt
from refitd_client.transport import handover
from refitd_client.transport.child import TransferSent
from refitd_client.transport.memory import LayoutCache, SharedTensors
from refitd_client.transport.offer_file import make_secret
from refitd_client.transport.sending import NoTransferError, Sending
from refitd_client.write import version_folder as staging
from support.exporting import shared
from support.inside import in_process
from support.mini_sglang import tiny_weights
from support.stand_in_service import StandIn, make_engine, stand_in

DEBT = "the files of what was handed over before were never written: these come first"


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[SharedTensors]:
    made = shared(tiny_weights(1), tmp_path)
    yield made
    made.close()


@pytest.fixture
def service() -> Iterator[StandIn]:
    with stand_in() as service:
        service.outcomes = [WaitOutcome.TAKEN]
        yield service


@pytest.fixture
def publisher(tmp_path: Path, service: StandIn) -> Iterator[WeightPublisher]:
    root = tmp_path / "root"
    (root / ".refitd").mkdir(parents=True)
    make_secret(root)
    with WeightPublisher(root, "run", service.url) as opened:
        yield opened


@pytest.fixture
def in_memory(tmp_path: Path, publisher: WeightPublisher, service: StandIn) -> Iterator[WeightPublisher]:
    """A publisher whose versions get no files where engines take them."""
    publisher.close()
    with WeightPublisher(tmp_path / "root", "run", service.url, options=PublishOptions(durable="never")) as opened:
        yield opened


def said(service: StandIn, step: int) -> list[str]:
    """What the service was told of a step: that it is offered, that it failed, or that its files are there."""
    notices = [notice for notice in service.bodies if notice.step == step]
    return ["offer" if each.offer else "failed" if each.failed else each.kind for each in notices]


def test_the_service_hears_of_an_offer_and_then_of_its_files(
    publisher: WeightPublisher, service: StandIn, trainer: SharedTensors
) -> None:
    publication = publisher.publish(trainer.tensors, step=1, transport="handover", metadata={"job": "seven"})
    assert publication.handed is not None
    assert publication.handed.reason == "no engine of the run is known to the service"
    assert not list((publication.path.parent).glob(".offer-*"))  # the tensors are the trainer's own again
    assert publication.committed(30).handed == publication.handed
    assert (said(service, 1), publication.path.is_dir()) == (["offer", Kind.FULL], True)
    assert [notice.metadata["job"] for notice in service.bodies] == ["seven"] * 2  # its trace begins with the offer


def test_a_publication_says_what_it_was_handed_to_whether_anything_was_asked_for_or_not(
    publisher: WeightPublisher, trainer: SharedTensors
) -> None:
    """So that a trainer that goes from files to a transport need not change what it reads."""
    plain = publisher.publish(trainer.tensors, step=1)
    staged = publisher.publish(trainer.tensors, step=2, block="staged")
    assert (plain.handed, staged.handed, staged.committed(30).handed) == (None, None, None)
    by_files = publisher.publish(trainer.tensors, step=3, transport="disk").committed(30)
    assert by_files.handed is not None
    assert by_files.handed.transport == "disk"


def test_no_tensor_is_kept_that_was_handed_over(publisher: WeightPublisher, trainer: SharedTensors) -> None:
    state = {name: tensor.view(tensor.shape) for name, tensor in trainer.tensors.items()}
    kept = [weakref.ref(tensor) for tensor in state.values()]
    publication = publisher.publish(state, step=1, transport="handover")
    assert publication.handed is not None
    assert publication.handed.timings is not None  # else they were not even offered
    del state
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)
    publication.committed(30)


def test_after_files_that_failed_the_next_version_is_durable_before_any_engine_hears_of_it(
    publisher: WeightPublisher, service: StandIn, trainer: SharedTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(staging.Staging, "seal", full)
        with pytest.raises(StorageError):
            publisher.publish(trainer.tensors, step=1, transport="handover").committed(30)
    assert said(service, 1) == ["offer", "failed"]
    second = publisher.publish(trainer.tensors, step=2, transport="handover")
    assert second.handed is not None
    assert (second.handed.engines, second.handed.reason) == ((), DEBT)
    second.committed(30)
    assert said(service, 2) == [Kind.FULL]
    publisher.publish(trainer.tensors, step=3, transport="handover").committed(30)
    assert said(service, 3) == ["offer", Kind.FULL]


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize(
    "broken_in", ["transport.handover.Handover._answered", "publish.attempt.PublishAttempt._stage"]
)
def test_a_failure_before_the_offer_is_over_or_after_takes_the_tensors_back_and_tells_the_service(
    publisher: WeightPublisher,
    service: StandIn,
    trainer: SharedTensors,
    monkeypatch: pytest.MonkeyPatch,
    broken_in: str,
    is_sent: bool,
) -> None:
    with monkeypatch.context() as broken:
        if is_sent:
            broken.setattr(handover.TensorsHere, "send", lambda *_: Sending(lambda _: TransferSent(refused={}, ms={})))
        broken.setattr(f"refitd_client.{broken_in}", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            publisher.publish(trainer.tensors, step=1, transport="handover")
    assert said(service, 1) == ["offer", "failed"]
    assert not list(in_process(publisher)._folder.path.glob(".offer-*"))


def test_without_room_for_its_files_a_version_is_offered_to_nobody(
    publisher: WeightPublisher, service: StandIn, trainer: SharedTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr("refitd_client.publish.attempt.free_bytes", lambda _: 10)
        with pytest.raises(NoSpaceError):
            publisher.publish(trainer.tensors, step=1, transport="handover")
    assert said(service, 1) == []
    publisher.publish(trainer.tensors, step=1, transport="handover").committed(30)
    assert said(service, 1) == ["offer", Kind.FULL]


def test_the_files_of_what_was_handed_over_are_staged_after_the_answers_and_have_the_fingerprints_of_the_offer(
    publisher: WeightPublisher, service: StandIn, trainer: SharedTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    over, stage = handover.Handover.complete, attempt.PublishAttempt._stage
    monkeypatch.setattr(handover.Handover, "complete", lambda hand: (order.append("over"), over(hand))[1])
    monkeypatch.setattr(attempt.PublishAttempt, "_stage", lambda *args: (order.append("stage"), stage(*args))[1])
    publication = publisher.publish(trainer.tensors, step=1, transport="handover").committed(30)
    assert order == ["over", "stage"]
    manifest = json.loads((publication.path / "refit.json").read_text())
    found = fingerprints(trainer.tensors.values())
    assert manifest["fingerprints"] == fitting_fingerprints(dict(zip(trainer.tensors, found, strict=True)))


def test_the_files_of_what_was_sent_are_staged_when_all_has_arrived_while_engines_load(
    publisher: WeightPublisher, service: StandIn, trainer: SharedTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_staged, stage = Event(), attempt.PublishAttempt._stage
    monkeypatch.setattr(handover.TensorsHere, "send", lambda *_: Sending(lambda _: TransferSent(refused={}, ms={})))
    monkeypatch.setattr(attempt.PublishAttempt, "_stage", lambda *args: (is_staged.set(), stage(*args))[1])
    monkeypatch.setattr(handover.Handover, "_answered", lambda *_: (("engine",) if is_staged.wait(60) else (), None))
    publication = publisher.publish(trainer.tensors, step=1, transport="handover")
    assert publication.handed is not None
    assert (publication.handed.engines, publication.handed.sent) == (("engine",), {})
    publication.committed(30)
    assert said(service, 1) == ["offer", Kind.FULL]


def test_engines_that_have_answered_end_the_wait_for_a_receiver_that_never_comes(
    publisher: WeightPublisher, trainer: SharedTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(stop: Event) -> TransferSent:
        raise NoTransferError("it was stopped" if stop.wait(60) else "it waited on")

    monkeypatch.setattr(handover.TensorsHere, "send", lambda *_: Sending(send))
    publication = publisher.publish(trainer.tensors, step=1, transport="handover")
    assert publication.handed is not None
    assert str(publication.handed.reason).endswith("nothing was sent: it was stopped")
    publication.committed(30)


def test_what_cannot_be_lent_goes_by_its_files_and_says_why(publisher: WeightPublisher, service: StandIn) -> None:
    publication = publisher.publish({"w": torch.ones(3)}, step=1, transport="handover")
    assert publication.handed is not None
    assert "the tensors are in this process's memory" in str(publication.handed.reason)
    publication.committed(30)
    assert said(service, 1) == [Kind.FULL]


def test_what_is_not_finite_is_offered_to_nobody(
    publisher: WeightPublisher, service: StandIn, trainer: SharedTensors
) -> None:
    trainer.tensors["norm.weight"][0] = torch.nan
    with pytest.raises(InvalidWeightsError, match=r"norm\.weight"):
        publisher.publish(trainer.tensors, step=1, transport="handover")
    assert said(service, 1) == []
    trainer.tensors["norm.weight"][0] = 0
    publisher.publish(trainer.tensors, step=2, transport="handover").committed(30)
    assert said(service, 2) == ["offer", Kind.FULL]  # nothing is owed for what nobody heard of


def test_a_layout_is_made_once_and_anew_when_a_tensor_has_gone_elsewhere(
    trainer: SharedTensors, tmp_path: Path
) -> None:
    layouts = LayoutCache()

    def layout(tensors: dict[str, torch.Tensor]) -> object:
        return layouts.prepare(tensors, [NO_RULE] * len(tensors)).offer("run~v000001", [0] * len(tensors)).layout

    first = layout(trainer.tensors)
    trainer.tensors["norm.weight"].fill_(3)  # the next step, in place
    assert layout(dict(trainer.tensors)) is first
    other = shared(tiny_weights(2), tmp_path)
    moved = layout(trainer.tensors | {"norm.weight": other.tensors["norm.weight"]})
    assert moved != first
    other.close()  # the same address, and nobody lends it any more
    with pytest.raises(RuntimeError, match="own memory"):
        layout(trainer.tensors | {"norm.weight": other.tensors["norm.weight"]})


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The engines that answer that they have it, each with why another has not."""
    engines: dict[str, str | None] = {"a:1": None}

    def answers(*_: object) -> tuple[tuple[str, ...], str | None]:
        return tuple(engines), next((why for why in engines.values() if why), None)

    monkeypatch.setattr(handover.Handover, "_answered", answers)
    return engines


def test_a_version_that_all_engines_have_gets_no_files_where_the_policy_needs_none(
    tmp_path: Path,
    publisher: WeightPublisher,
    service: StandIn,
    trainer: SharedTensors,
    taken: dict[str, str | None],
) -> None:
    publisher.close()
    with WeightPublisher(tmp_path / "root", "run", service.url, options=PublishOptions(durable="every=2")) as opened:
        first = opened.publish(trainer.tensors, step=1, transport="handover")
        second = opened.publish(trainer.tensors, step=2, transport="handover")
        third = opened.publish(trainer.tensors, step=3, transport="handover")
        assert [each.committed(30).in_memory for each in (first, second, third)] == [False, True, False]
        assert [each.path.is_dir() for each in (first, second, third)] == [True, False, True]
        with pytest.raises(ValueError, match="is in the engines' memory alone, as durable says: it is never sealed"):
            second.wait(5, "sealed")
    assert [said(service, step) for step in (1, 2, 3)] == [["offer", Kind.FULL], ["offer"], ["offer", Kind.FULL]]
    policies = [notice.metadata.get("durable") for notice in service.bodies if notice.offer]
    assert policies == [None, "every=2", None]


def test_what_a_trainer_itself_says_of_durable_is_no_policy(
    publisher: WeightPublisher, service: StandIn, trainer: SharedTensors
) -> None:
    publisher.publish(trainer.tensors, step=1, transport="handover", metadata={"durable": "never", "a": "b"}).committed(
        30
    )
    offered, written = service.bodies
    assert ("durable" in offered.metadata, offered.metadata["a"]) == (False, "b")
    assert written.metadata["durable"] == "never"


def test_a_version_that_an_engine_has_not_taken_gets_files_whatever_the_policy_is(
    in_memory: WeightPublisher, trainer: SharedTensors, taken: dict[str, str | None]
) -> None:
    taken["a:1"] = "b:1: it has no room"
    publication = in_memory.publish(trainer.tensors, step=1, transport="handover")
    assert (publication.committed(30).in_memory, publication.path.is_dir()) == (False, True)


def test_a_version_gets_files_where_a_follower_has_the_run_whatever_the_policy_is(
    tmp_path: Path, in_memory: WeightPublisher, service: StandIn, trainer: SharedTensors
) -> None:
    service.followers = ["far"]
    service.engines = [make_engine("a:1", version="run~v000001")]
    publication = in_memory.publish(trainer.tensors, step=1, transport="handover")
    assert publication.handed is not None
    assert publication.handed.engines == ("a:1",)
    assert publication.handed.reason == "far follows the run, and gets versions by their files"
    assert publication.committed(30).in_memory is False
    in_memory.close()
    with WeightPublisher(tmp_path / "root", "run", service.url) as opened:
        service.engines = [make_engine("a:1", version="run~v000002")]
        publication = opened.publish(trainer.tensors, step=2, transport="handover")
        assert publication.handed is not None
        assert publication.handed.reason is None  # files follow, and the follower waits for nothing else
        publication.committed(30)


def test_steps_without_files_are_not_used_again(
    tmp_path: Path,
    in_memory: WeightPublisher,
    service: StandIn,
    trainer: SharedTensors,
    taken: dict[str, str | None],
) -> None:
    assert in_memory.publish(trainer.tensors, step=1, transport="handover").committed(30).in_memory
    in_memory.close()
    with WeightPublisher(tmp_path / "root", "run", service.url) as opened:
        assert opened.begins(1) is not None
        assert opened.begins(2) is None
