"""Who computes on how many GPUs: engines that generate and trainers that train, each with its parallelism.

groups    lie on GPUs of their own, one group after the other ("+" in AReaL's strings)
members   of one group share its GPUs, and have as many ranks as it has GPUs ("|")
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from refitd_client.errors import PlanRefusedError


def refusal_at(text: str, position: int, sentence: str) -> PlanRefusedError:
    """A refusal that points at a character of what was typed."""
    return PlanRefusedError(f"{sentence} (character {position + 1})\n  {text}\n  {' ' * position}^")


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


def check_share(name: str, value: object) -> None:
    """Refuse what is no number between 0 and 1. None passes.

    Raises:
        PlanRefusedError: it is not.
    """
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise PlanRefusedError(f"{name} is {value!r}, which is no number")
    if not 0 < value < 1:
        raise PlanRefusedError(f"{name} is {value:g}: a share between 0 and 1")


def check_switch(name: str, value: object) -> None:
    """Refuse what is neither true nor false: "no" would be taken for yes.

    Raises:
        PlanRefusedError: it is neither.
    """
    if not isinstance(value, bool):
        raise PlanRefusedError(f"{name} is {value!r}, neither true nor false")


WordT = TypeVar("WordT", bound=StrEnum)


def check_word(name: str, value: object, choices: type[WordT]) -> WordT:
    """One of some words.

    Raises:
        PlanRefusedError: it is none of them; the message has all.
    """
    try:
        return choices(value)
    except ValueError as error:
        raise PlanRefusedError(f"{name} is {value!r}: it is {', '.join(choices)}") from error


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
        """The ranks, and so the GPUs, that it takes."""
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
    """The parts of a job and who shares GPUs with whom."""

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
        """The GPUs that it asks for."""
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


ENGINES = frozenset(ENGINE_NAMES)
TRAINERS: Mapping[str, str] = {"fsdp": "dtpc", "megatron": "dtpce", "archon": "dtpce"}
ENGINE_DIMS = "dtp"
_OLD_NAMES = {"m": "t"}
_MOST_DIGITS = 6
_DIMENSIONS = "dimensions such as d1p1t1"
_Dims = list[tuple[str, int]]  # as they stand there, such as d4, and at which character each begins


def parse(text: str) -> Allocation:
    """Read an allocation string.

    Raises:
        PlanRefusedError: it is none; the message points at the character.
    """
    if not text.strip():
        raise PlanRefusedError("the allocation is empty: write for example sglang:d1|fsdp:d1")
    reader = _Reader(text)
    groups = [_group(reader)]
    while reader.take(r"\+"):
        groups.append(_group(reader))
    reader.need(r"$", "'+' or '|' or the end")
    _check_names(text, tuple(groups))
    return Allocation(text=text, groups=tuple(groups))


class _Reader:
    """What is left of a text. Spaces count nowhere."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._skip()

    def _skip(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1

    def take(self, pattern: str) -> str | None:
        """What comes next, where it is that."""
        found = re.compile(pattern).match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        self._skip()
        return found[0]

    def need(self, pattern: str, what: str) -> str:
        """What has to come next."""
        if (found := self.take(pattern)) is None:
            raise refusal_at(self.text, self.at, f"the allocation does not parse: here {what} was expected")
        return found

    def dims(self) -> _Dims:
        found: _Dims = []
        at = self.at
        while (each := self.take(r"[A-Za-z]+[0-9]+")) is not None:
            found.append((each, at))
            at = self.at
        if not found:
            self.need(r"(?!)", _DIMENSIONS)
        return found


def _group(reader: _Reader) -> tuple[Component, ...]:
    members = [_component(reader)]
    while reader.take(r"\|"):
        at, member = reader.at, _component(reader)
        if member.parallel.world != members[0].parallel.world:
            raise refusal_at(
                reader.text,
                at,
                f"what shares GPUs has as many ranks: {members[0].title} has {members[0].parallel.world}, "
                f"{member.title} {member.parallel.world}",
            )
        members.append(member)
    return tuple(members)


def _component(reader: _Reader) -> Component:
    at = reader.at
    word, name = reader.take(r"(?!attn\s*:)[A-Za-z_]+(?![A-Za-z_0-9])"), None
    if word is not None:
        if reader.take(r"\["):
            name = reader.need(r"[A-Za-z_][A-Za-z0-9_]*", "a name")
            reader.need(r"\]", "']'")
        reader.need(r"[:.]", "':' or '.'" if name else "':' or '.' or '['")
    begins, is_enclosed = reader.at, reader.take(r"\(") is not None
    if is_enclosed or re.compile(r"attn\s*:").match(reader.text, reader.at):
        begins = reader.at
        body: _Dims | tuple[_Dims, _Dims] = _of_experts(reader)
        if is_enclosed:
            reader.need(r"\)", "')'")
    else:
        body = reader.dims()
    backend = None if word is None else word.lower()
    if backend is not None and backend not in {*ENGINES, *TRAINERS}:
        known = ", ".join(sorted({*ENGINES, *TRAINERS}))
        raise refusal_at(reader.text, at, f"{word} is no backend that can be planned: it is one of {known}")
    if backend is None or backend not in ENGINES:
        return _trainer(reader.text, backend, name, body, begins)
    if isinstance(body, tuple):
        what = f"{backend} has no parts for attention and experts: write d, t and p"
        raise refusal_at(reader.text, begins, what)
    parallel = Parallel(**_dims(reader.text, body, ENGINE_DIMS, backend))
    return Component(backend=backend, role=Role.GENERATION, name=name, parallel=parallel)


def _of_experts(reader: _Reader) -> tuple[_Dims, _Dims]:
    reader.need(r"attn\s*:", "'attn:'")
    attention = reader.dims()
    reader.need(r"\|\s*ffn\s*:", "'|ffn:'")
    return attention, reader.dims()


def _trainer(
    text: str, backend: str | None, name: str | None, body: _Dims | tuple[_Dims, _Dims], begins: int
) -> Component:
    if isinstance(body, tuple):
        chosen = backend or "megatron"
        if chosen == "fsdp":
            raise refusal_at(text, begins, "fsdp cuts experts as everything else: use megatron or archon")
        return Component(backend=chosen, role=Role.TRAINING, name=name, parallel=_moe(text, *body))
    # AReaL's own choice where the string names none: what FSDP cannot do needs Megatron.
    dims = _dims(text, body, TRAINERS[backend or "megatron"], backend or "a trainer")
    chosen = backend or ("megatron" if dims.get("p", 1) > 1 or dims.get("e", 1) > 1 else "fsdp")
    parallel = Parallel(**dims)
    if parallel.world % (parallel.e * parallel.p):
        raise refusal_at(text, begins, f"e{parallel.e} does not divide the {parallel.world} ranks into equal parts")
    return Component(backend=chosen, role=Role.TRAINING, name=name, parallel=parallel)


def _moe(text: str, attention: _Dims, experts: _Dims) -> Parallel:
    attn, ffn, at = _dims(text, attention, "dtpc", "attn"), _dims(text, experts, "dtpe", "ffn"), experts[0][1]
    parallel = Parallel(**attn, e=ffn.get("e", 1), et=ffn.get("t", 1))
    if ffn.get("p", parallel.p) != parallel.p:
        raise refusal_at(text, at, f"attention has p{parallel.p}, experts p{ffn['p']}: pipelines are one")
    inner = parallel.e * parallel.et * parallel.p
    if parallel.world % inner or ffn.get("d", parallel.world // inner) * inner != parallel.world:
        raise refusal_at(text, at, f"experts take other ranks than the {parallel.world} of attention")
    return parallel


def _dims(text: str, found: _Dims, allowed: str, where: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for token, at in found:
        letters = token.rstrip("0123456789")
        digits = token[len(letters) :]
        if len(digits) > _MOST_DIGITS:
            raise refusal_at(text, at, f"{letters} with {len(digits)} digits cannot be meant")
        letter, size = _OLD_NAMES.get(letters, letters), int(digits)
        if letter not in allowed or len(letter) != 1:
            raise refusal_at(text, at, f"{where} has no dimension {letters!r}: it has {', '.join(allowed)}")
        if letter in sizes:
            raise refusal_at(text, at, f"{where} has {letters!r} twice")
        if size < 1:
            raise refusal_at(text, at, f"{token} is no size: at least 1")
        sizes[letter] = size
    return sizes


def _check_names(text: str, groups: tuple[tuple[Component, ...], ...]) -> None:
    members = [member for group in groups for member in group]
    names = [member.name for member in members if member.name is not None]
    if twice := {name for name in names if names.count(name) > 1}:
        name = min(twice)
        *_, last = re.finditer(rf"\[\s*({re.escape(name)})\s*\]", text)
        raise refusal_at(text, last.start(1), f"two components are called {name}")
    if len(members) > 2 and len(names) < len(members):
        raise refusal_at(text, 0, "of three components and more each has a name, such as fsdp[actor]:d4")
