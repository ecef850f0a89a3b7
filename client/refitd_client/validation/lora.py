"""LoRA adapters as peft saves them, compared with the model that they are for. Pure.

    adapter_config.json          peft_type, r, target_modules, …
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight  [r, in features]
                                 base_model.model.<module>.lora_B.weight  [out features, r]

An engine gets pairs of A and B for linear layers of the model, all of one rank. What engines would ignore in silence,
or add in another way (biases, DoRA, whole modules, another scale or rank), is refused by name.
SGLang adds every pair at `lora_alpha / r` (lora/lora.py) and has one buffer of rank r (lora/mem_pool.py).
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from refitd_client.checkpoint.fault import Code, Defect
from refitd_client.checkpoint.inventory import Inventory, Reference, Tensor
from refitd_client.contract.decoding import from_json
from refitd_client.contract.naming import ADAPTER_CONFIG_NAME, ADAPTER_NAME

MAX_CONFIG_BYTES = 2**20
MOST_FAULTS = 3
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_FLOATS = frozenset({"F32", "F16", "BF16"})


class AdapterConfig(msgspec.Struct, frozen=True):
    """The part of `adapter_config.json` that matters here."""

    peft_type: str
    r: int
    bias: str = "none"
    use_dora: bool = False
    use_rslora: bool = False
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, Any] | None = None


class AdapterRefusedError(ValueError):
    """A configuration that is not an adapter's. The message is a sentence about "it"."""


def parse_adapter(data: bytes) -> AdapterConfig:
    """Parse a configuration of any origin.

    Raises:
        AdapterRefusedError: it is too large, no such JSON object, or of another kind of adapter.
    """
    if len(data) > MAX_CONFIG_BYTES:
        raise AdapterRefusedError(f"it is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        config = from_json(data, AdapterConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterRefusedError(f"it does not parse: {error}") from error
    for is_odd, what in (
        (config.peft_type != "LORA", f"it says peft_type {config.peft_type[:40]!a}: engines take LORA alone"),
        (config.r < 1, f"it says rank {config.r}"),
        (config.use_dora, "it says use_dora: engines would add it as a plain LoRA"),
        (config.use_rslora, "it says use_rslora: engines would scale it by lora_alpha / r and not by its root"),
        (bool(config.alpha_pattern), "it has an alpha_pattern: engines would scale all layers by one lora_alpha"),
        (bool(config.rank_pattern), "it has a rank_pattern, and engines take one rank for all layers"),
        (config.bias != "none", "it trains biases, which engines do not take: use bias='none'"),
        (bool(config.modules_to_save), "it saves whole modules, which engines do not take: leave out modules_to_save"),
    ):
        if is_odd:
            raise AdapterRefusedError(what)
    return config


def is_adapter(names: Collection[str]) -> bool:
    """Whether a folder with these names is an adapter's: a model's may have an adapter's leftovers beside it."""
    weights = [name for name in names if name.endswith(".safetensors")]
    return ADAPTER_CONFIG_NAME in names and weights in ([], [ADAPTER_NAME])


def adapter_faults(config: AdapterConfig, found: Inventory, reference: Reference) -> Iterator[Defect]:
    """What an engine could not add to its model, at most a few of each kind.

    Args:
        config: the adapter's.
        found: the adapter's tensors.
        reference: the model.
    """
    pairs: dict[str, dict[str, Tensor]] = {}
    extra: list[str] = []
    for name, tensor in found.tensors.items():
        if (match := _NAME.fullmatch(name)) is None:
            extra.append(name)
        else:
            pairs.setdefault(match[1], {})[match[2]] = tensor
    if extra:
        yield Defect(Code.EXTRA_TENSOR, f"tensor {extra[0]!a} is no lora_A or lora_B of a linear layer: leave it out")
    if not pairs:
        yield Defect(Code.MISSING_TENSOR, f"{ADAPTER_NAME} has no lora_A and lora_B: was the adapter trained?")
    for count, (module, pair) in enumerate(pairs.items()):
        for fault in _of_module(module, pair, config, reference):
            yield fault
            if count >= MOST_FAULTS:
                return


def _of_module(
    module: str, pair: Mapping[str, Tensor], config: AdapterConfig, reference: Reference
) -> Iterator[Defect]:
    base = reference.inventory.tensors.get(f"{module}.weight")
    if base is None or len(base.shape) != 2:
        where = f"(the model is {reference.source})"
        yield Defect(Code.EXTRA_TENSOR, f"the adapter is for {module}, which is no linear layer of the model {where}")
        return
    if len(pair) != 2:
        (there,) = pair
        yield Defect(Code.MISSING_TENSOR, f"{module} has a lora_{there} alone: A and B belong together")
        return
    rank = config.r
    for half, shape in (("A", (rank, base.shape[1])), ("B", (base.shape[0], rank))):
        if pair[half].shape != shape:
            yield Defect(
                Code.WRONG_SHAPE,
                f"{module}.lora_{half} is {list(pair[half].shape)} where the model and rank {rank} want {list(shape)}",
            )
        if pair[half].dtype not in _FLOATS:
            yield Defect(Code.WRONG_DTYPE, f"{module}.lora_{half} is {pair[half].dtype}: save it in BF16, F16 or F32")
