"""What the catalog says of deltas: held against their base, before any engine or copy hears of them."""

import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from refitd.problem import ProblemError
from refitd.state.version import VersionRecord
from refitd_client.checkpoint.fault import Code
from refitd_client.checkpoint.inventory import Inventory, Tensor
from refitd_client.contract.manifest import Manifest, ManifestFile, parse_manifest
from refitd_client.contract.states import Kind, VersionState
from refitd_client.contract.wire import Notice
from refitd_client.delta import Delta, encode, read_delta
from refitd_client.validation.base import Base
from refitd_client.validation.examine import examine, glance, structure
from refitd_client.validation.validate import Invalid, Options, Verdict, validate
from support.catalogs import Stage, watching
from support.checkpoints import tensors, write_model
from support.deltas import Trainer, chain, training

ONE, TWO, THREE = (f"run~v{step:06d}" for step in (1, 2, 3))
DELTA = "weights.refit-delta"


@asynccontextmanager
async def publishing(tmp_path: Path) -> AsyncIterator[tuple[Stage, Trainer]]:
    async with watching(tmp_path) as stage:
        with training(tmp_path / "elsewhere") as trainer:
            yield stage, trainer


def arrive(stage: Stage, tmp_path: Path, *steps: int) -> None:
    """What was published elsewhere comes into the root."""
    (stage.root / "run").mkdir(exist_ok=True)
    for step in steps:
        (tmp_path / f"elsewhere/run/v{step:06d}").rename(stage.root / f"run/v{step:06d}")


async def test_a_delta_on_a_good_base_is_sealed_and_says_what_it_is(tmp_path: Path) -> None:
    async with publishing(tmp_path) as (stage, trainer):
        chain(trainer, tmp_path / "elsewhere", 3)
        arrive(stage, tmp_path, 1, 2, 3)
        full = await stage.verdict(ONE, VersionState.SEALED)
        found = await stage.verdict(THREE, VersionState.SEALED)
        assert (found.kind, found.base, found.files.owned) == (Kind.DELTA, TWO, True)
        assert found.files.inventory == full.files.inventory
        assert found.differs_in_weights(full)
        assert not found.differs_in_weights(found)


async def test_a_delta_whose_base_has_not_been_seen_waits_for_it(tmp_path: Path) -> None:
    async with publishing(tmp_path) as (stage, trainer):
        chain(trainer, tmp_path / "elsewhere", 3)
        arrive(stage, tmp_path, 3)
        found = await stage.verdict(THREE, VersionState.UNKNOWN)
        assert found.reason == f"its base {TWO} has not been seen yet"
        arrive(stage, tmp_path, 2)
        await stage.verdict(TWO, VersionState.UNKNOWN)
        arrive(stage, tmp_path, 1)
        await stage.verdict(THREE, VersionState.SEALED)


async def test_a_delta_whose_base_is_gone_is_rejected_with_the_way_out(tmp_path: Path) -> None:
    async with publishing(tmp_path) as (stage, trainer):
        chain(trainer, tmp_path / "elsewhere", 3)
        arrive(stage, tmp_path, 1)
        await stage.verdict(ONE, VersionState.SEALED)
        shutil.rmtree(stage.root / "run/v000001")
        await stage.verdict(ONE, VersionState.LOST)
        arrive(stage, tmp_path, 2)
        two = await stage.verdict(TWO, VersionState.REJECTED)
        assert two.verdict.code is Code.WRONG_BASE
        assert f"its base {ONE} is LOST" in (two.reason or "")
        assert "publish in full" in (two.reason or "")
        stage.store.put_version(replace(two, state=VersionState.DELETED))
        arrive(stage, tmp_path, 3)
        three = await stage.verdict(THREE, VersionState.REJECTED)
        assert three.reason == f"its base {TWO} was deleted: publish in full"


async def test_a_notice_that_comes_after_the_watch_says_the_same(tmp_path: Path) -> None:
    """Before anybody has read the manifest the version looks like a full one; another base is a conflict."""
    async with publishing(tmp_path) as (stage, trainer):
        chain(trainer, tmp_path / "elsewhere", 2)
        arrive(stage, tmp_path, 2)
        await stage.verdict(TWO, *VersionState)
        await stage.intake.take(Notice(run="run", step=2, kind=Kind.DELTA, base=ONE))
        with pytest.raises(ProblemError, match=f"announced as delta on {ONE}, not full"):
            await stage.intake.take(Notice(run="run", step=2))
        arrive(stage, tmp_path, 1)
        found = await stage.verdict(TWO, VersionState.SEALED)
        assert found.announced.noticed


@pytest.mark.parametrize("both", [True, False])
async def test_a_delta_on_a_model_that_ties_its_head_changes_both_or_is_rejected(tmp_path: Path, both: bool) -> None:
    embedding = np.ones((4, 3), np.float32)
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.copy()}
    base = write_model(tmp_path / "tied", weights)
    (base / "config.json").write_text('{"tie_word_embeddings": true}')
    changed = {name: array + np.eye(4, 3, dtype=np.float32) for name, array in weights.items()}
    if not both:
        changed |= {"lm_head.weight": weights["lm_head.weight"]}
    async with watching(tmp_path, model=base) as stage:
        with training(tmp_path / "elsewhere") as trainer:
            trainer.publisher.publish(weights, step=1, transport="delta")
            trainer.base = lambda: ONE
            assert trainer.publisher.publish(changed, step=2, transport="delta").why_full is None
        arrive(stage, tmp_path, 1, 2)
        await stage.verdict(ONE, VersionState.SEALED)
        found = await stage.verdict(TWO, VersionState.SEALED if both else VersionState.REJECTED)
        assert found.verdict.code is (None if both else Code.NO_COPY)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[VersionRecord]]:
    root = tmp_path_factory.mktemp("root")
    with training(root) as trainer:
        return root, chain(trainer, root, 2)


MODEL = Inventory({name: Tensor("F32", array.shape) for name, array in tensors(1).items()})


def judged(root: Path, base: Base | None = None) -> Verdict:
    fingerprints = parse_manifest((root / "run/v000001/refit.json").read_bytes()).fingerprints
    base = base or Base(ONE, MODEL, fingerprints)
    return validate(examine(root, "run/v000002", base, Options()), base, Options())


def spoilt(
    tmp_path: Path, root: Path, delta: Callable[[Delta], Delta], manifest: Callable[[Manifest], Manifest]
) -> Path:
    """A root with a delta that was made by somebody else: each file digest fits, what they say does not."""
    shutil.copytree(root, tmp_path / "root")
    folder = tmp_path / "root/run/v000002"
    data = encode(delta(read_delta(folder / DELTA))).to_bytes()
    (folder / DELTA).write_bytes(data)
    said = parse_manifest((folder / "refit.json").read_bytes())
    files = {DELTA: ManifestFile(size=len(data), digest=f"xxh3:{xxhash.xxh3_128(data).hexdigest()}")}
    (folder / "refit.json").write_bytes(manifest(replace(said, files=files)).to_json())
    return tmp_path / "root"


def test_a_change_that_ends_the_likeness_of_a_tied_head_is_refused(published: tuple[Path, list[VersionRecord]]) -> None:
    root, _ = published
    fingerprints = parse_manifest((root / "run/v000001/refit.json").read_bytes()).fingerprints
    changed, *others = sorted(read_delta(root / "run/v000002" / DELTA).changes)
    same = [name for name in fingerprints if name not in {changed, *others}]
    base = Base(ONE, MODEL, fingerprints, pairs={changed: next(iter([*others, *same]))})
    found = judged(root, base)
    assert isinstance(found, Invalid)
    assert found.code is Code.NO_COPY
    assert f"{changed} differs from" in found.reason


def _all(delta: Delta, **fields: object) -> Delta:
    return replace(delta, changes={name: replace(each, **fields) for name, each in delta.changes.items()})  # type: ignore[arg-type]


SAME_DELTA: Callable[[Delta], Delta] = lambda delta: delta  # noqa: E731
SAME: Callable[[Manifest], Manifest] = lambda manifest: manifest  # noqa: E731
NAN = np.float32("nan").view(np.uint32)
BAD: dict[str, tuple[Callable[[Delta], Delta], Callable[[Manifest], Manifest], Code, str]] = {
    "another-base": (lambda d: replace(d, base="run~v000000"), SAME, Code.WRONG_BASE, "leads from run~v000000"),
    "another-version": (lambda d: replace(d, version=THREE), SAME, Code.WRONG_BASE, f"to {THREE}, and refit.json says"),
    "other-contents": (lambda d: _all(d, base=7), SAME, Code.WRONG_BASE, "with fingerprint 0000000000000007, and that"),
    "another-result": (lambda d: _all(d, result=7), SAME, Code.BAD_DELTA, "another fingerprint than refit.json says"),
    "another-shape": (lambda d: _all(d, shape=(3, 4)), SAME, Code.WRONG_BASE, r"F32 \[3, 4\], and in run~v000001"),
    "unknown-tensor": (
        lambda d: replace(d, changes={"else": next(iter(d.changes.values()))}),
        SAME,
        Code.WRONG_BASE,
        "it changes tensor else, which its base",
    ),
    "nan": (
        lambda d: replace(
            d, changes={name: replace(c, values=np.full_like(c.values, NAN)) for name, c in d.changes.items()}
        ),
        SAME,
        Code.NON_FINITE,
        r"has \d+ new values that are NaN or infinite",
    ),
    "one-nan": (
        lambda d: replace(
            d,
            changes={
                name: replace(c, values=np.where(np.arange(len(c.values)) == 0, NAN, c.values).astype(c.values.dtype))
                for name, c in d.changes.items()
            },
        ),
        SAME,
        Code.NON_FINITE,
        "has 1 new value that is NaN or infinite",
    ),
    "hidden-change": (
        SAME_DELTA,
        lambda m: replace(m, fingerprints=m.fingerprints | {"layer.3.weight": "0" * 16}),
        Code.WRONG_BASE,
        "layer.3.weight has another fingerprint than in run~v000001, and no changes",
    ),
    "other-model": (
        SAME_DELTA,
        lambda m: replace(m, tensors=replace(m.tensors, count=7)),
        Code.WRONG_BASE,
        "describes other tensors than those of its base",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_delta_that_does_not_fit_its_base_is_refused_by_name(
    published: tuple[Path, list[VersionRecord]], tmp_path: Path, name: str
) -> None:
    delta, manifest, code, reason = BAD[name]
    found = judged(spoilt(tmp_path, published[0], delta, manifest))
    assert isinstance(found, Invalid)
    assert found.code is code
    assert re.search(reason, found.reason), found.reason


def test_a_flipped_byte_and_a_foreign_file_are_refused(
    published: tuple[Path, list[VersionRecord]], tmp_path: Path
) -> None:
    root = spoilt(tmp_path, published[0], SAME_DELTA, SAME)
    file = root / "run/v000002" / DELTA
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(bytes(data))
    found = judged(root)
    assert isinstance(found, Invalid)
    assert "damaged or written over" in found.reason
    (root / "run/v000002/model.safetensors").write_bytes(b"x")
    found = judged(root)
    assert isinstance(found, Invalid)
    assert "model.safetensors" in found.reason


def test_a_delta_that_is_larger_than_any_on_its_base_is_not_read(
    published: tuple[Path, list[VersionRecord]], tmp_path: Path
) -> None:
    root = spoilt(tmp_path, published[0], SAME_DELTA, SAME)
    file = root / "run/v000002" / DELTA
    with file.open("r+b") as opened:
        opened.truncate(2**40)
    said = parse_manifest((root / "run/v000002/refit.json").read_bytes())
    files = {DELTA: ManifestFile(size=2**40, digest="xxh3:" + "0" * 32)}
    (root / "run/v000002/refit.json").write_bytes(replace(said, files=files).to_json())
    found = judged(root)
    assert isinstance(found, Invalid)
    assert found.code is Code.BAD_DELTA
    assert "more than any delta" in found.reason


def test_a_delta_of_the_first_format_is_rejected_with_the_advice_to_publish_in_full(
    published: tuple[Path, list[VersionRecord]], tmp_path: Path
) -> None:
    root = spoilt(tmp_path, published[0], SAME_DELTA, SAME)
    folder = root / "run/v000002"
    data = (folder / DELTA).read_bytes().replace(b"refit-delta/2", b"refit-delta/1")
    data = data[:-16] + xxhash.xxh3_128_digest(data[:-16])
    (folder / DELTA).write_bytes(data)
    said = parse_manifest((folder / "refit.json").read_bytes())
    files = {DELTA: ManifestFile(size=len(data), digest=f"xxh3:{xxhash.xxh3_128(data).hexdigest()}")}
    (folder / "refit.json").write_bytes(replace(said, files=files).to_json())
    found = judged(root)
    assert isinstance(found, Invalid)
    assert found.code is Code.BAD_DELTA
    assert "its format is refit-delta/1, and this refitd reads refit-delta/2: publish a full version" in found.reason


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_glance_at_a_delta_shows_all_of_it(tmp_path: Path, *, is_whole: bool) -> None:
    with training(tmp_path) as trainer:
        delta = chain(trainer, tmp_path, 2)[1]
    if not is_whole:
        (tmp_path / delta.path / DELTA).unlink()
    seen = glance(tmp_path, delta.path)
    assert seen == structure(tmp_path, delta.path)
    assert (seen.faults == ()) is is_whole
