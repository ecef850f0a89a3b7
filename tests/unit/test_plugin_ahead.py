"""What a clerk finds is what the rank's thread finds, refusals and all; memory that is in use is not written again."""

import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from refitd.catalog import whole_file
from refitd_client.contract.digest import digest_of_block, joined
from refitd_sglang import changes
from refitd_sglang.ahead import letters, line
from refitd_sglang.ahead.clerk import Clerk
from refitd_sglang.ahead.reading import Reading
from refitd_sglang.ahead.rooms import Rooms
from refitd_sglang.source import Place, SourceRefusedError
from refitd_sglang.transaction import Outcome
from support.mini_sglang import expected, tiny_weights, values
from support.tiny_rank import Rank, Weights, delta, version


class InProcess(Clerk):
    """A clerk whose letters go through bytes and whose files are its own, without a process."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = Reading()
        self.generation = 1
        self.replies: list[Any] = []

    def begin(self) -> None:
        """It is there."""

    def ask(self, order: letters.Order, stop: threading.Event) -> Any:
        asked = msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=letters.Order)
        found = self.reading.read(asked, stop)
        reply = msgspec.msgpack.decode(msgspec.msgpack.encode(found.reply), type=letters.Reply)
        self.replies.append(reply)
        files = [os.dup(fd) for fd in found.files]
        found.close()
        return reply, files


def with_clerk(startup: Path) -> Rank:
    rank = Rank(startup)
    rank.engine.preparing.looking.clerk = InProcess()
    return rank


def replies(rank: Rank) -> list[Any]:
    return rank.engine.preparing.looking.clerk.replies


def changed(weights: Weights, step: int) -> Weights:
    after = {name: tensor.clone() for name, tensor in weights.items()}
    for name, tensor in after.items():
        if name != "norm.weight":
            tensor.view(-1)[step % tensor.numel()] += 1
    return after


def served(rank: Rank, folder: Path) -> str:
    rank.engine.prepare(str(folder))
    answer = rank.answer(folder)
    assert answer.outcome is Outcome.SERVED, answer.reason
    return answer.how


def test_versions_that_a_clerk_has_read_are_served_as_others(root: Path, startup: Path) -> None:
    rank, weights = with_clerk(startup), tiny_weights(2)
    assert [served(rank, version(root, step, fingerprints=True)) for step in (1, 2)] == ["load", "replay"]
    for step in (3, 4, 5):
        before, weights = weights, changed(weights, step)
        assert served(rank, delta(root, step, step - 1, before, weights)) == "delta"
        assert values(rank.model) == expected(weights)
    assert [type(reply).__name__ for reply in replies(rank)] == ["Whole"] * 2 + ["Delta"] * 3


def test_a_layout_and_the_ways_into_a_model_are_told_once(root: Path, startup: Path) -> None:
    rank, weights = with_clerk(startup), tiny_weights(2)
    for step in (1, 2):
        served(rank, version(root, step, fingerprints=True))
    assert [reply.headers is None for reply in replies(rank)] == [False, True]
    for step in (3, 4):
        before, weights = weights, changed(weights, step)
        served(rank, delta(root, step, step - 1, before, weights))
    assert [reply.along for reply in replies(rank)[2:]] == [1, 1]


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
def test_a_clerk_refuses_what_the_thread_refuses_and_for_the_same_reason(
    root: Path, startup: Path, spoil: Callable[[Path], None]
) -> None:
    folder = version(root, 1)
    spoil(folder)
    reasons: list[str] = []
    for rank in (with_clerk(startup), Rank(startup)):
        with pytest.raises(SourceRefusedError) as refused:
            rank.engine.prepare(str(folder))
        reasons.append(str(refused.value))
    assert reasons[0] == reasons[1]


def test_a_delta_that_a_clerk_did_not_lay_out_is_read_by_the_rank(root: Path, startup: Path) -> None:
    """It was not told how, since nothing was served; then something is."""
    rank = with_clerk(startup)
    after = changed(tiny_weights(2), 3)
    folder = delta(root, 3, 2, tiny_weights(2), after)
    rank.engine.runner.args.enable_memory_saver = True  # so it is not looked at before the pause either
    prepared = rank.engine.prepare(str(folder))
    rank.engine.runner.args.enable_memory_saver = False
    assert (prepared.changes.laid, prepared.changes.delta) == (None, None)
    for step in (1, 2):
        served(rank, version(root, step, fingerprints=True))
    rank.engine._prepared = prepared
    assert rank.answer(folder).how == "delta"
    assert values(rank.model) == expected(after)


def test_what_a_clerk_cannot_say_the_thread_finds_out(
    root: Path, startup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = with_clerk(startup)
    monkeypatch.setattr(Reading, "_whole", lambda *_: 1 / 0)
    assert served(rank, version(root, 1)) == "load"
    assert [reply.kind for reply in replies(rank)] == ["unable"]


def test_a_delta_that_is_still_held_is_not_written_over_by_the_next(root: Path, startup: Path) -> None:
    rank, weights = with_clerk(startup), tiny_weights(2)
    for step in (1, 2):
        served(rank, version(root, step, fingerprints=True))
    one = rank.engine.prepare(str(delta(root, 3, 2, weights, changed(weights, 3))))
    values_of_one = [group.values.copy() for group in one.changes.laid.groups]
    other = rank.engine.prepare(str(delta(root, 4, 2, weights, changed(weights, 4))))
    assert set(one.changes.lease.rooms).isdisjoint(other.changes.lease.rooms)
    assert [group.values.tolist() for group in one.changes.laid.groups] == [each.tolist() for each in values_of_one]
    used = set(one.changes.lease.rooms)
    rank.engine.forget()
    del one
    again = rank.engine.prepare(str(root / "run" / "v000003"))
    assert set(again.changes.lease.rooms) == used


def test_rooms_are_used_again_and_grow() -> None:
    rooms = Rooms()
    rooms.begin([])
    small = rooms.place(np.arange(10, dtype=np.uint16))
    rooms.begin([small.room])
    assert rooms.place(np.arange(10)).room != small.room
    rooms.begin([])
    assert rooms.memory(2**24 + 1).nbytes == 2**24 + 1
    assert len(rooms.numbers) == 2


def test_a_delta_of_several_blocks_is_held_against_its_manifest(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As publishers digest what is larger than 16 MiB."""
    monkeypatch.setattr(whole_file, "BLOCK", 128)
    folder = delta(root, 3, 2, tiny_weights(2), changed(tiny_weights(2), 3))
    data = np.fromfile(folder / "weights.refit-delta", np.uint8)
    digest = joined([digest_of_block(data[at : at + 128]) for at in range(0, len(data), 128)])
    manifest = json.loads((folder / "refit.json").read_text())
    for said, is_good in ((digest, True), (digest.replace("a", "b"), False)):
        manifest["files"]["weights.refit-delta"]["digest"] = said
        (folder / "refit.json").write_text(json.dumps(manifest))
        if is_good:
            assert changes.open_changes(Place(root, "run/v000003"), check_bytes=True).label == "run~v000003"
        else:
            with pytest.raises(SourceRefusedError, match="damaged"):
                changes.open_changes(Place(root, "run/v000003"), check_bytes=True)


def test_letters_carry_files_and_a_line_that_breaks_off_is_lost() -> None:
    mine, its = socket.socketpair()
    decoder = msgspec.msgpack.Decoder(letters.Reply)
    with mine, its, Path(os.devnull).open("rb") as file:
        line.send(mine, letters.Refusal("full", "x" * 100_000), [file.fileno()])
        letter, files = line.receive(its, decoder)
        assert (letter.kind, len(letter.reason), len(files)) == ("full", 100_000, 1)
        assert os.path.sameopenfile(files[0], file.fileno())
        os.close(files[0])
        its.settimeout(0.01)
        with pytest.raises(TimeoutError):
            line.receive(its, decoder)
        mine.sendall(b"\x01")
        mine.close()
        with pytest.raises(line.LineLostError):
            line.receive(its, decoder)
