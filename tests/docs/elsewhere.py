"""What pages name (folders, ports, hosts, words to be filled in), and where it is while a test runs them.

A page says `/mnt/weights` and `http://127.0.0.1:8700`; a test has a folder of its own, and ports that are free.
"""

import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_LOWEST = 10_000
_BELOW = max(int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]), 2 * _LOWEST)
TOP = "dev/shm|mnt|shared|data|models|run|etc|tmp|weights"
_ABSOLUTE = re.compile(rf"(?<![\w.:/~>])/({TOP})(?=[/\s\"']|$)", re.MULTILINE)
_PORT = re.compile(r"(?<![\w.])(8700|8701|8702|30000|30001|30002|31000|31001)(?!\w)")
_HOST = re.compile(r"\b(?:10\.0\.0\.\d+|gpu-\d)(?=:\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """`folder` stands for the root of the file system, `ports` are by the port that a page says."""

    folder: Path
    ports: Mapping[str, int]
    words: Mapping[str, str] = field(default_factory=dict[str, str])

    def __call__(self, text: str) -> str:
        """A page's text as it is run: first what is to be filled in, then what stands elsewhere."""
        for word, value in self.words.items():
            text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", lambda _, value=value: value, text)
        text = _HOST.sub("127.0.0.1", text)
        text = _ABSOLUTE.sub(lambda found: f"{self.folder}/{found[1]}", text)
        return _PORT.sub(lambda found: str(self.ports[found[1]]), text)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, one after the other, as engines of one process have them.

    They are below those that the kernel hands out to programs that ask for any port: what a page starts seconds later
    finds them free.
    """
    while True:
        first = _LOWEST + secrets.randbelow(_BELOW - _LOWEST - count)
        if all(_is_free(port) for port in range(first, first + count)):
            return list(range(first, first + count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
