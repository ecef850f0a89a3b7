"""What each release of SGLang can do, read from the released wheels. Pure.

    0.5.7   a label sent with a load is kept while paused too; 0.5.6 drops it, and nothing older has pause modes
    0.5.12  /weights_checker with action "checksum"
    0.5.18  /server_info goes on naming the start-up model; before, it named the one that was loaded last
    0.5.21  a flush works while requests are retracted
    0.5.22  a refused flush fails the update call; before, the scheduler asserts that it went well, and dies

So `retract`, which keeps requests in flight, is safe from 0.5.21 on and `in_place` from 0.5.22 on. An older server
pauses with `abort`, whatever was asked for, and shows by a flush that nothing runs before it is told to load.
A release that is not known yet is taken for the newest that is; one before a release (`0.5.21.dev7`, as a build from
source calls itself) may lack what that release brought.
"""

import re
from dataclasses import dataclass, replace

OLDEST = (0, 5, 7)
_CHECKSUMS = (0, 5, 12)
_NAMES_STARTUP = (0, 5, 18)
_RETRACT_FLUSHES = (0, 5, 21)
_SURVIVES_FLUSH = (0, 5, 22)

_RELEASE = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?!\d)(?:\.?(dev|rc|a|b))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How to speak to a server. `pause_modes` are those that it survives, the best first.

    `dies_of_flush`: whether the flush that ends a load must not be refused.
    `names_startup`: whether its launch settings name the model that it was started with, whatever it loaded since.
    """

    version: str
    supported: bool
    pause_modes: tuple[str, ...]
    dies_of_flush: bool
    checksums: bool
    names_startup: bool

    def pause_mode(self, wanted: str) -> str:
        """`wanted` where the server survives it, else ("auto" too) the best mode that it does survive."""
        return wanted if wanted in self.pause_modes else self.pause_modes[0]


_CAREFUL = Dialect(
    version="unknown",
    supported=True,
    pause_modes=("abort",),
    dies_of_flush=True,
    checksums=True,
    names_startup=False,
)


def dialect_of(version: str) -> Dialect:
    """The dialect of a release, by the version that its server reports. What does not parse gets the careful one."""
    found = _RELEASE.match(version)
    if found is None or version.startswith("0.0.0"):  # 0.0.0: built from source without its tags
        return replace(_CAREFUL, version=version)
    release = (int(found[1]), int(found[2]), int(found[3]))

    def has(since: tuple[int, int, int]) -> bool:
        return release > since if found[4] else release >= since

    modes = [("in_place", _SURVIVES_FLUSH), ("retract", _RETRACT_FLUSHES)]
    alive = [mode for mode, since in modes if has(since)]
    return Dialect(
        version=version,
        supported=has(OLDEST),
        pause_modes=(*reversed(alive), "abort"),
        dies_of_flush=not has(_SURVIVES_FLUSH),
        checksums=has(_CHECKSUMS),
        names_startup=has(_NAMES_STARTUP),
    )
