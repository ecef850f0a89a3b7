"""LoRA adapters: read from peft's files, and added to what linear layers give for the rows that ask for them."""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

_DOWN_NAME = re.compile(r"base_model\.model\.(.+)\.lora_A\.weight")


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """By linear layer: A [r, in] and B [out, r], B multiplied with the adapter's scale."""

    pairs: dict[str, tuple[Tensor, Tensor]]


def read_adapter(folder: Path, decoder: nn.Module) -> Adapter:
    """Read a folder as peft saves it. Blocking.

    Raises:
        OSError: a file cannot be read.
        ValueError: it is no adapter of this model.
        SafetensorError: a file is damaged.
    """
    config = json.loads((folder / "adapter_config.json").read_bytes())
    tensors, layers = load_file(folder / "adapter_model.safetensors"), dict(_linear(decoder))
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, first in tensors.items():
        if (found := _DOWN_NAME.fullmatch(name)) is None:
            continue
        if (layer := layers.get(found[1])) is None:
            raise ValueError(f"the model has no linear layer {found[1]}")
        second = tensors[name.replace("lora_A", "lora_B")] * (config["lora_alpha"] / config["r"])
        pairs[found[1]] = first.to(layer.weight.dtype), second.to(layer.weight.dtype)
    return Adapter(pairs)


def _linear(decoder: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, module) for name, module in decoder.named_modules() if isinstance(module, nn.Linear))


class AdapterRows:
    """Which adapter each row of the next forward has. None for a row of the model alone."""

    def __init__(self, decoder: nn.Module) -> None:
        self.rows: Sequence[Adapter | None] = ()
        for name, layer in _linear(decoder):
            layer.register_forward_hook(partial(self._add, name))

    def _add(self, name: str, _layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        for row, adapter in enumerate(self.rows):
            if adapter is not None and (pair := adapter.pairs.get(name)) is not None:
                output[row] += inputs[0][row] @ pair[0].T @ pair[1].T


class Adapters:
    """The adapters by name, with their folders. One change at a time, as in SGLang."""

    def __init__(self, decoder: nn.Module, *, enabled: bool) -> None:
        self.enabled = enabled
        self.folders: dict[str, str] = {}
        self._loaded: dict[str, Adapter] = {}
        self._decoder = decoder
        self._turn = asyncio.Lock()

    def named(self, name: Any) -> Adapter | None:
        """The adapter that a request names; None where it names none.

        Raises:
            ValueError: no adapter of this name is loaded.
        """
        if name is None:
            return None
        if name not in self._loaded:
            raise ValueError(f"The following requested LoRA adapters are not loaded: {name}")
        return self._loaded[name]

    async def load(self, name: str, folder: str) -> str | None:
        """Load an adapter. Returns why that failed; None where it did not."""
        if not self.enabled:
            return "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        async with self._turn:
            if name in self.folders:
                return f"Failed to load LoRA adapter {name} from {folder}: it is already loaded"
            try:
                self._loaded[name] = await asyncio.to_thread(read_adapter, Path(folder), self._decoder)
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                return f"Failed to load LoRA adapter {name} from {folder}: {error}"
            self.folders[name] = folder
            return None

    async def unload(self, name: str) -> str | None:
        """Unload an adapter. Returns why that failed; None where it did not."""
        if not self.enabled:
            return "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        async with self._turn:
            if self.folders.pop(name, None) is None:
                return f"LoRA with name {name} does not exist. Loaded LoRAs: {set(self.folders)}"
            del self._loaded[name]
            return None
