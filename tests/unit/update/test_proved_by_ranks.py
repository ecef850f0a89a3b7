"""Versions whose tensors the ranks of engines prove in the service's place: never one whose bytes were not proved."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from refitd.catalog.files import DiskFiles
from refitd.engine.port import Coming, RankProof
from refitd.policy.admit import Prove
from refitd.update import proving
from refitd_client import PublishOptions, WeightPublisher
from refitd_client.contract.manifest import to_text
from refitd_client.contract.plugin import TensorProof
from refitd_client.contract.states import VersionState
from refitd_client.fingerprint import fingerprints
from refitd_client.validation import contents
from refitd_client.validation.examine import structure
from refitd_client.validation.foreign import described
from refitd_plugin.memory.source import mapped, place_of
from refitd_plugin.proof.proving import HostReader, VersionProver
from support.checkpoints import tensors, write_model
from support.provable import damage
from support.services import Stage, serving

ONE = "run~v000001"
Proofs = Sequence[RankProof]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The versions whose every byte the service has read."""
    found: list[str] = []
    original = DiskFiles.examine

    async def noted(self: DiskFiles, seen: object, *args: object, **more: bool) -> object:
        if not more.get("beside"):
            found.append(seen.path)  # type: ignore[attr-defined]
        return await original(self, seen, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskFiles, "examine", noted)
    return found


def ranks_of(root: Path, ranks: int = 1) -> Callable[[Coming], Proofs]:
    """What the plugin of an engine does with processors in the place of its GPUs."""

    def prove(coming: Coming) -> Proofs:
        source = mapped(place_of(str(root / coming.path), root))
        return [
            found(VersionProver(HostReader(), rank, ranks).prove(source), rank, ranks, source.structure.signature)
            for rank in range(ranks)
        ]

    return prove


def found(proof: TensorProof, rank: int, ranks: int, signature: str) -> RankProof:
    return RankProof(
        rank=rank,
        ranks=ranks,
        signature=signature,
        tensors=proof.tensors,
        digest=proof.digest,
        fault=proof.fault,
    )


async def with_gpus(stage: Stage, *names: str, ranks: int = 1) -> None:
    for name in names:
        engine = stage.engines[name]
        engine.plugin, engine.prover = "0.1.0", ranks_of(stage.root, ranks)
    async with asyncio.timeout(10):
        while sum(engine.seen.proves for engine in stage.store.engines.values()) < len(names):
            await stage.store.changed.wait_after(stage.store.changed.count, within=0.02)


def publish(stage: Stage, step: int = 1, *, fingerprints: bool = True) -> Path:
    with WeightPublisher(stage.root, "run", options=PublishOptions(fingerprints=fingerprints)) as publisher:
        return publisher.publish(tensors(step), step=step).path


async def settled(stage: Stage, id_: str = ONE) -> VersionState:
    ends = {VersionState.SEALED, VersionState.REJECTED, VersionState.LOST}
    await stage.until(id_, lambda record: record.state in ends)
    return stage.store.versions[id_].state


@pytest.mark.parametrize("ranks", [1, 4])
async def test_a_version_that_gpus_proved_is_served_and_says_so(tmp_path: Path, read: list[str], ranks: int) -> None:
    async with serving(tmp_path) as stage:
        await with_gpus(stage, "a", ranks=ranks)
        publish(stage)
        await stage.until(ONE, lambda record: record.served_at is not None)
        assert (read, stage.store.versions[ONE].verdict.proved_by) == ([], ("a:1",))
        version = (await stage.http.get(f"/v1/versions/{ONE}")).json()
        assert version["proved_by"] == ["a:1"]
        told = (await stage.http.get(f"/v1/explain/{ONE}")).json()["sentences"]
        assert "Its tensors were proved by the GPUs of a:1, and not read by the service itself." in told
        log = (await stage.http.get("/v1/log", params={"subject": ONE})).json()["items"]
        assert any("proved by the GPUs of a:1" in entry["text"] for entry in log)


async def test_a_version_without_a_manifest_is_read_once_for_its_verdict_and_its_fingerprints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, original = list[int](), contents.fill

    def noted(fd: int, data: memoryview, position: int) -> None:
        read.append(len(data))
        original(fd, data, position)

    monkeypatch.setattr(contents, "fill", noted)
    async with serving(tmp_path, settle=0.0) as stage:
        await with_gpus(stage, "a")
        folder = write_model(stage.root / "run/v000001", tensors(1))
        await stage.until(ONE, lambda record: record.state is VersionState.SEALED)
        assert sum(read) == sum(file.stat().st_size for file in folder.iterdir())
        kept = described(stage.root, structure(stage.root, "run/v000001")).manifest
        assert kept is not None
        found = fingerprints([torch.from_numpy(each) for each in tensors(1).values()])
        assert kept.fingerprints == dict(zip(tensors(1), map(to_text, found), strict=True))


async def test_a_service_that_is_told_to_reads_itself(tmp_path: Path, read: list[str]) -> None:
    async with serving(tmp_path, prove=Prove.SERVICE) as stage:
        await with_gpus(stage, "a")
        publish(stage)
        assert await settled(stage) is VersionState.SEALED
        assert (read, stage.store.versions[ONE].verdict.proved_by) == (["run/v000001"], ())


def lies_digest(proof: RankProof) -> RankProof:
    return replace(proof, digest="xxh3:0")


def lies_files(proof: RankProof) -> RankProof:
    return replace(proof, signature="others")


def lies_less(proof: RankProof) -> RankProof:
    return replace(proof, tensors=proof.tensors - 1)


def lies_ranks(proof: RankProof) -> RankProof:
    return replace(proof, ranks=2)


@pytest.mark.parametrize("lie", [lies_digest, lies_files, lies_less, lies_ranks])
async def test_a_proof_in_any_doubt_has_the_service_read(
    tmp_path: Path, read: list[str], lie: Callable[[RankProof], RankProof]
) -> None:
    async with serving(tmp_path) as stage:
        await with_gpus(stage, "a")
        good = stage.engines["a"].prover
        assert good is not None
        stage.engines["a"].prover = lambda coming: [lie(each) for each in good(coming)]
        publish(stage)
        assert await settled(stage) is VersionState.SEALED
        assert (read, stage.store.versions[ONE].verdict.proved_by) == (["run/v000001"], ())


async def test_a_rotten_byte_is_found_and_the_version_is_loaded_by_no_engine(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await with_gpus(stage, "a")
        good = stage.engines["a"].prover
        assert good is not None

        def rots(coming: Coming) -> Proofs:
            place = stage.root / coming.path
            source = mapped(place_of(str(place), stage.root))
            before = {name: (place / name).stat() for name in source.structure.headers}
            damage(source, "layer.2.weight")
            for name, stat in before.items():  # it leaves no trace but the byte
                os.utime(place / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            return good(coming)

        stage.engines["a"].prover = rots
        publish(stage)
        assert await settled(stage) is not VersionState.SEALED
        assert stage.engines["a"].loads == []


async def test_an_engine_that_does_not_answer_holds_up_no_verdict(
    tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proving, "_PROVE_SECONDS", 0.05)
    async with serving(tmp_path) as stage:
        await with_gpus(stage, "a")
        stage.engines["a"].hangs = True
        publish(stage)
        assert await settled(stage) is VersionState.SEALED
        assert (read, stage.store.versions[ONE].verdict.proved_by) == (["run/v000001"], ())


async def test_a_stock_engine_that_joins_later_has_the_service_read_first(tmp_path: Path, read: list[str]) -> None:
    async with serving(tmp_path) as stage:
        await with_gpus(stage, "a")
        publish(stage)
        await stage.until(ONE, lambda record: record.served_at is not None)
        assert read == []
        await stage.http.post("/v1/engines", json={"url": "http://b:1", "run": "run"})
        await stage.until(ONE, lambda _: bool("b" in stage.engines and stage.engines["b"].loads))
        assert (read, stage.store.versions[ONE].verdict.proved_by) == (["run/v000001"], ())


async def test_what_is_rotten_by_then_is_lost_and_the_stock_engine_does_not_load_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await with_gpus(stage, "a")
        path = publish(stage)
        await stage.until(ONE, lambda record: record.served_at is not None)
        source = mapped(place_of(str(path), stage.root))
        record = stage.store.versions[ONE]
        damage(source, "layer.1.weight")
        again = mapped(place_of(str(path), stage.root)).structure.signature
        stage.store.put_version(record.having(signature=again))  # as if the disk had changed the byte
        await stage.http.post("/v1/engines", json={"url": "http://b:1", "run": "run"})
        await stage.until(ONE, lambda each: each.state is VersionState.LOST)
        assert "the GPUs of a:1 had read other bytes" in (stage.store.versions[ONE].reason or "")
        assert stage.engines["b"].loads == []
