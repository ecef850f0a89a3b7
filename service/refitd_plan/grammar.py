"""AReaL's allocation strings, in the grammars of 2025 and of today.

    sglang.d4p1t1+d2p1t1                            2025: a dot, and a trainer without a name
    sglang:d4t2+fsdp:d8                             today; "+": GPUs of their own
    vllm:d4t2+fsdp:d8                               likewise, on vLLM
    sglang:d4|fsdp:d4                               "|": the same GPUs; binds tighter than "+"
    sglang[r]:d2+fsdp[a]:d4|fsdp[c]:d4              named components
    sglang:d8t2+megatron:(attn:d1p4t2c2|ffn:d2p4e2) mixture of experts: attention and experts cut differently

Dimensions: d data, t tensor (m in old strings), p pipeline, c context, e expert. World = d·t·p·c; e does not count.
Source: AReaL, `areal/api/alloc_mode.py` (ALLOCATION_GRAMMAR) of 0.3 to 1.0.
"""

import re
from collections.abc import Mapping

from refitd_client.errors import PlanRefusedError
from refitd_plan.allocation import ENGINE_NAMES, Allocation, Component, Parallel, Role
from refitd_plan.faults import refusal_at

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
        """One dimension and more."""
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
