"""One rank's part of a version in a slot: its GPU copies it into the files' pages, and its threads digest blocks.

    this thread      begins the copies, a little ahead of the bus
    a lane           says how far this rank has come (`write/progress.py`), for engines and for the other ranks
    a lane           has the GPU scan what is copied, beside the bus
    the other lanes  digest this rank's blocks of the files, each when every rank has come beyond it

So files are digested while they are written, though several ranks write into a block. What ranks say of their progress
is waited for, and when rank 0 has heard that all have copied everything, nothing is. All ranks are on one host: only
there the pages of a tmpfs are the same for all.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from refitd_client.contract.manifest import BLOCK, digest_of_block
from refitd_client.errors import PublishError
from refitd_client.files.durable import Mapped, Mappings
from refitd_client.files.plain_file import open_folder
from refitd_client.fingerprint.parts import part_scans
from refitd_client.lanes import Lanes
from refitd_client.sharded.holdings import Holding
from refitd_client.sharded.layout import Claim
from refitd_client.sharded.parts import SentPart, sent_parts
from refitd_client.sharded.rank_group import RankTask
from refitd_client.sharded.reading import add_scans, each_part, flat_box, not_finite_here, part_input
from refitd_client.sharded.slot_gpu import SlotGpu, gpu_of
from refitd_client.sharded.slot_pieces import FileBlock, SlotPart, blocks_of, in_order_of_files, slot_parts
from refitd_client.write.device_shards import CopiesAhead
from refitd_client.write.progress import WriterProgress, open_progress, read_progress
from refitd_client.write.version_folder import open_recycled

_LOOK_SECONDS = 0.001  # between two looks at how far others are: a bus brings 55 MB in it
_MADE_BYTES = 2**28  # of casts that are there at a time to be scanned
_COPIES = 32  # of small parts, that are begun without a mark between them

Scans = dict[str, tuple[int, int]]


class SlotCopier:
    """What a rank keeps from one version in a slot to the next: the files' mappings, and a task's pieces."""

    def __init__(self, rank: int, ranks: int, threads: int) -> None:
        """`threads` are this rank's share of the processors."""
        self._rank, self._ranks, self._threads = rank, ranks, threads
        self._mappings = Mappings()
        self._known: tuple[RankTask, list[int], list[SlotPart]] | None = None
        self._share: SlotShare | None = None

    def copy(
        self, folder: Path, task: RankTask, claims: Sequence[Claim], holdings: Mapping[str, Holding], **checks: bool
    ) -> Scans:
        """Copy this rank's parts, and begin to digest its blocks. The tensors may change when it returns.

        Args:
            folder: the staging folder, which was a slot.
            task: what this rank writes.
            claims: what it holds.
            holdings: its tensors, all on one GPU.
            checks: see `SlotShare`.

        Returns:
            What this rank's parts add to each tensor's fingerprint, and 0, by name.

        Raises:
            InvalidWeightsError: a part holds values that are not finite.
            PublishError: a file cannot be written through a mapping here.
            OSError: a file cannot be opened.
        """
        self.end()
        self._mappings.prune()
        share = self._share = SlotShare(folder, task, self._mappings, **checks)
        if self._known is None or self._known[0] is not task or self._known[1] != share.sizes:
            parts = sent_parts(task.parts, claims)[0]
            self._known = task, share.sizes, slot_parts(parts, task.locations, share.sizes)
        own = blocks_of(share.sizes)[self._rank :: self._ranks]
        return share.copy(self._known[2], own, holdings, writer=self._rank, threads=self._threads)

    def digests(self) -> list[bytes]:
        """The digests of this rank's blocks. All ranks have copied everything.

        Raises:
            PublishError: nothing was copied.
        """
        if self._share is None:
            raise PublishError("this rank was asked for digests of what it has not copied")
        return self._share.digests()

    def end(self) -> None:
        """End what is under way: nothing is written or read of the files any more."""
        share, self._share = self._share, None
        if share is not None:
            share.end()

    def close(self) -> None:
        """Release the files."""
        self.end()
        self._mappings.close()


class SlotShare:
    """The part of one rank in one version. `end` must be called."""

    def __init__(
        self, folder: Path, task: RankTask, mappings: Mappings, *, check_finite: bool, fingerprinted: bool
    ) -> None:
        """Open and map the files.

        Args:
            folder: the staging folder, which was a slot.
            task: what this rank writes.
            mappings: of slots' files.
            check_finite: whether NaN and infinity are refused.
            fingerprinted: whether fingerprints are wanted.

        Raises:
            PublishError: a file cannot be written through a mapping here.
            OSError: a file cannot be opened.
        """
        self._task, self._check_finite, self._is_scanned = task, check_finite, check_finite or fingerprinted
        self._are_there = Event()
        self._lanes: list[Lanes] = []
        self._stack = ExitStack()
        self._found: list[bytes] = []
        with ExitStack() as opened:
            handle = open_folder(folder)
            opened.callback(os.close, handle)
            self._progress = open_progress(handle, os.O_RDWR)
            opened.callback(os.close, self._progress)
            self._files: list[Mapped] = []
            for name in task.files:
                fd = open_recycled(folder / name)
                opened.callback(os.close, fd)
                if (mapped := mappings.of(fd)) is None:
                    raise PublishError(f"{name} of the slot is not in this host's memory: is the root one tmpfs?")
                self._files.append(mapped)
            self._stack = opened.pop_all()
        self.sizes = [len(each.bytes) for each in self._files]
        self._place = {number: place for place, number in enumerate(
            sorted(range(len(task.files)), key=lambda number: task.files[number]))}  # fmt: skip

    def copy(
        self,
        parts: Sequence[SlotPart],
        blocks: Sequence[FileBlock],
        holdings: Mapping[str, Holding],
        *,
        writer: int,
        threads: int,
    ) -> Scans:
        """Copy everything, and begin to digest blocks. As `SlotCopier.copy`.

        Args:
            parts: what is copied.
            blocks: what is digested.
            holdings: this rank's tensors.
            writer: this rank's number.
            threads: how many digest.
        """
        progress = WriterProgress(self._progress, self._task.files, writer)
        first = list(self.sizes)
        for part in parts:
            first[part.file] = min([first[part.file], *(piece.strip.begin for piece in part.pieces)])
        for name, begin in zip(self._task.files, first, strict=True):
            progress.reached(name, begin)
        self._found = [b""] * len(blocks)
        digesting = self._begun(max(1, threads - 2))
        for number, block in enumerate(blocks):
            digesting.add(partial(self._digest, number, block))
        digesting.close()
        scans: Scans = {}
        with SlotGpu(gpu_of(holdings)) as gpu:
            telling, scanning = self._begun(1), self._begun(1)
            scanning.add(lambda stop: self._scan(gpu, parts, holdings, scans, stop))
            self._copy(gpu, parts, holdings, progress, telling, scans)
            scanning.join()
            telling.join()
        for name, (_, bad) in scans.items():
            if bad and self._check_finite:
                raise not_finite_here(name, bad)
        return scans

    def _begun(self, count: int) -> Lanes:
        self._lanes.append(Lanes(count))
        return self._lanes[-1]

    def _copy(
        self,
        gpu: SlotGpu,
        parts: Sequence[SlotPart],
        holdings: Mapping[str, Holding],
        progress: WriterProgress,
        telling: Lanes,
        scans: Scans,
    ) -> None:
        ahead = CopiesAhead()
        begun, nbytes = 0, 0
        mine: dict[str, list[SlotPart]] = {}
        for part in parts:
            mine.setdefault(part.sent.entry.name, []).append(part)

        def copy(holding: Holding, local: Any, part: SlotPart) -> None:
            nonlocal begun, nbytes
            flat = _published(holding, local, part.sent)
            if self._is_scanned and holding.target is not None:  # it is made once, by all ranks of its mesh
                add_scans(scans, [part.sent], part_scans([self._input(part.sent, flat)]))
            for piece in part.pieces:
                gpu.copy(flat, self._files[part.file], piece)
                begun, nbytes = begun + 1, nbytes + piece.strip.nbytes
                is_last = piece.reached == self.sizes[part.file]
                if nbytes >= BLOCK or is_last or begun == _COPIES:
                    arrived = gpu.mark()
                    telling.add(partial(_tell, arrived, progress, self._task.files[part.file], piece.reached))
                    ahead.add(arrived, begun)
                    begun = nbytes = 0
                    if ahead.is_far:
                        ahead.wait()

        with gpu.copying():
            each_part(holdings, mine, copy, names=in_order_of_files(self._task.locations))

    def _scan(
        self, gpu: SlotGpu, parts: Sequence[SlotPart], holdings: Mapping[str, Holding], scans: Scans, stop: Event
    ) -> None:
        """Scan what lies as it is published, and what is cast."""
        if not self._is_scanned:
            return
        with gpu.scanning():
            for group in _groups([part.sent for part in parts], holdings):
                if stop.is_set():
                    return
                inputs = [self._input(each, _published(holding, holding.local(), each))
                          for each in group for holding in [holdings[each.entry.name]]]  # fmt: skip
                add_scans(scans, group, part_scans(inputs))

    def _input(self, part: SentPart, flat: Any) -> Any:
        return part_input(part, flat, check_finite=self._check_finite)

    def _digest(self, number: int, block: FileBlock, stop: Event) -> None:
        place, count = self._place[block.file], len(self._files)
        while not self._are_there.is_set() and read_progress(self._progress, count)[place] < block.end:
            if stop.is_set():
                return
            time.sleep(_LOOK_SECONDS)
        self._found[number] = digest_of_block(self._files[block.file].bytes[block.begin : block.end])

    def digests(self) -> list[bytes]:
        """The digests of the blocks. All ranks have copied everything."""
        self._are_there.set()
        self._lanes[0].join()
        return self._found

    def end(self) -> None:
        """End what is under way, and close the files."""
        for lanes in self._lanes:
            lanes.stop()
        for lanes in self._lanes:
            with suppress(BaseException):  # what went wrong first was raised
                lanes.join()
        self._stack.close()


def _published(holding: Holding, local: Any, part: SentPart) -> Any:
    """The elements of a part in the published dtype: a view where they lie so."""
    flat = flat_box(local, holding.claim.boxes, part.part.box)[part.part.begin : part.part.end]
    return flat.to(getattr(sys.modules["torch"], holding.claim.dtype))


def _groups(parts: Sequence[SentPart], holdings: Mapping[str, Holding]) -> Iterator[list[SentPart]]:
    """Parts to be scanned together, so that not too much that is made for it is there at a time."""
    group, made = list[SentPart](), 0
    for part in parts:
        holding = holdings[part.entry.name]
        if holding.target is not None:
            continue
        is_view = str(holding.tensor.dtype) == f"torch.{holding.claim.dtype}" and len(holding.claim.boxes) == 1
        more = 0 if is_view else part.nbytes
        if group and made + more > _MADE_BYTES:
            yield group
            group, made = [], 0
        group.append(part)
        made += more
    if group:
        yield group


def _tell(arrived: Callable[[], None], progress: WriterProgress, name: str, reached: int, stop: Event) -> None:
    arrived()
    if not stop.is_set():
        progress.reached(name, reached)
