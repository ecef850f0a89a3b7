"""`python -m support.rogue_sender send FD`: a trainer's sender process that does what ROGUE_SENDER says.

dies     it dies when all have joined, before it sends
other    it flips one bit of what it sends
rank     of several trainer ranks: it sends its first block, and kills its rank and itself
"""

import os
import signal
import socket
import sys
from collections.abc import Iterator

import torch

from refitd_client.transport.group.child import serve
from refitd_client.transport.group.membership import WaitLimit
from refitd_client.transport.group.sender import SenderProcess
from refitd_client.transport.group.transfer import Backend
from refitd_client.transport.ipc.offer import GroupTransfer, Offer
from refitd_client.transport.shards import sender
from refitd_client.transport.shards.lanes import LaneMember
from refitd_client.transport.shards.packing import PackedPlaces
from refitd_client.transport.shards.script import MemberScript

PROGRAM = "support.rogue_sender"
VARIABLE = "ROGUE_SENDER"
BLOCK_BYTES = 64 * 2**10  # so that a rank of a small model sends several: the first rank's sender plans them for all


class RogueSender(SenderProcess):
    """A sender with a fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault
        if fault == "rank":
            self._shards._member = KillingMember()

    def _blocks(self, offer: Offer, transfer: GroupTransfer) -> Iterator[torch.Tensor]:
        for block in super()._blocks(offer, transfer):
            if self._fault == "dies":
                os._exit(1)
            sent = block.clone()
            if self._fault == "other":
                sent[5] ^= 1
            yield sent


class KillingMember(LaneMember):
    """Sends its first block, and kills its trainer rank and itself."""

    def run(
        self,
        memory: torch.Tensor,
        backend: Backend,
        waiting: WaitLimit,
        *,
        sends: bool,
        places: PackedPlaces | None = None,
    ) -> int:
        assert len(self._script.blocks) > 1
        self._script = MemberScript(self._script.lanes, self._script.blocks[:1])
        super().run(memory, backend, waiting, sends=sends, places=places)
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


if __name__ == "__main__":
    sender.BLOCK_BYTES = {"gloo": BLOCK_BYTES}
    process = RogueSender(os.environ.get(VARIABLE, ""))
    serve(socket.socket(fileno=int(sys.argv[2])), process.work, process.end)
