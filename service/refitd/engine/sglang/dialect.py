"""What each release of SGLang can do, read from the released wheels. Pure.

    0.5.6   /model_info, pause modes, `flush_cache` and `weight_version` honoured on the disk path
    0.5.12  /weights_checker with action "checksum"
    0.5.20  /server_info goes on naming the start-up model; before, it named the one that was loaded last
    0.5.21  a flush works while requests are retracted; before, the scheduler asserts that it does, and dies

So `retract`, which keeps requests in flight, is safe from 0.5.21 on; older servers pause with `abort`.
A release that is not known yet is taken for the newest that is.
"""

import re
from dataclasses import dataclass

OLDEST = (0, 5, 6)
_CHECKSUMS = (0, 5, 12)
_NAMES_STARTUP = (0, 5, 20)
_RETRACT_FLUSHES = (0, 5, 21)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How to speak to a server. `pause_mode` is what "auto" means for it.

    `names_startup`: whether its launch settings name the model that it was started with, whatever it loaded since.
    """

    version: str
    supported: bool
    pause_mode: str
    checksums: bool
    names_startup: bool


def dialect_of(version: str) -> Dialect:
    """The dialect of a release, by the version that its server reports. What does not parse gets the careful one."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if len(numbers) < 3:
        return Dialect(version=version, supported=True, pause_mode="abort", checksums=True, names_startup=False)
    return Dialect(
        version=version,
        supported=numbers >= OLDEST,
        pause_mode="retract" if numbers >= _RETRACT_FLUSHES else "abort",
        checksums=numbers >= _CHECKSUMS,
        names_startup=numbers >= _NAMES_STARTUP,
    )
