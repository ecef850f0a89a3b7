"""How weights get from the trainer's memory to an engine without a file (docs/transports.md, ADRs 8, 22 and 25).

ways         which way a publication takes, and why another cannot work: pure
handover     a version's tensors offered, announced, and withdrawn when all engines have answered

offer        what is offered, as plain data under a message authentication code: pure
offer_file   the offer's file and its lock, by which a trainer gets its tensors back; the key of that code
exporter     the lock that says whether the trainer lives
memory       tensors in memory of the host, and an offer of tensors on both sides; `device` in a GPU's, by CUDA IPC

sending      the trainer's sender process, and the memory that it reads
child        such a process as its parent has it, and its own loop; `processes` their work, `member` that of AReaL's
schedule     parts of tensors, and who sends which of them to whom: pure
script       what members say to each other, and what each does: pure
needs        what an engine rank needs, as it says it, and where its receiver keeps it: pure
membership   a member of the groups that send, which follows its script
proving      what has arrived, held against what was announced
"""
