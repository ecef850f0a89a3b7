"""A model's shape out of its `config.json`. Field names are those of transformers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from refitd_client.errors import PlanRefusedError
from refitd_plan.faults import positive
from refitd_plan.model import KNOWN, Experts, Latent, Model

CONFIG_NAME = "config.json"
_MOST = 10**9


def read_model(folder: Path) -> tuple[Model, list[str]]:
    """The model in a folder, and what its configuration left to be assumed.

    Raises:
        PlanRefusedError: there is no configuration, or it lacks what is needed; the field is named.
    """
    path = folder / CONFIG_NAME if folder.is_dir() else folder
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
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
    fields.assumed += _unknown(fields, kind)
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
        positive(f"{self.where}: {name!r}", value, most=_MOST)
        return value

    def flag(self, name: str) -> bool:
        value = self._config.get(name)
        if value is None:
            self.assumed.append(f"{self.where} has no {name!r}: the output head is a matrix of its own")
            return False
        if not isinstance(value, bool):
            raise PlanRefusedError(f"{self.where}: {name!r} is {value!r}, neither true nor false")
        return value


def _unknown(fields: _Fields, kind: str) -> Iterator[str]:
    """What is in the configuration and not in the count."""
    if kind not in KNOWN:
        yield f"{fields.where}: model_type {kind!r} is none that is known here: it is counted as a decoder like Llama"
    if fields.get("quantization_config") or fields.outer.get("quantization_config"):
        yield f"{fields.where}: quantization_config is left out: weights are counted in bf16, which takes more"


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
