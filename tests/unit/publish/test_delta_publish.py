"""`transport="delta"`: a delta where engines can use it, a full version with its reason everywhere else."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from refitd_client import (
    InvalidRequestError,
    InvalidWeightsError,
    Publication,
    PublishOptions,
    RefitClient,
    WeightPublisher,
)
from refitd_client.checkpoint.header import Entry
from refitd_client.contract.manifest import parse_manifest
from refitd_client.contract.states import EngineState, Kind
from refitd_client.contract.wire import Notice, Problem
from refitd_client.delta import apply, read_delta
from refitd_client.errors import problem_error
from refitd_client.fingerprint import fingerprints, to_text
from refitd_client.publish.options import DeltaRules
from support.stand_in_service import StandIn, make_engine, stand_in

FIRST = "nothing to compare with: the publisher's first version, or its first after one without transport='delta'"
AFTER_FAILURE = "nothing to compare with: the publication before it failed"


@pytest.fixture
def service() -> Iterator[StandIn]:
    with stand_in() as service:
        service.engines = [make_engine(version=None, run="run")]
        yield service


@pytest.fixture
def publisher(tmp_path: Path, service: StandIn) -> Iterator[WeightPublisher]:
    rules = DeltaRules(threshold=0.2, anchor_every=5)
    with WeightPublisher(tmp_path, "run", service.url, options=PublishOptions(delta_rules=rules)) as publisher:
        yield publisher


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.randn(40, 50, generator=generator).to(torch.bfloat16), "scale": torch.ones(100)}


def serve(service: StandIn, *served: Publication) -> None:
    service.engines = [
        make_engine(f"engine-{number}", version=publication.version_id, step=publication.step, run="run")
        for number, publication in enumerate(served)
    ]


def applied(publication: Publication, onto: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The delta of a publication, applied to a copy of some tensors."""
    copies = {name: tensor.clone() for name, tensor in onto.items()}
    dtypes = {torch.bfloat16: "BF16", torch.float32: "F32"}
    targets = {
        name: (
            Entry(name=name, dtype=dtypes[tensor.dtype], shape=tuple(tensor.shape)),
            tensor.reshape(-1).view(torch.uint8).numpy(),
        )
        for name, tensor in copies.items()
    }
    apply(read_delta(publication.path / "weights.refit-delta"), targets)
    return copies


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_small_step_after_a_served_version_is_a_delta(publisher: WeightPublisher, service: StandIn) -> None:
    """It leads from the one to the other, says what it is, and holds nothing that a loader would take."""
    state = weights()
    first = publisher.publish(state, step=1, transport="delta")
    assert (first.kind, first.why_full) == (Kind.FULL, FIRST)
    serve(service, first)
    old = copied(state)
    state["w"][3, 4:9] = 7
    second = publisher.publish(state, step=2, transport="delta")
    assert (second.kind, second.base, second.why_full) == (Kind.DELTA, first.version_id, None)
    assert second.density == 5 / 2100
    assert sorted(path.name for path in second.path.iterdir()) == ["refit.json", "weights.refit-delta"]
    assert same(applied(second, old), state)
    manifest = parse_manifest((second.path / "refit.json").read_bytes())
    assert (manifest.density, manifest.why_full) == (5 / 2100, None)
    assert parse_manifest((first.path / "refit.json").read_bytes()).why_full == FIRST
    assert (manifest.kind, manifest.base) == (Kind.DELTA, first.version_id)
    assert manifest.fingerprints == {name: to_text(fingerprints([tensor])[0]) for name, tensor in state.items()}
    assert manifest.tensors == parse_manifest((first.path / "refit.json").read_bytes()).tensors
    assert manifest.delta is not None
    assert (manifest.delta.changed, manifest.delta.elements, manifest.delta.tensors) == (5, 2100, 1)
    notice = service.bodies[-1]
    assert (notice.kind, notice.base) == (Kind.DELTA, first.version_id)


def test_what_is_too_much_is_said_once(tmp_path: Path, service: StandIn) -> None:
    """29 of 100 are a share of 0.29 and no more, but more than 0.29 * 100 = 28.999…: none may be lost in between."""
    state = {"w": torch.ones(100)}
    with WeightPublisher(
        tmp_path, "run", service.url, options=PublishOptions(delta_rules=DeltaRules(threshold=0.29))
    ) as publisher:
        serve(service, publisher.publish(state, step=1, transport="delta"))
        state["w"][:29] = 7
        done = publisher.publish(state, step=2, transport="delta")
        assert (done.kind, done.density) == (Kind.FULL, 0.29)
        serve(service, done)
        old = copied(state)
        state["w"][:28] = 8
        done = publisher.publish(state, step=3, transport="delta")
        assert done.kind is Kind.DELTA
        assert same(applied(done, old), state)


def test_a_delta_lists_what_changed_in_any_version_since_its_base(publisher: WeightPublisher, service: StandIn) -> None:
    """Also what went back to its old value: an engine may be at any version in between."""
    state = weights()
    first = publisher.publish(state, step=1, transport="delta")
    serve(service, first)
    versions = [copied(state)]
    for step in (2, 3, 4):
        state["w"][0, 0] = 5 if step == 2 else versions[0]["w"][0, 0]
        state["w"][step, step] += 1
        last = publisher.publish(state, step=step, transport="delta")
        versions.append(copied(state))
        assert (last.kind, last.base) == (Kind.DELTA, first.version_id)
    change = read_delta(last.path / "weights.refit-delta").changes["w"]
    assert change.indices.tolist() == [0, 2 * 50 + 2, 3 * 50 + 3, 4 * 50 + 4]
    assert [change.base, change.result] == fingerprints([versions[0]["w"], state["w"]])
    assert all(same(applied(last, version), state) for version in versions)


def test_the_base_moves_on_with_the_engines_and_is_that_of_the_slowest(
    publisher: WeightPublisher, service: StandIn
) -> None:
    state = weights()
    first = publisher.publish(state, step=1, transport="delta")
    serve(service, first)
    state["w"][1, 1] = 2
    second = publisher.publish(state, step=2, transport="delta")
    serve(service, second, first)
    state["w"][2, 2] = 2
    third = publisher.publish(state, step=3, transport="delta")
    serve(service, second, third)
    old = copied(state)
    state["w"][3, 3] = 2
    fourth = publisher.publish(state, step=4, transport="delta")
    assert [each.base for each in (second, third, fourth)] == [first.version_id, first.version_id, second.version_id]
    assert same(applied(fourth, old), state)


def test_engines_that_cannot_be_reached_hold_up_no_delta(publisher: WeightPublisher, service: StandIn) -> None:
    state = weights()
    first = publisher.publish(state, step=1, transport="delta")
    serve(service, first)
    service.engines += [
        make_engine("gone", state=EngineState.UNREACHABLE, version=None, run="run"),
        make_engine("ill", state=EngineState.QUARANTINED, version=None, run="run"),
        make_engine("another run's", version=None, run="other"),
    ]
    assert publisher.publish(state, step=2, transport="delta").kind is Kind.DELTA


def engines_of_nobody(service: StandIn) -> None:
    service.engines = []


def fresh_engine(service: StandIn) -> None:
    service.engines.append(make_engine("new", version=None, run="run"))


def unknown_version(service: StandIn) -> None:
    service.engines = [make_engine(version="run~v000000", run="run")]


def trouble(service: StandIn) -> None:
    service.trouble = Problem(type="urn:refitd:problem:x", title="No", status=503, detail="no")


@pytest.mark.parametrize(
    ("happen", "why"),
    [
        (engines_of_nobody, "no engine of run run can be reached"),
        (fresh_engine, "engine new serves no version of run run yet"),
        (unknown_version, "is not among the last versions of this publisher"),
        (trouble, "the service did not say what engines serve"),
    ],
)
def test_without_a_base_that_counts_a_version_is_full(
    publisher: WeightPublisher, service: StandIn, happen: Any, why: str
) -> None:
    state = weights()
    serve(service, publisher.publish(state, step=1, transport="delta"))
    happen(service)
    second = publisher.publish(state, step=2, transport="delta")
    assert second.kind is Kind.FULL
    assert second.why_full is not None
    assert why in second.why_full


def test_without_a_service_every_version_is_full(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path, "run") as publisher:
        publisher.publish(weights(), step=1, transport="delta")
        second = publisher.publish(weights(), step=2, transport="delta")
    assert second.kind is Kind.FULL
    assert "without service_url" in str(second.why_full)


def test_too_many_changes_are_published_in_full_and_the_next_step_goes_from_there(
    publisher: WeightPublisher, service: StandIn
) -> None:
    state = weights()
    first = publisher.publish(state, step=1, transport="delta")
    serve(service, first)
    state["w"] += 1
    second = publisher.publish(state, step=2, transport="delta")
    assert second.kind is Kind.FULL
    assert "more than 20.00%" in str(second.why_full)
    assert second.density is not None
    assert second.density > 0.9
    state["w"][0, 0] = 3
    third = publisher.publish(state, step=3, transport="delta")
    assert third.kind is Kind.FULL  # engines serve the first still, and what changed in the second is not remembered
    serve(service, second)
    old = copied(state)
    state["w"][0, 1] = 3
    fourth = publisher.publish(state, step=4, transport="delta")
    assert fourth.base == second.version_id
    assert same(applied(fourth, old), state)


def test_every_fifth_version_is_an_anchor_and_ends_no_chain(publisher: WeightPublisher, service: StandIn) -> None:
    state = weights()
    first = publisher.publish(state, step=1, transport="delta")
    serve(service, first)
    kinds: list[Kind] = []
    for step in range(2, 8):
        state["w"][step, 0] += 1
        kinds.append(publisher.publish(state, step=step, transport="delta").kind)
    assert kinds == [Kind.DELTA] * 4 + [Kind.FULL] + [Kind.DELTA]


def test_other_tensors_are_published_in_full(publisher: WeightPublisher, service: StandIn) -> None:
    state = weights()
    serve(service, publisher.publish(state, step=1, transport="delta"))
    for step, change in enumerate(
        [{"w": torch.ones(3, 3)}, {"scale": torch.ones(100).half()}, {"x": torch.ones(1)}], 2
    ):
        publication = publisher.publish({**state, **change}, step=step, transport="delta")
        assert publication.why_full == "the tensors are not those of the last"


def test_a_folder_is_published_in_full(publisher: WeightPublisher, service: StandIn) -> None:
    first = publisher.publish(weights(), step=1, transport="delta")
    serve(service, first)
    second = publisher.publish(first.path, step=2, transport="delta")
    assert second.kind is Kind.FULL
    assert "folder" in str(second.why_full)
    third = publisher.publish(weights(), step=3, transport="delta")
    assert third.why_full == "nothing to compare with: the version before it was made of a folder"


class CancelledError(Exception):
    """A hook's."""


def cancel(_: Any) -> None:
    raise CancelledError


def test_what_was_not_published_is_compared_with_by_nobody(publisher: WeightPublisher, service: StandIn) -> None:
    """A publication that was stopped has moved the shadow on: the next version is full, and right."""
    state = weights()
    serve(service, publisher.publish(state, step=1, transport="delta"))
    state["w"][0, 0] = 9
    with pytest.raises(CancelledError):
        publisher.publish(state, step=2, transport="delta", progress=cancel)
    again = publisher.publish(state, step=2, transport="delta")
    assert (again.kind, again.why_full) == (Kind.FULL, AFTER_FAILURE)


def test_a_changed_value_that_is_not_finite_never_becomes_visible(
    publisher: WeightPublisher, service: StandIn, tmp_path: Path
) -> None:
    state = weights()
    serve(service, publisher.publish(state, step=1, transport="delta"))
    state["scale"][7] = float("nan")
    with pytest.raises(InvalidWeightsError, match="scale has 1 changed value that is NaN") as caught:
        publisher.publish(state, step=2, transport="delta")
    assert caught.value.tensor == "scale"
    assert not (tmp_path / "run" / "v000002").exists()
    state["scale"][7] = 2
    then = publisher.publish(state, step=3, transport="delta")
    assert (then.kind, then.why_full) == (Kind.FULL, AFTER_FAILURE)


def test_a_version_published_without_deltas_ends_the_chain(publisher: WeightPublisher, service: StandIn) -> None:
    """It was not compared, so nobody knows what changed in it."""
    state = weights()
    serve(service, publisher.publish(state, step=1, transport="delta"))
    state["w"][0, 0] = 9
    second = publisher.publish(state, step=2)
    assert (second.kind, second.why_full) == (Kind.FULL, None)
    assert parse_manifest((second.path / "refit.json").read_bytes()).fingerprints == {}
    serve(service, second)
    assert publisher.publish(state, step=3, transport="delta").why_full == FIRST


def test_a_service_that_refuses_deltas_gets_no_second_one(
    publisher: WeightPublisher, service: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stands, and the trainer is told; from then on every version is full."""
    state = weights()
    serve(service, publisher.publish(state, step=1, transport="delta"))
    problem = Problem(type="urn:refitd:problem:unsupported-kind", title="No", status=422, detail="publish 'full' ones")
    real = RefitClient.announce

    def refuse(client: RefitClient, notice: Notice) -> Any:
        if notice.kind is Kind.DELTA:
            raise problem_error(problem)
        return real(client, notice)

    monkeypatch.setattr(RefitClient, "announce", refuse)
    with pytest.raises(InvalidRequestError) as caught:
        publisher.publish(state, step=2, transport="delta")
    assert caught.value.publication is not None
    assert caught.value.publication.kind is Kind.DELTA
    third = publisher.publish(state, step=3, transport="delta")
    assert third.kind is Kind.FULL
    assert "refuses deltas" in str(third.why_full)
