"""The ways that a version takes to engines, by the names that `publish` takes.

    handover    engines open the trainer's memory
    nccl        each rank of the trainer sends what it has over a process group of GPUs
    gloo        the same through host memory
    delta       files, of what changed where little did
    disk        files, in full

`refitd_client.transport.choice` says why one cannot work, and which `auto` takes.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from refitd_client.contract.states import Kind

Transport = Literal["auto", "disk", "delta", "handover", "nccl", "gloo"]
TRANSPORTS: tuple[str, ...] = get_args(Transport)
BY_FILES: tuple[str, ...] = ("disk", "delta")


def way_of(transport: str, kind: Kind) -> str:
    """How a version goes to engines by a transport, as the end of a sentence.

    `transport` is as `publish` takes it; `delta` alone is a full version's as well, where too much changed.
    """
    if transport not in BY_FILES:
        return f"by {transport}"
    return "as a delta" if kind is Kind.DELTA else "by files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The transport that a publication takes, and why, as a sentence."""

    transport: Transport
    why: str
