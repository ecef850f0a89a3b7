"""The protocol between the service and the plugin in an engine's process: sockets, lines, messages.

Each rank of an engine listens on `<root>/.refitd/engines/<rank>-<pid>-<random>.sock`. One line of JSON is one request,
one line its reply. docs/plugin.md describes both in full; the plugin's reply to an update is in `answer`.
"""

import re
from typing import Literal

import msgspec

PROTOCOL = 1
"""The version of the protocol, of answers too. It changes when readers have to change."""

ENGINES_FOLDER = "engines"
MAX_LINE = 64 * 2**10  # bytes
_SOCKET = re.compile(r"\d+-\d+-[0-9a-f]+\.sock")


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """A service: `service` is a random name that its state folder keeps, so that a restart leaves it the same."""

    service: str
    root: str
    host: str
    pid: int


class PluginRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the service. `path` is relative to the root, and so is `offer`, the file of an offer of the version
    that will be at `path`; the `allow_…` are what the notice allows. `owner` leads for `seconds`. `peer` is the pid of
    the process that sent it, from the kernel and not from the line (0 if it is of another PID namespace).
    """

    do: Literal["hello", "prepare", "contents", "forget", "lead"]
    path: str = ""
    offer: str = ""
    allow_missing: bool = False
    allow_extra: bool = False
    allow_dtype_cast: bool = False
    check: Literal["bytes", "headers"] | None = None
    owner: Owner | None = None
    seconds: float = 0.0
    peer: int = 0


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The rank's load plan: whether copies can stand for a load, and how many tensors go through the engine's loader.
    `reason` says why nothing can be replayed.
    """

    replays: bool
    loader: int = 0
    reason: str = ""


class Handshake(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the reply to `hello` that the service reads. `rank` of `ranks` is tensor-parallel.

    `host`, `port` and `seed` identify its server: the host's name, and two of the server's own launch settings.
    `leads`: it supports leases.
    """

    plugin: str
    sglang: str
    state: Literal["on", "aside"]
    host: str
    port: int | None
    rank: int
    ranks: int
    seed: int | None = None
    dp_rank: int | None = None
    reason: str = ""
    served: str = ""
    kinds: tuple[str, ...] = ()
    leads: bool = False
    plan: LoadPlan | None = None


def socket_name(rank: int, pid: int, random: str) -> str:
    """The name of a rank's socket.

    Args:
        rank: the tensor-parallel rank.
        pid: of its process.
        random: hex digits: a process may open more than one.
    """
    return f"{rank}-{pid}-{random}.sock"


def is_socket_name(name: str) -> bool:
    """Whether a plugin could have given a file this name."""
    return _SOCKET.fullmatch(name) is not None
