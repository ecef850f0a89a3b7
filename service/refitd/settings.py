"""Every setting of the service: `REFITD_*` in the environment, the flag of the same name, and its documentation.

Secrets come from files. Durations are seconds, sizes are bytes (or '200GB', '1.5TiB').
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode

from refitd.api.options import AccessSettings, ApiValues
from refitd.engine.address import check_adapter_name, parse_allow_list
from refitd.engine.kind import EngineAccess
from refitd.engine.registry import EngineSpec, check_engine, check_pause_mode, named_engines
from refitd.parts import parts
from refitd.policy.admit import CatalogRules, Prove
from refitd.policy.keep import KEEP_LAST, KeepRules
from refitd.policy.roster import OperatorHosts
from refitd.policy.spare_slots import ReclaimRules, SlotRules
from refitd.policy.strategy import Strategy, StrategyName, strategy_of
from refitd.root.ownership import why_no_slots
from refitd.text import bytes_in, canary_check_url
from refitd_client.contract.naming import check_run
from refitd_client.contract.states import Kind
from refitd_client.contract.wire import Keeping
from refitd_client.validation.foreign import Trainer

LORA_KEEP = 2
SETTLE_TIMEOUTS = 60  # of --settle, after which an unchanged, incomplete checkpoint is rejected
SCANS_A_SWEEP = 5  # between two looks for what to reclaim, where nothing changes


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _run(value: object) -> object:
    return check_run(value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class LoraVersions:
    """What adapters are called, and how many stay loaded in each engine."""

    name: str
    keep: int = LORA_KEEP

    def __str__(self) -> str:
        return f"{self.name}:{self.keep}"


def _adapters(value: object) -> object:
    if not isinstance(value, str):
        return value
    name, is_said, keep = value.partition(":")
    if is_said and (not keep.isdecimal() or int(keep) < 1):
        raise ValueError(f"{value!r} is not of the form NAME or NAME:KEEP, with at least 1 to keep")
    return LoraVersions(check_adapter_name(name), int(keep) if is_said else LORA_KEEP)


def _strategy(value: object) -> object:
    return strategy_of(value) if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(bytes_in)]
Urls = Annotated[list[str], NoDecode, BeforeValidator(_split)]


class CoreSettings(AccessSettings):
    """The settings of the core. `Settings` has those of the rings besides."""

    root: Path = Field(description="Folder that trainers publish into: <root>/<run>/v000123/")
    engines: Annotated[Urls, AfterValidator(lambda texts: [check_engine(text) for text in texts])] = Field(
        default=[],
        description="URLs of the engines (comma-separated in the environment); sglang=URL says its kind",
    )
    engines_file: Path | None = Field(
        default=None, description="YAML file of engines: url, run, keys, path map; watched"
    )
    run: Annotated[str | None, BeforeValidator(_run)] = Field(
        default=None, description="Run that engines without one of their own follow (default: the only run in the root)"
    )
    trainers: Annotated[list[Trainer], NoDecode, BeforeValidator(_split)] = Field(
        default=[],
        description="Trainers whose own folders in the root are versions as well",
    )
    base_model: Path | None = Field(
        default=None,
        description="Model that the engines serve: checkpoints are compared with its tensors' names and shapes",
    )
    path_map: str | None = Field(
        default=None,
        description="Where the engines see the root, if elsewhere than the service does (an absolute path)",
    )
    lora: Annotated[LoraVersions, NoDecode, BeforeValidator(_adapters)] | None = Field(
        default=None,
        description="Versions are LoRA adapters, which engines get under NAME-v<step> beside the model they serve; the "
        "newest KEEP (2) stay loaded, since requests may still name them",
    )
    engine_key_file: Path | None = Field(default=None, description="File with the engines' API key")
    engine_admin_key_file: Path | None = Field(default=None, description="File with the engines' admin API key")
    engine_allow: Urls = Field(
        default=[],
        description="Hosts (names, *.patterns, CIDRs) that the API and the engines file may name as engines "
        "(default: loopback and the hosts that are named already)",
    )

    state: Path | None = Field(
        default=None, description="Folder of the journal (default: under the XDG state directory)"
    )
    keep_last: int = Field(
        default=3,
        ge=1,
        description=KEEP_LAST,
    )
    keep_every: int = Field(default=0, ge=0, description="Keep each version whose step divides by this (0: none)")
    reclaim_foreign: bool = Field(
        default=False,
        description="Delete versions in trainers' own folders by the keep rules as well (default: leave it to them)",
    )
    disk_budget: Size | None = Field(
        default=None,
        description="Bytes that all that refitd may delete may take in the root; slots go first, then evidence",
    )
    slots: int = Field(
        default=2,
        ge=0,
        description="Old versions' files of each run that its publisher may write the next versions into (0: none)",
    )

    scan_interval: float = Field(
        default=2.0,
        gt=0,
        description="Time between full scans of the root; at each fifth one what may be deleted is looked for",
    )
    settle: float = Field(
        default=1.0,
        ge=0,
        description="Time for which a checkpoint without manifest must not change; an incomplete one that has not "
        "changed for 60 times that is rejected",
    )
    allow_dtype_cast: bool = Field(
        default=False, description="Let engines cast floating-point tensors to their own dtype"
    )
    prove: Prove = Field(
        default=Prove.ENGINE,
        description="Who reads a version's tensors to prove them: the GPUs of engines with the plugin (where there are "
        "none, the service), or the service",
    )

    probe_interval: float = Field(
        default=2.0,
        gt=0,
        description="Time between looks at an engine that is in sync; where there are many, a fortieth of a second "
        "for each of them if that is longer, but a minute at most",
    )
    load_timeout: float = Field(default=600.0, gt=0, description="Longest time that an engine may take to load")
    pause_mode: Annotated[str, AfterValidator(check_pause_mode)] = Field(
        default="auto",
        description="What becomes of requests in flight: they go on after a load (SGLang: retract, vLLM: keep), end "
        "before it (vLLM: wait), or are ended (abort). auto: they go on if the engine can",
    )
    strategy: Annotated[Strategy, NoDecode, BeforeValidator(_strategy)] = Field(
        default=Strategy(),
        description="How a version goes to the engines: all at once; rolling, N (1) out of service at a time; or to a "
        "canary first, ENGINE or the first by name",
    )
    canary_check: Annotated[str, AfterValidator(canary_check_url)] | None = Field(
        default=None, description="URL that is asked (POST) whether a canary is good: 2xx yes, 4xx no"
    )
    quorum: int = Field(default=1, ge=1, description="Engines that must serve a version before it counts as served")

    @model_validator(mode="after")
    def _check(self) -> "CoreSettings":
        parse_allow_list(self.engine_allow)
        self.check_access()
        self._check_strategy()
        if self.path_map is not None and not self.path_map.startswith("/"):
            raise ValueError("path_map must be an absolute path")
        return self

    def _check_strategy(self) -> None:
        if self.canary_check is not None and self.strategy.name is not StrategyName.CANARY:
            raise ValueError(f"--canary-check is for --strategy canary, and the strategy is {self.strategy}")

    @property
    def kind(self) -> Kind:
        """The kind of the versions in the root."""
        return Kind.FULL if self.lora is None else Kind.LORA

    @property
    def takes_deltas(self) -> bool:
        """Whether versions may be deltas as well: they may where they are no adapters."""
        return self.lora is None

    @property
    def keeping(self) -> Keeping:
        """What is kept on the root, as others are told."""
        return Keeping(last=self.keep_last, slots=self.slots, disk_budget=self.disk_budget)

    @property
    def api_values(self) -> ApiValues:
        """What the routes get of them."""
        return ApiValues(
            access=self,
            root=self.root,
            operator_hosts=self.operator_hosts,
            quorum=self.quorum,
            keeping=self.keeping,
        )

    @property
    def catalog_rules(self) -> CatalogRules:
        return CatalogRules(
            scan_interval=self.scan_interval,
            settle_for=self.settle,
            settle_timeout=SETTLE_TIMEOUTS * self.settle,
            allow_dtype_cast=self.allow_dtype_cast,
            kind=self.kind,
            deltas=self.takes_deltas,
            prove=self.prove,
        )

    @property
    def engine_specs(self) -> dict[str, EngineSpec]:
        return named_engines(self.engines)

    @property
    def operator_hosts(self) -> OperatorHosts:
        """Which engines the operator names, and which hosts may be called."""
        named = tuple(spec.url for spec in self.engine_specs.values())
        return OperatorHosts(named, tuple(self.engine_allow))

    @property
    def engine_access(self) -> EngineAccess:
        """How engines are driven, and the keys that open them."""
        return EngineAccess(
            root=self.root.resolve(),
            load_timeout=self.load_timeout,
            pause_mode=self.pause_mode,
            allow_dtype_cast=self.allow_dtype_cast,
            api_key=self.engine_key_file,
            admin_key=self.engine_admin_key_file,
            lora=None if self.lora is None else self.lora.name,
            lora_keep=LORA_KEEP if self.lora is None else self.lora.keep,
            path_map=self.path_map,
        )

    @property
    def reclaim_rules(self) -> ReclaimRules:
        """The rules of reclaim. Looks up the type of the root's file system."""
        slots = SlotRules(count=self.slots, disk_budget=self.disk_budget, off=why_no_slots(self.slots, self.root))
        keep = KeepRules(
            last=self.keep_last, every=self.keep_every, disk_budget=self.disk_budget, foreign=self.reclaim_foreign
        )
        return ReclaimRules(interval=SCANS_A_SWEEP * self.scan_interval, keep=keep, slots=slots)

    @property
    def state_folder(self) -> Path:
        """The folder of the journal of a service alone: one for each root, on local disk."""
        if isinstance(self.state, Path):
            return self.state
        base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        name = hashlib.sha256(str(self.root.resolve()).encode()).hexdigest()[:12]
        return base / "refitd" / f"{self.root.name}-{name}"


GroupT = TypeVar("GroupT")


def group_of(settings: CoreSettings, group: type[GroupT]) -> GroupT:
    """The settings as a ring's own, which it has registered (`Part.settings`)."""
    if not isinstance(settings, group):
        raise TypeError(f"{group.__name__} is not registered")
    return settings


if TYPE_CHECKING:
    Settings = CoreSettings
else:
    groups = [resolve_name(name) for part in parts() for name in part.settings]
    Settings = type("Settings", (*groups, CoreSettings), {"__module__": __name__})
    """All settings of the service: those of the core, and the groups that the rings register."""
