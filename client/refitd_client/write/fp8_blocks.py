"""Linear layers' weights in fp8, block by block: `dtype="fp8_block"`.

    x.weight             float8_e4m3fn, in the shape of the trainer's weight
    x.weight_scale_inv   float32, one for each block of 128 by 128 elements or less: value = element · scale

SGLang and vLLM serve such checkpoints as `fp8` with `weight_block_size` [128, 128]; DeepSeek-V3 and the FP8 releases of
Qwen3 have this layout. The arithmetic is that of `block_fp8` in slime's `tools/convert_hf_to_fp8.py`: a scale is the
block's largest magnitude divided by 448 in float32, an element is the value divided by the scale, rounded as torch
rounds. One thing is added: a block of zeros has scale 1, where the division would give NaN.

What stays as it is: what the base model's own checkpoint has without scales, if that is in fp8; else what its
configuration lists (`modules_to_not_convert`) and embeddings, heads, norms, router gates and vision towers.

A weight is quantised anew each time its bytes are asked for, some rows at a time. Nothing is kept between two steps.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec

from refitd_client.checkpoint.header import SCALES_END, Entry
from refitd_client.contract.decoding import from_python_json
from refitd_client.errors import PublishError
from refitd_client.files.plain_file import read_plain
from refitd_client.tensors import Casts, TensorSource, entry_of, refused

_MAX_CONFIG_BYTES = 4 * 2**20
BLOCK = 128
LARGEST = 448.0  # of float8_e4m3fn

_WEIGHT, _SCALE = ".weight", SCALES_END.removeprefix("weight")
_WIDE = frozenset({"F64", "F32", "F16", "BF16"})
_SCALED_AT_ONCE = 2**24  # elements: with what is computed from them they take 200 MB
_STAY = (
    "embed", "norm", "lm_head", "router", ".gate.", "shared_expert_gate", "eh_proj", "weights_proj", "visual", "vision",
)  # fmt: skip


class Fp8Blocks:
    """Decides which weights a publisher quantises, and quantises them."""

    def __init__(self, casts: Casts, folder: Path | None, names: frozenset[str] | None) -> None:
        """Read what the base model, if there is one, says of its quantisation. `names` are the tensors in its
        checkpoint. Raises PublishError if it is quantised in another way.
        """
        self._casts = casts
        self._config = {} if folder is None else _read(folder / "config.json")
        told = cast("dict[str, Any]", self._config.get("quantization_config") or {})
        form = {key: told.get(key) for key in ("quant_method", "weight_block_size", "scale_fmt")}
        if told and form != {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "scale_fmt": None}:
            raise PublishError(
                f"base_model {folder} is quantised otherwise than by dtype fp8_block: {form}. Name one in fp8 with "
                f"weight_block_size [{BLOCK}, {BLOCK}] and no scale_fmt, or one that is not quantised"
            )
        self._is_told = bool(told)
        self._listed: list[str] = told.get("modules_to_not_convert") or told.get("ignored_layers") or []
        self._scaled = {name for name in names or () if name.endswith(SCALES_END)}

    def sources(self, source: TensorSource) -> list[TensorSource]:
        """What is published of a tensor: itself, or its elements in fp8 and their scales. Raises InvalidWeightsError if
        it would have to be quantised, and is no torch tensor.
        """
        entry, held = source.entry, source.held
        if not self._takes(entry):
            return [source]
        if held is None:
            raise refused(entry.name, "is a numpy array, which is not quantised: pass torch tensors")

        def made(entry: Entry, make: Callable[[Any], Any]) -> TensorSource:
            torch: Any = sys.modules["torch"]
            return replace(
                source,
                entry=entry,
                read=lambda: make(held.value.detach()).cpu().reshape(-1).view(torch.uint8).numpy(),
                tensor=lambda: make(held.value.detach()),
                memory=None if source.memory is None else (entry.dtype, source.memory),
                is_view=False,
                address=0,
            )

        blocks = tuple(-(-size // BLOCK) for size in entry.shape)
        return [
            made(entry_of(entry.name, "float8_e4m3fn", entry.shape), elements_of),
            made(entry_of(entry.name + _SCALE, "float32", blocks), scales_of),
        ]

    def config(self, entries: Iterable[Entry]) -> bytes:
        """The base model's `config.json` with this quantisation of what is published; nothing if that names it already,
        or there is none.
        """
        if self._is_told or not self._config:
            return b""
        kept = [
            entry.name.removesuffix(_WEIGHT)
            for entry in entries
            if entry.name.endswith(_WEIGHT) and len(entry.shape) > 1 and entry.dtype in _WIDE
        ]
        quantisation = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": sorted(kept),
        }
        return json.dumps(self._config | {"quantization_config": quantisation}, indent=2).encode()

    def _takes(self, entry: Entry) -> bool:
        name = entry.name
        if len(entry.shape) != 2 or 0 in entry.shape or entry.dtype not in _WIDE or not name.endswith(_WEIGHT):
            return False
        if not self._casts.is_fp8_block(name):
            return False
        if self._scaled:
            return name + _SCALE in self._scaled
        listed = any(name.startswith(f"{module}.") for module in self._listed)
        return not listed and not any(part in f".{name}" for part in _STAY)


def scales_of(weight: Any) -> Any:
    """The scales of a matrix: float32, one for each block."""
    return sys.modules["torch"].cat([_scales(blocks) for blocks in _slabs(weight)])


def elements_of(weight: Any) -> Any:
    """The elements of a matrix in fp8. NaN and infinity become NaN."""
    torch: Any = sys.modules["torch"]
    rows, columns = weight.shape
    found = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=weight.device)
    begin = 0
    for blocks in _slabs(weight):
        elements = (blocks / _scales(blocks)[:, None, :, None]).clamp_(-LARGEST, LARGEST).to(found.dtype)
        slab = elements.reshape(-1, elements.shape[2] * BLOCK)[: rows - begin, :columns]
        found[begin : begin + len(slab)] = slab
        begin += len(slab)
    return found


def _slabs(weight: Any) -> Iterator[Any]:
    """Some rows of blocks at a time in float32: (rows of blocks, 128, blocks of a row, 128), filled up with zeros."""
    rows, columns = weight.shape
    step = max(1, _SCALED_AT_ONCE // (columns * BLOCK)) * BLOCK
    for begin in range(0, rows, step):
        slab = weight[begin : begin + step].float()
        slab = sys.modules["torch"].nn.functional.pad(slab, (0, -columns % BLOCK, 0, -len(slab) % BLOCK))
        yield slab.reshape(len(slab) // BLOCK, BLOCK, slab.shape[1] // BLOCK, BLOCK)


def _scales(blocks: Any) -> Any:
    largest = blocks.abs().amax(dim=(1, 3))
    scales = largest / largest.new_full((), LARGEST)  # a number would be a product with its inverse on a GPU
    # Of zeros, and of what is too small to be divided. A NaN shows in the elements, an infinity here as well.
    return sys.modules["torch"].where(scales > 0, scales, 1.0)


def _read(path: Path) -> dict[str, Any]:
    try:
        return from_python_json(read_plain(path, _MAX_CONFIG_BYTES, follow=True), dict[str, Any])
    except msgspec.MsgspecError as error:
        raise PublishError(f"{path} cannot be read as a model's configuration: {error}") from error
