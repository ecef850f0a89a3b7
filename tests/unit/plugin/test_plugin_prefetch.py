"""A prefetch worker finds what the rank's thread finds, refusals and all; memory in use is not written again."""

import os
import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from refitd_client.contract.plugin import UpdateOutcome
from refitd_client.files.plain_file import memory_file
from refitd_plugin import prefetch
from refitd_plugin.delta import changes
from refitd_plugin.delta.layout import PlacedTensor, Route
from refitd_plugin.memory.source import SourceRefusedError, VersionPlace
from refitd_plugin.prefetch import BufferMemory, PrefetchWorker, VersionReader
from support.mini_sglang import expected, tiny_weights, values
from support.tiny_rank import Rank, Weights, delta, version


class InProcess(PrefetchWorker):
    """A prefetch worker whose messages go through bytes, without a process."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = VersionReader()
        self.generation = 1
        self.orders: list[Any] = []
        self.replies: list[Any] = []

    def begin(self) -> None:
        """It is there."""

    def ask(self, order: prefetch.ReadOrder, stop: threading.Event, buffer: int = -1) -> Any:
        asked = msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=prefetch.ReadOrder)
        self.orders.append(asked)
        found = self.reading.read(asked, buffer, stop)
        reply = msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=prefetch.Reply)
        self.replies.append(reply)
        return reply


def with_worker(startup: Path) -> Rank:
    rank = Rank(startup)
    rank.engine.preparing.worker = InProcess()
    return rank


def replies(rank: Rank) -> list[Any]:
    return rank.engine.preparing.worker.replies


def changed(weights: Weights, step: int) -> Weights:
    after = {name: tensor.clone() for name, tensor in weights.items()}
    for name, tensor in after.items():
        if name != "norm.weight":
            tensor.view(-1)[step % tensor.numel()] += 1
    return after


def served(rank: Rank, folder: Path) -> str:
    rank.engine.prepare(str(folder))
    answer = rank.answer(folder)
    assert answer.outcome is UpdateOutcome.SERVED, answer.reason
    return answer.how


def test_versions_that_a_prefetch_worker_has_read_are_served_as_others(root: Path, startup: Path) -> None:
    rank, weights = with_worker(startup), tiny_weights(2)
    assert [served(rank, version(root, step, fingerprints=True)) for step in (1, 2)] == ["load", "replay"]
    for step in (3, 4, 5):
        before, weights = weights, changed(weights, step)
        assert served(rank, delta(root, step, step - 1, before, weights)) == "delta"
        assert values(rank.model) == expected(weights)
    assert [type(reply).__name__ for reply in replies(rank)] == ["FullRead"] * 2 + ["DeltaRead"] * 3
    orders = rank.engine.preparing.worker.orders[2:]
    assert [each.lays_out for each in orders] == [True] * 3
    assert [each.placements is None for each in orders] == [False, True, True], "the ways into a model are told once"


def test_the_headers_of_a_full_version_are_looked_at_without_a_worker(root: Path, startup: Path) -> None:
    rank = with_worker(startup)
    rank.engine.prepare(str(version(root, 1)), check_bytes=False)
    assert rank.answer(root / "run" / "v000001").outcome is UpdateOutcome.SERVED
    assert replies(rank) == []


def test_a_version_that_changes_after_the_worker_has_read_it_is_refused(
    root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, folder, read = with_worker(startup), version(root, 1), VersionReader.read

    def then_changed(*args: Any) -> Any:
        found = read(*args)
        flipped(folder)
        return found

    monkeypatch.setattr(VersionReader, "read", then_changed)
    with pytest.raises(SourceRefusedError, match="changed while it was looked at"):
        rank.engine.prepare(str(folder))


def torn(folder: Path) -> None:
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-2])


def flipped(folder: Path) -> None:
    shard = folder / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-2] ^= 4
    shard.write_bytes(data)


def another_model(folder: Path) -> None:
    save_file({"q.weight": torch.zeros(2, 2)}, folder / "model.safetensors")


def gone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("spoil", [torn, flipped, another_model, gone])
def test_a_prefetch_worker_refuses_what_the_thread_refuses_and_for_the_same_reason(
    root: Path, startup: Path, spoil: Callable[[Path], None]
) -> None:
    folder = version(root, 1)
    spoil(folder)
    reasons: list[str] = []
    for rank in (with_worker(startup), Rank(startup)):
        with pytest.raises(SourceRefusedError) as refused:
            rank.engine.prepare(str(folder))
        reasons.append(str(refused.value))
    assert reasons[0] == reasons[1]


def test_a_delta_that_a_prefetch_worker_did_not_lay_out_is_read_by_the_rank(root: Path, startup: Path) -> None:
    """It was not told how, since nothing was served; then something is."""
    rank = with_worker(startup)
    after = changed(tiny_weights(2), 3)
    folder = delta(root, 3, 2, tiny_weights(2), after)
    rank.updater.server_args.enable_memory_saver = True  # so it is not looked at before the pause either
    prepared = rank.engine.prepare(str(folder))
    rank.updater.server_args.enable_memory_saver = False
    assert (prepared.changes.laid, prepared.changes.delta) == (None, None)
    for step in (1, 2):
        served(rank, version(root, step, fingerprints=True))
    rank.engine._prepared = prepared
    assert rank.answer(folder).how == "delta"
    assert values(rank.model) == expected(after)


def test_what_a_prefetch_worker_cannot_say_the_thread_finds_out(
    root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = with_worker(startup)
    monkeypatch.setattr(VersionReader, "_read_full", lambda *_: 1 / 0)
    assert served(rank, version(root, 1)) == "load"
    assert [reply.kind for reply in replies(rank)] == ["unable"]


def test_a_delta_that_is_still_held_is_not_written_over_by_the_next(root: Path, startup: Path) -> None:
    rank, weights = with_worker(startup), tiny_weights(2)
    for step in (1, 2):
        served(rank, version(root, step, fingerprints=True))
    one = rank.engine.prepare(str(delta(root, 3, 2, weights, changed(weights, 3))))
    values_of_one = [group.values.copy() for group in one.changes.laid.groups]
    other = rank.engine.prepare(str(delta(root, 4, 2, weights, changed(weights, 4))))
    assert one.changes.lease.buffer is not other.changes.lease.buffer
    assert [group.values.tolist() for group in one.changes.laid.groups] == [each.tolist() for each in values_of_one]
    used = one.changes.lease.buffer
    rank.engine.forget()
    del one
    again = rank.engine.prepare(str(root / "run" / "v000003"))
    assert again.changes.lease.buffer is used


def test_what_a_worker_that_is_lost_may_still_write_is_no_buffer_of_the_next_delta(
    root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, weights = with_worker(startup), tiny_weights(2)
    for step in (1, 2):
        served(rank, version(root, step, fingerprints=True))
    folder = delta(root, 3, 2, weights, changed(weights, 3))
    used = rank.engine.prepare(str(folder)).changes.lease.buffer
    rank.engine.forget()
    with monkeypatch.context() as patch:
        patch.setattr(InProcess, "ask", lambda *_: None)
        assert rank.engine.prepare(str(folder)).changes.lease is None, "the rank has read it"
    assert rank.engine.prepare(str(folder)).changes.lease.buffer is not used


def test_what_a_rank_takes_of_a_delta_is_written_to_shared_memory_at_once(root: Path) -> None:
    """Every second element, as of the columns of a matrix: nothing is left to be copied there."""
    folder = VersionPlace(root, "run/v000003")
    delta(root, 3, 2, tiny_weights(2), changed(tiny_weights(2), 4))
    placements: dict[str, PlacedTensor] = {}
    for name, change in changes.open_changes(folder, check_bytes=True).read().changes.items():
        half = {"rows": change.elements // 2, "columns": 1, "row_index": 2, "row_place": 1, "column_place": 1}
        route = Route(holder=0, offset=0, begin=0, whole=False, **half)
        placements[name] = PlacedTensor(change.dtype, change.shape, (route,))
    fd = memory_file("buffer")
    memory = BufferMemory(fd)
    laid = changes.open_changes(folder, check_bytes=True, allocate=memory.memory, placements=placements).laid
    assert laid is not None
    there = len(memory._stretches)
    placed = [memory.place(array).count for group in laid.groups for array in (group.indices, group.values)]
    assert (len(placed), len(memory._stretches)) == (2, there)
    os.close(fd)


def test_a_buffer_grows_and_keeps_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank maps it once more then: it was registered with the GPU, which takes longer than to fill it."""
    monkeypatch.setattr(prefetch, "_BUFFER_STEP", 2**14)
    free: list[prefetch.DeltaBuffer] = []
    sizes: list[int] = []

    def mapper(fd: int, size: int) -> Any:
        sizes.append(size)
        return prefetch.PlainMapping(fd, size)

    lease = prefetch.BufferLease(free, mapper)
    for count in (2**8, 2**9, 2**14):
        memory = BufferMemory(lease.buffer.fd)
        arrays = [np.arange(count), np.arange(3, dtype=np.uint16)]
        for array, stored in zip(arrays, [memory.place(each) for each in arrays], strict=True):
            found = np.frombuffer(lease.buffer.bytes, stored.dtype, stored.count, stored.begin)
            assert found.tolist() == array.tolist()
    assert sizes == [2**14, 2**14 * 9]
    del lease
    assert len(free) == 1


def test_a_file_goes_with_an_order_and_a_message_that_breaks_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_BODY_SECONDS", 1)
    first, second = socket.socketpair()
    broken = socket.socket(fileno=os.dup(first.fileno()))
    mine, its = prefetch._line(first), prefetch._line(second)
    with Path(os.devnull).open("rb") as file:
        mine.send_bytes(b"x" * 100_000)
        send_handle(mine, file.fileno(), 0)
        assert len(its.recv_bytes()) == 100_000
        got = recv_handle(its)
        assert os.path.sameopenfile(got, file.fileno())
        os.close(got)
    broken.sendall(struct.pack("!I", 2**20) + b"x")
    with pytest.raises(BlockingIOError):
        its.recv_bytes()
    for each in (mine, its, broken):
        each.close()
