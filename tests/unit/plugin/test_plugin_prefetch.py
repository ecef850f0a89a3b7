"""A prefetch worker finds what the rank's thread finds, refusals and all; memory in use is not written again."""

import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from refitd_client.contract.plugin import UpdateOutcome
from refitd_plugin.delta import changes
from refitd_plugin.delta.layout import PlacedTensor, Route
from refitd_plugin.memory.source import SourceRefusedError, VersionPlace, close_all
from refitd_plugin.prefetch import process
from refitd_plugin.prefetch.process import SharedBuffers, VersionReader
from refitd_plugin.prefetch.worker import PrefetchWorker
from support.mini_sglang import expected, tiny_weights, values
from support.tiny_rank import Rank, Weights, delta, version


class InProcess(PrefetchWorker):
    """A prefetch worker whose messages go through bytes and whose files are its own, without a process."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = VersionReader()
        self.generation = 1
        self.replies: list[Any] = []

    def begin(self) -> None:
        """It is there."""

    def ask(self, order: process.ReadOrder, stop: threading.Event) -> Any:
        asked = msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=process.ReadOrder)
        found = self.reading.read(asked, stop)
        reply = msgspec.msgpack.decode(msgspec.msgpack.encode(found.reply), type=process.Reply)
        self.replies.append(reply)
        files = [os.dup(fd) for fd in found.files]
        close_all(found.own)
        return reply, files


def with_worker(startup: Path) -> Rank:
    rank = Rank(startup)
    rank.engine.preparing.inspector.worker = InProcess()
    return rank


def replies(rank: Rank) -> list[Any]:
    return rank.engine.preparing.inspector.worker.replies


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
    assert [type(reply).__name__ for reply in replies(rank)] == ["FullFound"] * 2 + ["DeltaFound"] * 3
    assert [reply.along for reply in replies(rank)[2:]] == [1] * 3, "the ways into a model are told once"


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
    assert set(one.changes.lease.buffers).isdisjoint(other.changes.lease.buffers)
    assert [group.values.tolist() for group in one.changes.laid.groups] == [each.tolist() for each in values_of_one]
    used = set(one.changes.lease.buffers)
    rank.engine.forget()
    del one
    again = rank.engine.prepare(str(root / "run" / "v000003"))
    assert set(again.changes.lease.buffers) == used


def test_what_a_rank_takes_of_a_delta_is_written_to_shared_memory_at_once(root: Path) -> None:
    """Every second element, as of the columns of a matrix: nothing is left to be copied there."""
    folder = VersionPlace(root, "run/v000003")
    delta(root, 3, 2, tiny_weights(2), changed(tiny_weights(2), 4))
    placements: dict[str, PlacedTensor] = {}
    for name, change in changes.open_changes(folder, check_bytes=True).read().changes.items():
        half = {"rows": change.elements // 2, "columns": 1, "row_index": 2, "row_place": 1, "column_place": 1}
        route = Route(holder=0, offset=0, begin=0, whole=False, **half)
        placements[name] = PlacedTensor(change.dtype, change.shape, (route,))
    buffers = SharedBuffers()
    buffers.begin([])
    laid = changes.open_changes(folder, check_bytes=True, allocate=buffers.memory, placements=placements).laid
    assert laid is not None
    there = list(buffers.numbers)
    placed = [buffers.place(array).count for group in laid.groups for array in (group.indices, group.values)]
    assert (len(placed), buffers.numbers) == (2, there)


def test_a_larger_array_takes_the_place_of_the_largest_and_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each buffer was registered with the GPU, which takes longer than to fill it."""
    monkeypatch.setattr(process, "_BUFFER_STEP", 2**12)
    buffers = SharedBuffers()
    buffers.begin([])
    first = [buffers.place(np.arange(count)).buffer for count in (2**10, 2**13)]
    buffers.begin([])
    assert buffers.memory(2**17).nbytes == 2**17
    assert (first[0] in buffers.numbers, first[1] in buffers.numbers) == (True, False)


def test_messages_carry_files_and_a_line_that_breaks_off_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_BODY_SECONDS", 1)
    first, second = socket.socketpair()
    mine, its = process.Line(first), process.Line(second)
    decoder = msgspec.msgpack.Decoder(process.Reply)
    with Path(os.devnull).open("rb") as file:
        mine.send(process.Refusal("full", "x" * 100_000), [file.fileno()])
        message, files = its.receive(decoder, 30) or (None, [])
        assert (message.kind, len(message.reason), len(files)) == ("full", 100_000, 1)
        assert os.path.sameopenfile(files[0], file.fileno())
        os.close(files[0])
    assert its.receive(decoder, 0.01) is None
    first.sendall(struct.pack("!I", 2**20) + b"x")
    with pytest.raises(process.LineLostError):
        its.receive(decoder, 30)
    mine.close()
    with pytest.raises(process.LineLostError):
        its.receive(decoder, 30)
    its.close()
