"""What one rank says of itself when it is greeted. Pure: anyone may have written the reply."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from refitd_sglang import PROTOCOL

_SHOWN = 200  # characters of a foreign text in a sentence


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The rank's load plan: whether copies can stand for a load, and how many tensors go through SGLang's loader."""

    replays: bool
    loader: int = 0
    reason: str = ""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the reply that matters here. `rank` of `ranks` is tensor-parallel; docs/plugin.md has all of it.

    `host`, `port` and `seed` tie it to a server: the host's name, and two of the server's own launch settings. `leads`:
    it knows of leases.
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
    plan: Plan | None = None


def read_hello(reply: Mapping[str, Any]) -> Hello | str:
    """The hello in a reply, or why it cannot be used, in a sentence without a subject."""
    protocol = reply.get("protocol")
    if protocol != PROTOCOL:
        return f"speaks protocol {protocol!a:.20} and refitd {PROTOCOL}: install the same refitd beside the engine"
    try:
        hello = msgspec.convert(reply, Hello)
    except msgspec.ValidationError as error:
        return f"says hello in another form ({error})"
    if not 0 <= hello.rank < hello.ranks:
        return f"says that it is rank {hello.rank} of {hello.ranks}"
    return hello


def shown(text: str, most: int = _SHOWN) -> str:
    """What a process wrote, in a sentence: a line of it at most, and nothing that a terminal would obey."""
    return ascii(text[:most])[1:-1]
