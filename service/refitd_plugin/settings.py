"""What the operator may set, in the environment of the engine's server. NAME is the hook's, as `REFITD_SGLANG`.

NAME=off           nothing is wrapped: the engine is stock
NAME_ROOT=DIR      refitd's root as this server sees it: the channel opens at the start instead of with the first
                   version that is loaded from there
NAME_WAIT=SECONDS  how long a rank waits for the others (default 300)
NAME_PROVE=auto    the GPU reads a version while the engine serves, to prove it for the service; `off`: it does not;
                   `host`: the processors do where the model is on no GPU, to try this out without one

An empty variable counts as not set. With a value that cannot be understood the plugin stands aside and says so. A
variable whose name is nearly one of these is named in the engine's log.
"""

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from refitd_client.contract.plugin import variable_meant

logger = logging.getLogger("refitd_plugin")
_OFF = {"off", "0", "no", "false", "none"}
_ON = {"on", "1", "yes", "true"}
_WAIT_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """See the module. `wait`: seconds; `on_host`: as NAME_PROVE=host.

    `fault` names a variable that cannot be understood, and says what it may be; None where all can.
    """

    on: bool = True
    root: Path | None = None
    wait: float = _WAIT_SECONDS
    prove: bool = True
    on_host: bool = False
    fault: str | None = None


def read_settings(name: str, environment: Mapping[str, str] = os.environ) -> PluginSettings:
    said = {key: value.strip() for key, value in environment.items() if value.strip()}
    switch = said.get(name, "on")
    if switch.lower() in _OFF:
        return PluginSettings(on=False)
    for key in sorted(said):
        if key.startswith(name) and (meant := variable_meant(key)) is not None:
            logger.warning("refitd does not read %s: did you mean %s?", key, meant)
    root, wait = said.get(f"{name}_ROOT"), said.get(f"{name}_WAIT", str(_WAIT_SECONDS))
    prove = said.get(f"{name}_PROVE", "auto")
    seconds = 0.0
    with suppress(ValueError):
        seconds = float(wait)
    faults = {
        f"{name} is {switch!r}: it may be on or off": switch.lower() not in _ON,
        f"{name}_WAIT is {wait!r}: it must be a number of seconds, more than 0": not 0 < seconds < 86400,
        f"{name}_PROVE is {prove!r}: it may be auto, off or host": prove not in {"auto", "off", "host"},
    }
    return PluginSettings(
        root=Path(root).absolute() if root else None,
        wait=seconds,
        prove=prove != "off",
        on_host=prove == "host",
        fault=next((fault for fault, is_there in faults.items() if is_there), None),
    )
