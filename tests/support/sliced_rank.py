"""Ranks of an engine that is split by tensor parallelism in every way that loaders of SGLang and vLLM split: columns,
rows, stacked and replicated heads, a padded vocabulary, two parts of one tensor, experts of which each rank has some.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import HashStore

from refitd_client.contract.plugin import Answer
from refitd_plugin.update import ranks
from support.tiny_rank import Rank, version

HIDDEN, HEAD, WIDE, VOCABULARY, PADDED = 8, 2, 12, 10, 12
HEADS, KV_HEADS, EXPERTS = 4, 2, 4
SHAPES = {
    "q": (HEADS * HEAD, HIDDEN),
    "k": (KV_HEADS * HEAD, HIDDEN),
    "v": (KV_HEADS * HEAD, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD),
    "gate_up": (2 * WIDE, HIDDEN),
    "down": (HIDDEN, WIDE),
    "turned": (WIDE, HIDDEN),
    "embed": (VOCABULARY, HIDDEN),
    "bias": (WIDE,),
    "norm": (HIDDEN,),
    **{f"expert_{number}": (3, HIDDEN) for number in range(EXPERTS)},
}
SLICED = [name for name in SHAPES if name != "norm" and "expert" not in name]


def sliced_weights(seed: int) -> dict[str, torch.Tensor]:
    """A checkpoint of `SlicedModel`."""
    made = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=made).bfloat16() for name, shape in SHAPES.items()}
    return found | {"bias": torch.randn(SHAPES["bias"], generator=made)}


class SlicedModel(torch.nn.Module):
    """One rank's part, of 1, 2 or 4. Where there are more ranks than heads of keys and values, two have the same."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.rows = {
            "q": HEADS * HEAD // size,
            "k": max(1, KV_HEADS // size) * HEAD,
            "v": max(1, KV_HEADS // size) * HEAD,
        }
        self.qkv = _empty(sum(self.rows.values()), HIDDEN)
        self.o = _empty(HIDDEN, HEADS * HEAD // size)
        self.gate_up = _empty(2 * WIDE // size, HIDDEN)
        self.down = _empty(HIDDEN, WIDE // size)
        self.turned = _empty(HIDDEN, WIDE // size)
        self.embed = _empty(PADDED // size, HIDDEN)
        self.bias = _empty(WIDE // size, dtype=torch.float32)
        self.norm = _empty(HIDDEN)
        self.experts = _empty(EXPERTS // size, 3, HIDDEN)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """By name."""
        for name, tensor in weights:
            for target, part in self.parts(name, tensor):
                target.copy_(part)
                if name == "embed":
                    self.embed.data[len(target) :].fill_(0)

    def parts(self, name: str, tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What is copied of a checkpoint's tensor, and where to."""
        rank, wide = self.rank, WIDE // self.size
        if name in self.rows:
            rows = self.rows[name]
            above = sum(self.rows[each] for each in list(self.rows)[: list(self.rows).index(name)])
            head = rank * rows if name == "q" else rank * KV_HEADS // self.size * HEAD
            return [(self.qkv.data[above : above + rows], tensor[head : head + rows])]
        if name == "gate_up":
            return [
                (self.gate_up.data[half * wide : (half + 1) * wide], tensor[half * WIDE + rank * wide :][:wide])
                for half in range(2)
            ]
        if name in {"o", "down"}:
            target = getattr(self, name).data
            return [(target, tensor[:, rank * target.shape[1] :][:, : target.shape[1]])]
        if name == "turned":
            return [(self.turned.data, tensor[rank * wide : (rank + 1) * wide].t())]
        if name == "embed":
            rows = tensor[rank * len(self.embed) :][: len(self.embed)]
            return [(self.embed.data[: len(rows)], rows)]
        if name == "bias":
            return [(self.bias.data, tensor[rank * wide : (rank + 1) * wide])]
        if name == "norm":
            return [(self.norm.data, tensor)]
        number = int(name.removeprefix("expert_")) - rank * len(self.experts)
        return [(self.experts.data[number], tensor)] if 0 <= number < len(self.experts) else []

    def place(self, name: str) -> torch.Tensor:
        """Where the first of a checkpoint's tensor lies."""
        return self.parts(name, sliced_weights(0)[name])[0][0]


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)


class SlicedEngine:
    """An engine of some ranks that was started on the weights of step 0, each in a thread of its own while it loads."""

    def __init__(
        self,
        root: Path,
        patch: pytest.MonkeyPatch,
        size: int,
        kind: type[SlicedModel] = SlicedModel,
        *,
        device: str = "cpu",
    ) -> None:
        startup = root.parent / "startup"
        startup.mkdir(exist_ok=True)
        save_file(sliced_weights(0), startup / "model.safetensors")
        store = HashStore()
        patch.setattr(ranks, "default_store", lambda: store)
        self.root, self.store = root, store
        self.members = [Rank(startup, rank, size, model=kind(rank, size).to(device)) for rank in range(size)]

    def take(self, step: int, *, fingerprints: bool = True) -> list[Answer]:
        """Have all ranks load a version with the weights of a step."""
        return self.load(version(self.root, step, sliced_weights(step), fingerprints=fingerprints))

    def load(self, folder: Path) -> list[Answer]:
        """Have all ranks load a version."""
        return self.on_all(lambda rank: rank.answer(folder))

    def on_all(self, do: Callable[[Rank], Answer]) -> list[Answer]:
        """Do something on all ranks at once."""
        with ThreadPoolExecutor(len(self.members)) as pool:
            return list(pool.map(do, self.members))

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        """Whether every rank holds its part of these, by every bit."""
        return all(_bytes_of(rank.model) == _bytes_of(self._loaded(rank.model, weights)) for rank in self.members)

    def _loaded(self, model: Any, weights: dict[str, torch.Tensor]) -> SlicedModel:
        made = type(model)(model.rank, model.size)
        made.load_weights(weights.items())
        return made

    def spoil_once(self, rank: int, name: str) -> None:
        """Flip a bit of what a rank has of a tensor, after its next load and before anything looks at that."""
        updater, left = self.members[rank].updater, [True]

        def spoil() -> None:
            if left:
                left.pop()
                flip(self.members[rank].model.place(name))

        updater.after = spoil


def flip(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of a tensor's last element."""
    bits = tensor[(-1,) * tensor.dim()].reshape(1).view(torch.uint8)
    bits[0] ^= 1


def _bytes_of(model: torch.nn.Module) -> dict[str, bytes]:
    named = model.named_parameters()
    return {name: tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in named}
