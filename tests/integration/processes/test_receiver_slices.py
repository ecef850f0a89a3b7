"""A real receiver process that is sent slices: it has memory for these, and each tensor can be read where it lies."""

import os
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import torch

from refitd_client.fingerprint import fingerprints
from refitd_client.transport.group.child import GroupChild, Receive, Received
from refitd_client.transport.group.sending import QUIET, Destination
from refitd_client.transport.ipc import exporter
from refitd_client.transport.ipc.exported_memory import ImportedMemory
from refitd_client.transport.ipc.offer import HostPlace, OfferedTensor, OfferLayout, offer_with, side_by_side
from refitd_client.transport.ipc.offer_file import ExportedTensors, ImportedTensors, make_secret, read_secret
from refitd_client.transport.ipc.shared import PREFIX, SHARED_MEMORY, boot_id, host_name
from refitd_client.transport.shards.needs import RankNeeds, TensorNeeds, encode, numbered, path_of, whole
from refitd_client.transport.shards.proving import sent_slices
from refitd_client.transport.shards.schedule import HeldStrip
from refitd_client.transport.shards.script import ShardTable, held_numbers, needs_numbers
from refitd_client.transport.shards.sending import ShardSender
from refitd_client.transport.shards.strips import strip

pytestmark = pytest.mark.timeout(600)

NAME = f"slices{os.getpid()}"
SECONDS = 120.0
ROWS, COLUMNS = 512, 1024  # of 4 bytes each
SIZE = ROWS * COLUMNS * 4
LAYERS = 4


def weights(step: int) -> dict[str, torch.Tensor]:
    """Of each layer a matrix that is cut by columns, one that is cut by rows, and one expert of another rank."""
    made = torch.Generator().manual_seed(step)
    names = [f"{layer}.{kind}" for layer in range(LAYERS) for kind in ("columns", "rows", "expert")]
    found = {name: torch.randint(0, 2**14, (ROWS, COLUMNS), dtype=torch.int32, generator=made) for name in names}
    return found | {"norm": torch.randint(0, 2**14, (7,), dtype=torch.int32, generator=made)}


def half() -> RankNeeds:
    """What the second of two ranks needs."""
    row = COLUMNS * 4
    of = {
        "columns": TensorNeeds(SIZE, (strip(row // 2, row // 2, ROWS, row),)),
        "rows": TensorNeeds(SIZE, (strip(SIZE // 2, SIZE // 2),)),
        "expert": TensorNeeds(SIZE),
        "norm": whole(7 * 4),
    }
    return RankNeeds({name: of[name.split(".")[-1]] for name in weights(0)})


NEEDED = sum(each.nbytes for needs in half().tensors.values() for each in needs.strips)


@dataclass
class OneToOne:
    """A sender with the whole version, and a receiver."""

    root: Path
    sender: ShardSender
    receiver: GroupChild
    pool: ThreadPoolExecutor

    def goes(self, step: int, needs: RankNeeds | None) -> dict[str, torch.Tensor]:
        """A transfer. Returns the tensors as the receiver offers them."""
        tensors, digest = weights(step), ""
        places, nbytes = side_by_side(each.nbytes for each in tensors.values())
        memory = self.sender.memory(nbytes, torch.device("cpu"))
        held = list[HeldStrip]()
        for number, (at, each) in enumerate(zip(places, tensors.values(), strict=True)):
            memory[at : at + each.nbytes].copy_(each.reshape(-1).view(torch.uint8))
            held.append(HeldStrip(number, strip(0, each.nbytes), at))
        transfer = self.sender.open(Destination(backend="gloo", receivers=(NAME,), service_host="127.0.0.1"), 1)
        table = ShardTable(sizes=tuple(each.nbytes for each in tensors.values()), held=(held_numbers(held),))
        if needs is not None:
            data, digest = encode(needs)
            path_of(self.root, NAME, digest).write_bytes(data)
            by_name = {name: [each._replace(tensor=0)] for name, each in zip(tensors, held, strict=True)}
            sums = sent_slices(memory, by_name, dict.fromkeys(tensors, "I32"), needs.partial())
            packed = struct.pack(f"<{len(sums)}Q", *(sums[name] for name in needs.partial()))
            transfer = msgspec.structs.replace(transfer, needs={NAME: digest}, slices={digest: packed})
            table = msgspec.structs.replace(table, needs={NAME: needs_numbers(numbered(needs, list(tensors)))})
        layout = OfferLayout(
            host=host_name(), boot=boot_id(), pid=os.getpid(), life="",
            tensors=tuple(OfferedTensor(name, "I32", tuple(each.shape), HostPlace(os.devnull, 0))
                          for name, each in tensors.items()),
        )  # fmt: skip
        offer = replace(offer_with(layout, f"run~v{step:06d}", fingerprints(tensors.values())), transfer=transfer)
        with ExportedTensors(self.root / "run", offer, read_secret(self.root)) as exported:
            order = Receive(
                root=str(self.root), offer=f"run/{exported.path.name}", name=NAME, folder=str(self.folder),
                within=SECONDS, on_device=False, needs=digest,
            )  # fmt: skip
            receiving = self.pool.submit(self.receiver.ask, order, SECONDS)
            self.sender.send(transfer, 0, table, threading.Event())
            reply = receiving.result(SECONDS)
        assert isinstance(reply, Received), reply
        imported = ImportedTensors(self.folder / reply.offer, read_secret(self.root))
        there = ImportedMemory().tensors(imported.offer)
        imported.close()
        return there

    @property
    def folder(self) -> Path:
        return self.root / ".refitd" / "receivers" / NAME

    @property
    def memory(self) -> tuple[int, int]:
        """The size of the receiver's memory, and the bytes of it that exist."""
        (path,) = SHARED_MEMORY.glob(f"{PREFIX}{NAME}-*")
        status = path.stat()
        return status.st_size, status.st_blocks * 512


@pytest.fixture
def one_to_one(tmp_path: Path) -> Iterator[OneToOne]:
    (tmp_path / "run").mkdir()
    (tmp_path / ".refitd" / "receivers" / NAME).mkdir(parents=True)
    make_secret(tmp_path)
    sender, receiver = ShardSender(f"to-{NAME}"), GroupChild("receive", QUIET)
    with ThreadPoolExecutor(1) as pool:
        yield OneToOne(tmp_path, sender, receiver, pool)
        receiver.end()
        sender.close()
    exporter.end(tmp_path / "run")
    for path in SHARED_MEMORY.glob(f"{PREFIX}{NAME}-*"):  # of a receiver that did not end in time, and was killed
        path.unlink()


def test_it_has_memory_for_its_slices_and_gives_that_of_the_whole_version_back(one_to_one: OneToOne) -> None:
    for step in (1, 2, 3):
        there = one_to_one.goes(step, half() if step > 1 else None)
        size, taken = one_to_one.memory
        sent = weights(step)
        if step == 1:
            assert taken >= sum(each.nbytes for each in sent.values())
            assert all(torch.equal(there[name], each) for name, each in sent.items())
            continue
        assert size <= NEEDED + SIZE
        assert taken <= NEEDED + 2**16
        for layer in range(LAYERS):
            columns, rows = f"{layer}.columns", f"{layer}.rows"
            assert torch.equal(there[columns][:, COLUMNS // 2 :], sent[columns][:, COLUMNS // 2 :])
            assert torch.equal(there[rows][ROWS // 2 :], sent[rows][ROWS // 2 :])
        assert torch.equal(there["norm"], sent["norm"])


def test_after_another_need_it_has_the_whole_version_again(one_to_one: OneToOne) -> None:
    one_to_one.goes(1, half())
    there, sent = one_to_one.goes(2, None), weights(2)
    assert all(torch.equal(there[name], each) for name, each in sent.items())
