"""All ranks of a trainer read their sources of weights together, and publish one version: each keeps a share."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from refitd_client import InvalidWeightsError, PublishError, PublishOptions, WeightPublisher
from refitd_client.publish.options import DeltaRules
from refitd_client.sharded.follower import Follower
from refitd_client.ways import Transport
from support import published
from support.mini_sglang import tiny_weights
from support.once import made_once
from support.ranks import attempted, run_ranks
from support.sharded_trainer import RUN, sharded_job
from support.weight_sources import Gathering, ParamMeta, Source, Split, described

LAYERS = [["embed"], ["layer.0.w", "layer.0.b"], ["layer.1.w", "layer.1.b"], ["head"]]
NAMES = [name for group in LAYERS for name in group]


def model(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((64, 8 * (place + 1)), float(step)) for place, name in enumerate(NAMES)}


def _gathering(_: int, step: int) -> Source:
    return Gathering(model(step))


def _disjoint(rank: int, step: int) -> Source:
    """As of pipeline stages: what a rank does not hold is yielded as None."""
    return Split(model(step), NAMES[rank * 3 :][:3])


def _grouped(rank: int, step: int) -> Source:
    """As vLLM's base class has it: a group of which a rank holds nothing is not yielded to it. One name is on both."""
    return Split(model(step), (["embed", "layer.0.w", "layer.0.b"], ["layer.0.b", *NAMES[3:]])[rank], LAYERS)


def _on_one(rank: int, step: int) -> Source:
    """Rank 1 holds nothing."""
    return Source(model(step)) if rank == 0 else Split(model(step), [])


WAYS: dict[str, tuple[Callable[[int, int], Source], list[list[str]]]] = {
    "gathering": (_gathering, [["layer.0.b", "layer.0.w", "head"], ["embed", "layer.1.b", "layer.1.w"]]),
    "disjoint": (_disjoint, [NAMES[:3], NAMES[3:]]),
    "grouped": (_grouped, [NAMES[:3], NAMES[3:]]),
    "on-one": (_on_one, [NAMES, []]),
}


def _publish(rank: int, __: int, root: Path) -> dict[str, list[list[str]]]:
    """Three steps of each way, the last one a delta; what this rank held at each."""
    told: dict[str, list[list[str]]] = {}
    release = Follower.release
    options = PublishOptions(delta_rules=DeltaRules(threshold=1.0))
    for way, (source_of, _) in WAYS.items():
        held = told[way] = []

        def noting(follower: Follower, held: list[list[str]] = held) -> None:
            held.append([*follower._holdings])
            release(follower)

        Follower.release = noting  # type: ignore[method-assign]
        with WeightPublisher(root, way, ranks="all", options=options) as publisher:
            for step in (1, 2):
                source = source_of(rank, step)
                publisher.publish(source, step=step)
                assert source.passes == 1
    return told


def _published(folder: Path) -> tuple[Path, list[Any]]:
    return folder / "root", run_ranks(2, folder, _publish, folder / "root")


@pytest.mark.parametrize("way", WAYS)
def test_the_version_is_whole_and_each_rank_held_its_share_alone(
    way: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root, told = made_once(tmp_path_factory, "weight-sources", _published)
    shares = [each[way] for each in told]
    assert [[sorted(names) for names in held] for held in shares] == [[sorted(names)] * 2 for names in WAYS[way][1]]
    assert published.whole(root / way) == ["v000001", "v000002"]
    for step in (1, 2):
        found = published.tensors(root / way / f"v00000{step}")
        assert {name: each.tolist() for name, each in found.items()} == {
            name: each.tolist() for name, each in model(step).items()
        }


class _Failing(Gathering):
    """Its iteration ends with an error of the trainer's, after the last collective."""

    def __iter__(self) -> Any:
        yield from super().__iter__()
        raise RuntimeError("the export failed")


class _Changing(Gathering):
    """Gathers all with the other ranks, and yields something else."""

    def __init__(self, change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> None:
        super().__init__(model(1))
        self._change = change

    def __iter__(self) -> Any:
        return (self._change(name, each) for name, each in super().__iter__())


def _on_rank_1(bad: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda rank: bad() if rank == 1 else Gathering(model(1))


def _said(last: ParamMeta) -> list[ParamMeta]:
    return [*described(model(1))[:-1], last]


SWAPPED = {"embed": "layer.0.w", "layer.0.w": "embed"}
BAD: dict[str, tuple[Callable[[int], Any], type[PublishError], str | None, str]] = {
    "order": (
        _on_rank_1(lambda: _Changing(lambda name, each: (SWAPPED.get(name, name), each))),
        InvalidWeightsError,
        "embed",
        r"rank 1: tensor embed is the next in metadata\(\) of its source, which yields layer\.0\.w in its place",
    ),
    "dtype": (
        _on_rank_1(lambda: _Changing(lambda name, each: (name, each.double() if name == "head" else each))),
        InvalidWeightsError,
        "head",
        r"rank 1: tensor head is yielded as float64 of shape \[64, 48\], and metadata\(\) says float32",
    ),
    "metadata": (
        _on_rank_1(lambda: Source(model(1), _said(ParamMeta("head", torch.float32, (1,))))),
        InvalidWeightsError,
        "head",
        r"tensor head stands otherwise in metadata\(\) on rank 1",
    ),
    "orphan": (
        lambda rank: Split(model(1), NAMES[:1] if rank else NAMES[2:]),
        InvalidWeightsError,
        "layer.0.w",
        r"tensor layer\.0\.w is held by none of the ranks that publish",
    ),
    "unknown": (
        _on_rank_1(lambda: Split(model(1), [*NAMES, "tail"])),
        InvalidWeightsError,
        "tail",
        r"rank 1: tensor tail is in held_names\(\) of its source, and not in metadata\(\)",
    ),
    "failing": (
        _on_rank_1(lambda: _Failing(model(1))),
        PublishError,
        None,
        "rank 1 failed with RuntimeError: the export failed",
    ),
    "mixed": (_on_rank_1(lambda: model(1)), PublishError, None, "1 of 2 ranks pass a source of weights"),
    "mixed-the-other-way": (
        lambda rank: Gathering(model(1)) if rank == 1 else model(1),
        PublishError,
        None,
        "1 of 2 ranks pass a source of weights",
    ),
    "nan": (
        lambda _: Gathering({"w": torch.tensor([1.0, float("inf")]), "v": torch.ones(1)}),
        InvalidWeightsError,
        "w",
        "tensor w holds 1 value that is NaN or infinite",
    ),
}  # fmt: skip


def _refuse(rank: int, __: int, root: Path) -> dict[str, tuple[Exception | None, int]]:
    """Fail with each, then publish what is good with the same publisher and the same step."""
    told: dict[str, tuple[Exception | None, int]] = {}
    for name, (weights_of, *_) in BAD.items():
        weights = weights_of(rank)
        with WeightPublisher(root, name, ranks="all") as publisher:
            error = attempted(lambda: publisher.publish(weights, step=1))  # noqa: B023
            told[name] = error, len([*(root / name).glob("v*")])
            torch.distributed.barrier()
            publisher.publish(Gathering(model(1)), step=1)
    return told


def _refused(folder: Path) -> tuple[Path, list[Any]]:
    return folder / "root", run_ranks(2, folder, _refuse, folder / "root")


@pytest.mark.parametrize("name", BAD)
def test_a_source_that_does_not_keep_its_word_on_one_rank_is_refused_on_all_and_nothing_is_visible(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root, told = made_once(tmp_path_factory, "refused-sources", _refused)
    _, kind, tensor, why = BAD[name]
    (one, seen), (other, seen_by_other) = (each[name] for each in told)
    assert (type(one), type(other)) == (kind, kind), one
    assert re.search(why, str(one)), one
    assert str(one) == str(other)
    assert getattr(one, "tensor", None) == tensor
    assert (seen, seen_by_other) == (0, 0)
    assert (published.whole(root / name), published.leftovers(root / name)) == (["v000001"], [])


def _failed_and_closed(_: int, __: int, root: Path) -> Exception | None:
    with WeightPublisher(root, "run", ranks="all") as publisher:
        return attempted(lambda: publisher.publish(Split(model(1), []), step=1))


def test_after_a_source_was_refused_the_run_is_free_for_another_publisher(tmp_path: Path) -> None:
    errors = run_ranks(2, tmp_path, _failed_and_closed, tmp_path)
    assert [type(error) for error in errors] == [InvalidWeightsError] * 2
    with WeightPublisher(tmp_path, "run") as publisher:
        publisher.publish(model(1), step=1)
    assert published.whole(tmp_path / "run") == ["v000001"]


TRANSPORTS: list[Transport] = ["disk", "handover", "gloo", "delta", "delta", "auto"]
SECONDS = 240.0


def _by_each_transport(_: int, __: int, root: Path, url: str) -> list[tuple[str | None, str, str | None]]:
    """The second delta changes little."""
    told: list[tuple[str | None, str, str | None]] = []
    with WeightPublisher(root, RUN, url, ranks="all") as publisher:
        for step, transport in enumerate(TRANSPORTS, 1):
            source = Gathering(tiny_weights(4 if step == 5 else step))
            if step == 5:
                source.tensors["norm.weight"][0] += 1
            publication = publisher.publish(source, step=step, transport=transport)
            publication.wait(SECONDS)
            assert publication.handed is not None
            told.append((publication.handed.transport, publication.kind.value, publication.handed.reason))
    return told


@pytest.mark.timeout(600)
def test_engines_get_what_ranks_read_of_their_sources_by_every_transport(tmp_path: Path) -> None:
    with sharded_job(tmp_path) as job:
        first, other = run_ranks(2, tmp_path, _by_each_transport, job.root, job.refitd.url, limit=SECONDS)
        assert isinstance(first, list), first
        assert first == other
        *by_name, (_, _, reason) = first
        assert by_name == [
            ("disk", "full", None),
            ("handover", "full", None),
            ("gloo", "full", None),
            ("delta", "full", None),
            ("delta", "delta", None),
        ]
        assert reason is None
        assert job.engine.holds(len(TRANSPORTS))
