"""What the operator may set, in the environment of the engine's server. NAME is the hook's, as `REFITD_SGLANG`.

NAME=off           nothing is wrapped: the engine is stock
NAME_ROOT=DIR      refitd's root as this server sees it: the channel opens at the start instead of with the first
                   version that is loaded from there
NAME_CHECK=headers a version's bytes are not read once more before each load: names, shapes, sizes and dtypes are
                   checked, digests and values are left to the service
NAME_WAIT=SECONDS  how long a rank waits for the others (default 300)
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_OFF = {"off", "0", "no", "false", "none"}
_WAIT_SECONDS = 300.0


class SettingError(ValueError):
    """A variable that cannot be understood. The message names it and says what it may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """See the module. `check_bytes`: read every byte before a load; `wait`: seconds."""

    on: bool = True
    root: Path | None = None
    check_bytes: bool = True
    wait: float = _WAIT_SECONDS


def read_settings(name: str, environment: Mapping[str, str] = os.environ) -> PluginSettings:
    """Read the variable `name`, and those whose names begin with it.

    Raises:
        SettingError: a variable cannot be understood.
    """
    if environment.get(name, "on").strip().lower() in _OFF:
        return PluginSettings(on=False)
    root = environment.get(f"{name}_ROOT", "")
    check = environment.get(f"{name}_CHECK", "bytes")
    if check not in {"bytes", "headers"}:
        raise SettingError(f"{name}_CHECK is {check!r}: it may be bytes or headers")
    wait = environment.get(f"{name}_WAIT", str(_WAIT_SECONDS))
    seconds = 0.0
    with suppress(ValueError):
        seconds = float(wait)
    if not 0 < seconds < 86400:
        raise SettingError(f"{name}_WAIT is {wait!r}: it must be a number of seconds, more than 0")
    return PluginSettings(root=Path(root).absolute() if root else None, check_bytes=check == "bytes", wait=seconds)
