"""What one rank says of itself when it is greeted. Pure: anyone may have written the reply."""

from collections.abc import Mapping
from typing import Any

import msgspec

from refitd_client.contract.plugin import PROTOCOL, Handshake

_SHOWN = 200  # characters of a foreign text in a sentence


def read_handshake(reply: Mapping[str, Any]) -> Handshake | str:
    """The handshake in a reply, or why it cannot be used, in a sentence without a subject."""
    protocol = reply.get("protocol")
    if protocol != PROTOCOL:
        return f"speaks protocol {protocol!a:.20} and refitd {PROTOCOL}: install the same refitd beside the engine"
    try:
        handshake = msgspec.convert(reply, Handshake)
    except msgspec.ValidationError as error:
        return f"says hello in another form ({error})"
    if not 0 <= handshake.rank < handshake.ranks:
        return f"says that it is rank {handshake.rank} of {handshake.ranks}"
    return handshake


def shown(text: str, most: int = _SHOWN) -> str:
    """What a process wrote, in a sentence: a line of it at most, and nothing that a terminal would obey."""
    return ascii(text[:most])[1:-1]
