"""Ranks of a trainer that publish deltas, and the process that publishes the same of the gathered weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from refitd_client import WeightPublisher
from refitd_client.publish.ports import Full
from refitd_client.publisher import RunPublisher
from refitd_client.sharded.publisher import RankPublisher
from support.sharded_cases import Case, Model, cast_state, full_state, renamed_model

SOME, HALF = 8, 2


@dataclass(frozen=True)
class Step:
    """One element of `every` changes, and engines serve version `base` meanwhile, None where that is not known."""

    every: int = SOME
    base: int | None = None
    delta: Literal["auto", "never"] = "auto"


STEPS = (
    Step(),
    Step(base=1),
    Step(base=1),  # engines are behind: what changed in the step before is listed as well
    Step(base=3),
    Step(every=HALF, base=4),
    Step(base=5),
    Step(base=6, delta="never"),
    Step(base=7),
)
KINDS = ["full", "delta", "delta", "delta", "full", "delta", "full", "full"]


def train(weights: Any, step: int, every: int) -> None:
    """Change some elements in place: which, depends on their values alone, so that it is the same in every sharding."""
    state: Mapping[str, Any] = weights.state_dict() if isinstance(weights, torch.nn.Module) else weights
    seen = set[int]()
    with torch.no_grad():
        for tensor in state.values():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if local.numel() == 0 or local.data_ptr() in seen:
                continue
            seen.add(local.data_ptr())
            if not local.is_floating_point():
                local += 1
                continue
            bits = local.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
            mixed = ((bits ^ (bits >> 15)) * 0x9E3779B1 + step * 0x85EBCA6B) & 0xFFFFFFFF
            local.copy_(torch.where((mixed >> 11) % every == 0, local + 0.5, local))


def bases(publisher: WeightPublisher, run: str, base: int | None) -> None:
    """Have the publisher hear that engines serve a version."""
    own = publisher._publisher
    if isinstance(own, RankPublisher):
        if own._lead is None:
            return
        own = own._lead.publisher
    if isinstance(own, RunPublisher):
        answer = Full("no service was asked") if base is None else f"{run}~v{base:06d}"
        own._context.deltas._ask_base = lambda: answer


def gathered(case: Case) -> Any:
    """The gathered weights as the trainer has them, before they are cast and renamed."""
    return {cast_state: full_state, renamed_model: Model}.get(case.gathered, case.gathered)()
