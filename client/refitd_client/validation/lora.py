"""LoRA adapters as peft saves them, compared with the model that they are for. Pure.

    adapter_config.json          peft_type, r, target_modules, …
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight  [r, in features]
                                 base_model.model.<module>.lora_B.weight  [out features, r]

An engine gets pairs of A and B for linear layers of the model, all of one rank. SGLang adds every pair at
`lora_alpha / r` (lora/lora.py) and has one buffer of rank r (lora/mem_pool.py). A setting that makes an adapter compute
something else is refused by name, and so is one that is not known here: engines read the few that they know, and would
ignore it in silence.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from refitd_client.checkpoint.fault import Code, Defect
from refitd_client.checkpoint.inventory import Inventory, Reference, Tensor
from refitd_client.contract.decoding import converted, from_json
from refitd_client.contract.naming import ADAPTER_CONFIG_NAME, ADAPTER_NAME

MAX_CONFIG_BYTES = 2**20
MOST_FAULTS = 3
_PAIR_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_OTHER_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")  # of peft's module
_PARTS = frozenset({"model", "language_model"})  # of a name, which transformers 5 puts elsewhere than checkpoints do
_FLOATS = frozenset({"F32", "F16", "BF16"})


class AdapterConfig(msgspec.Struct, frozen=True):
    """The part of `adapter_config.json` that matters here. `fan_in_fan_out`: the model's weights lie as (in, out)."""

    peft_type: str
    r: int
    bias: str = "none"
    fan_in_fan_out: bool = False
    init_lora_weights: bool | str | None = None


_UNDERSTOOD = frozenset({*AdapterConfig.__struct_fields__, "lora_alpha", "target_modules"})
_OF_TRAINING = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("lora_dropout", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
        *("megatron_config", "megatron_core", "runtime_config", "qalora_group_size"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # init_lora_weights says what they did
    }
)
"""What decides how an adapter is trained, and which layers get tensors: those are there to be seen."""

_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""The ways to begin that leave the base model as it is."""

_MERGE = "merge it (merge_and_unload) and publish the whole model"
_REFUSED_OPTIONS = {
    "use_dora": "engines would add it as a plain LoRA",
    "use_rslora": "engines would scale it by lora_alpha / r and not by its root: multiply lora_alpha by sqrt(r) and "
    "save use_rslora=false",
    "alpha_pattern": "engines would scale all layers by one lora_alpha",
    "rank_pattern": "engines take one rank for all layers",
    "modules_to_save": "it saves whole modules, which engines do not take",
    "trainable_token_indices": "engines would lose the embeddings of the tokens that it trained",
    "lora_bias": "engines would leave out the biases that it trained",
    "layer_replication": "engines have the layers of the base model, and not copies of them",
    "alora_invocation_tokens": "engines would apply it to all tokens",
    "target_parameters": "engines take pairs of linear layers, and not of single parameters",
    "use_qalora": "engines would not pool its inputs",
    "use_bdlora": "engines would take its blocks for whole matrices",
    "arrow_config": "engines have no router of adapters",
    "kasa_config": "engines would leave out the singular values that it trained",
}
"""What engines would leave out or do in another way."""


class AdapterRefusedError(ValueError):
    """A configuration that is not an adapter's. The message is a sentence about "it"."""


def parse_adapter(data: bytes) -> AdapterConfig:
    """Parse a configuration of any origin. Raises AdapterRefusedError if it is too large, no such JSON object, or of
    another kind of adapter.
    """
    if len(data) > MAX_CONFIG_BYTES:
        raise AdapterRefusedError(f"it is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        said = from_json(data, dict[str, Any])
        config = converted(said, AdapterConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterRefusedError(f"it does not parse: {error}") from error
    init = config.init_lora_weights
    for is_odd, what in (
        (config.peft_type != "LORA", f"it says peft_type {config.peft_type[:40]!a}: engines take LORA alone"),
        (config.r < 1, f"it says rank {config.r}"),
        (config.bias != "none", f"it trains biases, which engines do not take: use bias='none', or {_MERGE}"),
        (
            isinstance(init, str) and init.lower() not in _PLAIN_INITS,
            f"it says init_lora_weights {str(init)[:40]!a}, which changes the base model: save a plain LoRA by peft's "
            f"save_pretrained(..., path_initial_model_for_weight_conversion=), or {_MERGE}",
        ),
    ):
        if is_odd:
            raise AdapterRefusedError(what)
    for name in sorted(said.keys() - _UNDERSTOOD - _OF_TRAINING):
        if said[name]:  # peft saves what is not used as null, false or empty
            why = _REFUSED_OPTIONS.get(name, "which this release of refitd does not know, and engines may ignore")
            raise AdapterRefusedError(_setting(name, why))
    return config


def _setting(name: str, why: str) -> str:
    if name not in _REFUSED_OPTIONS:
        return f"it sets {name[:60]!a}, {why}: leave that out if it is of the training alone, or {_MERGE}"
    return f"it says {name}: {why}" + ("" if name == "use_rslora" else f"; {_MERGE}")


def is_adapter(names: Collection[str]) -> bool:
    weights = [name for name in names if name.endswith(".safetensors")]
    return ADAPTER_CONFIG_NAME in names and weights in ([], [ADAPTER_NAME])


def adapter_faults(config: AdapterConfig, found: Inventory, reference: Reference) -> Iterator[Defect]:
    """What an engine could not add to its model, the reference, at most a few of each kind."""
    pairs: dict[str, dict[str, Tensor]] = {}
    extra: list[str] = []
    for name, tensor in found.tensors.items():
        if (match := _PAIR_NAME.fullmatch(name)) is None:
            extra.append(name)
        else:
            pairs.setdefault(match[1], {})[match[2]] = tensor
    if extra:
        yield Defect(Code.EXTRA_TENSOR, _of_extra(extra[0]))
        if not pairs:
            return
    if not pairs:
        yield Defect(Code.MISSING_TENSOR, f"{ADAPTER_NAME} has no lora_A and lora_B: was the adapter trained?")
    for count, (module, pair) in enumerate(pairs.items()):
        for fault in _of_module(module, pair, config, reference):
            yield fault
            if count >= MOST_FAULTS:
                return


def _of_extra(name: str) -> str:
    if (match := _OTHER_NAME.fullmatch(name)) is not None:
        return (
            f"tensor {name[:100]!a} has its name of a module, and engines read "
            f"base_model.model.{match[1][:60]}.lora_{match[2]}.weight: save the adapter by peft's save_pretrained, "
            "or rename its tensors"
        )
    if name.endswith(".weight") and "lora_" not in name:
        return (
            f"tensor {name[:100]!a} is a whole weight, which engines do not take: if it was not trained, save by "
            f"save_pretrained(..., save_embedding_layers=False); if it was, {_MERGE}"
        )
    return f"tensor {name[:100]!a} is no lora_A or lora_B, and engines would lose what it has learned: {_MERGE}"


def _of_module(
    module: str, pair: Mapping[str, Tensor], config: AdapterConfig, reference: Reference
) -> Iterator[Defect]:
    shape = _shape_in(module, reference)
    if shape is None:
        where = f"(the model is {reference.source})"
        yield Defect(Code.EXTRA_TENSOR, f"the adapter is for {module}, which is no linear layer of the model {where}")
        return
    if len(pair) != 2:
        (there,) = pair
        yield Defect(Code.MISSING_TENSOR, f"{module} has a lora_{there} alone: A and B belong together")
        return
    rank, (outs, ins) = config.r, reversed(shape) if config.fan_in_fan_out else shape
    for half, wanted in (("A", (rank, ins)), ("B", (outs, rank))):
        if not _fits(pair[half].shape, wanted):
            text = f"{list(pair[half].shape)} where the model and rank {rank} want"
            sizes = ", ".join("any" if size is None else str(size) for size in wanted)
            yield Defect(Code.WRONG_SHAPE, f"{module}.lora_{half} is {text} [{sizes}]")
        if pair[half].dtype not in _FLOATS:
            yield Defect(Code.WRONG_DTYPE, f"{module}.lora_{half} is {pair[half].dtype}: save it in BF16, F16 or F32")


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    sizes = zip(shape, wanted, strict=False)
    return len(shape) == len(wanted) and all(each is None or size == each for size, each in sizes)


LogicalShape = tuple[int | None, int | None]


def _shape_in(module: str, reference: Reference) -> LogicalShape | None:
    """The shape of a linear layer, by its name in a module or in a checkpoint; None if the model has none."""
    tensors = reference.inventory.tensors
    found = _logical_shape(module, tensors)
    if found is not None or _plain(module) == module:
        return found
    owners = {name.rpartition(".")[0] for name in tensors if _plain(name).startswith(f"{_plain(module)}.")}
    shapes = [shape for owner in sorted(owners) if (shape := _logical_shape(owner, tensors)) is not None]
    return shapes[0] if len(shapes) == 1 else None


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _PARTS)


def _logical_shape(module: str, tensors: Mapping[str, Tensor]) -> LogicalShape | None:
    """Outputs and inputs of a linear layer, of which a quantised model stores something else: None where its form does
    not show a size. None in all if there is no such layer.

        AWQ, GPTQ           qweight I32, scales (groups, out), qzeros, GPTQ with g_idx (in)
        NVFP4, MXFP4        weight U8 (out, in / 2) and its scales; or weight_packed
        compressed-tensors  weight_packed I32 (out, in / some), of 4 or 8 bits
        bitsandbytes        weight U8 (all / 2, 1) and weight.absmax
    """
    weight, packed = tensors.get(f"{module}.weight"), tensors.get(f"{module}.weight_packed")
    if (qweight := tensors.get(f"{module}.qweight")) is not None:
        return _shape_of_groups(module, qweight, tensors)
    if packed is not None and len(packed.shape) == 2:
        return packed.shape[0], 2 * packed.shape[1] if packed.dtype == "U8" else None
    if weight is None:  # of a quantisation that is not known here
        is_leaf = any(name.startswith(f"{module}.") and "." not in name[len(module) + 1 :] for name in tensors)
        return (None, None) if is_leaf else None
    if f"{module}.weight.absmax" in tensors:
        return None, None
    if len(weight.shape) != 2:
        return None
    halves = weight.dtype == "U8"
    if halves and f"{module}.weight_scale" not in tensors:
        return None, None
    return weight.shape[0], weight.shape[1] * (2 if halves else 1)


def _shape_of_groups(module: str, qweight: Tensor, tensors: Mapping[str, Tensor]) -> LogicalShape:
    scales, zeros, order = (tensors.get(f"{module}.{name}") for name in ("scales", "qzeros", "g_idx"))
    if scales is None or len(scales.shape) != 2 or len(qweight.shape) != 2:
        return None, None
    outs = scales.shape[1]
    if qweight.shape[1] != outs:  # AWQ packs along the outputs
        return outs, qweight.shape[0]
    if order is not None and len(order.shape) == 1:
        return outs, order.shape[0]
    if zeros is not None and len(zeros.shape) == 2 and zeros.shape[1]:
        return outs, qweight.shape[0] * outs // zeros.shape[1]
    return outs, None
