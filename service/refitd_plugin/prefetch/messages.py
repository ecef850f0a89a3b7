"""What a rank and its prefetch worker say to each other. One order at a time, and one reply to each."""

from typing import Literal

import msgspec

from refitd_client.checkpoint.opening import FileStat
from refitd_client.checkpoint.strict_header import Header
from refitd_client.contract.manifest import Manifest
from refitd_plugin.layout import PlacedTensor


class ReadOrder(msgspec.Struct, tag=True, kw_only=True):
    """Look at a version. `model` is the folder that full ones are held against, and that says how much memory a delta
    may take (empty: it cannot be found); `layout` the one whose headers the rank has; `busy` are the buffers that it
    still uses. `placements` come once, with the number that is named from then on in `along` (0: none).
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
    placements: dict[str, PlacedTensor] | None = None
    along: int = 0


class Stop(msgspec.Struct, tag=True):
    """Give up what is being read. Its reply still comes."""


class FullFound(msgspec.Struct, tag=True, kw_only=True):
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


class BufferArray(msgspec.Struct, array_like=True):
    """Where one lies: the number of its buffer, its first byte, its length in elements, numpy's name of its type."""

    buffer: int
    begin: int
    count: int
    dtype: str


class PlacedGroup(msgspec.Struct, array_like=True):
    """As `refitd_plugin.layout.Group`; `table` as it lies in memory."""

    indices: BufferArray
    values: BufferArray
    table: bytes


class DeltaFound(msgspec.Struct, tag=True, kw_only=True):
    """A delta, laid out where placements were sent. Its file comes with it, and after it the buffers that groups lie in
    (number and size of each). `kept` are all buffers that there are.
    """

    manifest: Manifest
    files: list[FileStat]
    results: dict[str, int]
    nbytes: int
    along: int
    names: list[str]
    whole: list[bool]
    groups: list[PlacedGroup]
    buffers: list[tuple[int, int]]
    kept: list[int]
    ms: float = 0.0


class Refusal(msgspec.Struct, tag=True):
    """It is not one to load, or could not be looked at. `unable`: the worker cannot say, and the rank looks itself."""

    kind: Literal["refused", "full", "stopped", "unreadable", "unable"]
    reason: str = ""


Asked = ReadOrder | Stop
Reply = FullFound | DeltaFound | Refusal
