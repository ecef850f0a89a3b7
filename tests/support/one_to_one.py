"""A sender with a whole version, and a real receiver process that is sent all of it or slices."""

import os
import struct
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch

from refitd_client.checkpoint.finite import NO_RULE
from refitd_client.fingerprint import fingerprints
from refitd_client.transport import exporter
from refitd_client.transport.child import GroupChild, Receive, Received
from refitd_client.transport.membership import FlatMemory
from refitd_client.transport.memory import PREFIX, SHARED_MEMORY, ImportedMemory, LayoutCache, boot_id, host_name
from refitd_client.transport.needs import RankNeeds, TensorNeeds, encode, numbered, path_of, whole
from refitd_client.transport.offer import HostPlace, OfferedTensor, OfferLayout, offer_with, side_by_side
from refitd_client.transport.offer_file import ExportedTensors, ImportedTensors, make_secret, read_secret
from refitd_client.transport.proving import sent_slices
from refitd_client.transport.schedule import HeldStrip, strip
from refitd_client.transport.script import ShardTable, held_numbers, needs_numbers
from refitd_client.transport.sending import QUIET, Destination, TensorSender

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
    sender: TensorSender
    receiver: GroupChild
    pool: ThreadPoolExecutor
    on_device: bool
    taker: ImportedMemory = field(default_factory=ImportedMemory)  # what the rank has open

    def goes(self, step: int, needs: RankNeeds | None) -> dict[str, torch.Tensor]:
        """A transfer. Returns the tensors as the receiver offers them. What the rank had open is closed before, as the
        plugin does where its needs change."""
        self.taker.keep(None)
        tensors, digest = weights(step), ""
        places, nbytes = side_by_side(each.nbytes for each in tensors.values())
        memory = self.sender.memory(nbytes, torch.device("cpu"))
        held = list[HeldStrip]()
        for number, (at, each) in enumerate(zip(places, tensors.values(), strict=True)):
            memory[at : at + each.nbytes].copy_(each.reshape(-1).view(torch.uint8))
            held.append(HeldStrip(number, strip(0, each.nbytes), at))
        mine = LayoutCache().prepare({"flat": memory}, [NO_RULE]).layout
        to = Destination(backend="gloo", receivers=(NAME,), service_host="127.0.0.1")
        transfer = self.sender.open(to, mine)
        table = ShardTable(sizes=tuple(each.nbytes for each in tensors.values()), held=(held_numbers(held),))
        if needs is not None:
            data, digest = encode(needs)
            path_of(self.root, NAME, digest).write_bytes(data)
            by_name = {name: [each._replace(tensor=0)] for name, each in zip(tensors, held, strict=True)}
            sums = sent_slices(FlatMemory([memory]), by_name, dict.fromkeys(tensors, "I32"), needs.partial())
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
                within=SECONDS, on_device=self.on_device, needs=digest,
            )  # fmt: skip
            receiving = self.pool.submit(self.receiver.ask, order, SECONDS)
            self.sender.send(transfer, mine, threading.Event(), table=table)
            reply = receiving.result(SECONDS)
        assert isinstance(reply, Received), reply
        imported = ImportedTensors(self.folder / reply.offer, read_secret(self.root))
        there = self.taker.tensors(imported.offer)
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


@contextmanager
def one_to_one(root: Path, *, on_device: bool) -> Generator[OneToOne]:
    """The two, with a root. `on_device`: the receiver keeps what it receives on its GPU."""
    (root / "run").mkdir()
    (root / ".refitd" / "receivers" / NAME).mkdir(parents=True)
    make_secret(root)
    sender, receiver = TensorSender(root / "run", NAME), GroupChild("receive", QUIET)
    with ThreadPoolExecutor(1) as pool:
        pair = OneToOne(root, sender, receiver, pool, on_device)
        yield pair
        pair.taker.keep(None)
        receiver.end()
        sender.close()
    exporter.end(root / "run")
    for path in SHARED_MEMORY.glob(f"{PREFIX}{NAME}-*"):  # of a receiver that did not end in time, and was killed
        path.unlink()
