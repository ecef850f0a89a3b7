"""`python -m support.rogue_sender send FD`: a trainer's sender process that does what ROGUE_SENDER says.

dies     it dies when all have joined, before it sends
other    it flips one bit of what it sends
rank     of several trainer ranks: it sends its first block, and kills its rank and itself
"""

import os
import signal
import sys
from multiprocessing.connection import Connection

from refitd_client.transport import processes
from refitd_client.transport.child import serve
from refitd_client.transport.membership import FlatMemory, LaneMember, WaitLimit
from refitd_client.transport.needs import PackedPlaces
from refitd_client.transport.processes import SenderProcess
from refitd_client.transport.script import Backend, MemberScript

PROGRAM = "support.rogue_sender"
VARIABLE = "ROGUE_SENDER"
BLOCK_BYTES = 64 * 2**10  # so that a rank of a small model sends several: the first rank's sender plans them for all


class FaultyMember(LaneMember):
    """Dies before it sends, sends another bit, or sends its first block and kills its trainer rank and itself."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    def run(
        self,
        memory: FlatMemory,
        backend: Backend,
        waiting: WaitLimit,
        *,
        sends: bool,
        places: PackedPlaces | None = None,
    ) -> int:
        if self._fault == "dies":
            os._exit(1)
        if self._fault == "other":
            memory = FlatMemory([piece.clone() for piece in memory._pieces])
            next(piece for piece in memory._pieces if len(piece) > 5)[5] ^= 1
        if self._fault == "rank":
            assert len(self._script.blocks) > 1
            self._script = MemberScript(self._script.lanes, self._script.blocks[:1])
        sent = super().run(memory, backend, waiting, sends=sends, places=places)
        if self._fault == "rank":
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return sent


if __name__ == "__main__":
    processes.BLOCK_BYTES = {"gloo": BLOCK_BYTES}
    process = SenderProcess()
    if fault := os.environ.get(VARIABLE, ""):
        process._member = FaultyMember(fault)
    serve(Connection(int(sys.argv[2])), process.work, process.end)
