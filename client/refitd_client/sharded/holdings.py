"""A rank's tensors: what it holds of each, claimed as boxes.

What lies in long runs of the file is written in few calls; a part that is cut along the last dimension has a run for
each row. Replicated tensors are claimed whole by every rank, and rank 0 shares the writing out. A pending reduction
(Partial) is refused: no parameter is one, and a publisher must not sum silently.

This is the only module that knows `torch.distributed.tensor`. Placements are recognised by the names of their classes:
torch moved them between modules, and made the strided one (which FSDP2 uses under tensor parallelism) a subclass of the
plain one in some releases and not in others.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import xxhash

from refitd_client import tensors as torch_tensors
from refitd_client.errors import InvalidWeightsError
from refitd_client.publish.options import Sharded
from refitd_client.sharded.layout import Claim, Split, boxes_of, local_shape, whole_box
from refitd_client.tensors import Casts, entry_of, refused
from refitd_client.write.plan import Rename, after, checkpoint_names, plain_names, published_names, second_names

_ELEMENTS = 64  # of a sample


@dataclass(frozen=True, slots=True, kw_only=True)
class NamingOptions:
    casts: Casts
    rename: Rename | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A tensor of this rank, or its part of one."""

    claim: Claim
    tensor: Any

    def local(self) -> Any:
        """The plain tensor with this rank's part, in the trainer's dtype."""
        return plain_of(self.tensor)


def holdings_of(weights: Any, options: NamingOptions, sharded: Mapping[str, Sharded]) -> dict[str, Holding]:
    """This rank's tensors by published name. `sharded`: describes plain tensors that are parts, by the trainer's name,
    with or without the marks of wrappers. Raises InvalidWeightsError: the weights are no module or state dict, or hold
    what cannot be published.
    """
    state, patterns, known = _state(weights)
    names = published_names(state.keys(), after(known, options.rename))
    plain = plain_names(list(state))
    for name in sharded:
        if name not in plain and name not in plain.values():
            raise refused(name, "is described as Sharded, and there is none of that name")
    second = second_names(names, patterns)
    first_names: dict[Any, str] = {}  # the first name of each memory
    found: dict[str, Holding] = {}
    for name, new in names.items():
        tensor = state[name]
        holding = _holding(tensor, new, name, options.casts, sharded.get(name) or sharded.get(plain[name]))
        memory = torch_tensors.memory_of(plain_of(tensor))
        first = None if memory is None else first_names.setdefault((memory, tuple(tensor.shape)), new)
        found[new] = replace(holding, claim=replace(holding.claim, memory=first, second=new in second))
    return found


class HoldingsReader:
    """Lists a rank's tensors at each publication. What was worked out of them is used again as long as all of them are
    what and where they were: then the claims are the very same objects. No tensor is kept between two publications.
    """

    def __init__(self, options: NamingOptions) -> None:
        self._options = options
        self._key: Any = None
        self._claims: list[tuple[str, Claim]] = []

    def read(self, weights: Any, sharded: Mapping[str, Sharded]) -> dict[str, Holding]:
        state, patterns, known = _state(weights)
        names = published_names(state.keys(), after(known, self._options.rename))
        with sys.modules["torch"].no_grad():
            key = names, patterns, dict(sharded), [_facts(state[name]) for name in names]
        if key == self._key:
            return {claim.name: Holding(claim=claim, tensor=state[name]) for name, claim in self._claims}
        found = holdings_of(weights, self._options, sharded)
        self._key = key
        self._claims = [(name, found[new].claim) for name, new in names.items()]
        return found


def _facts(tensor: Any) -> tuple[Any, ...]:
    """All properties of a tensor that its claim depends on, and where it lies."""
    local, mesh = tensor, None
    if is_dtensor(tensor):
        local, mesh = tensor.to_local(), (tensor.shape, tensor.placements, tensor.device_mesh)
    return (
        local.__class__,
        local.data_ptr(),
        local.dtype,
        local.shape,
        local.stride(),
        local.device,
        local.is_neg(),
        mesh,
    )


def plain_of(tensor: Any) -> Any:
    """The plain tensor with this rank's part. Detaching a DTensor takes ten times as long as detaching its part."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with sys.modules["torch"].no_grad():
        return tensor.to_local().detach()


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def _state(weights: Any) -> tuple[Mapping[str, Any], list[str], dict[str, str]]:
    """The tensors by the trainer's names, the patterns of names that the module declares to be tied, and the names in
    its checkpoint by those in the module.
    """
    if torch_tensors.is_module(weights):
        state = weights.state_dict()
        if (names := checkpoint_names(weights, state)) is None:
            raise InvalidWeightsError(
                f"{type(weights).__name__} has tensors that its checkpoint has in another form, such as fused experts, "
                "and ranks cannot convert parts: publish the folder that save_pretrained writes, or its state dict"
            )
        return state, torch_tensors.tied_patterns(weights), names
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
    return state, [], {}


def _holding(tensor: Any, name: str, old: str, casts: Casts, part: Sharded | None) -> Holding:
    """A tensor with published name `name`, which the trainer calls `old` and may describe as a `part`."""
    shape, local, splits = tuple(tensor.shape), tensor, list[Split]()
    if is_dtensor(tensor):
        if part is not None:
            raise refused(old, "is a DTensor, which says itself how it is sharded: do not describe it")
        local, splits = plain_of(tensor), _splits_of(old, tensor)
    elif part is not None:
        if part.dim >= len(shape):
            raise refused(old, f"has {len(shape)} dimensions and is described as {part}")
        size = shape[part.dim] * part.count if part.size is None else part.size
        shape = (*shape[: part.dim], size, *shape[part.dim + 1 :])
        splits = [Split(part.dim, part.index, part.count)]
    _check_local(old, local, shape, splits)
    dtype = casts.target(name, str(tensor.dtype).removeprefix("torch."))
    entry_of(name, dtype, shape)  # refuses what the format cannot hold, on the rank that has it
    boxes = boxes_of(shape, splits) if splits else [whole_box(shape)]
    own = tuple(box for box in boxes if box.count)
    claim = Claim(name=name, dtype=dtype, shape=shape, boxes=own, memory=None)
    return Holding(claim=claim, tensor=tensor)


def _splits_of(name: str, tensor: Any) -> list[Split]:
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        raise refused(name, "is a DTensor of a mesh that this rank is not in: leave it out of this rank's state dict")
    splits: list[Split] = []
    for dimension, placement in enumerate(tensor.placements):
        match type(placement).__name__:
            case "Replicate":
                continue
            case "Shard" | "_StridedShard":
                stride = int(getattr(placement, "split_factor", 1))
                splits.append(Split(int(placement.dim), int(place[dimension]), int(mesh.size(dimension)), stride))
            case "Partial" | "_MaskPartial" | "_NormPartial":
                raise refused(
                    name, f"has a pending reduction ({placement}): redistribute it to Replicate() or Shard(0) first"
                )
            case other:
                raise refused(name, f"has placement {other}, which is not known: redistribute it to Shard(0) first")
    return splits


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


def gpu_of(holdings: Mapping[str, Holding]) -> Any:
    """The one GPU that all of a rank's tensors are on; None where there is no such."""
    tensors = [each.tensor for each in holdings.values() if each.tensor.numel()]
    devices = {tensor.device for tensor in tensors}
    return devices.pop() if len(devices) == 1 and all(torch_tensors.on_gpu(tensor) for tensor in tensors) else None


def flat_of(tensor: Any) -> Any:
    """All elements of a plain tensor in row-major order, in one dimension; a copy only where they do not lie so."""
    return torch_tensors.row_major(tensor.detach().resolve_neg()).reshape(-1)


def samples_of(holdings: Iterable[Holding]) -> dict[str, int]:
    """A digest of a few elements of each tensor that other ranks may hold, too, to find ranks that differ.

    Each rank writes a part of a replicated tensor, and the file is whole whatever the parts are: nothing later would
    show that two ranks had different tensors (ranks out of step, a tensor-parallel part that the trainer did not
    describe). Reading all of it on every rank would undo what sharing the writing gains, so elements spread evenly are
    compared: a guard against mistakes, not a proof. Each GPU is copied from once.
    """
    torch: Any = sys.modules["torch"]
    by_device: dict[Any, dict[str, Any]] = {}
    for holding in holdings:
        tensor = holding.tensor
        if is_dtensor(tensor) and not any(type(each).__name__ == "Replicate" for each in tensor.placements):
            continue
        flat = flat_of(plain_of(tensor))
        sample = flat[:: max(1, flat.numel() // _ELEMENTS)].contiguous().view(torch.uint8)
        if len(sample):
            by_device.setdefault(sample.device, {})[holding.claim.name] = sample
    digests: dict[str, int] = {}
    for samples in by_device.values():
        data = torch.cat(list(samples.values())).cpu().numpy()
        begin = 0
        for name, sample in samples.items():
            digests[name] = xxhash.xxh3_64_intdigest(data[begin : begin + len(sample)].data)
            begin += len(sample)
    return digests


def compare_samples(
    samples: Sequence[Mapping[str, int]], shared: Mapping[str, list[list[int]]]
) -> InvalidWeightsError | None:
    """The error for ranks that hold different samples; `shared` has, by name, the ranks that hold the same part."""
    for name, groups in shared.items():
        for first, *others in groups:
            for other in others:
                if samples[first].get(name) != samples[other].get(name):
                    return refused(
                        name,
                        f"differs between rank {first} and rank {other}, which should hold the same: if each has a "
                        "part of it, pass DTensors or say so with sharded={name: Sharded(dim, index, count)}; else the "
                        "ranks are not in step",
                    )
    return None
