"""The kinds of engines that refitd can drive. To add one: a package beside `sglang`, and a line in `KINDS`.

The package has one `EngineKind` and the dialect of its servers. `connect` picks among the kinds, by what the operator
says of an engine, or else by what the server answers to the probe of each kind. No other module names a kind.
"""

from refitd.engine.kind import EngineKind
from refitd.engine.sglang import SGLANG
from refitd.engine.vllm import VLLM

KINDS: tuple[EngineKind, ...] = (SGLANG, VLLM)
PAUSE_MODES = ("auto", *dict.fromkeys(mode for kind in KINDS for mode in kind.pause_modes))


def check_kind(name: str) -> str:
    """Return `name` if it is that of a kind.

    Raises:
        ValueError: it is none; the message lists them.
    """
    if name not in (known := [kind.name for kind in KINDS]):
        raise ValueError(
            f"{name!r} is no kind of engine: use {', '.join(known[:-1])} or {known[-1]}, or none, and refitd finds out"
        )
    return name


def check_pause_mode(mode: str) -> str:
    """Return `mode` if an engine of some kind can pause so. Those of another kind take the best that they can.

    Raises:
        ValueError: no engine can; the message lists the modes.
    """
    if mode not in PAUSE_MODES:
        raise ValueError(f"{mode!r} is no pause mode: use {', '.join(PAUSE_MODES[:-1])} or {PAUSE_MODES[-1]}")
    return mode
