"""An engine that looks at versions while they are written, in this process, with the plugin as it is on a `HostGpu`.

It is told what a service would tell it: to prepare and prove a version, and where its proof is one for a service, to
load it. `Outcome` says what came of it, and `held` which step's weights lie in the model, by every bit.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from refitd.engine.port import RankProof
from refitd.policy.proving import fault_in
from refitd_client import WeightPublisher
from refitd_client.files.plain_file import open_folder
from refitd_client.validation.examine import structure
from refitd_plugin.source import SourceRefusedError, VersionSource, mapped, place_of
from support.host_gpu import HostGpu
from support.mini_sglang import TinyModel, Weights, tiny_weights
from support.plugin_threads import ending_plugin_threads
from support.slot_trainer import NoRenames
from support.tiny_rank import Rank

SHARD = 100  # bytes of a shard at most: three shards of the tiny checkpoint's seven tensors
SECONDS = 20.0


@contextmanager
def root_in_memory() -> Generator[Path]:
    """A root on tmpfs, as files are registered nowhere else."""
    folder = Path(tempfile.mkdtemp(prefix="refitd-look-", dir="/dev/shm"))
    (folder / "root" / ".refitd").mkdir(parents=True)
    try:
        with ending_plugin_threads():
            yield folder / "root"
    finally:
        shutil.rmtree(folder)


def published(root: Path, step: int) -> VersionSource:
    """A version with the weights of a step, in new files."""
    with WeightPublisher(root, "run", fingerprints=True, max_shard_bytes=SHARD) as publisher:
        path = publisher.publish(tiny_weights(step), step=step).path
    return mapped(place_of(str(path), root))


class PlainModel(TinyModel):
    """One whose tensors are those of its checkpoint: a load can be held against the manifest to the last byte."""

    def __init__(self, *_: object) -> None:
        torch.nn.Module.__init__(self)
        for name, tensor in tiny_weights(0).items():
            empty = torch.nn.Parameter(torch.zeros_like(tensor), requires_grad=False)
            self.register_parameter(name.split(".")[0], empty)

    def load_weights(self, weights: Weights) -> None:
        """By name."""
        for name, tensor in weights:
            getattr(self, name.split(".")[0]).data.copy_(tensor)


class Outcome(StrEnum):
    """What came of a version: it was refused in the end by its proof, or by its load, which put back what was there, or
    said that it could not.
    """

    SERVED = "served"
    UNPROVED = "unproved"
    REFUSED = "refused"
    RESTORED = "restored"
    UNKNOWN = "unknown"


class Looker:
    """What can be seen of a rank of any engine that follows its trainer. `rank` has `engine` and `model`."""

    def __init__(self, rank: Any, gpu: HostGpu) -> None:
        self.rank, self.gpu = rank, gpu

    @property
    def follower(self) -> Any:
        """The `TrainerFollower` of its rank."""
        return self.rank.engine.preparing._prover._reader._follower

    def await_look(self, folder: Path, least: int) -> None:
        """Wait until its thread has begun with so many bytes of what is written there."""
        ends = time.monotonic() + SECONDS
        wanted = {path.stat().st_ino for path in folder.glob("*.safetensors")}
        while self._begun_of(wanted) < least:
            assert time.monotonic() < ends, "it does not follow"
            self.gpu.began.wait(0.01)
            self.gpu.began.clear()

    def _begun_of(self, inodes: set[int]) -> int:
        ahead = self.follower._ahead
        if ahead is None or {os.fstat(file._fd).st_ino for file in ahead.files.values()} != inodes:
            return -1
        return int(ahead.begun)

    def held(self, steps: int) -> int | None:
        """The step, of 0 to `steps`, whose weights it holds; None where it holds those of none."""
        now, kind = _bytes_of(self.rank.model), type(self.rank.model)
        return next((step for step in range(steps + 1) if now == _loaded(kind, step)), None)


def proof_of(rank: Any, root: Path, version: Path) -> tuple[RankProof, int]:
    """What a rank proves of a version, and how many bytes it had looked at before that had its name.

    Args:
        rank: it has `engine` and `model`.
        root: refitd's.
        version: the version's folder.

    Raises:
        SourceRefusedError: the rank refuses it. OSError: it cannot be read.
    """
    proof = rank.engine.prepare(str(version), check_bytes=False, prove=True).proof
    found = RankProof(
        rank=getattr(rank.model, "rank", 0),
        ranks=getattr(rank.model, "size", 1),
        signature=structure(root, str(version.relative_to(root))).signature,
        tensors=proof.tensors,
        digest=proof.digest,
        fault=proof.fault,
    )
    return found, proof.ahead


class FollowingEngine(Looker):
    """One rank that was started on the weights of step 0.

    Args:
        root: refitd's.
        patch: undoes what is patched.
        stage: versions are copied ahead, otherwise read ahead.
        plain: its model is a `PlainModel`, otherwise one that its loader computes some of.
        is_late: as of `HostGpu`.
        follows: in a thread of its own; otherwise the test says when it looks.
    """

    def __init__(
        self,
        root: Path,
        patch: pytest.MonkeyPatch,
        *,
        stage: bool,
        plain: bool = True,
        is_late: bool = False,
        follows: bool = True,
    ) -> None:
        startup = root.parent / "startup"
        startup.mkdir(exist_ok=True)
        save_file(tiny_weights(0), startup / "model.safetensors")
        gpu = HostGpu(patch, is_late=is_late)  # before the rank looks for one
        super().__init__(Rank(startup, model=PlainModel() if plain else TinyModel(), stage=stage), gpu)
        self.root = root
        self.ahead = 0  # bytes of the last proof that were looked at before the version had its name
        self.reason = ""
        if not follows:
            self.follower._renames = cast("Any", NoRenames())

    def look(self, folder: Path) -> None:
        """Follow what is written there to its end, in this thread."""
        opened = open_folder(folder)
        self.follower.follow(opened)
        os.close(opened)

    def prepare(self, version: Path) -> bool:
        """Have it prepared and proved; whether a service would have it loaded."""
        try:
            found, self.ahead = proof_of(self.rank, self.root, version)
        except (SourceRefusedError, OSError) as error:
            self.reason = str(error)
            return False
        self.reason = fault_in(structure(self.root, str(version.relative_to(self.root))), [found]) or ""
        return not self.reason

    def load(self, version: Path) -> Outcome:
        """Have it loaded, prepared or not."""
        answer = self.rank.answer(version)
        self.reason = answer.reason
        return Outcome(answer.outcome.value)

    def take(self, version: Path) -> Outcome:
        """What a service does with a version."""
        return self.load(version) if self.prepare(version) else Outcome.UNPROVED


@cache
def _loaded(kind: type[TinyModel], step: int) -> dict[str, bytes]:
    model = kind()
    model.load_weights(tiny_weights(step).items())
    return _bytes_of(model)


def _bytes_of(model: torch.nn.Module) -> dict[str, bytes]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in named}
