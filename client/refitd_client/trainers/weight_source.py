"""A source of weights, as vLLM's trainers have it for each of its backends, read into what the ranks publish.

vLLM's `WeightSource` (`vllm.distributed.weight_transfer.base`, which is not imported) has `metadata()`: name, dtype and
whole shape of each parameter, the same on all ranks; `held_names()`: those that this rank holds, None for all; and
yields, in that order, each name with its whole tensor, or None for one that is not held. A rank that holds a part reads
`groups()` alone: a group of which it holds nothing is not yielded to it.

Tensors are gathered as they are yielded, by collectives of the trainer's ranks: so each rank reads to the end, whatever
it has found. It keeps its share, as the tensors come, and lets the others go.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import xxhash

from refitd_client.errors import InvalidWeightsError
from refitd_client.tensors import refused


@dataclass(frozen=True, slots=True)
class SourceWord:
    """What a rank says of its source: 8 bytes for each parameter, and a bit for each whether it is held; None for all.

    Names would be megabytes of a model with many experts, from each rank at each step.
    """

    digests: bytes
    held: bytes | None


class WholeReading:
    """Reads a source for one version (`publish.ports.SourceReading`)."""

    def __init__(self, source: Any) -> None:
        """Ask the source what it has. Raises InvalidWeightsError: it names one twice, or holds one that it lacks."""
        self._source = source
        self._described: dict[str, str] = {}
        self._sizes: list[int] = []
        for each in source.metadata():
            if each.name in self._described:
                raise refused(each.name, "stands twice in the metadata() of its source")
            self._described[each.name] = _form(each)
            self._sizes.append(prod(each.shape) * each.dtype.itemsize)
        held = source.held_names() if hasattr(source, "held_names") else None
        self._held = None if held is None else frozenset[str](held)
        for name in sorted((self._held or frozenset()) - self._described.keys()):
            raise refused(name, "is in held_names() of its source, and not in metadata()")

    @property
    def word(self) -> SourceWord:
        """What this rank says of its source."""
        digests = [xxhash.xxh3_64_intdigest(f"{name} {form}".encode()) for name, form in self._described.items()]
        held = None if self._held is None else np.packbits([name in self._held for name in self._described]).tobytes()
        return SourceWord(np.array(digests, np.uint64).tobytes(), held)

    def shares(self, words: Iterable[SourceWord]) -> Sequence[Sequence[int]]:
        """Decide which parameters each rank keeps: numbers in the order of metadata()."""
        words, names = tuple(words), list(self._described)
        own = np.frombuffer(words[0].digests, np.uint64)
        for rank, word in enumerate(words):
            if word.digests != words[0].digests:
                its = np.frombuffer(word.digests, np.uint64)
                common = min(len(own), len(its))
                at = next(iter(np.flatnonzero(own[:common] != its[:common])), common)
                if at == len(names):
                    raise InvalidWeightsError(
                        f"metadata() has {len(its)} parameters on rank {rank} and {at} on rank 0: it is the same on all"
                    )
                raise refused(names[at], f"stands otherwise in metadata() on rank {rank}, or not at its place")
        holders = _holders(tuple(word.held for word in words), len(names))
        if orphan := next((name for name, its in zip(names, holders, strict=True) if not its), None):
            raise refused(orphan, "is held by none of the ranks that publish (held_names() of its source)")
        shares = _shared_out(holders, tuple(self._sizes), len(words))
        of_ddp = [name.startswith("module.") for name in names]
        for share in shares if not all(of_ddp) else ():
            if share and all(of_ddp[number] for number in share):
                why = "begins with 'module.', as all that one rank keeps does, and not all names: it would be taken off"
                raise refused(names[share[0]], f"{why} as DDP's mark. Yield it by another name")
        return shares

    def kept(self, share: Iterable[int]) -> dict[str, Any]:
        """Read the source to its end, and return the tensors of a share."""
        names = list(self._described)
        wanted, found, fault = {names[number] for number in share}, dict[str, Any](), None
        expected = iter(names if self._held is None else self._in_groups())
        for name, tensor in self._source:  # to its end: other ranks gather the rest together with this one
            fault = fault or self._fault(next(expected, None), name, tensor)
            if fault is not None:
                found.clear()
            elif name in wanted:
                found[name] = tensor
        if fault is None and (left := next(expected, None) or next(iter(wanted - found.keys()), None)) is not None:
            fault = refused(left, "stands in the metadata() of its source, which does not yield it")
        if fault is not None:
            raise fault
        return found

    def _in_groups(self) -> list[str]:
        """What a rank is yielded that holds a part."""
        if not hasattr(self._source, "groups"):
            return list(self._described)
        return [name for group in self._source.groups() for name in group]

    def _fault(self, expected: str | None, name: str, tensor: Any) -> InvalidWeightsError | None:
        if expected is None:
            return refused(name, "is yielded by its source after all that metadata() has")
        if name != expected:
            return refused(expected, f"is the next in metadata() of its source, which yields {name} in its place")
        if tensor is None:
            is_held = self._held is None or name in self._held
            return refused(name, "is held by this rank, and its source yields None") if is_held else None
        if (form := _form(tensor)) != self._described.get(name):
            said = self._described.get(name, "nothing")
            return refused(name, f"is yielded as {form}, and metadata() says {said}: sources yield whole tensors")
        return None


def _form(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


@lru_cache(maxsize=1)
def _holders(held: tuple[bytes | None, ...], count: int) -> tuple[tuple[int, ...], ...]:
    """The ranks that hold each parameter."""
    bits = np.ones((len(held), count), np.bool_)
    for rank, some in enumerate(held):
        if some is not None:
            bits[rank] = np.unpackbits(np.frombuffer(some, np.uint8), count=count)
    return tuple(tuple(np.flatnonzero(column).tolist()) for column in bits.T)


@lru_cache(maxsize=1)  # the same at each step
def _shared_out(
    holders: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], ranks: int
) -> tuple[tuple[int, ...], ...]:
    """Give each parameter to one of its holders: the largest first, each to the one that has least."""
    load, shares = [0] * ranks, [list[int]() for _ in range(ranks)]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        rank = min(holders[number], key=lambda rank: load[rank])
        load[rank] += sizes[number]
        shares[rank].append(number)
    return tuple(tuple(sorted(share)) for share in shares)
