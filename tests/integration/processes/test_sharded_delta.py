"""A delta of several ranks is the one that one process would publish of the gathered weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refitd_client import PublishOptions, WeightPublisher
from refitd_client.delta import shadow
from refitd_client.delta.device import DeviceShadow, StreamShadow
from refitd_client.publish.options import DeltaRules
from refitd_client.sharded import rank_group
from support import published
from support.once import made_once
from support.ranks import run_ranks
from support.sharded_cases import Case, cases
from support.sharded_deltas import KINDS, STEPS, bases, gathered, train

CASES = cases()
RULES = DeltaRules(threshold=0.3)
ON_DEVICES = ("shard0-cast-4", "shard1-2", "fsdp2-tp-4", "mesh-replicate-shard1-4", "parts-2")

Told = list[tuple[str, str | None, str | None, float | None, str]]


def _publish_all(rank: int, size: int, root: Path, names: list[str], kind: str = "") -> dict[str, Told]:
    """Each case as a run of its own. With `kind` it is compared as on a GPU, and sent as what is large."""
    kinds: dict[str, Callable[..., Any]] = {"gpu": DeviceShadow, "stream": StreamShadow}
    if kind:
        rank_group._LARGE = 1
        shadow._shadow_for = lambda *_, parts, **__: kinds[kind](parts=parts)
    return {name: _published(CASES[name], rank, size, root, name) for name in names if CASES[name].ranks == size}


def _published(case: Case, rank: int, size: int, root: Path, name: str) -> Told:
    told: Told = []
    with WeightPublisher(
        root, name, ranks="all", options=PublishOptions(delta_rules=RULES, **case.publisher or {})
    ) as publisher:
        sharded, weights = case.sharded(rank, size) if case.sharded else None, case.local(rank, size)
        for number, step in enumerate(STEPS, 1):
            train(weights, number, step.every)
            bases(publisher, name, step.base)
            done = publisher.publish(
                weights, step=number, sharded=sharded, transport="delta" if step.delta == "auto" else None
            )
            told.append((done.kind.value, done.base, done.why_full, done.density, done.digest))
    return told


def _of_one_process(root: Path, name: str, case: Case) -> Told:
    told: Told = []
    with WeightPublisher(root, name, options=PublishOptions(delta_rules=RULES, **case.publisher or {})) as publisher:
        weights = gathered(case)
        for number, step in enumerate(STEPS, 1):
            train(weights, number, step.every)
            bases(publisher, name, step.base)
            done = publisher.publish(weights, step=number, transport="delta" if step.delta == "auto" else None)
            told.append((done.kind.value, done.base, done.why_full, done.density, done.digest))
    return told


def _all_of(folder: Path, names: list[str], kind: str = "") -> tuple[Path, dict[str, list[Told]]]:
    """The root, and what each rank was told, by case."""
    found: dict[str, list[Told]] = {}
    for size in (2, 4):
        for result in run_ranks(size, folder, _publish_all, folder / "root", names, kind):
            if isinstance(result, Exception):
                raise result
            for name, told in result.items():
                found.setdefault(name, []).append(told)
    return folder / "root", found


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Told]]]:
    return made_once(tmp_path_factory, "sharded-deltas", partial(_all_of, names=list(CASES)))


@pytest.fixture(scope="module", params=["gpu", "stream"])
def on_devices(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[Told]]]:
    make = partial(_all_of, names=list(ON_DEVICES), kind=request.param)
    return made_once(tmp_path_factory, f"sharded-deltas-{request.param}", make)


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_delta_is_byte_by_byte_the_gathered_one(
    sharded: tuple[Path, dict[str, list[Told]]], tmp_path: Path, name: str
) -> None:
    """Also of engines that are behind, after too many changes, and after a version that was no delta by its call."""
    _compare(*sharded, tmp_path, name)


@pytest.mark.parametrize("name", ON_DEVICES)
def test_what_is_compared_as_on_a_gpu_is_the_same(
    on_devices: tuple[Path, dict[str, list[Told]]], tmp_path: Path, name: str
) -> None:
    _compare(*on_devices, tmp_path, name)


def _compare(root: Path, told: dict[str, list[Told]], other: Path, name: str) -> None:
    expected = _of_one_process(other, name, CASES[name])
    assert [each[0] for each in expected] == KINDS
    assert told[name] == [expected] * CASES[name].ranks
    for number in range(1, len(STEPS) + 1):
        mine, its = (folder / name / f"v{number:06d}" for folder in (root, other))
        assert _files(mine) == _files(its)
        assert _manifest(mine) == _manifest(its)
    assert published.leftovers(root / name) == []


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "refit.json"}


def _manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = msgspec.json.decode((folder / "refit.json").read_bytes())
    del manifest["created_at"]
    return manifest
