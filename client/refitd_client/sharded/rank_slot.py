"""One rank's part of a version in a slot: its GPU copies it into the files' pages, and its threads digest blocks.

    this thread      begins the copies, a little ahead of the bus
    a lane           says how far this rank has come
    a lane           has the GPU scan what is copied, beside the bus
    a lane           looks how far all ranks have come, and has this rank's blocks of the files digested
    the other lanes  digest them

So files are digested while they are written, though several ranks write into a block: ranks go through the files alike,
so that such blocks are whole early. What ranks say of their progress is waited for, and when rank 0 has heard that all
have copied everything, nothing is. All ranks are on one host: only there the pages of a tmpfs are the same for all.

    <run>/.incoming-<unique>/.progress    a row for each rank, in their order, of one unsigned number of 8 bytes,
                                          little-endian, for each shard in the order of their names: of the shard's
                                          first so many bytes those that this rank writes are there

All ranks' bytes are there as far as the rank says that has come least far. The file is never synced. It is removed
before the version gets its name, and what a crash leaves of it goes with its folder.
"""

import os
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import is_
from pathlib import Path
from struct import pack, unpack
from threading import Event
from typing import Any, NamedTuple, Self

from refitd_client.contract.manifest import BLOCK, blocks, digest_of_block
from refitd_client.contract.naming import STAGING_PROGRESS
from refitd_client.errors import PublishError
from refitd_client.files import durable
from refitd_client.files.durable import Mapped, Mappings
from refitd_client.files.plain_file import open_folder, open_plain
from refitd_client.lanes import Lanes
from refitd_client.sharded.holdings import Holding, gpu_of
from refitd_client.sharded.layout import Claim, Location
from refitd_client.sharded.orders import RankTask
from refitd_client.sharded.parts import PartScanner, SentPart, add_scans, lying, not_finite_here, published, sent_parts
from refitd_client.transport.schedule import Strip, cut
from refitd_client.write import cuda
from refitd_client.write.cuda import register
from refitd_client.write.device_shards import MOST_UNMARKED, CopiesAhead
from refitd_client.write.version_folder import open_recycled

_NUMBER_BYTES = 8
_COPIED_LOOK_SECONDS = 0.001  # between two looks at how far all are: a bus brings 55 MB in it
_MADE_BYTES = 2**28  # of casts that are there at a time to be scanned
ScansByName = dict[str, tuple[int, int]]
"""What parts add to each tensor's fingerprint, and how many of their elements are not finite, by name."""


def begin_progress(folder: Path, shards: int, ranks: int) -> Path:
    """Make the file in the folder that the version is written in. It says that nothing is written."""
    path = folder / STAGING_PROGRESS
    durable.write_file(path, bytes(ranks * shards * _NUMBER_BYTES))
    return path


class WriterProgress:
    """One rank's row, as that rank says it. For one thread."""

    def __init__(self, fd: int, names: Iterable[str], rank: int) -> None:
        self._fd, shards = fd, sorted(names)
        first = rank * len(shards)
        self._place = {name: (first + number) * _NUMBER_BYTES for number, name in enumerate(shards)}
        self._reached = dict.fromkeys(self._place, 0)

    def reached(self, name: str, end: int) -> None:
        """Say that of a shard's first `end` bytes those that this rank writes are there."""
        if end > self._reached[name]:
            self._reached[name] = end
            durable.write_at(self._fd, pack("<Q", end), self._place[name])


def open_progress(folder: int) -> int:
    """A descriptor of the file in an open folder. Raises OSError: there is none, or it is no plain file."""
    return open_plain(STAGING_PROGRESS, os.O_RDWR, within=folder)


def read_progress(fd: int, count: int) -> tuple[int, ...]:
    """The bytes that are there of each of `count` shards, in the order of their names."""
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    numbers = unpack(f"<{len(data) // _NUMBER_BYTES}Q", data)
    return tuple(min(numbers[shard::count]) for shard in range(count))


@dataclass(frozen=True, slots=True)
class SlotPiece:
    """Bytes of a part from byte `at` of the part on, which go to a `strip` of their file.

    When it is there, so are all others of this rank that begin before byte `reached` of the file.
    """

    at: int
    strip: Strip
    reached: int


@dataclass(frozen=True, slots=True)
class SlotPart:
    sent: SentPart
    file: int
    pieces: Sequence[SlotPiece]


def slot_parts(
    parts: Sequence[SentPart],
    locations: Mapping[str, Location],
    sizes: Sequence[int],
    *,
    made: Collection[str] = (),
    most: int = BLOCK,
) -> list[SlotPart]:
    """The parts of a rank in the order of the files, cut into pieces of at most `most` bytes. The tensors `made` come
    last, since they do not lie as they are published.
    """

    def turn(each: SentPart) -> tuple[bool, int, int]:
        where = locations[each.entry.name]
        return each.entry.name in made, where.file, where.offset

    reached = list(sizes)
    found: list[SlotPart] = []
    placed = sorted(parts, key=turn)
    for each in placed[::-1]:
        where, at = locations[each.entry.name], 0
        strips: list[tuple[int, Strip]] = []
        for strip in each.strips:
            for piece in cut(strip, most):
                strips.append((at, piece._replace(begin=where.offset + piece.begin)))
                at += piece.nbytes
        pieces: list[SlotPiece] = []
        for at, piece in reversed(strips):
            pieces.append(SlotPiece(at, piece, reached[where.file]))
            reached[where.file] = min(reached[where.file], piece.begin)
        found.append(SlotPart(each, where.file, pieces[::-1]))
    return found[::-1]


class FileBlock(NamedTuple):
    """Bytes `begin` to `end` of file number `file`, which are digested together."""

    file: int
    begin: int
    end: int


def blocks_of(sizes: Sequence[int]) -> list[FileBlock]:
    """The blocks of files of these sizes. Rank r of n digests every n-th, from the r-th on."""
    return [FileBlock(file, begin, end) for file, size in enumerate(sizes) for begin, end in blocks(size)]


def digests_of_files(sizes: Sequence[int], shares: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
    """The digests of each file's blocks, from those that each rank has of its own."""
    found: list[list[bytes]] = [[] for _ in sizes]
    for number, block in enumerate(blocks_of(sizes)):
        found[block.file].append(shares[number % len(shares)][number // len(shares)])
    return found


@dataclass(frozen=True, slots=True, eq=False)
class SlotPlan:
    """What is copied, worked out once for as long as the rank's tensors stay in place.

    `lying` are parts that lie on the GPU as they are published, with their addresses, and `sent` the same alone; `made`
    are the others, which are cast. `first` is, for each file, the first byte that this rank writes.
    """

    task: RankTask
    claims: Sequence[Claim]
    sizes: Sequence[int]
    lying: Sequence[tuple[SlotPart, int]]
    sent: Sequence[SentPart]
    made: Sequence[SlotPart]
    first: Sequence[int]
    device: Any

    @classmethod
    def of(
        cls, task: RankTask, claims: Sequence[Claim], sizes: Sequence[int], holdings: Mapping[str, Holding]
    ) -> "SlotPlan":
        sent = sent_parts(task.parts, claims)
        places = {id(each): lying(holdings[each.entry.name], each) for each in sent}
        made = {each.entry.name for each in sent if places[id(each)] is None}
        parts = slot_parts(sent, task.locations, sizes, made=made)
        first = list(sizes)
        for part in parts:
            first[part.file] = min([first[part.file], *(piece.strip.begin for piece in part.pieces)])
        direct = [part for part in parts if part.sent.entry.name not in made]
        return cls(
            task=task,
            claims=claims,
            sizes=sizes,
            lying=[(part, places[id(part.sent)].data_ptr()) for part in direct],
            sent=[part.sent for part in direct],
            made=[part for part in parts if part.sent.entry.name in made],
            first=first,
            device=gpu_of(holdings),
        )

    def is_of(self, task: RankTask, claims: Sequence[Claim], sizes: Sequence[int]) -> bool:
        """Whether it holds for these: claims are the very same objects where no tensor has another place."""
        is_same = task is self.task and sizes == self.sizes and len(claims) == len(self.claims)
        return is_same and all(map(is_, claims, self.claims))

    def cast_groups(self) -> Iterator[list[SentPart]]:
        """The parts that are cast, so many that not too much of them is there at a time."""
        group, nbytes = list[SentPart](), 0
        for part in self.made:
            if group and nbytes + part.sent.nbytes > _MADE_BYTES:
                yield group
                group, nbytes = [], 0
            group.append(part.sent)
            nbytes += part.sent.nbytes
        if group:
            yield group


class SlotGpu:
    """The streams of one publication, for copies into the slot's pages and for scans beside. Copies have arrived, and
    scans ended, when it is left. A cast is made and freed along the copies' stream: its memory is used again only
    behind the copy.
    """

    def __init__(self, device: Any) -> None:
        """`device` is the GPU. The streams wait for what its current stream computes."""
        self._torch: Any = sys.modules["torch"]
        self._device = device
        self._is_by_address = cuda.has_driver()
        self._streams = [self._torch.cuda.Stream(device) for _ in range(2)]
        for stream in self._streams:
            stream.wait_stream(self._torch.cuda.current_stream(device))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.synchronize()

    @contextmanager
    def copying(self) -> Generator[None]:
        """The stream that copies go along, for this thread."""
        with self._torch.cuda.device(self._device), self._torch.cuda.stream(self._streams[0]):
            yield

    @contextmanager
    def scanning(self) -> Generator[None]:
        """The stream that scans go along, for this thread."""
        with self._torch.cuda.device(self._device), self._torch.cuda.stream(self._streams[1]):
            yield

    def copy(self, address: int, file: Mapped, piece: SlotPiece) -> None:
        """Begin to copy a piece of a part, whose first byte is at an address on the GPU. In `copying`."""
        is_registered = file.register(partial(register, device=self._device))
        strip, source = piece.strip, address + piece.at
        if is_registered and self._is_by_address:
            if strip.rows == 1:
                cuda.copy("down", file.address + strip.begin, source, strip.width, self._streams[0])
            else:
                target = file.address + strip.begin
                cuda.copy_rows_down(target, strip.pitch, source, strip.width, strip.rows, self._streams[0])
            return
        from refitd_client.fingerprint.device import bits_at

        there = file.tensor if is_registered else self._torch.from_numpy(file.bytes)
        data = bits_at(source, strip.nbytes, 1, self._device).view(self._torch.uint8).view(strip.rows, strip.width)
        for row in range(strip.rows):
            begin = strip.begin + row * strip.pitch
            there[begin : begin + strip.width].copy_(data[row], non_blocking=is_registered)

    def mark(self) -> Callable[[], None]:
        """Return what waits until all copies that were begun have arrived."""
        event = self._torch.cuda.Event(blocking=True)
        event.record(self._streams[0])
        return event.synchronize


class SlotCopier:
    """What a rank keeps from one version in a slot to the next: the files' mappings, and the plan of its copies.

    `threads` are this rank's share of the processors.
    """

    def __init__(self, rank: int, ranks: int, threads: int, *, check_finite: bool) -> None:
        self._rank, self._ranks, self._threads = rank, ranks, threads
        self._mappings = Mappings()
        self._plan: SlotPlan | None = None
        self._scanner = PartScanner(check_finite=check_finite)
        self._check_finite = check_finite
        self._share: SlotShare | None = None

    def copy(
        self, folder: Path, task: RankTask, claims: Sequence[Claim], holdings: Mapping[str, Holding], *, scanned: bool
    ) -> ScansByName:
        """Copy this rank's parts, and begin to digest its blocks. The tensors may change when it returns.

        Raises:
            InvalidWeightsError: a part holds values that are not finite.
            PublishError: a file cannot be written through a mapping here.
            OSError: a file cannot be opened.
        """
        self.end()
        self._mappings.prune()
        share = self._share = SlotShare(folder, task.files, self._mappings)
        if self._plan is None or not self._plan.is_of(task, claims, share.sizes):
            self._plan = SlotPlan.of(task, claims, share.sizes, holdings)
        share.digest(self._rank, self._ranks, max(1, self._threads - 2))
        scanner = self._scanner if self._check_finite or scanned else None
        found = share.copy(self._plan, holdings, self._rank, scanner)
        for name, (_, bad) in found.items() if self._check_finite else ():
            if bad:
                raise not_finite_here(name, bad)
        return found

    def digests(self) -> list[bytes]:
        """The digests of this rank's blocks. All ranks have copied everything. Raises PublishError if nothing was."""
        if self._share is None:
            raise PublishError("this rank was asked for digests of what it has not copied")
        return self._share.digests()

    def end(self) -> None:
        """End what is under way: nothing is written or read of the files any more."""
        share, self._share = self._share, None
        if share is not None:
            share.end()

    def close(self) -> None:
        self.end()
        self._mappings.close()


class SlotShare:
    """The part of one rank in one version. `end` must be called. `sizes` are the files'."""

    def __init__(self, folder: Path, names: Sequence[str], mappings: Mappings) -> None:
        """Open and map the files. Raises as `SlotCopier.copy`."""
        self._names, self._files = names, list[Mapped]()
        self._are_there = Event()
        self._lanes: list[Lanes] = []
        self._found: list[bytes] = []
        with ExitStack() as opened:
            handle = open_folder(folder)
            opened.callback(os.close, handle)
            self._progress = open_progress(handle)
            opened.callback(os.close, self._progress)
            for name in names:
                fd = open_recycled(folder / name)
                opened.callback(os.close, fd)
                if (mapped := mappings.of(fd)) is None:
                    raise PublishError(f"{name} of the slot is not in this host's memory: is the root one tmpfs?")
                self._files.append(mapped)
            self._stack = opened.pop_all()
        self.sizes = [len(each.bytes) for each in self._files]

    def digest(self, rank: int, ranks: int, threads: int) -> None:
        """Begin to digest the blocks of rank `rank` of `ranks`, in so many threads, as they come."""
        mine = blocks_of(self.sizes)[rank::ranks]
        self._found = [b""] * len(mine)
        place = {number: at for at, number in enumerate(sorted(range(len(self.sizes)), key=self._names.__getitem__))}
        digesting, watching = self._begun(threads), self._begun(1)

        def digest_one(number: int, _: Event) -> None:
            file, begin, end = mine[number]
            self._found[number] = digest_of_block(self._files[file].bytes[begin:end])

        def watch(stop: Event) -> None:
            waiting = list(enumerate(mine))
            while waiting and not stop.is_set():
                reached = None if self._are_there.is_set() else read_progress(self._progress, len(self.sizes))
                still: list[tuple[int, FileBlock]] = []
                for number, block in waiting:
                    if reached is None or reached[place[block.file]] >= block.end:
                        digesting.add(partial(digest_one, number))
                    else:
                        still.append((number, block))
                waiting = still
                if waiting:
                    self._are_there.wait(_COPIED_LOOK_SECONDS)
            digesting.close()

        watching.add(watch)
        watching.close()

    def copy(
        self, plan: SlotPlan, holdings: Mapping[str, Holding], rank: int, scanner: PartScanner | None
    ) -> ScansByName:
        progress = WriterProgress(self._progress, self._names, rank)
        for name, begin in zip(self._names, plan.first, strict=True):
            progress.reached(name, begin)
        found = ScansByName()

        def scan(_: Event) -> None:
            if scanner is None:
                return
            with gpu.scanning():
                addresses = [address for _, address in plan.lying]
                add_scans(found, plan.sent, scanner.scan(plan.sent, addresses, plan.device))
                for group in plan.cast_groups():
                    flats = [published(holdings[each.entry.name], each) for each in group]
                    add_scans(found, group, scanner.scan_flats(group, flats))

        with SlotGpu(plan.device) as gpu:
            telling, scanning = self._begun(1), self._begun(1)
            scanning.add(scan)
            scanning.close()
            told = _Telling(gpu, telling, progress)

            def copy(part: SlotPart, address: int) -> None:
                for piece in part.pieces:
                    gpu.copy(address, self._files[part.file], piece)
                    told.begun(self._names[part.file], piece, is_last=piece.reached == self.sizes[part.file])

            with gpu.copying():
                for part, address in plan.lying:
                    copy(part, address)
                for part in plan.made:
                    flat = published(holdings[part.sent.entry.name], part.sent)
                    copy(part, flat.data_ptr())
            scanning.join()
            telling.join()
        return found

    def _begun(self, count: int) -> Lanes:
        self._lanes.append(Lanes(count))
        return self._lanes[-1]

    def digests(self) -> list[bytes]:
        """The digests of the blocks. All ranks have copied everything."""
        self._are_there.set()
        digesting, watching = self._lanes[:2]
        watching.join()
        digesting.join()
        return self._found

    def end(self) -> None:
        """End what is under way, and close the files."""
        for lanes in self._lanes:
            lanes.stop()
        self._are_there.set()
        for lanes in self._lanes:
            with suppress(BaseException):  # what went wrong first was raised
                lanes.join()
        self._stack.close()


class _Telling:
    """Says how far the copies have come, behind them, and keeps them from being begun too far ahead."""

    def __init__(self, gpu: SlotGpu, lane: Lanes, progress: WriterProgress) -> None:
        self._gpu, self._lane, self._progress = gpu, lane, progress
        self._ahead, self._copies, self._bytes = CopiesAhead(), 0, 0

    def begun(self, name: str, piece: SlotPiece, *, is_last: bool) -> None:
        """A piece of a file was begun; `is_last` of the file's."""
        self._copies, self._bytes = self._copies + 1, self._bytes + piece.strip.nbytes
        if self._bytes < BLOCK and self._copies < MOST_UNMARKED and not is_last:
            return
        arrived = self._gpu.mark()

        def tell(stop: Event) -> None:
            arrived()
            if not stop.is_set():
                self._progress.reached(name, piece.reached)

        self._lane.add(tell)
        self._ahead.add(arrived, self._copies)
        self._copies = self._bytes = 0
        if self._ahead.is_far:
            self._ahead.wait()
