"""What a sender process does for one engine without refitd inside: it broadcasts to the engine's own processes.

The engine's scheduler takes part in the collective, and a scheduler that waits there answers nothing. So there is one
process for each engine: when it ends, whatever ended it, the engine's call fails and it is free. It ends by itself when
the service is gone (`stock_line`), when the trainer is gone, and at the trainer's deadline (`child`).

The checksums that the engine is to have afterwards are computed here, from the very bytes that are sent, after these
were held against the fingerprints of the offer. They are computed before anything is paused.
"""

import secrets
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

from refitd_client.fingerprint import fingerprints
from refitd_client.transport.group.child import Open, Opened, Order, OrderFailed, Reply, Send, TransferSent
from refitd_client.transport.group.membership import TransferError, WaitLimit, dist, open_store
from refitd_client.transport.group.stock_checksum import CHECKSUMS
from refitd_client.transport.group.stock_line import ServiceLine, accepted
from refitd_client.transport.group.stock_rules import UnexplainedError, explained, parts
from refitd_client.transport.group.stock_words import (
    BucketsSent,
    EngineHello,
    EngineOver,
    EngineReady,
    Expected,
    GroupMade,
    StockWelcome,
    buckets,
    code_of,
)
from refitd_client.transport.group.transfer import SENDER, Backend
from refitd_client.transport.ipc.device import DriverError
from refitd_client.transport.ipc.exported_memory import ImportedMemory
from refitd_client.transport.ipc.offer import Offer, OfferedTensor, OfferRefusedError
from refitd_client.transport.ipc.offer_file import HandoverKeyRefusedError, ImportedTensors, read_secret

_c10d: Any = distributed_c10d  # the helper by which SGLang's processes make their side of the group
_REFUSALS = (
    TransferError, UnexplainedError, OfferRefusedError, HandoverKeyRefusedError, DriverError, OSError, ValueError,
)  # fmt: skip


class DeliveryProcess:
    """The work of a sender process of one engine. `work` raises nothing for what others do."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._host = ""
        self._memory = ImportedMemory()
        self._offer: Offer | None = None

    def work(self, order: Order, stopped: Callable[[], bool]) -> Reply:
        """Carry out one order."""
        try:
            match order:
                case Open(host):
                    family = socket.AF_INET6 if ":" in host else socket.AF_INET
                    self._listener, self._host = socket.create_server((host, 0), family=family), host
                    return Opened(int(self._listener.getsockname()[1]))
                case Send():
                    return self._send(order, stopped)
                case _:
                    return OrderFailed("it is a sender, and receives nothing")
        except _REFUSALS as error:
            return OrderFailed(str(error) or type(error).__name__)

    def end(self) -> None:
        """Nothing of it outlives the process."""

    def _send(self, order: Send, stopped: Callable[[], bool]) -> TransferSent:
        root, waiting = Path(order.root), WaitLimit(order.within, stopped)
        secret = read_secret(root)
        imported = ImportedTensors(root / order.offer, secret, self._offer)
        try:
            offer = self._offer = imported.offer
            if offer.stock is None or self._listener is None:
                raise TransferError("its process has ended, and another one has begun")
            line, hello = accepted(self._listener, offer.stock, waiting.at_most(order.join))
            try:
                return self._deliver(imported, line, hello, secret, waiting)
            except (*_REFUSALS, RuntimeError) as error:
                line.refuse(str(error) or type(error).__name__)
                raise TransferError(str(error) or type(error).__name__) from error
            finally:
                line.close()
        finally:
            imported.close()

    def _deliver(
        self, imported: ImportedTensors, line: ServiceLine, hello: EngineHello, secret: bytes, waiting: WaitLimit
    ) -> TransferSent:
        offer, transfer = imported.offer, imported.offer.stock
        if transfer is None:
            raise TransferError("the offer is of no transfer to engines without refitd inside")
        imported.hold()
        tensors = self._memory.tensors(offer)
        expected = _expected(offer, tensors, hello)
        store, port = open_store(self._host)
        group_name = f"refitd-{secrets.token_hex(8)}"
        line.say(
            StockWelcome(port=port, group=group_name, expected=expected, code=code_of(transfer.name, expected, secret))
        )
        line.is_vital = True
        group = make_group(transfer.backend, store, group_name, hello.ranks + 1, waiting.left())
        line.say(GroupMade())
        line.hear(EngineReady, waiting)
        _broadcast(group, offer, tensors, transfer.backend, waiting)
        line.say(BucketsSent())
        imported.release()
        over = line.hear(EngineOver, waiting)
        line.is_vital = False
        _c10d.destroy_process_group(group)
        return TransferSent(refused={hello.engine: over.refused}, ms={})


def make_group(backend: Backend, store: Any, name: str, size: int, within: float) -> Any:
    """Join, as rank `SENDER`, the group that the engine's ranks make of their `/init_weights_update_group`.

    Args:
        backend: `gloo` or `nccl`.
        store: this process's, where the ranks meet it.
        name: the group's.
        size: how many members it has.
        within: seconds, for this and for each broadcast.

    Raises:
        TransferError: not all have joined in time.
    """
    try:
        group, _ = _c10d._new_process_group_helper(  # noqa: SLF001 - torch has no public call for a second group
            size, SENDER, [], _c10d.Backend(backend), dist.PrefixStore(name, store), group_name=name,
            timeout=timedelta(seconds=within),
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise TransferError(f"the {backend} group of {size} was not made: {str(error)[:300]}") from error
    _c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}  # noqa: SLF001 - as SGLang's side does
    return group


def _expected(offer: Offer, tensors: dict[str, torch.Tensor], hello: EngineHello) -> Expected:
    """The checksums that each rank is to have.

    Raises:
        TransferError: the tensors are not those that were published, or the engine computes unknown checksums.
        UnexplainedError: it is not known what the engine makes of a tensor.
    """
    if (checksum := CHECKSUMS.get(hello.device)) is None:
        raise TransferError(f"it is not known how an engine on {hello.device[:20]!a} computes checksums")
    published = {each.name: number for each, number in zip(offer.layout.tensors, offer.fingerprints, strict=True)}
    sources = explained(hello.parameters, published)
    for name, found in zip(tensors, fingerprints(list(tensors.values())), strict=True):
        if found != published[name]:
            raise TransferError(f"tensor {name[:100]!a} has changed since it was published")
    return [
        {
            parameter: [checksum(each) for each in parts(names, tensors, rank, hello.ranks)]
            for parameter, names in sources.items()
        }
        for rank in range(hello.ranks)
    ]


def _broadcast(
    group: Any, offer: Offer, tensors: dict[str, torch.Tensor], backend: Backend, waiting: WaitLimit
) -> None:
    """Send all buckets. Each waits until the service has asked the engine for it.

    Raises:
        TransferError: a member is gone, or the time was over.
    """
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = SENDER, 0
    device = "cuda" if backend == "nccl" else "cpu"
    try:
        for bucket in buckets(offer.layout.tensors):
            work = group.broadcast([_flat(bucket, tensors, device)], options)
            work.wait(timedelta(seconds=waiting.left()))
            if backend == "nccl":
                torch.cuda.synchronize()
    except RuntimeError as error:
        raise TransferError(f"a broadcast has failed: {str(error).splitlines()[0][:300]}") from error


def _flat(bucket: list[OfferedTensor], tensors: dict[str, torch.Tensor], device: str) -> torch.Tensor:
    flat, at = torch.empty(sum(each.nbytes for each in bucket), dtype=torch.uint8, device=device), 0
    for each in bucket:
        flat[at : at + each.nbytes].copy_(tensors[each.name].reshape(-1).view(torch.uint8))
        at += each.nbytes
    return flat
