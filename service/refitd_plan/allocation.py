"""Who computes on how many GPUs: engines that generate and trainers that train, each with its parallelism.

groups    lie on GPUs of their own, one group after the other ("+" in AReaL's strings)
members   of one group share its GPUs, and have as many ranks as it has GPUs ("|")
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from refitd_client.errors import PlanRefusedError


def check_positive(name: str, value: object, *, most: float = 2**40) -> None:
    """Refuse what is no whole number above 0, or absurd. None passes.

    Raises:
        PlanRefusedError: the value is refused.
    """
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanRefusedError(f"{name} is {value!r}, which is no whole number")
    if value < 1:
        raise PlanRefusedError(f"{name} is {value:g}: it has to be above 0")
    if value > most:
        raise PlanRefusedError(f"{name} is {value:g}: more than {most:g} cannot be meant")


MOST_RANKS = 65_536
SGLANG, VLLM = "sglang", "vllm"
ENGINE_NAMES = {SGLANG: "SGLang", VLLM: "vLLM"}
"""The backends that generate, and what people call them."""


class Role(StrEnum):
    GENERATION = "generation"
    TRAINING = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Sizes of the dimensions. Experts are spread over ranks that are there anyway: `e` and `et` add none.

    `e` is the size of expert parallelism, `et` that of tensor parallelism within an expert.
    """

    d: int = 1
    t: int = 1
    p: int = 1
    c: int = 1
    e: int = 1
    et: int = 1

    @property
    def world(self) -> int:
        return self.d * self.t * self.p * self.c

    def __str__(self) -> str:
        parts = {"d": self.d, "t": self.t, "p": self.p, "c": self.c, "e": self.e}
        return "".join(f"{letter}{size}" for letter, size in parts.items() if size > 1) or "d1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One part of a job. `name` is what AReaL calls it, None where it has none."""

    backend: str
    role: Role
    parallel: Parallel
    name: str | None = None

    @property
    def title(self) -> str:
        return self.name or self.backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    text: str
    groups: tuple[tuple[Component, ...], ...]

    def __post_init__(self) -> None:
        """Refuse what leaves nothing to plan.

        Raises:
            PlanRefusedError: there is no engine, no trainer, or there are more ranks than any job has.
        """
        if not self.of(Role.GENERATION):
            raise PlanRefusedError(f"{self.text} names no engine to bring weights to: add one, such as sglang:d1")
        if not self.of(Role.TRAINING):
            raise PlanRefusedError(f"{self.text} names no trainer that makes weights: add one, such as fsdp:d1")
        check_positive(f"the number of ranks of {self.text}", self.world, most=MOST_RANKS)

    @property
    def world(self) -> int:
        return sum(members[0].parallel.world for members in self.groups)

    def of(self, role: Role) -> list[Component]:
        return [member for members in self.groups for member in members if member.role is role]

    @property
    def engine(self) -> str:
        """The backend that generates; of several the first."""
        return self.of(Role.GENERATION)[0].backend


def allocation_of_counts(
    engine_gpus: int, trainer_gpus: int, *, engine_tp: int = 1, shared: bool = False
) -> Allocation:
    """An allocation by plain counts.

    Raises:
        PlanRefusedError: they contradict each other.
    """
    for name, value in (("engine_gpus", engine_gpus), ("trainer_gpus", trainer_gpus), ("engine_tp", engine_tp)):
        check_positive(name, value, most=MOST_RANKS)
    if engine_gpus % engine_tp:
        raise PlanRefusedError(f"{engine_gpus} GPUs cannot be cut into engines of {engine_tp} GPUs each")
    if shared and engine_gpus != trainer_gpus:
        raise PlanRefusedError(f"shared GPUs take as many ranks of both: {engine_gpus} generate, {trainer_gpus} train")
    generation = Parallel(d=engine_gpus // engine_tp, t=engine_tp)
    engine = Component(backend="sglang", role=Role.GENERATION, parallel=generation)
    trainer = Component(backend="fsdp", role=Role.TRAINING, parallel=Parallel(d=trainer_gpus))
    sign = "|" if shared else "+"
    text = f"sglang:{engine.parallel}{sign}fsdp:{trainer.parallel}"
    return Allocation(text=text, groups=((engine, trainer),) if shared else ((engine,), (trainer,)))


# AReaL's allocation strings, in the grammars of 2025 and of today.
#
#     sglang.d4p1t1+d2p1t1                            2025: a dot, and a trainer without a name
#     sglang:d4t2+fsdp:d8                             today; "+": GPUs of their own
#     vllm:d4t2+fsdp:d8                               likewise, on vLLM
#     sglang:d4|fsdp:d4                               "|": the same GPUs; binds tighter than "+"
#     sglang[r]:d2+fsdp[a]:d4|fsdp[c]:d4              named components
#     sglang:d8t2+megatron:(attn:d1p4t2c2|ffn:d2p4e2) mixture of experts: attention and experts cut differently
#
# Dimensions: d data, t tensor (m in old strings), p pipeline, c context, e expert. World = d·t·p·c; e does not count.
# Source: AReaL, `areal/api/alloc_mode.py` (ALLOCATION_GRAMMAR) of 0.3 to 1.0.


TRAINERS: Mapping[str, str] = {"fsdp": "dtpc", "megatron": "dtpce", "archon": "dtpce"}
_ENGINE_DIMS = "dtp"
_DIMS = r"(?:[a-z]+[0-9]{1,6})+"
_PART = re.compile(
    r"(?:(?!attn:)(?P<backend>[a-z_]+)(?:\[(?P<name>[a-z_][a-z0-9_]*)\])?[:.])?"
    rf"(?:(?P<open>\()?attn:(?P<attn>{_DIMS})\|ffn:(?P<ffn>{_DIMS})(?(open)\))|(?P<dims>{_DIMS}))",
    re.IGNORECASE | re.ASCII,
)
_SHOWN = 40  # characters of what does not parse


def parse(text: str) -> Allocation:
    """Read an allocation string. Spaces count nowhere.

    Raises:
        PlanRefusedError: it is none; the message has the part that is not.
    """
    plain, at = "".join(text.split()), 0
    if not plain:
        raise PlanRefusedError("the allocation is empty: write for example sglang:d1|fsdp:d1")
    groups: list[list[Component]] = [[]]
    while True:
        found = _PART.match(plain, at)
        end = at if found is None else found.end()
        if found is None or plain[end : end + 1] not in {"", "+", "|"}:
            raise PlanRefusedError(
                f"the allocation {plain[:_SHOWN]} does not parse at {plain[end : end + _SHOWN]!r}: a part is written "
                "as sglang:d4t2, fsdp[actor]:d8 or megatron:(attn:d1p4|ffn:d2e2), with '+' or '|' between two"
            )
        groups[-1].append(_component(found))
        if end == len(plain):
            break
        if plain[end] == "+":
            groups.append([])
        at = end + 1
    _check(groups)
    return Allocation(text=text, groups=tuple(tuple(group) for group in groups))


def _component(found: re.Match[str]) -> Component:
    part, name = found[0], found["name"]
    backend = None if found["backend"] is None else found["backend"].lower()
    if backend is not None and backend not in {*ENGINE_NAMES, *TRAINERS}:
        known = ", ".join(sorted({*ENGINE_NAMES, *TRAINERS}))
        raise PlanRefusedError(f"{backend} is no backend that can be planned: it is one of {known}")
    if backend in ENGINE_NAMES:
        if found["dims"] is None:
            raise PlanRefusedError(f"{part}: {backend} has no parts for attention and experts: write d, t and p")
        parallel = Parallel(**_sizes(part, found["dims"], _ENGINE_DIMS))
        return Component(backend=backend, role=Role.GENERATION, name=name, parallel=parallel)
    if found["dims"] is None:
        if backend == "fsdp":
            raise PlanRefusedError(f"{part}: fsdp cuts experts as everything else: use megatron or archon")
        parallel = _of_experts(part, _sizes(part, found["attn"], "dtpc"), _sizes(part, found["ffn"], "dtpe"))
        return Component(backend=backend or "megatron", role=Role.TRAINING, name=name, parallel=parallel)
    parallel = Parallel(**_sizes(part, found["dims"], TRAINERS[backend or "megatron"]))
    # AReaL's own choice where the string names none: what FSDP cannot do needs Megatron.
    chosen = backend or ("megatron" if parallel.p > 1 or parallel.e > 1 else "fsdp")
    if parallel.world % (parallel.e * parallel.p):
        raise PlanRefusedError(f"{part}: e{parallel.e} does not divide the {parallel.world} ranks into equal parts")
    return Component(backend=chosen, role=Role.TRAINING, name=name, parallel=parallel)


def _of_experts(part: str, attn: Mapping[str, int], ffn: Mapping[str, int]) -> Parallel:
    parallel = Parallel(**attn, e=ffn.get("e", 1), et=ffn.get("t", 1))
    if ffn.get("p", parallel.p) != parallel.p:
        raise PlanRefusedError(f"{part}: attention has p{parallel.p}, experts p{ffn['p']}: pipelines are one")
    inner = parallel.e * parallel.et * parallel.p
    if parallel.world % inner or ffn.get("d", parallel.world // inner) * inner != parallel.world:
        raise PlanRefusedError(f"{part}: experts take other ranks than the {parallel.world} of attention")
    return parallel


def _sizes(part: str, dims: str, allowed: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for letters, digits in re.findall(r"([a-z]+)([0-9]+)", dims, re.IGNORECASE):
        letter = "t" if letters == "m" else letters
        if len(letter) != 1 or letter not in allowed:
            raise PlanRefusedError(f"{part} has no dimension {letters!r}: it may have {', '.join(allowed)}")
        if letter in sizes or int(digits) < 1:
            why = f"{letter!r} twice" if letter in sizes else f"{letters}{digits}, which is no size"
            raise PlanRefusedError(f"{part} has {why}")
        sizes[letter] = int(digits)
    return sizes


def _check(groups: list[list[Component]]) -> None:
    """Those that share GPUs have as many ranks, and names are there where they are needed, each once."""
    members = [member for group in groups for member in group]
    for first, *others in groups:
        for other in others:
            if other.parallel.world != first.parallel.world:
                raise PlanRefusedError(
                    f"what shares GPUs has as many ranks: {first.title} has {first.parallel.world}, "
                    f"{other.title} {other.parallel.world}"
                )
    names = [member.name for member in members if member.name is not None]
    if twice := {name for name in names if names.count(name) > 1}:
        raise PlanRefusedError(f"two components are called {min(twice)}")
    if len(members) > 2 and len(names) < len(members):
        raise PlanRefusedError("of three components and more each has a name, such as fsdp[actor]:d4")
