"""DTensors: their mesh and placements as splits. The only place that knows `torch.distributed.tensor`.

Placements are told by the names of their classes: torch moved them between modules, and made the strided one (which
FSDP2 uses under tensor parallelism) a subclass of the plain one in some releases and not in others.
"""

import sys
from collections.abc import Sequence
from typing import Any

from refitd_client.sharded.placement import Split
from refitd_client.tensors.source import refused


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is sharded or replicated over a mesh."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def splits_of(name: str, tensor: Any, placements: Sequence[Any] | None = None) -> list[Split]:
    """How this rank's part comes of the whole tensor, by its own placements or by others on the same mesh.

    Raises:
        InvalidWeightsError: a placement is none that can be written, or this rank is not in the mesh.
    """
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        raise refused(name, "is a DTensor of a mesh that this rank is not in: leave it out of this rank's state dict")
    splits: list[Split] = []
    for dimension, placement in enumerate(tensor.placements if placements is None else placements):
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


def along_first_dimension(tensor: Any) -> tuple[Any, ...] | None:
    """Its placements with every split moved to the first dimension, None where its splits are not plain."""
    if any(type(placement).__name__ not in {"Shard", "Replicate"} for placement in tensor.placements):
        return None
    shard = sys.modules["torch.distributed.tensor"].Shard
    return tuple(shard(0) if type(each).__name__ == "Shard" else each for each in tensor.placements)
