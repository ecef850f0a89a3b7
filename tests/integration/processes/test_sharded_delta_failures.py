"""Deltas of several ranks: what all have to agree on, and what is believed of their copies after a failure."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from refitd_client import (
    InvalidWeightsError,
    PublishError,
    PublishOptions,
    RankLostError,
    StorageError,
    WeightPublisher,
)
from refitd_client.delta.maker import DeltaWeights
from refitd_client.publish.options import DeltaRules
from refitd_client.sharded.rank_shadow import RankShadow
from support import published, sharded_cases
from support.inside import in_rank
from support.ranks import attempted, run_ranks
from support.sharded_deltas import bases, train

FIRST = "nothing to compare with: the publisher's first version, or its first after one without transport='delta'"
AFTER_FAILURE = "nothing to compare with: the publication before it failed"
RULES = DeltaRules(threshold=0.3)


class Trainer:
    """A rank that publishes steps of training; engines serve the last one that was published."""

    def __init__(self, publisher: WeightPublisher, weights: Any) -> None:
        self.publisher, self.weights = publisher, weights
        self.step, self.base = 0, None

    def publish(self, delta: Literal["auto", "never"] = "auto") -> tuple[str, str | None]:
        """Train a step and publish it. Returns what it was, and why it was no delta."""
        self.step += 1
        train(self.weights, self.step, 16)
        bases(self.publisher, "run", self.base)
        done = self.publisher.publish(self.weights, step=self.step, transport="delta" if delta == "auto" else None)
        self.base = self.step
        return done.kind.value, done.why_full


def _with_one_failure(rank: int, size: int, root: Path, fail: Callable[[int, Trainer], Exception | None]) -> list[Any]:
    with WeightPublisher(root, "run", ranks="all", options=PublishOptions(delta_rules=RULES)) as publisher:
        trainer = Trainer(publisher, sharded_cases.fsdp2(rank, size))
        begun = [trainer.publish(), trainer.publish()]
        error = fail(rank, trainer)
        return [begun, error, trainer.publish(), trainer.publish()]


def _fails_to_compare(rank: int, trainer: Trainer) -> Exception | None:
    works = RankShadow._compare

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    if rank == 1:
        RankShadow._compare = fail  # pyright: ignore[reportAttributeAccessIssue]
    error = attempted(trainer.publish)
    RankShadow._compare = works
    return error


def _has_nan(rank: int, trainer: Trainer) -> Exception | None:
    value = trainer.weights.blocks[1].weight.to_local().data.view(-1)
    before = value[2].clone()
    if rank == 1:
        value[2] = float("nan")
    error = attempted(trainer.publish)
    value[2] = before
    return error


def _cannot_be_written(rank: int, trainer: Trainer) -> Exception | None:
    works = DeltaWeights.write

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    DeltaWeights.write = fail  # pyright: ignore[reportAttributeAccessIssue]
    error = attempted(trainer.publish)
    DeltaWeights.write = works
    return error


FAILURES: dict[str, tuple[Any, type[Exception], str]] = {
    "compare": (_fails_to_compare, PublishError, "rank 1 failed with RuntimeError: out of memory"),
    "nan": (_has_nan, InvalidWeightsError, "rank 1: tensor blocks.1.weight has 1 changed value that is NaN"),
    "write": (_cannot_be_written, StorageError, "Input/output error"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_after_a_delta_that_fails_on_one_rank_all_hear_of_it_and_the_next_is_full(tmp_path: Path, name: str) -> None:
    """The copies have the step that was not published: no delta may lead from them."""
    fail, kind, said = FAILURES[name]
    for told in run_ranks(2, tmp_path, _with_one_failure, tmp_path / "root", fail):
        assert isinstance(told, list), told
        begun, error, next_one, then = told
        assert begun == [("full", FIRST), ("delta", None)]
        assert isinstance(error, kind)
        assert said in str(error)
        assert next_one == ("full", AFTER_FAILURE)
        assert then == ("delta", None)
    assert published.versions(tmp_path / "root/run") == [f"v{step:06d}" for step in (1, 2, 4, 5)]
    assert published.leftovers(tmp_path / "root/run") == []


def _die(rank: int, size: int, root: Path, where: str) -> list[Any]:
    publisher = WeightPublisher(root, "run", ranks="all", options=PublishOptions(rank_timeout=20, delta_rules=RULES))
    trainer = Trainer(publisher, sharded_cases.fsdp2(rank, size))
    begun = [trainer.publish(), trainer.publish()]
    if rank == 1:
        setattr(RankShadow, where, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    errors = [attempted(trainer.publish), attempted(trainer.publish)]
    publisher.close()
    return [begun, *errors]


def _go_on(rank: int, size: int, root: Path) -> list[tuple[str, str | None]]:
    with WeightPublisher(root, "run", ranks="all", options=PublishOptions(delta_rules=RULES)) as publisher:
        trainer = Trainer(publisher, sharded_cases.fsdp2(rank, size))
        trainer.step = 2
        return [trainer.publish(), trainer.publish()]


@pytest.mark.parametrize("where", ["_compare", "_translated"])
def test_a_rank_that_is_killed_while_it_compares_leaves_no_version_and_the_next_is_full(
    tmp_path: Path, where: str
) -> None:
    first, dead, third = run_ranks(3, tmp_path, _die, tmp_path / "root", where)
    assert dead is None
    for begun, error, again in (first, third):
        assert begun == [("full", FIRST), ("delta", None)]
        assert isinstance(error, RankLostError)
        assert "rank 1 is gone, or did not compare its part" in str(error)
        assert "open another" in str(again)
    assert published.versions(tmp_path / "root/run") == ["v000001", "v000002"]
    assert published.leftovers(tmp_path / "root/run") == []
    assert run_ranks(2, tmp_path, _go_on, tmp_path / "root") == [[("full", FIRST), ("delta", None)]] * 2


def _disagree(rank: int, size: int, root: Path) -> list[Any]:
    """One rank with other rules; then one that wants none; then they agree."""
    weights, told = sharded_cases.fsdp2(rank, size), list[Any]()
    rules = replace(RULES, threshold=0.1) if rank == 1 else RULES
    with WeightPublisher(root, "run", ranks="all", options=PublishOptions(delta_rules=rules)) as publisher:
        told.append(str(attempted(Trainer(publisher, weights).publish)))
    with WeightPublisher(root, "run", ranks="all", options=PublishOptions(delta_rules=RULES)) as publisher:
        trainer = Trainer(publisher, weights)
        trainer.publish()
        told.append(str(attempted(lambda: trainer.publish(delta=("auto", "never")[rank]))))
        return [*told, trainer.publish()]


def test_ranks_that_do_not_say_the_same_of_deltas_are_refused_on_every_rank_with_both_words(tmp_path: Path) -> None:
    for rules, choice, then in run_ranks(2, tmp_path, _disagree, tmp_path / "root"):
        assert rules == (
            "rank 1 asks for delta_rules=DeltaRules(threshold=0.1, anchor_every=20) and rank 0 for "
            "DeltaRules(threshold=0.3, anchor_every=20): all ranks ask for the same"
        )
        assert choice == "rank 1 asks for transport=None and rank 0 for 'delta': all ranks ask for the same"
        assert then == ("full", "nothing to compare with: ranks 0 and 1 have no copy of the last version")
    assert published.versions(tmp_path / "root/run") == ["v000001", "v000003"]


def _resharded(rank: int, size: int, root: Path) -> list[Any]:
    """The same tensors, sharded otherwise; then by a transport of its own name; then rank 1 has lost its copy."""
    from torch.distributed.tensor import Shard

    with WeightPublisher(root, "run", ranks="all", options=PublishOptions(delta_rules=RULES)) as publisher:
        trainer = Trainer(publisher, sharded_cases.placed(Shard(0))(rank, size))
        told: list[Any] = [trainer.publish(), trainer.publish()]
        trainer.weights = sharded_cases.placed(Shard(1))(rank, size)
        told += [trainer.publish(), trainer.publish()]
        train(trainer.weights, 5, 16)
        bases(publisher, "run", 4)
        by_name = publisher.publish(trainer.weights, step=5, transport="delta").committed()
        trainer.step = trainer.base = 5
        if rank == 1:
            in_rank(publisher)._follower.shadow.drop()
        return [*told, (by_name.kind.value, by_name.why_full), trainer.publish(), trainer.publish()]


def test_a_copy_is_made_anew_where_a_rank_has_none_of_these_tensors(tmp_path: Path) -> None:
    others, delta = ("full", "the tensors are not those of the last"), ("delta", None)
    lost = "full", "nothing to compare with: rank 1 has no copy of the last version"
    for told in run_ranks(2, tmp_path, _resharded, tmp_path / "root"):
        assert told == [("full", FIRST), delta, others, delta, delta, lost, delta]
