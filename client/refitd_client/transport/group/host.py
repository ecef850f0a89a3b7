"""What this host and this process's torch have for process groups. Imports no torch by itself."""

import socket
import sys
from typing import Any

from refitd_client.transport.group.transfer import Backend


def own_address(other: str) -> str:
    """The address of this host from which another host is reached. Nothing is sent.

    Args:
        other: the other host's name or address.

    Raises:
        OSError: it has no address, or there is no way to it.
    """
    family, kind, _, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def available() -> frozenset[Backend]:
    """The backends that this process's torch has, none where it has not imported torch."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return frozenset()
    found: set[Backend] = {"gloo"} if torch.distributed.is_gloo_available() else set()
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found.add("nccl")
    return frozenset(found)
