"""Which tensors of a version a parameter of a stock engine is made of, by its name, and which part of them a rank has.

SGLang keeps a checkpoint's tensors under their names, or several in one parameter: the queries, keys and values of a
layer one below the other, and the two halves of a gated layer. With tensor parallelism a rank has rows or columns of
each. A parameter that is made in another way is refused before anything is sent: its contents could not be proved.

Every part that is named here is the version's own. So where a parameter may be one of several parts, that it is any of
them proves that it was received.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_SHARED = frozenset({"k_proj", "v_proj"})  # of which several ranks have the same part, where there are few
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
_TIED = "lm_head.weight"
_UNUSED = "rotary_emb.inv_freq"  # engines compute it
_VOCABULARY_ROWS = 64  # SGLang fills the last ones with zeros


class UnexplainedError(ValueError):
    """A parameter or a tensor of which it is not known what an engine makes of it. The message is a sentence."""


def explained(parameters: Iterable[str], tensors: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """The tensors that each parameter is made of, by the parameter's name.

    Args:
        parameters: the engine's.
        tensors: the fingerprints of the version's, by name.

    Raises:
        UnexplainedError: a parameter is made in an unknown way, or a tensor is in none.
    """
    found: dict[str, tuple[str, ...]] = {}
    for parameter in parameters:
        sources = _sources(parameter)
        if not all(name in tensors for name in sources):
            raise UnexplainedError(f"it is not known which tensors the engine's parameter {parameter[:100]!a} has")
        found[parameter] = sources
    used = {name for sources in found.values() for name in sources}
    tied = {tensors[name] for name in used if name.endswith(_VOCABULARY[0])}
    for name in tensors.keys() - used:
        if not name.endswith(_UNUSED) and not (name.endswith(_TIED) and tensors[name] in tied):
            raise UnexplainedError(f"it is not known which of the engine's parameters has tensor {name[:100]!a}")
    return found


def parts(names: Sequence[str], tensors: Mapping[str, Any], rank: int, ranks: int) -> Iterator[list[Any]]:
    """What a parameter may hold on one rank: each time tensors that lie there one after the other.

    Args:
        names: the tensors that it is made of.
        tensors: the version's, as torch tensors by name.
        rank: the rank, from 0 on.
        ranks: how many there are.
    """
    whole = [tensors[name] for name in names]
    yield whole
    if len(names) == 1 and names[0].endswith(_VOCABULARY):
        padded = _padded(whole[0])
        if ranks > 1 or len(padded) > len(whole[0]):
            yield [_rows(padded, rank, ranks)]
    if ranks == 1:
        return
    is_shared = [_kind(name) in _SHARED for name in names]
    for shares in (each for each in range(1, ranks + 1) if ranks % each == 0 and (each == ranks or any(is_shared))):
        split = [shares if shared else ranks for shared in is_shared]
        if all(len(each.shape) and len(each) % by == 0 for each, by in zip(whole, split, strict=True)):
            yield [_rows(each, rank * by // ranks, by) for each, by in zip(whole, split, strict=True)]
    if len(names) == 1 and len(whole[0].shape) == 2 and whole[0].shape[1] % ranks == 0:
        share = whole[0].shape[1] // ranks
        yield [whole[0][:, rank * share : (rank + 1) * share]]


def _sources(parameter: str) -> tuple[str, ...]:
    *above, layer, kind = ["", "", *parameter.split(".")]
    found = _STACKED.get(layer)
    if found is None:
        return (parameter,)
    return tuple(".".join([*above[2:], part, kind]) for part in found)


def _kind(name: str) -> str:
    return name.split(".")[-2] if "." in name else ""


def _rows(tensor: Any, part: int, of: int) -> Any:
    share = len(tensor) // of
    return tensor[part * share : (part + 1) * share]


def _padded(tensor: Any) -> Any:
    rows = -len(tensor) % _VOCABULARY_ROWS
    if not rows:
        return tensor
    import torch  # not above: what only explains names has no need of it

    return torch.cat([tensor, tensor.new_zeros((rows, *tensor.shape[1:]))])
