"""What a rank and its clerk say to each other. One order at a time, and one reply to each."""

from typing import Literal

import msgspec

from refitd.catalog.opening import FileStat
from refitd_client.contract.manifest import Manifest
from refitd_client.strict_header import Header
from refitd_sglang.laid import Placed


class Order(msgspec.Struct, tag=True, kw_only=True):
    """Look at a version. `model` is the folder that full ones are held against, and that says how much memory a delta
    may take (empty: it cannot be found); `layout` the one whose headers the rank has; `busy` are the rooms that it
    still uses. `ways` come once, with the number that is named from then on in `along` (0: none).
    """

    root: str
    path: str
    model: str
    check_bytes: bool
    allow_missing: bool = False
    allow_extra: bool = False
    allow_dtype_cast: bool = False
    layout: str = ""
    busy: list[int] = []
    ways: dict[str, Placed] | None = None
    along: int = 0


class Stop(msgspec.Struct, tag=True):
    """Give up what is being read. Its reply still comes."""


class Whole(msgspec.Struct, tag=True, kw_only=True):
    """A full version. Its weight files come with it, opened, in the order of `names`. `headers` are left out where the
    rank has those of this `layout`.
    """

    signature: str
    files: dict[str, FileStat]
    manifest: Manifest | None
    inventory: str
    layout: str
    headers: dict[str, Header] | None
    names: list[str]
    ms: float = 0.0


class Array(msgspec.Struct, array_like=True):
    """Where one lies: the number of its room, its first byte, its length in elements, and numpy's name of its type."""

    room: int
    begin: int
    count: int
    dtype: str


class Group(msgspec.Struct, array_like=True):
    """As `refitd_sglang.laid.Group`; `table` as it lies in memory."""

    indices: Array
    values: Array
    table: bytes


class Delta(msgspec.Struct, tag=True, kw_only=True):
    """A delta, laid out where ways were told. Its file comes with it, and after it the rooms that groups lie in (number
    and size of each). `kept` are all rooms that there are.
    """

    manifest: Manifest
    files: list[FileStat]
    results: dict[str, int]
    nbytes: int
    along: int
    names: list[str]
    whole: list[bool]
    groups: list[Group]
    rooms: list[tuple[int, int]]
    kept: list[int]
    ms: float = 0.0


class Refusal(msgspec.Struct, tag=True):
    """It is not one to load, or could not be looked at; `unable`: the clerk cannot say, and the rank looks itself."""

    kind: Literal["refused", "full", "stopped", "unreadable", "unable"]
    reason: str = ""


Asked = Order | Stop
Reply = Whole | Delta | Refusal
