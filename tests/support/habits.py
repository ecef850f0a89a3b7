"""What the kinds of engines under test differ in: the tests of the contract ask for a habit and never for a kind."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from refitd.engine.port import Stage


class Fate(Enum):
    """What becomes of an engine that serves model_a when it is told to load a checkpoint past the service's checks."""

    SERVED = auto()  # it serves the checkpoint, whose values are those of model_b
    UNTOUCHED = auto()  # it refuses, or undoes the load within the pause: what it served before goes on
    MIXED = auto()  # it says that it has loaded, and serves tensors of two checkpoints
    NOT_NUMBERS = auto()  # it says that it has loaded, and answers token 0 for ever
    FOUND_OUT = auto()  # it says that it has loaded, and the answer to a fixed prompt shows that it did not
    DEAD = auto()  # its process ends
    LOST = auto()  # no later load brings it back: it has to be restarted


REFUSED = ("bad_empty", "bad_shard2_gone", "nowhere")
TORN = ("bad_trunc", "bad_garbage", "bad_shard2_trunc", "bad_shape_norm")
PARTIAL = ("bad_missing", "b_only_lm_head")
CAST_OR_EXTRA = ("b_fp32", "bad_extra")
LIKE_B = ("b_sharded", "b_only_weights")
CHECKPOINTS = (*REFUSED, *TORN, *PARTIAL, *CAST_OR_EXTRA, *LIKE_B, "bad_shape", "bad_nan")


def _fates(**names: Fate) -> dict[str, Fate]:
    return {**dict.fromkeys(CHECKPOINTS, Fate.UNTOUCHED), **dict.fromkeys(LIKE_B, Fate.SERVED), **names}


def _each(names: tuple[str, ...], fate: Fate) -> dict[str, Fate]:
    return dict.fromkeys(names, fate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Those of one kind of engine.

    Attributes:
        fates: by checkpoint of tests/sglang/README.md, and of a path where there is none (`nowhere`).
        release: what it says first of its release.
        configuration: some words that say how it was started.
        refusal: what it says of a checkpoint that it refuses by itself; empty where another part says it.
        unopened: what it says of a path where nothing is.
        stages: of an update that goes well, in order.
        other_fingerprint: a fingerprint of contents that no load has given.
        asks_for_keys: whether reads and changes of weights want a key each.
        seeded: whether it tells a number that it drew when it started.
        told_while_it_loads: whether it says what it serves while a load is under way.
        labels_answers: whether an answer says which version gave it.
        starts_at_once: whether a restart costs a test next to nothing.
    """

    fates: Mapping[str, Fate]
    release: str = "0.5.23"
    configuration: tuple[str, ...] = ("sglang", "unquantized", "tp1", "pp1", "dp1", "ep1")
    refusal: str = "Failed to get weights iterator"
    unopened: str = "Failed to get weights iterator"
    stages: tuple[Stage, ...] = (Stage.PAUSE, Stage.LOAD, Stage.VERIFY, Stage.RESUME)
    other_fingerprint: str = "xxh3:0"
    asks_for_keys: bool = True
    seeded: bool = True
    told_while_it_loads: bool = True
    labels_answers: bool = True
    starts_at_once: bool = False


_careless = _fates(
    **_each(TORN, Fate.DEAD),
    **_each((*PARTIAL, "bad_shape"), Fate.MIXED),
    **_each(CAST_OR_EXTRA, Fate.SERVED),
    bad_nan=Fate.NOT_NUMBERS,
)
# Where files are those that the service has checked, the plugin leaves values to it.
_careful = _fates(bad_nan=Fate.NOT_NUMBERS)
_SGLANG = Habits(fates=_careless)
_PREPARED = (Stage.PREPARE, *_SGLANG.stages)
_VLLM = Habits(
    fates=_fates(**_each(PARTIAL, Fate.MIXED), b_fp32=Fate.SERVED, bad_shape=Fate.LOST, bad_nan=Fate.FOUND_OUT),
    release="0.32.0",
    configuration=("vllm", "cpu", "bfloat16", "unquantized", "tp1", "pp1", "dp1", "ep0"),
    refusal="what it served before is back",
    unopened="restart it",
    stages=(*_SGLANG.stages, Stage.VERIFY),  # its digests do not cover all: it is asked once it runs again
    other_fingerprint="vllm-answers:-:" + ",".join(["-1000.000"] * 15),
    asks_for_keys=False,
    seeded=False,
    told_while_it_loads=False,
    labels_answers=False,
)
_VLLM_PLUGGED = replace(
    _VLLM,
    fates=_careful,
    configuration=(*_VLLM.configuration, "refitd"),
    refusal="",
    stages=_PREPARED,
    other_fingerprint="plugin:xxh3:0",
)


def _two_ranks(habits: Habits) -> Habits:
    return replace(habits, configuration=tuple("tp2" if word == "tp1" else word for word in habits.configuration))


HABITS = {
    "embedded": Habits(fates=_fates(**_each(CAST_OR_EXTRA, Fate.SERVED)), starts_at_once=True),
    "embedded-defects": replace(_SGLANG, starts_at_once=True),
    "sglang": _SGLANG,
    "sglang-plugged": replace(_SGLANG, fates=_careful, refusal="", stages=_PREPARED, other_fingerprint="plugin:xxh3:0"),
    "vllm": _VLLM,
    "vllm-plugged": _VLLM_PLUGGED,
    "vllm-plugged-two-ranks": _two_ranks(replace(_VLLM_PLUGGED, unopened="--worker-extension-cls")),
}
HABITS["vllm-plugged-in-place"] = HABITS["vllm-plugged"]
HABITS["vllm-plugged-two-ranks-repacked"] = HABITS["vllm-plugged-two-ranks"]
