"""AReaL's allocation strings, in the grammars of 2025 and of today, as one grammar for a parser library (lark).

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
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from refitd_client.errors import PlanRefusedError
from refitd_plan.allocation import ENGINE_NAMES, Allocation, Component, Parallel, Role
from refitd_plan.faults import refusal_at

if TYPE_CHECKING:
    from lark import Lark, Token, Tree

GRAMMAR = r"""
start: group ("+" group)*
group: component ("|" component)*
component: [WORD [name] (":" | ".")] body
name: "[" NAME "]"
?body: dims | "(" moe ")" | moe
moe: _ATTN dims _FFN dims
dims: DIM+

_ATTN.2: /attn\s*:/
_FFN: /\|\s*ffn\s*:/
WORD: /[A-Za-z_]+(?![A-Za-z_0-9])/
NAME: /[A-Za-z_][A-Za-z0-9_]*/
DIM: /[A-Za-z]+[0-9]+/
%ignore /\s+/
"""

ENGINES = frozenset(ENGINE_NAMES)
TRAINERS: Mapping[str, str] = {"fsdp": "dtpc", "megatron": "dtpce", "archon": "dtpce"}
ENGINE_DIMS = "dtp"
_OLD_NAMES = {"m": "t"}
_MOST_DIGITS = 6
_SAID = {
    "DIM": "dimensions such as d1p1t1",
    "WORD": "a backend (sglang, vllm, fsdp, megatron, archon)",
    "PLUS": "'+'",
    "VBAR": "'|'",
    "COLON": "':'",
    "DOT": "'.'",
    "LSQB": "'['",
    "RSQB": "']'",
    "LPAR": "'('",
    "RPAR": "')'",
    "NAME": "a name",
    "_ATTN": "'attn:'",
    "_FFN": "'|ffn:'",
    "$END": "the end",
}


def parse(text: str) -> Allocation:
    """Read an allocation string.

    Raises:
        PlanRefusedError: it is none; the message points at the character.
    """
    tree = _tree(text)
    groups = tuple(_group(text, group) for group in _trees(tree))
    _check_names(text, groups)
    return Allocation(text=text, groups=groups)


@cache
def _parser() -> "Lark":
    try:
        from lark import Lark
    except ImportError as error:
        raise PlanRefusedError("allocation strings need a parser: refitd's extra 'plan' brings it") from error
    return Lark(GRAMMAR, parser="lalr", maybe_placeholders=True)


def _tree(text: str) -> "Tree[Token]":
    parser: Any = _parser()  # of its annotations some are unknown to a strict reader
    from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

    if not text.strip():
        raise PlanRefusedError("the allocation is empty: write for example sglang:d1|fsdp:d1")
    try:
        return cast("Tree[Token]", parser.parse(text))
    except UnexpectedToken as error:
        token: Any = error.token
        position = len(text) if token.type == "$END" else int(token.start_pos or 0)
        raise refusal_at(text, position, _expected(error.accepts or error.expected)) from None
    except UnexpectedCharacters as error:
        found: Any = error
        raise refusal_at(text, found.pos_in_stream, _expected(found.allowed or ())) from None
    except UnexpectedInput as error:
        raise refusal_at(text, 0, f"the allocation does not parse: {error}") from None


def _expected(names: object) -> str:
    said = sorted({_SAID.get(str(name), str(name)) for name in cast("set[str]", names)})
    return f"the allocation does not parse: here {' or '.join(said)} was expected"


def _trees(tree: "Tree[Token]") -> Iterator["Tree[Token]"]:
    return (child for child in tree.children if not hasattr(child, "start_pos"))  # pyright: ignore[reportReturnType]


def _group(text: str, group: "Tree[Token]") -> tuple[Component, ...]:
    read = [(tree, _component(text, tree)) for tree in _trees(group)]
    first = read[0][1]
    for tree, member in read[1:]:
        if member.parallel.world != first.parallel.world:
            raise refusal_at(
                text,
                _start(tree),
                f"what shares GPUs has as many ranks: {first.title} has {first.parallel.world}, "
                f"{member.title} {member.parallel.world}",
            )
    return tuple(member for _, member in read)


def _component(text: str, tree: "Tree[Token]") -> Component:
    word, name, body = cast("tuple[Token | None, Tree[Token] | None, Tree[Token]]", tuple(tree.children))
    called = None if name is None else str(name.children[0])
    if word is None:
        return _trainer(text, None, called, body)
    backend = str(word).lower()
    if backend in ENGINES:
        if body.data == "moe":
            raise refusal_at(text, _start(body), f"{backend} has no parts for attention and experts: write d, t and p")
        parallel = Parallel(**_dims(text, body, ENGINE_DIMS, backend))
        return Component(backend=backend, role=Role.GENERATION, name=called, parallel=parallel)
    if backend in TRAINERS:
        return _trainer(text, backend, called, body)
    known = ", ".join(sorted({*ENGINES, *TRAINERS}))
    raise refusal_at(text, _position(word), f"{word} is no backend that can be planned: it is one of {known}")


def _trainer(text: str, backend: str | None, name: str | None, body: "Tree[Token]") -> Component:
    if body.data == "moe":
        chosen = backend or "megatron"
        if chosen == "fsdp":
            raise refusal_at(text, _start(body), "fsdp cuts experts as everything else: use megatron or archon")
        return Component(backend=chosen, role=Role.TRAINING, name=name, parallel=_moe(text, body))
    # AReaL's own choice where the string names none: what FSDP cannot do needs Megatron.
    dims = _dims(text, body, TRAINERS[backend or "megatron"], backend or "a trainer")
    chosen = backend or ("megatron" if dims.get("p", 1) > 1 or dims.get("e", 1) > 1 else "fsdp")
    parallel = Parallel(**dims)
    if parallel.world % (parallel.e * parallel.p):
        raise refusal_at(
            text, _start(body), f"e{parallel.e} does not divide the {parallel.world} ranks into equal parts"
        )
    return Component(backend=chosen, role=Role.TRAINING, name=name, parallel=parallel)


def _moe(text: str, body: "Tree[Token]") -> Parallel:
    attention, experts = list(_trees(body))
    attn, ffn = _dims(text, attention, "dtpc", "attn"), _dims(text, experts, "dtpe", "ffn")
    parallel = Parallel(**attn, e=ffn.get("e", 1), et=ffn.get("t", 1))
    if ffn.get("p", parallel.p) != parallel.p:
        raise refusal_at(text, _start(experts), f"attention has p{parallel.p}, experts p{ffn['p']}: pipelines are one")
    inner = parallel.e * parallel.et * parallel.p
    if parallel.world % inner or ffn.get("d", parallel.world // inner) * inner != parallel.world:
        raise refusal_at(text, _start(experts), f"experts take other ranks than the {parallel.world} of attention")
    return parallel


def _dims(text: str, body: "Tree[Token]", allowed: str, where: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for token in cast("list[Token]", body.children):
        letters = token.rstrip("0123456789")
        digits = token[len(letters) :]
        if len(digits) > _MOST_DIGITS:
            raise refusal_at(text, _position(token), f"{letters} with {len(digits)} digits cannot be meant")
        letter, size = _OLD_NAMES.get(letters, letters), int(digits)
        if letter not in allowed or len(letter) != 1:
            raise refusal_at(
                text, _position(token), f"{where} has no dimension {letters!r}: it has {', '.join(allowed)}"
            )
        if letter in sizes:
            raise refusal_at(text, _position(token), f"{where} has {letters!r} twice")
        if size < 1:
            raise refusal_at(text, _position(token), f"{token} is no size: at least 1")
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


def _start(tree: "Tree[Token]") -> int:
    for node in tree.iter_subtrees_topdown():
        for child in node.children:
            if hasattr(child, "start_pos"):
                return _position(cast("Token", child))
    return 0


def _position(token: "Token") -> int:
    return token.start_pos or 0
