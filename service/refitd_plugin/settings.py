"""What the operator may set, in the environment of the engine's server. NAME is the hook's, as `REFITD_SGLANG`.

NAME=off           nothing is wrapped: the engine is stock
NAME_ROOT=DIR      refitd's root as this server sees it: the channel opens at the start instead of with the first
                   version that is loaded from there
NAME_CHECK=headers a version's bytes are not read once more before each load: names, shapes, sizes and dtypes are
                   checked, digests and values are left to the service
NAME_WAIT=SECONDS  how long a rank waits for the others (default 300)
NAME_PROVE=auto    the GPU reads a version while the engine serves, to prove it for the service; `off`: it does not;
                   `host`: the processors do where the model is on no GPU, to try this out without one
NAME_STAGE=auto    what was read to prove it stays on the GPU until the load, where that leaves half of the free memory
                   (default: off)
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
    """See the module. `check_bytes`: read every byte before a load; `wait`: seconds; `on_host`: as NAME_PROVE=host."""

    on: bool = True
    root: Path | None = None
    check_bytes: bool = True
    wait: float = _WAIT_SECONDS
    prove: bool = True
    on_host: bool = False
    stage: bool = False


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
    prove, stage = environment.get(f"{name}_PROVE", "auto"), environment.get(f"{name}_STAGE", "off")
    if prove not in {"auto", "off", "host"}:
        raise SettingError(f"{name}_PROVE is {prove!r}: it may be auto, off or host")
    if stage not in {"auto", "off"}:
        raise SettingError(f"{name}_STAGE is {stage!r}: it may be auto or off")
    return PluginSettings(
        root=Path(root).absolute() if root else None,
        check_bytes=check == "bytes",
        wait=seconds,
        prove=prove != "off",
        on_host=prove == "host",
        stage=stage == "auto",
    )
