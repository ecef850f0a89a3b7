"""An engine of several ranks that look at versions while they are written, each at its share, on a `HostGpu`."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from refitd.policy.proving import fault_in
from refitd_client import WeightPublisher
from refitd_client.contract.plugin import Answer, UpdateOutcome
from refitd_client.validation.examine import structure
from refitd_plugin.source import SourceRefusedError, VersionSource, mapped, place_of
from support.following import SECONDS, Looker, proof_of
from support.host_gpu import HostGpu
from support.sliced_rank import SlicedEngine, SlicedModel, sliced_weights
from support.slot_trainer import NoRenames

SHARD = 300  # bytes of a shard at most: several shards, so that each rank has some of its own and one with others


def published_slices(root: Path, step: int) -> VersionSource:
    """A version with the weights of a step, in new files."""
    with WeightPublisher(root, "run", fingerprints=True, max_shard_bytes=SHARD) as publisher:
        path = publisher.publish(sliced_weights(step), step=step).path
    return mapped(place_of(str(path), root))


class FollowingRanks:
    """Ranks that were started on the weights of step 0.

    Args:
        root: refitd's, on tmpfs.
        patch: undoes what is patched.
        size: how many ranks.
        kind: their model.
        stage: as the operator's setting.
        follows: in threads of their own; otherwise the test says when they look.
    """

    def __init__(
        self,
        root: Path,
        patch: pytest.MonkeyPatch,
        size: int = 2,
        kind: type[SlicedModel] = SlicedModel,
        *,
        stage: bool = False,
        follows: bool = True,
    ) -> None:
        gpu = HostGpu(patch)  # before the ranks look for one
        self.root = root
        self.engine = SlicedEngine(root, patch, size, kind, stage=stage)
        self.lookers = [Looker(rank, gpu) for rank in self.engine.members]
        self.ahead: list[int] = []  # bytes of the last proof that each rank had looked at before the commit
        self.reason = ""
        for looker in self.lookers if not follows else ():
            looker.follower._renames = cast("Any", NoRenames())

    def await_look(self, folder: Path) -> None:
        """Wait until all ranks have looked at their shares of what is written there."""
        ends = time.monotonic() + SECONDS
        for looker in self.lookers:
            looker.await_look(folder, 0)
            while not looker.follower._ahead.is_whole:
                assert time.monotonic() < ends, "it does not follow"
                looker.gpu.began.wait(0.01)

    def prepare(self, version: Path) -> bool:
        """Have it prepared and proved by all ranks; whether a service would have it loaded."""

        try:
            with ThreadPoolExecutor(len(self.lookers)) as pool:
                found = list(pool.map(lambda rank: proof_of(rank, self.root, version), self.engine.members))
        except (SourceRefusedError, OSError) as error:
            self.reason = str(error)
            return False
        self.ahead = [ahead for _, ahead in found]
        seen = structure(self.root, str(version.relative_to(self.root)))
        self.reason = fault_in(seen, [proof for proof, _ in found]) or ""
        return not self.reason

    def load(self, version: Path) -> list[Answer]:
        """Have it loaded by all ranks, prepared or not."""
        return self.engine.load(version)

    def take(self, version: Path) -> bool:
        """What a service does with a version; whether it is served then."""
        return self.prepare(version) and {each.outcome for each in self.load(version)} == {UpdateOutcome.SERVED}

    def holds(self, step: int) -> bool:
        """Whether all ranks hold their parts of a step's weights, by every bit."""
        return self.engine.holds(sliced_weights(step))
