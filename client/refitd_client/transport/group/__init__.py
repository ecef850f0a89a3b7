"""Weights sent over a process group (Gloo, NCCL), to ranks that cannot open the trainer's memory (docs/transports.md).

No collective runs in the trainer, in an engine or in the service: a hung one holds up none of them. The trainer has a
sender process, each rank a receiver process beside it, and either may be killed at any moment. A receiver checks what
arrived against the fingerprints of the trainer's offer, and then offers it to its rank as a trainer on the same host
would (`transport.ipc`). So a transfer ends before the engine is paused, and the engine's part is that of a hand-over.

transfer      what both sides compute alike: blocks, and who sends to whom: pure
choice        which transport a publication takes, and why another cannot work: pure
membership    one process in the group: the store where members meet, the group, its broadcasts
host          what this host and this process's torch have
sender        the sender process's work; `receiver` the receiver's
child         such a process as its parent has it, and its own loop: `python -m refitd_client.transport.group`
sending       the trainer's sender process: begun, asked, ended
"""
