"""What a member process does: it is a rank of the engines in a trainer's group, and writes what comes to files.

Each rank has a process of its own, since torch takes a group's name once in a process, and NCCL one GPU. A member that
cannot keep what comes takes part all the same, so that the trainer is not left in a broadcast; then it says why.
"""

import mmap
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from refitd_client.checkpoint.header import Entry, encode, file_order, locate
from refitd_client.errors import InvalidWeightsError
from refitd_client.files.plain_file import open_plain
from refitd_client.tensors import TORCH_NAMES
from refitd_client.transport.child import (
    JoinGroup,
    LookAround,
    MemberReady,
    NamedTensor,
    Order,
    OrderFailed,
    Reply,
    Surroundings,
    TakeHandles,
    TakePatches,
    TakeTensors,
)
from refitd_client.transport.device import DeviceMemory, uuid_of
from refitd_client.transport.membership import TransferError, WaitLimit, first_line
from refitd_client.transport.memory import view
from refitd_client.transport.offer import DevicePlace
from refitd_client.transport.sending import available
from refitd_client.transport.trainer_groups import Broadcast, join

_CHANCE_BYTES = 16


class PatchRefusedError(ValueError):
    """A patch does not fit the weights that it changes. The message is a sentence."""


class MemberProcess:
    """The work of a member process. `work` raises nothing for what others do."""

    def __init__(self) -> None:
        self._receive: Broadcast | None = None
        self._device = "cpu"
        self._read: set[tuple[str, int]] = set()

    def work(self, order: Order, stopped: Callable[[], bool]) -> Reply:
        try:
            match order:
                case LookAround():
                    return Surroundings(backends=sorted(available()), gpus=torch.cuda.device_count())
                case JoinGroup():
                    self._receive, self._device = join(order)
                case TakeTensors():
                    return self._take(order, WaitLimit(order.within, stopped))
                case TakePatches():
                    return self._patch(order, WaitLimit(order.within, stopped))
                case TakeHandles():
                    self._copy(order)
                case _:
                    return OrderFailed("it is a member, and sends nothing")
        except (TransferError, InvalidWeightsError, OSError, ValueError, RuntimeError) as error:
            return OrderFailed(first_line(error))
        return MemberReady()

    def end(self) -> None:
        """Nothing of it outlives the process: the file is its parent's."""

    def _take(self, order: TakeTensors, waiting: WaitLimit) -> Reply:
        entries = _entries(order.tensors)
        with ExitStack() as stack:
            tensors: dict[str, torch.Tensor] = {}
            hindrance: Exception | None = None
            if order.file:
                try:
                    tensors = stack.enter_context(_tensors_of(Path(order.file), entries))
                except (InvalidWeightsError, OSError) as error:
                    hindrance = error
            for together in _chunks(entries, order.chunk):
                if order.chunk:
                    self._take_packed(together, tensors, waiting)
                else:
                    self._take_one(together[0], tensors, waiting)
            self._until_here()
        return MemberReady() if hindrance is None else OrderFailed(first_line(hindrance), in_step=True)

    def _take_one(self, entry: Entry, tensors: dict[str, torch.Tensor], waiting: WaitLimit) -> None:
        """Take one tensor. A rank passes on what it receives, so it needs memory for a tensor that it drops."""
        place = tensors.pop(entry.name, None)
        told = f"tensor {entry.name}"
        if place is not None and self._device == "cpu":
            self._broadcast(told, place, waiting)
            return
        got = self._broadcast(told, self._empty(entry.shape, getattr(torch, TORCH_NAMES[entry.dtype])), waiting)
        if place is not None:
            place.copy_(got)

    def _take_packed(self, together: Sequence[Entry], tensors: dict[str, torch.Tensor], waiting: WaitLimit) -> None:
        told = f"the bucket that begins with {together[0].name}"
        packed = self._broadcast(told, self._empty((sum(entry.nbytes for entry in together),), torch.uint8), waiting)
        at = 0
        for entry in together:
            part, at = packed[at : at + entry.nbytes], at + entry.nbytes
            if (place := tensors.pop(entry.name, None)) is not None:
                _bytes_of(place).copy_(part)

    def _patch(self, order: TakePatches, waiting: WaitLimit) -> Reply:
        entries = _entries(order.tensors)
        hindrance: Exception | None = None
        with ExitStack() as stack:
            places: dict[str, torch.Tensor] = {}
            try:
                for file in order.files:
                    places |= stack.enter_context(_writable(Path(file)))
                _check_fits(entries, places if order.files else None)
            except (PatchRefusedError, InvalidWeightsError, OSError) as error:
                hindrance, places = error, {}
            for entry, count in zip(entries, order.counts, strict=True):
                told, dtype = f"the patch of tensor {entry.name}", getattr(torch, TORCH_NAMES[entry.dtype])
                indices = self._broadcast(told, self._empty((count,), torch.int32), waiting).cpu().long()
                values = self._broadcast(told, self._empty((count,), dtype), waiting).cpu()
                if hindrance is None and entry.name in places:
                    hindrance = _write(places[entry.name], entry.name, indices, values)
            self._until_here()
        return MemberReady() if hindrance is None else OrderFailed(first_line(hindrance), in_step=True)

    def _copy(self, order: TakeHandles) -> None:
        try:
            with _tensors_of(Path(order.file), _entries(order.tensors)) as tensors:
                _read_gpus(order, tensors)
        finally:
            self._count_as_read(order)

    def _count_as_read(self, order: TakeHandles) -> None:
        """Tell torch that all handles are read: until then the trainer cannot free the memory. A buffer that several
        orders name is shared once, and counts as read once.
        """
        storage: Any = torch.UntypedStorage
        counters = {each.counter for handles in order.handles for each in handles.values() if each.counter[0]}
        for file, number in counters - self._read:
            storage._release_ipc_counter(file.encode(), number)  # noqa: SLF001 - what torch calls for a tensor's copy
        self._read = counters if order.is_packed else set()

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _broadcast(self, told: str, tensor: torch.Tensor, waiting: WaitLimit) -> torch.Tensor:
        if self._receive is None:
            raise TransferError("it is in no group")
        if self._device != "cpu":
            return self._receive(tensor, waiting)
        with _whole(told, tensor):
            return self._receive(tensor, waiting)

    def _until_here(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()


@contextmanager
def _whole(told: str, tensor: torch.Tensor) -> Generator[None]:
    """Look whether a tensor is received to its end. Gloo takes fewer bytes for the whole, and leaves the rest as it is.
    Raises TransferError: the trainer has sent less than it has said.
    """
    flat = _bytes_of(tensor)
    # What the tensor's end is before: a NaN, which is no weight; else chance, in enough bytes that it does not recur.
    count = tensor.element_size() if tensor.is_floating_point() else _CHANCE_BYTES
    end = flat[-count:] if len(flat) >= count else flat[:0]
    before = torch.full_like(end, 0xFF) if tensor.is_floating_point() else torch.randint_like(end, 256)
    end.copy_(before)
    yield
    if len(end) and torch.equal(end, before):
        raise TransferError(f"less was sent of {told} than the {len(flat)} bytes that the call has said")


def _entries(tensors: Sequence[NamedTensor]) -> list[Entry]:
    return [Entry(name=name, dtype=dtype, shape=shape) for name, dtype, shape in tensors]


def _chunks(entries: Sequence[Entry], most: int) -> Iterator[Sequence[Entry]]:
    """Group tensors as senders pack them: until a chunk has more than `most` bytes. With 0 each is by itself."""
    together: list[Entry] = []
    size = 0
    for entry in entries:
        together.append(entry)
        size += entry.nbytes
        if size > most or not most:
            yield together
            together, size = [], 0
    if together:
        yield together


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _check_fits(entries: Sequence[Entry], places: dict[str, torch.Tensor] | None) -> None:
    """Check that each patch is of a tensor that there is.

    Raises:
        PatchRefusedError: it is not.
    """
    for entry in entries if places is not None else ():
        place = (places or {}).get(entry.name)
        if place is None:
            raise PatchRefusedError(f"tensor {entry.name} is to change, and the weights that engines serve have none")
        is_same = tuple(place.shape) == tuple(entry.shape) and place.dtype == getattr(torch, TORCH_NAMES[entry.dtype])
        if not is_same:
            raise PatchRefusedError(
                f"the patch of tensor {entry.name} is {entry.dtype} {list(entry.shape)}, and engines serve "
                f"{str(place.dtype).removeprefix('torch.')} {list(place.shape)}"
            )


def _write(place: torch.Tensor, name: str, indices: torch.Tensor, values: torch.Tensor) -> PatchRefusedError | None:
    flat = place.view(-1)
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < flat.numel():
        return PatchRefusedError(f"the patch of tensor {name} has an index beyond its {flat.numel()} elements")
    flat[indices] = values
    return None


def _read_gpus(order: TakeHandles, tensors: dict[str, torch.Tensor]) -> None:
    """Fill tensors from other processes' GPU memory, which nothing here holds afterwards.

    Raises:
        TransferError: their GPU is not seen here.
        DriverError: the memory cannot be opened.
    """
    gpus = {uuid_of(torch.device("cuda", each)): each for each in range(torch.cuda.device_count())}
    memory, at = DeviceMemory(), 0
    try:
        for number, entry in enumerate(_entries(order.tensors)):
            handles = order.handles[0 if order.is_packed else number]
            gpu = next((each for each in handles if each in gpus), None)
            if gpu is None:
                raise TransferError(
                    f"the trainer's tensors are on {', '.join(handles)}, which 'refitd front' does not see: run it on "
                    "the trainer's host with that GPU visible, or have the trainer update by disk"
                )
            there = handles[gpu]
            with torch.cuda.device(gpus[gpu]):
                if there.event and not at:
                    _await(there.event, gpus[gpu])
                place = DevicePlace(device=gpu, handle=there.handle, serial=0, offset=there.offset + at)
                _bytes_of(tensors.pop(entry.name)).copy_(memory.tensor(place, "U8", (entry.nbytes,)))
            at += entry.nbytes if order.is_packed else 0
    finally:
        memory.keep(set())


def _await(event: bytes, gpu: int) -> None:
    """Wait until the GPU has done what the trainer had begun when it shared the memory."""
    cuda: Any = torch.cuda
    cuda.Event.from_ipc_handle(torch.device("cuda", gpu), event).synchronize()


@contextmanager
def _writable(path: Path) -> Generator[dict[str, torch.Tensor]]:
    """The tensors of a safetensors file, as views of it that are written through.

    Raises:
        InvalidWeightsError, OSError: it cannot be read as one.
    """
    placed = locate(path)
    fd = open_plain(path, os.O_RDWR, 0)
    try:
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    yield {name: view(memory, offset, entry.dtype, entry.shape) for name, (entry, offset) in placed.items()}


@contextmanager
def _tensors_of(path: Path, entries: Sequence[Entry]) -> Generator[dict[str, torch.Tensor]]:
    """A new safetensors file of these tensors, which are to be filled inside the context: views of the file by name.
    Raises OSError: it cannot be made, or there is no room for it; InvalidWeightsError: they are too many for one
    header.
    """
    ordered = sorted(entries, key=file_order)
    head = encode(ordered)
    size = len(head) + sum(entry.nbytes for entry in ordered)
    fd = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)  # a file with holes would end the process where memory runs out
        os.pwrite(fd, head, 0)
        memory = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    tensors: dict[str, torch.Tensor] = {}
    offset = len(head)
    for entry in ordered:
        tensors[entry.name] = view(memory, offset, entry.dtype, entry.shape)
        offset += entry.nbytes
    yield tensors
