"""What an AReaL configuration (YAML) says of a job, as arguments of `plan()`. Pure but for reading the file.

References to other keys (`${actor.path}`) are followed. Keys are those of AReaL's `cli_args.py`; what it does not say
is left out, and what it says otherwise than as a number, a word or true and false is refused.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

_KEYS: Mapping[str, str] = {
    "cluster.n_nodes": "nodes",
    "cluster.n_gpus_per_node": "gpus_per_node",
    "actor.gradient_checkpointing": "gradient_checkpointing",
    "actor.mb_spec.max_tokens_per_mb": "micro_batch_tokens",
    "sglang.mem_fraction_static": "mem_fraction_static",
    "sglang.context_length": "context_length",
    "sglang.max_running_requests": "running_requests",
    "sglang.attention_backend": "attention_backend",
    "gconfig.n_samples": "samples",
    "gconfig.max_new_tokens": "max_new_tokens",
    "train_dataset.batch_size": "batch_size",
    "train_dataset.max_length": "prompt_tokens",
    "rollout.max_concurrent_rollouts": "concurrent_rollouts",
}
_REFERENCE = re.compile(r"\$\{([A-Za-z0-9_.]+)\}")
_MOST_REFERENCES = 16
_INTEGERS = frozenset(_KEYS.values()) - {"gradient_checkpointing", "mem_fraction_static", "attention_backend"}


def read_areal(file: Path) -> dict[str, Any]:
    """The arguments that a configuration gives.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no AReaL configuration, or a value cannot be one; the message names the key.
    """
    try:
        tree = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{file} is no AReaL configuration: it is no mapping")  # noqa: TRY004 - of what was typed
    config = _Config(file, cast("Mapping[str, Any]", tree))
    given = {name: _checked(config, key, name) for key, name in _KEYS.items() if config.get(key) is not None}
    return {**given, **_allocation(config), **_model(config), **_lora(config)}


class _Config:
    def __init__(self, file: Path, tree: Mapping[str, Any]) -> None:
        self.file = file
        self._tree = tree

    def get(self, key: str) -> Any:
        """The value at a dotted key, None where there is none; references are followed."""
        for _ in range(_MOST_REFERENCES):
            value: Any = self._tree
            for name in key.split("."):
                value = cast("Mapping[str, Any]", value).get(name) if isinstance(value, dict) else None
            found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if found is None:
                return value
            key = found[1]
        raise ValueError(f"{self.file}: {key} refers to itself")


def _checked(config: _Config, key: str, name: str) -> Any:
    value = config.get(key)
    if name in _INTEGERS and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError(f"{config.file}: {key} is {value!r}, which is no whole number")
    if name == "mem_fraction_static" and not isinstance(value, int | float):
        raise ValueError(f"{config.file}: {key} is {value!r}, which is no number")
    if name == "gradient_checkpointing" and not isinstance(value, bool):
        raise ValueError(f"{config.file}: {key} is {value!r}, neither true nor false")
    return value


def _allocation(config: _Config) -> dict[str, Any]:
    """One string for all; or, in newer configurations, one for each of the two."""
    if (whole := config.get("allocation_mode")) is not None:
        return {"allocation": str(whole)}
    parts = [config.get("rollout.backend"), config.get("actor.backend")]
    said = [str(part) for part in parts if part is not None and ":" in str(part)]
    return {"allocation": "+".join(said)} if len(said) == len(parts) else {}


def _model(config: _Config) -> dict[str, Any]:
    """The model, where it is a folder; a name on the hub has to be given as one."""
    path = config.get("actor.path")
    return {"model": Path(path)} if isinstance(path, str) and Path(path).is_dir() else {}


def _lora(config: _Config) -> dict[str, Any]:
    return {"lora_rank": config.get("actor.lora_rank")} if config.get("actor.use_lora") is True else {}
