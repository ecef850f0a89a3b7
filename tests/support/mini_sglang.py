"""As much of SGLang as the plugin touches, with its way of failing, for one rank without a server.

The updater is SGLang's own flow (`model_runner_components/weight_updater.py` in 0.5.23): the path is set before
anything is read, and a load that fails is "rolled back" onto the files that have just failed.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open

Weights = Iterable[tuple[str, torch.Tensor]]
WIDTH = 4
ROWS = {"q": 4, "k": 2, "v": 2}
VOCABULARY, PADDED = 5, 8


class TinyModel(torch.nn.Module):
    """Stacked projections, a padded vocabulary, a transposed matrix, and a norm from which a buffer is derived."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.qkv = _empty(sum(ROWS.values()) // size, WIDTH)
        self.embed = _empty(PADDED, WIDTH)
        self.down = _empty(WIDTH, 6 // size)
        self.turned = _empty(6, WIDTH)
        self.norm = _empty(WIDTH)
        self.register_buffer("norm_plus_one", torch.zeros(WIDTH, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def load_weights(self, weights: Weights) -> None:
        """As models of SGLang do: by name, whatever comes."""
        for name, tensor in weights:
            getattr(self, f"_load_{name.split('.')[0]}", self._skip)(tensor)

    def _load_q(self, tensor: torch.Tensor) -> None:
        self._stack(tensor, "q", 0)

    def _load_k(self, tensor: torch.Tensor) -> None:
        self._stack(tensor, "k", ROWS["q"])

    def _load_v(self, tensor: torch.Tensor) -> None:
        self._stack(tensor, "v", ROWS["q"] + ROWS["k"])

    def _stack(self, tensor: torch.Tensor, kind: str, above: int) -> None:
        rows = ROWS[kind] // self.size
        place = self.qkv.data.narrow(0, above // self.size, rows)
        part = tensor.narrow(0, self.rank * rows, rows)
        assert place.shape == part.shape  # as SGLang's loaders check
        place.copy_(part)

    def _load_embed(self, tensor: torch.Tensor) -> None:
        self.embed.data[:VOCABULARY].copy_(tensor)
        self.embed.data[VOCABULARY:].fill_(0)

    def _load_down(self, tensor: torch.Tensor) -> None:
        columns = 6 // self.size
        self.down.data.copy_(tensor.narrow(1, self.rank * columns, columns))

    def _load_turned(self, tensor: torch.Tensor) -> None:
        self.turned.data.copy_(tensor.t())

    def _load_norm(self, tensor: torch.Tensor) -> None:
        self.norm.data.copy_(tensor)
        self.norm_plus_one.copy_(self.norm.data).add_(1.0)

    def _skip(self, tensor: torch.Tensor) -> None:
        """A name that the model does not have: SGLang's loaders say nothing."""


def _empty(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(*shape, dtype=torch.bfloat16), requires_grad=False)


def tiny_weights(seed: int) -> dict[str, torch.Tensor]:
    """A checkpoint of `TinyModel`."""
    torch_random = torch.Generator().manual_seed(seed)
    shapes = {
        "q.weight": (ROWS["q"], WIDTH),
        "k.weight": (ROWS["k"], WIDTH),
        "v.weight": (ROWS["v"], WIDTH),
        "embed.weight": (VOCABULARY, WIDTH),
        "down.weight": (WIDTH, 6),
        "turned.weight": (WIDTH, 6),
        "norm.weight": (WIDTH,),
    }
    return {name: torch.randn(shape, generator=torch_random).bfloat16() for name, shape in shapes.items()}


def values(model: torch.nn.Module) -> dict[str, list[float]]:
    """What a model holds, to be compared."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().float().flatten().tolist() for name, tensor in named}


def expected(weights: dict[str, torch.Tensor], rank: int = 0, size: int = 1) -> dict[str, list[float]]:
    """What a model holds that loaded these weights and nothing else."""
    model = TinyModel(rank, size)
    model.load_weights(weights.items())
    return values(model)


def make_loader() -> type:
    """A loader class of its own for each rank: the ranks of these tests are threads, and SGLang's are processes."""

    class DefaultModelLoader:
        def _get_weights_iterator(self, folder: str) -> Iterator[tuple[str, torch.Tensor]]:
            files = sorted(Path(folder).glob("*.safetensors"))
            if not files:
                raise RuntimeError(f"Cannot find any model weights with `{folder}`")
            return _read(files)

        def load_weights_and_postprocess(self, model: Any, weights: Weights, device: torch.device) -> None:
            model.load_weights(weights)

    return DefaultModelLoader


def _read(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                yield name, file.get_tensor(name)


@dataclass
class Updater:
    """SGLang's WeightUpdater."""

    model: Any
    model_config: SimpleNamespace
    loader: type
    tp_rank: int = 0
    server_args: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(tp_size=1))
    after: Callable[[], None] = lambda: None

    def get_model_runner(self) -> "Updater":
        return self

    def __hash__(self) -> int:
        return id(self)

    def update_weights_from_disk(
        self, model_path: str, load_format: str, weight_name_filter: Any = None, recapture_cuda_graph: bool = False
    ) -> tuple[bool, str]:
        self.model_config.model_path = model_path
        if load_format != "auto":
            raise ValueError(f"Unknown load format {load_format}")
        loader = self.loader()

        def get_weight_iter() -> Any:
            return loader._get_weights_iterator(self.model_config.model_path)

        try:
            weights = get_weight_iter()
        except Exception as error:
            return False, f"Failed to get weights iterator: {error}."
        try:
            loader.load_weights_and_postprocess(self.model, weights, torch.device("cpu"))
        except Exception as error:
            loader.load_weights_and_postprocess(self.model, get_weight_iter(), torch.device("cpu"))
            return False, f"Failed to update weights: {error}.\nRolling back to original weights."
        self.after()
        return True, "Succeeded to update model weights."
