"""A model's shape out of its `config.json`, and what is counted from it: parameters, and bytes of KV cache.

Known kinds: decoders with grouped-query attention (Llama, Qwen2, Qwen3, Mistral), mixtures of experts (Qwen2-MoE,
Qwen3-MoE, Mixtral) and multi-head latent attention (DeepSeek V2 and V3). Field names are those of transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from refitd_client.checkpoint.opening import CONFIG_NAME
from refitd_client.contract.decoding import from_python_json
from refitd_client.errors import PlanRefusedError
from refitd_plan.allocation import check_positive

_BIASED = frozenset({"qwen2", "qwen2_moe"})  # biases on q, k and v that their configurations do not speak of
_NORMED = frozenset({"qwen3", "qwen3_moe"})  # a norm on each head of q and k
KNOWN = _BIASED | _NORMED | {"llama", "mistral", "mixtral", "deepseek_v2", "deepseek_v3"}
"""The kinds whose parameters and caches are counted as they are."""
_MOST_OF_CONFIG = 10**9
_KV_BYTES = 2  # of an element of the KV cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). `q_rank`: None for plain q."""

    kv_rank: int
    q_rank: int | None
    rope_dim: int
    nope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in all layers but the first `dense_layers`. Sizes are of the inner dimension."""

    count: int
    active: int
    size: int
    shared_size: int
    dense_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder. `inner` is the MLP's size; `tied`: the embedding is the output head too."""

    kind: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int | None
    tied: bool
    latent: Latent | None = None
    experts: Experts | None = None

    @property
    def q_size(self) -> int:
        if self.latent is not None:
            return self.heads * (self.latent.nope_dim + self.latent.rope_dim)
        return self.heads * self.head_dim

    @property
    def out_size(self) -> int:
        """The width of what attention gives to its output projection."""
        return self.heads * (self.latent.v_dim if self.latent is not None else self.head_dim)

    @property
    def norms_heads(self) -> bool:
        return self.kind in _NORMED

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """The attention parameters of one layer, with its two norms."""
        norms = 2 * self.hidden
        if self.latent is not None:
            return norms + self._latent_parameters(self.latent)
        matrices = 2 * self.hidden * self.q_size + 2 * self.hidden * self.kv_size
        biases = self.q_size + 2 * self.kv_size if self.kind in _BIASED else 0
        return norms + matrices + biases + (2 * self.head_dim if self.norms_heads else 0)

    def _latent_parameters(self, latent: Latent) -> int:
        down = self.hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank
        up = latent.kv_rank * self.heads * (latent.nope_dim + latent.v_dim)
        compressed = latent.q_rank
        q = (
            self.hidden * self.q_size
            if compressed is None
            else self.hidden * compressed + compressed + compressed * self.q_size
        )
        return down + up + q + self.out_size * self.hidden

    @property
    def dense_layers(self) -> int:
        return self.layers if self.experts is None else self.experts.dense_layers

    @property
    def dense_parameters(self) -> int:
        """All that is in every layer, and plain MLPs, routers and shared experts; without experts and embeddings."""
        total = self.layers * self.attention_parameters + self.dense_layers * 3 * self.hidden * self.inner + self.hidden
        if self.experts is not None:
            router = self.hidden * self.experts.count
            gate = self.hidden if self.kind == "qwen2_moe" else 0
            shared = 3 * self.hidden * self.experts.shared_size
            total += (self.layers - self.dense_layers) * (router + shared + gate)
        return total

    @property
    def expert_parameters(self) -> int:
        if self.experts is None:
            return 0
        return (self.layers - self.dense_layers) * self.experts.count * 3 * self.hidden * self.experts.size

    @property
    def embedding_parameters(self) -> int:
        """The embedding, and the output head where it is another matrix."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.dense_parameters + self.expert_parameters + self.embedding_parameters

    def kv_bytes(self, tp: int, pp: int) -> float:
        """What one token takes in the KV cache of one GPU, in bytes, in bf16.

        Keys and values of every layer, heads over `tp` (a head is never cut: more ranks than heads hold copies); with
        latent attention one compressed vector, whole on each rank. As SGLang's `DefaultPoolConfigurator` counts.
        """
        layers = self.layers / pp
        if self.latent is not None:
            return (self.latent.kv_rank + self.latent.rope_dim) * layers * _KV_BYTES
        return 2 * max(1, self.kv_heads // tp) * self.head_dim * layers * _KV_BYTES


def lora_parameters(model: Model, rank: int) -> float:
    """Two matrices of this rank beside each projection of every layer's attention and MLP."""
    attention = 2 * (model.hidden + model.q_size) + 2 * (model.hidden + model.kv_size)
    return rank * model.layers * (attention + 3 * (model.hidden + model.inner))


def read_model(folder: Path) -> tuple[Model, list[str]]:
    """The model in a folder, and what its configuration left to be assumed.

    Raises:
        PlanRefusedError: there is no configuration, or it lacks what is needed; the field is named.
    """
    path = folder / CONFIG_NAME if folder.is_dir() else folder
    try:
        config = from_python_json(path.read_bytes(), dict[str, Any])
    except OSError as error:
        what = "name the model's folder on this machine"
        raise PlanRefusedError(f"--model: {path} cannot be read ({error.strerror}): {what}") from error
    except msgspec.DecodeError as error:
        raise PlanRefusedError(f"--model: {path} is no JSON object: {error}") from error
    return model_of(config, str(path))


def model_of(config: Mapping[str, Any], where: str = CONFIG_NAME) -> tuple[Model, list[str]]:
    """The model of a configuration, and what that left to be assumed. `where` names it in errors.

    Raises:
        PlanRefusedError: a field is missing or absurd.
    """
    fields = _Fields(config, where)
    heads = fields.number("num_attention_heads")
    hidden = fields.number("hidden_size")
    latent = _latent(fields)
    kind = str(fields.get("model_type") or "?")
    if kind not in KNOWN:
        fields.assumed.append(f"{where}: model_type {kind!r} is not known here: it is counted as a decoder like Llama")
    if fields.get("quantization_config") or fields.outer.get("quantization_config"):
        fields.assumed.append(
            f"{where}: quantization_config is left out: weights are counted in bf16, which takes more"
        )
    model = Model(
        kind=kind,
        hidden=hidden,
        inner=fields.number("intermediate_size"),
        layers=fields.number("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.number("num_key_value_heads", heads, "as many as there are heads"),
        head_dim=fields.number("head_dim", hidden // heads) if hidden // heads else fields.number("head_dim"),
        vocabulary=fields.number("vocab_size"),
        context=fields.number("max_position_embeddings") if fields.get("max_position_embeddings") else None,
        tied=fields.flag("tie_word_embeddings"),
        latent=latent,
        experts=_experts(fields),
    )
    return model, fields.assumed


class _Fields:
    """A configuration's fields; the language model's own where it is a part of a larger one."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.outer = config
        self.assumed: list[str] = []
        inner: Any = config.get("text_config")
        self._config: Mapping[str, Any] = cast("Mapping[str, Any]", inner) if isinstance(inner, dict) else config
        if self._config is not config:
            self.assumed.append(f"{where}: only the language model (text_config) is planned for")

    def get(self, name: str) -> Any:
        return self._config.get(name)

    def number(self, name: str, default: int | None = None, why: str | None = None) -> int:
        value = self._config.get(name)
        if value is None:
            if default is None:
                raise PlanRefusedError(f"{self.where} has no {name!r}: nothing can be planned without it")
            if why is not None:
                self.assumed.append(f"{self.where} has no {name!r}: {why}")
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise PlanRefusedError(f"{self.where}: {name!r} is {value!r}, which is no whole number")
        check_positive(f"{self.where}: {name!r}", value, most=_MOST_OF_CONFIG)
        return value

    def flag(self, name: str) -> bool:
        value = self._config.get(name)
        if value is None:
            self.assumed.append(f"{self.where} has no {name!r}: the output head is a matrix of its own")
            return False
        if not isinstance(value, bool):
            raise PlanRefusedError(f"{self.where}: {name!r} is {value!r}, neither true nor false")
        return value


def _latent(fields: _Fields) -> Latent | None:
    if fields.get("kv_lora_rank") is None:
        return None
    return Latent(
        kv_rank=fields.number("kv_lora_rank"),
        q_rank=None if fields.get("q_lora_rank") is None else fields.number("q_lora_rank"),
        rope_dim=fields.number("qk_rope_head_dim"),
        nope_dim=fields.number("qk_nope_head_dim"),
        v_dim=fields.number("v_head_dim"),
    )


def _experts(fields: _Fields) -> Experts | None:
    counts = ("num_experts", "n_routed_experts", "num_local_experts")
    name = next((name for name in counts if fields.get(name)), None)
    if name is None:
        return None
    size = fields.number("moe_intermediate_size", fields.number("intermediate_size"))
    shared = _or_none(fields, "shared_expert_intermediate_size") or size * _or_none(fields, "n_shared_experts")
    return Experts(
        count=fields.number(name),
        active=fields.number("num_experts_per_tok"),
        size=size,
        shared_size=shared,
        dense_layers=_or_none(fields, "first_k_dense_replace"),
    )


def _or_none(fields: _Fields, name: str) -> int:
    """A count that may be missing, null or 0: then there are none."""
    return fields.number(name) if fields.get(name) else 0
