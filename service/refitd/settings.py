"""Every setting of the service: `REFITD_*` in the environment, the flag of the same name, and its documentation.

Secrets come from files. Durations are seconds, sizes are bytes (or '200GB', '1.5TiB').
"""

import hashlib
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode

from refitd.api.options import AccessSettings
from refitd.discovery.place import check_places
from refitd.engine.address import check_adapter_name, parse_allow_list
from refitd.engine.engines_file import EngineSpec, check_engine, named_engines
from refitd.engine.kind import EngineAccess
from refitd.engine.registry import check_pause_mode
from refitd.follow.options import FollowSettings
from refitd.policy.admit import CatalogRules
from refitd.policy.keep import KEEP_LAST, KeepRules
from refitd.policy.proving import Prove
from refitd.policy.roster import OperatorHosts
from refitd.policy.spare_slots import ReclaimRules, SlotRules
from refitd.policy.strategy import Strategy, StrategyName
from refitd.push.options import PushSettings
from refitd.root.file_systems import Watch, why_no_slots
from refitd.state.journal.address import PostgresAddress, is_postgres
from refitd.text import bytes_in, canary_check_url, collector_url
from refitd_client.contract.naming import check_run
from refitd_client.contract.states import Kind
from refitd_client.contract.wire import Keeping
from refitd_client.validation.conventions import Trainer


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _run(value: object) -> object:
    return check_run(value) if isinstance(value, str) else value


def _state(value: object) -> object:
    return PostgresAddress(value) if isinstance(value, str) and is_postgres(value) else value


Size = Annotated[int, BeforeValidator(bytes_in)]
Urls = Annotated[list[str], NoDecode, BeforeValidator(_split)]


class Settings(AccessSettings, FollowSettings, PushSettings):
    """The settings of `refitd serve`."""

    root: Path = Field(description="Folder that trainers publish into: <root>/<run>/v000123/")
    engines: Annotated[Urls, AfterValidator(lambda texts: [check_engine(text) for text in texts])] = Field(
        default=[],
        description="URLs of the engines (comma-separated in the environment); sglang=URL says its kind",
    )
    engines_file: Path | None = Field(
        default=None, description="YAML file of engines: url, run, keys, path map; watched"
    )
    discover: Annotated[Urls, AfterValidator(check_places)] = Field(
        default=[],
        description="Places that name engines: dns:NAME?port=N, dns:NAME?type=SRV, sglang-router+http://HOST:PORT, "
        "areal:/RECORD_ROOT/USER/EXPERIMENT/TRIAL; hosts beyond loopback need --engine-allow",
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
    lora: Annotated[str, AfterValidator(check_adapter_name)] | None = Field(
        default=None,
        description="Versions are LoRA adapters, which engines get under NAME-v<step> beside the model they serve",
    )
    lora_keep: int = Field(
        default=2,
        ge=1,
        description="Adapters that stay loaded in each engine, the newest and those right before it: requests may "
        "still name them",
    )
    engine_key_file: Path | None = Field(default=None, description="File with the engines' API key")
    engine_admin_key_file: Path | None = Field(default=None, description="File with the engines' admin API key")
    engine_allow: Urls = Field(
        default=[],
        description="Hosts (names, *.patterns, CIDRs) that the API and the engines file may name as engines "
        "(default: loopback and the hosts that are named already)",
    )

    state: Annotated[Path | PostgresAddress | None, BeforeValidator(_state)] = Field(
        default=None,
        description="Folder of the journal (default: under the XDG state directory), or the postgresql:// URL of the "
        "database that a group of services shares (needs refitd[postgres])",
    )
    lease: float = Field(
        default=3.0,
        ge=1.0,
        le=60.0,
        description="Time without an answer of the database after which another service of the group takes over",
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
    incoming_ttl: float = Field(
        default=3600.0,
        gt=0,
        description="Age at which an unlocked .incoming-* is abandoned that another host may be writing",
    )
    slots: int = Field(
        default=2,
        ge=0,
        description="Old versions' files of each run that its publisher may write the next versions into (0: none)",
    )
    slot_ttl: float = Field(default=3600.0, gt=0, description="Age at which a slot that no publisher takes is deleted")
    reclaim_interval: float = Field(
        default=10.0, gt=0, description="Longest time between two looks for what to reclaim"
    )

    watch: Watch = Field(default=Watch.AUTO, description="Hints from file events, from polling, or whichever works")
    scan_interval: float = Field(default=2.0, gt=0, description="Time between full scans of the root")
    settle: float = Field(default=1.0, ge=0, description="Time for which a checkpoint without manifest must not change")
    settle_timeout: float = Field(
        default=60.0, gt=0, description="Time after which an unchanged, incomplete one is rejected"
    )
    allow_dtype_cast: bool = Field(
        default=False, description="Let engines cast floating-point tensors to their own dtype"
    )
    prove: Prove = Field(
        default=Prove.ENGINE,
        description="Who reads a version's tensors to prove them: the GPUs of engines with the plugin (where there are "
        "none, the service), the service, or both",
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
    vllm_stock_ranks: bool = Field(
        default=False,
        description="Update vLLM servers of several ranks that lack the extension: a failure may mix weights",
    )
    strategy: StrategyName = Field(
        default=StrategyName.ALL,
        description="How a version goes to the engines: all at once, rolling in turns, or to a canary first",
    )
    max_unavailable: int = Field(
        default=1, ge=1, description="Engines that may be out of service at a time when rolling"
    )
    canary: str | None = Field(default=None, description="Engine that goes first (default: the first by name)")
    canary_check: Annotated[str, AfterValidator(canary_check_url)] | None = Field(
        default=None, description="URL that is asked (POST) whether a canary is good: 2xx yes, 4xx no"
    )
    quorum: int = Field(default=1, ge=1, description="Engines that must serve a version before it counts as served")
    otlp_endpoint: Annotated[str, AfterValidator(collector_url)] | None = Field(
        default=None,
        description="OpenTelemetry collector that gets a trace of each version, over HTTP, such as "
        "http://127.0.0.1:4318 (needs refitd[otel])",
    )
    log_format: Literal["auto", "console", "json"] = Field(default="auto", description="auto: console on a terminal")

    @model_validator(mode="after")
    def _check(self) -> "Settings":
        parse_allow_list(self.engine_allow)
        self.check_access()
        self._check_strategy()
        self.check_follow()
        if self.path_map is not None and not self.path_map.startswith("/"):
            raise ValueError("path_map must be an absolute path")
        return self

    def _check_strategy(self) -> None:
        """Refuse settings that the strategy does not use."""
        of_canary = [name for name in ("canary", "canary_check") if getattr(self, name) is not None]
        if of_canary and self.strategy is not StrategyName.CANARY:
            flag = "--" + of_canary[0].replace("_", "-")
            raise ValueError(f"{flag} is for --strategy canary, and the strategy is {self.strategy}")
        if "max_unavailable" in self.model_fields_set and self.strategy is not StrategyName.ROLLING:
            raise ValueError(f"--max-unavailable is for --strategy rolling, and the strategy is {self.strategy}")

    @property
    def kind(self) -> Kind:
        """The kind of the versions in the root."""
        return Kind.FULL if self.lora is None else Kind.LORA

    @property
    def takes_deltas(self) -> bool:
        """Whether versions may be deltas as well: they may where they are no adapters."""
        return self.lora is None

    @property
    def update_strategy(self) -> Strategy:
        """How versions go to the engines of their run."""
        return Strategy(name=self.strategy, max_unavailable=self.max_unavailable, canary=self.canary)

    @property
    def keeping(self) -> Keeping:
        """What is kept on the root, as others are told."""
        return Keeping(last=self.keep_last, slots=self.slots, disk_budget=self.disk_budget)

    @property
    def catalog_rules(self) -> CatalogRules:
        """The rules of the catalog."""
        return CatalogRules(
            scan_interval=self.scan_interval,
            settle_for=self.settle,
            settle_timeout=self.settle_timeout,
            allow_dtype_cast=self.allow_dtype_cast,
            kind=self.kind,
            deltas=self.takes_deltas,
            prove=self.prove,
        )

    @property
    def engine_specs(self) -> dict[str, EngineSpec]:
        """The engines that `engines` names, by id."""
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
            lora=self.lora,
            lora_keep=self.lora_keep,
            path_map=self.path_map,
            vllm_stock_ranks=self.vllm_stock_ranks,
        )

    @property
    def reclaim_rules(self) -> ReclaimRules:
        """The rules of reclaim. Looks up the type of the root's file system."""
        slots = SlotRules(
            count=self.slots, ttl=self.slot_ttl, disk_budget=self.disk_budget, off=why_no_slots(self.slots, self.root)
        )
        keep = KeepRules(
            last=self.keep_last, every=self.keep_every, disk_budget=self.disk_budget, foreign=self.reclaim_foreign
        )
        return ReclaimRules(interval=self.reclaim_interval, incoming_ttl=self.incoming_ttl, keep=keep, slots=slots)

    @property
    def database(self) -> PostgresAddress | None:
        """The database of the group that this service belongs to; None for a service alone."""
        return self.state if isinstance(self.state, PostgresAddress) else None

    @property
    def state_folder(self) -> Path:
        """The folder of the journal of a service alone: one for each root, on local disk."""
        if isinstance(self.state, Path):
            return self.state
        base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        name = hashlib.sha256(str(self.root.resolve()).encode()).hexdigest()[:12]
        return base / "refitd" / f"{self.root.name}-{name}"
