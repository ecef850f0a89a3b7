"""Weights sent by several trainer ranks, each what it has, to engine ranks, each what it needs (docs/transports.md).

Processes, store, offers and proofs are those of `transport.group`; what is here is for several senders.

strips       parts of a tensor as bytes: pure
schedule     who sends which bytes to whom, and in which order: pure
script       each member's part of that, and who takes part: pure
needs        what an engine rank needs, as it says it
packing      where a receiver keeps what it needs: pure
lanes        a member in its groups: it follows its script
sender       the work of a trainer rank's sender process
sending      that process, and the memory that it reads, as the trainer rank has them
proving      parts of tensors held against what was announced of them
"""
