"""What an AReaL configuration (YAML) says of a job, as arguments of `plan()`. Pure but for reading the file.

References to other keys (`${actor.path}`) are followed. Keys and defaults are those of AReaL's `cli_args.py` (1.0.4):
what the file does not say is what AReaL takes then, and each such default is listed. What it says otherwise than as a
number, a word or true and false is refused.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import yaml

from refitd_plan.allocation import SGLANG, VLLM
from refitd_plan.outputs import areal_keys

_DEFAULTS: Mapping[str, Any] = {
    "sglang.mem_fraction_static": 0.9,
    "sglang.context_length": 32_768,
    "sglang.attention_backend": "fa3",
    "vllm.gpu_memory_utilization": 0.9,
    "vllm.max_model_len": 32_768,
    "vllm.max_num_seqs": 256,
    "gconfig.n_samples": 1,
    "gconfig.max_new_tokens": 16_384,
    "train_dataset.batch_size": 1,
    "actor.gradient_checkpointing": False,
}
_SECTIONS = frozenset({"actor", "rollout", "sglang", "vllm", "gconfig", "train_dataset", "cluster", "allocation_mode"})
_LORA_RANK = 32
_ALL_OF_IT = 2**30  # tokens: no micro-batch is larger
_PRECISIONS: Mapping[str, str] = {"float32": "mixed", "fp32": "mixed", "bfloat16": "bf16", "bf16": "bf16"}
_OPTIMIZERS: Mapping[str, str] = {"adam": "adamw", "adam_bf16": "adamw", "sgd": "sgd"}
_LEFT_OUT: Mapping[str, str] = {
    "ref": " (--reference-model plans for one in the actor's own processes)",
    "critic": "",
    "teacher": "",
}
_REFERENCE = re.compile(r"\$\{([A-Za-z0-9_.]+)\}")
_MOST_REFERENCES = 16
_SAME_WORD = 0.9  # a letter or two: AReaL has min_new_tokens beside max_new_tokens
# Of settings that are no whole numbers: what they are, and what is said of anything else.
_VALUE_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "gradient_checkpointing": ((bool,), "neither true nor false"),
    "mem_fraction_static": ((int, float), "which is no number"),
    "attention_backend": ((bool, object), ""),  # the planner names the words that it knows
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Arguments of `plan()`, and what had to be assumed for them.

    `patch` are keys that have to be otherwise for refitd, whatever the plan is, and `advice` says why.
    """

    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    assumed: tuple[str, ...] = ()
    patch: Mapping[str, str] = field(default_factory=dict[str, str])
    advice: tuple[str, ...] = ()


def read_areal(file: Path, given: Collection[str] = ()) -> Read:
    """The arguments that a configuration gives, but for those that are `given` otherwise.

    Raises:
        ValueError: it cannot be read, is no AReaL configuration, or a value cannot be one; the message names the key.
    """
    try:
        tree = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ValueError(f"--areal {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{file} is no AReaL configuration: it is no mapping")  # noqa: TRY004 - of what was typed
    config = _Config(file, cast("Mapping[str, Any]", tree))
    config.assumed += _slips(file, cast("Mapping[str, Any]", tree))
    settings: dict[str, Any] = {"areal": True}
    for each in (_plain(config), _allocation(config), _batches(config), _trainer(config)):
        settings |= each
    settings |= {} if "model" in given else _model(config)
    config.assumed += config.slips()
    kept = {name: value for name, value in settings.items() if name not in given}
    sharing = _colocated_by(config)
    return Read(
        settings=kept,
        assumed=tuple(config.assumed),
        patch={f"{key}.type": "separation" for key in sharing},
        advice=tuple(
            f"AReaL: {key}.type has to be separation: with colocation it takes the engines' memory away and gives it "
            "back at each step, which 'refitd areal' answers with 409. Both can be on one GPU all the same, each with "
            "its share of the memory: start the engines yourself (docs/areal.md)"
            for key in sharing
        ),
    )


def _slips(file: Path, tree: Mapping[str, Any]) -> Iterator[str]:
    """Sections whose names are nearly those that are read: AReaL has many more, which say nothing here."""
    for name in tree:
        missing = _SECTIONS - tree.keys()
        for meant in get_close_matches(str(name), missing, 1, 0.8) if name not in _SECTIONS else ():
            yield f"{file.name} has {name}, which says nothing here: is {meant} meant?"


class _Config:
    def __init__(self, file: Path, tree: Mapping[str, Any]) -> None:
        self.file = file
        self.assumed: list[str] = []
        self._tree = tree
        self._missing: set[str] = set()

    def get(self, key: str) -> Any:
        """The value at a dotted key, None where there is none; references are followed."""
        for _ in range(_MOST_REFERENCES):
            value = self._at(key.split("."))
            if value is None:
                self._missing.add(key)
            found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if found is None:
                return value
            key = found[1]
        raise ValueError(f"{self.file}: {key} refers to itself")

    def _at(self, names: Sequence[str]) -> Any:
        value: Any = self._tree
        for name in names:
            value = cast("Mapping[str, Any]", value).get(name) if isinstance(value, dict) else None
        return value

    def slips(self) -> list[str]:
        """Keys that are nearly those that were looked for and are not there."""
        return [slip for key in sorted(self._missing) for slip in self._slips(*key.rpartition("."))]

    def _slips(self, section: str, _: str, name: str) -> Iterator[str]:
        beside = self._at(section.split(".")) if section else None
        names = [str(each) for each in cast("Mapping[Any, Any]", beside)] if isinstance(beside, dict) else []
        for slip in get_close_matches(name, names, 1, _SAME_WORD):
            yield f"{self.file.name} has {section}.{slip}, which says nothing here: is {name} meant?"

    def default(self, key: str, value: Any) -> Any:
        """AReaL's own value of a key that the file does not have, which is listed."""
        self.assumed.append(f"{self.file.name} has no {key}: AReaL takes {value}")
        return value

    def word(self, key: str, default: str, choices: Mapping[str, str]) -> str:
        """What a word of AReaL's is in a plan."""
        said = self.get(key)
        said = self.default(key, default) if said is None else said
        if said not in choices:
            raise ValueError(f"{self.file}: {key} is {said!r}: {', '.join(choices)} can be planned")
        return choices[said]


def _plain(config: _Config) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, key in areal_keys(_engine(config)).items():
        value = _checked(config, key, name, _DEFAULTS.get(key))
        if value is not None:
            settings[name] = value
    if config.get("sglang.disable_cuda_graph") is True:
        settings["cuda_graphs"] = False
    if (dtype := config.get("sglang.kv_cache_dtype")) is not None:
        settings["kv_cache_bytes"] = kv_cache_bytes(f"{config.file}: sglang.kv_cache_dtype", dtype)
    return settings


def _engine(config: _Config) -> str:
    """The backend that generates."""
    said = config.get("allocation_mode") or config.get("rollout.backend") or ""
    return VLLM if str(said).strip().lower().startswith(VLLM) else SGLANG


def _checked(config: _Config, key: str, name: str, default: Any = None) -> Any:
    """The value at a key, of the kind that the setting `name` has; else AReaL's default, if it has one."""
    value = config.get(key)
    if value is None:
        return None if default is None else config.default(key, default)
    kinds, fault = _VALUE_KINDS.get(name, ((int,), "which is no whole number"))
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"{config.file}: {key} is {value!r}, {fault}")
    return value


def kv_cache_bytes(name: str, dtype: str) -> int:
    """Bytes of an element of the KV cache, by SGLang's word for it.

    Raises:
        ValueError: it is none that can be planned; `name` says where it stands.
    """
    if dtype in {"auto", "bfloat16", "bf16"}:
        return 2
    if not dtype.startswith("fp8"):
        raise ValueError(f"{name} is {dtype!r}: auto or fp8 can be planned")
    return 1


def _allocation(config: _Config) -> dict[str, Any]:
    """One string for all; or, in newer configurations, one for each of the two, which may share their GPUs."""
    if (whole := config.get("allocation_mode")) is not None:
        return {"allocation": str(whole)}
    parts = [config.get("rollout.backend"), config.get("actor.backend")]
    said = [str(part) for part in parts if part is not None and ":" in str(part)]
    if len(said) != len(parts):
        return {}
    if not _colocated_by(config):
        return {"allocation": "+".join(said)}
    config.assumed.append(
        "scheduling_strategy is colocation: engine and trainer are planned on the same GPUs, with all of their memory "
        "at a time"
    )
    return {"allocation": "|".join(said)}


def _colocated_by(config: _Config) -> list[str]:
    """The keys by which trainer and engines get the same GPUs, as AReaL's trainer decides it
    (`_is_actor_rollout_colocated`); none where they do not.
    """
    found: list[str] = []
    for one, other in (("actor", "rollout"), ("rollout", "actor")):
        strategy = f"{one}.scheduling_strategy"
        if config.get(f"{strategy}.type") == "colocation" and config.get(f"{strategy}.target") == other:
            found.append(strategy)
    return found


def _batches(config: _Config) -> dict[str, Any]:
    """Without a number AReaL takes as many rollouts at a time as it consumes, and a rank's whole batch at once."""
    settings: dict[str, Any] = {}
    if config.get("rollout.max_concurrent_rollouts") is None:
        key = "rollout.consumer_batch_size"
        settings["concurrent_rollouts"] = _checked(config, key, key, 1)
    key = "actor.mb_spec.max_tokens_per_mb"
    if config.get(key) is None:
        config.assumed.append(f"{config.file.name} has no {key}: AReaL makes one micro-batch of a rank's whole batch")
        settings["micro_batch_tokens"] = _ALL_OF_IT
    return settings


def _trainer(config: _Config) -> dict[str, Any]:
    """Storage in fp32 with steps in bf16 takes 16 bytes a parameter, as master weights beside bf16 do."""
    settings: dict[str, Any] = {"precision": config.word("actor.optimizer_dtype", "float32", _PRECISIONS)}
    settings["optimizer"] = config.word("actor.optimizer.type", "adam", _OPTIMIZERS)
    if config.get("actor.use_lora") is True:
        settings["lora_rank"] = _checked(config, "actor.lora_rank", "lora_rank", _LORA_RANK)
    others = [(name, more) for name, more in _LEFT_OUT.items() if config.get(name) is not None]
    config.assumed += [f"{config.file.name} has {name}: its memory is not planned for{more}" for name, more in others]
    return settings


def _model(config: _Config) -> dict[str, Any]:
    """The model's folder."""
    path = config.get("actor.path")
    if path is None:
        return {}
    if not isinstance(path, str) or not Path(path).is_dir():
        raise ValueError(f"{config.file}: actor.path is {path!r}, which is no folder here: give --model DIR")
    return {"model": Path(path)}
