"""A rank's tensors: what it holds of each, claimed as boxes and read as bytes.

Which way a tensor goes into the file is decided here, from nothing but its placements, mesh and whole shape, so that
all ranks of its mesh decide alike:

    cut along the first dimension       its bytes are one range of the file: written as they are
    cut along another, in long runs     written run by run (`pwrite`)
    cut along another, in short runs    redistributed to Shard(0) by its mesh's own collective, tensor by tensor, and
                                        then written as one range; plain tensors have no mesh and are written run by run
    replicated                          claimed whole by every rank; rank 0 shares the writing out

A pending reduction (Partial) is refused: no parameter is one, and a sum that nobody asked for is no weight.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from refitd_client.errors import InvalidWeightsError
from refitd_client.sharded import mesh
from refitd_client.sharded.boxes import Box, run_length, whole
from refitd_client.sharded.claims import Claim
from refitd_client.sharded.description import Sharded
from refitd_client.sharded.placement import Split, boxes_of, local_shape
from refitd_client.tensors import from_torch as torch_tensors
from refitd_client.tensors.casts import Casts
from refitd_client.tensors.names import Rename, plain_names, published_names, second_names
from refitd_client.tensors.source import entry_of, refused

# A pwrite costs about as much as copying so many bytes into the page cache: shorter runs take longer than the copy, and
# an exchange between the ranks (which costs the part's own bytes once more, over a link faster than files) is cheaper.
MIN_RUN_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A tensor of this rank, or its part of one.

    `target` are the placements to redistribute to before it is read; then all ranks of its mesh have to read it.
    """

    claim: Claim
    tensor: Any
    target: tuple[Any, ...] | None = None

    def local(self) -> Any:
        """The plain tensor with this rank's part, in the trainer's dtype. With a `target`, a collective of the mesh."""
        tensor = self.tensor.detach()
        if self.target is not None:
            tensor = tensor.redistribute(placements=self.target)
        return tensor.to_local() if mesh.is_dtensor(tensor) else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a publisher names, casts and understands what it is passed."""

    casts: Casts
    rename: Rename | None


def holdings_of(weights: Any, options: Options, sharded: Mapping[str, Sharded]) -> dict[str, Holding]:
    """This rank's tensors by published name.

    `sharded` describes plain tensors that are parts, by the trainer's name, with or without the marks of wrappers.

    Raises:
        InvalidWeightsError: the weights are no module or state dict, or hold what cannot be published.
    """
    state, patterns = _state(weights)
    names = published_names(state.keys(), options.rename)
    described = _described(sharded, state.keys())
    held = [_holding(state[name], new, name, options.casts, described.get(name)) for name, new in names.items()]
    ties = _ties(state[name] for name in names)
    found: dict[str, Holding] = {}
    second = second_names(names, patterns)
    for new, holding, tie in zip(names.values(), held, ties, strict=True):
        first = None if tie is None else held[tie].claim.name
        found[new] = replace(holding, claim=replace(holding.claim, memory=first, second=new in second))
    return found


def _state(weights: Any) -> tuple[Mapping[str, Any], list[str]]:
    if torch_tensors.is_module(weights):
        return torch_tensors.module_state(weights), torch_tensors.tied_patterns(weights)
    if not isinstance(weights, Mapping):
        raise InvalidWeightsError(
            f"weights are a {type(weights).__name__}: pass the module or this rank's state dict; "
            "a checkpoint in a folder is published by a WeightPublisher on one rank"
        )
    state = cast("Mapping[Any, Any]", weights)
    for name, value in state.items():
        if not isinstance(name, str):
            raise InvalidWeightsError(f"a state dict's keys are names, and {name!r} is a {type(name).__name__}")
        if not torch_tensors.is_tensor(value):
            raise refused(name, f"is a {type(value).__module__}.{type(value).__name__}: pass torch tensors")
    return state, []


def _described(sharded: Mapping[str, Sharded], names: Iterable[str]) -> dict[str, Sharded]:
    plain = plain_names(list(names))
    known = set(plain) | set(plain.values())
    for name in sharded:
        if name not in known:
            raise refused(name, "is described as Sharded, and there is none of that name")
    found = {name: sharded.get(name) or sharded.get(new) for name, new in plain.items()}
    return {name: part for name, part in found.items() if part is not None}


def _holding(tensor: Any, name: str, old: str, casts: Casts, part: Sharded | None) -> Holding:
    target: tuple[Any, ...] | None = None
    if mesh.is_dtensor(tensor):
        if part is not None:
            raise refused(old, "is a DTensor, which says itself how it is sharded: do not describe it")
        shape, local = tuple(tensor.shape), tensor.detach().to_local()
        splits = mesh.splits_of(old, tensor)
        target = _target(tensor, shape, splits)
    else:
        shape, splits = _plain_splits(old, tuple(tensor.shape), part)
        local = tensor
    _check_local(old, local, shape, splits)
    if target is not None:
        splits = mesh.splits_of(old, tensor, target)
    dtype = casts.target(name, str(tensor.dtype).removeprefix("torch."))
    entry_of(name, dtype, shape)  # refuses what the format cannot hold, on the rank that has it
    claim = Claim(name=name, dtype=dtype, shape=shape, boxes=_boxes(shape, splits), memory=None)
    return Holding(claim=claim, tensor=tensor, target=target)


def _boxes(shape: tuple[int, ...], splits: Sequence[Split]) -> tuple[Box, ...]:
    if not splits:
        box = whole(shape)
        return (box,) if box.count else ()
    return tuple(boxes_of(shape, splits))


def _plain_splits(name: str, shape: tuple[int, ...], part: Sharded | None) -> tuple[tuple[int, ...], list[Split]]:
    if part is None:
        return shape, []
    if part.dim >= len(shape):
        raise refused(name, f"has {len(shape)} dimensions and is described as {part}")
    size = shape[part.dim] * part.count if part.size is None else part.size
    return (*shape[: part.dim], size, *shape[part.dim + 1 :]), [Split(part.dim, part.index, part.count)]


def _check_local(name: str, local: Any, shape: tuple[int, ...], splits: Sequence[Split]) -> None:
    why = torch_tensors.refusal(local)
    if why is not None:
        raise refused(name, why)
    expected = local_shape(shape, splits)
    if tuple(local.shape) != expected:
        raise refused(
            name,
            f"has a local part of shape {list(local.shape)}, and a tensor of shape {list(shape)} sharded like this has "
            f"one of {list(expected)} here: redistribute it to Shard(0) or Replicate first",
        )


def _target(tensor: Any, shape: tuple[int, ...], splits: Sequence[Split]) -> tuple[Any, ...] | None:
    """Placements to bring it to, if its runs are too short. The first rank's box stands for all: it has the longest."""
    if not any(split.dim > 0 for split in splits):
        return None
    first = boxes_of(shape, [replace(split, index=0) for split in splits])
    if not first or run_length(first[0], shape) * tensor.element_size() >= MIN_RUN_BYTES:
        return None
    return mesh.along_first_dimension(tensor)


def _ties(tensors: Iterable[Any]) -> list[int | None]:
    """For each tensor the number of the first with the same memory, None where there is none to share."""
    seen: dict[Any, int] = {}
    ties: list[int | None] = []
    for number, tensor in enumerate(tensors):
        local = tensor.detach().to_local() if mesh.is_dtensor(tensor) else tensor
        memory = torch_tensors.memory_of(local)
        ties.append(None if memory is None else seen.setdefault((memory, tuple(tensor.shape)), number))
    return ties
