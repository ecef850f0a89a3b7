"""Which host this is, and since which boot: memory that is offered elsewhere, or was before, is not here."""

import socket
from pathlib import Path


def host_name() -> str:
    """As the kernel tells it; containers with names of their own are hosts of their own."""
    return socket.gethostname()


def boot_id() -> str:
    """The kernel's, drawn anew at each start (proc(5)); empty where it has none, as gVisor's may not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return ""
