"""What a server says of itself, in /model_info and /server_info, and what its release of SGLang can do. Pure.

A reply that is not SGLang's becomes a sentence, so that a gateway, a web page or another service is named as such.
What each release can do was read from the released wheels:

    0.5.7   a label sent with a load is kept while paused too; 0.5.6 drops it, and nothing older has pause modes
    0.5.11  an update from disk is loaded into draft models as well
    0.5.12  /weights_checker with action "checksum"
    0.5.18  /server_info goes on naming the start-up model; before, it named the one that was loaded last
    0.5.21  a flush works while requests are retracted
    0.5.22  a refused flush fails the update call; before, the scheduler asserts that it went well, and dies

So `retract`, which keeps requests in flight, is safe from 0.5.21 on. An older server pauses with `abort`, whatever was
asked for, and shows by a flush that nothing runs before it is told to load. SGLang's third mode, `in_place`, keeps what
the old weights computed for requests in flight, and an update may not (ADR 32).
A release that is not known yet is taken for the newest that is; one before a release (`0.5.21.dev7`, as a build from
source calls itself) may lack what that release brought.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from xxhash import xxh3_128_hexdigest

from refitd.engine.http import NoReply, Reply
from refitd.engine.plugin.rank_group import Launch
from refitd.engine.port import Process
from refitd.engine.sglang.stores import PrefixStores, read_stores

OLDEST = (0, 5, 7)
LOADS_DRAFTS = (0, 5, 11)
_CHECKSUMS_SINCE = (0, 5, 12)
_NAMES_STARTUP = (0, 5, 18)
_RETRACT_FLUSHES = (0, 5, 21)
_SURVIVES_FLUSH = (0, 5, 22)
PAUSE_MODES = {"retract": _RETRACT_FLUSHES, "abort": OLDEST}
"""What a server does with requests in flight, the best first, and the first release that survives a load with it."""
_NO_DRAFT = frozenset({"", "NGRAM", "UNO"})  # speculation without a model of its own
_RELEASE = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?!\d)(?:\.?(dev|rc|a|b))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How to speak to a server. `pause_modes` are those that it survives, the best first.

    `dies_of_flush`: whether the flush that ends a load must not be refused.
    `names_startup`: whether its launch settings name the model that it was started with, whatever it loaded since.
    """

    version: str
    supported: bool
    pause_modes: tuple[str, ...]
    dies_of_flush: bool
    checksums: bool
    names_startup: bool
    release: tuple[int, int, int] | None = None

    def has(self, since: tuple[int, int, int]) -> bool:
        """Whether the server has what came with a release. One whose release is not known has it."""
        return self.release is None or self.release >= since

    def pause_mode(self, wanted: str) -> str:
        """`wanted` where the server survives it, else ("auto" too) the best mode that it does survive."""
        return wanted if wanted in self.pause_modes else self.pause_modes[0]


_CAREFUL = Dialect(
    version="unknown",
    supported=True,
    pause_modes=("abort",),
    dies_of_flush=True,
    checksums=True,
    names_startup=False,
)


def dialect_of(version: str) -> Dialect:
    """The dialect of a release, by the version that its server reports. What does not parse gets the careful one."""
    found = _RELEASE.match(version)
    if found is None or version.startswith("0.0.0"):  # 0.0.0: built from source without its tags
        return replace(_CAREFUL, version=version)
    release = (int(found[1]), int(found[2]), int(found[3]))

    def has(since: tuple[int, int, int]) -> bool:
        return release > since if found[4] else release >= since

    return Dialect(
        version=version,
        supported=has(OLDEST),
        pause_modes=tuple(mode for mode, since in PAUSE_MODES.items() if mode == "abort" or has(since)),
        dies_of_flush=not has(_SURVIVES_FLUSH),
        checksums=has(_CHECKSUMS_SINCE),
        names_startup=has(_NAMES_STARTUP),
        release=release,
    )


class ModelInfo(msgspec.Struct, frozen=True):
    """The part of /model_info that matters here."""

    model_path: str
    weight_version: str | None = None


class _Launch(msgspec.Struct, frozen=True):
    version: str
    model_path: str | None = None
    device: str | None = None
    dtype: str = "?"
    quantization: str | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    attn_dp_size: int = 1  # since 0.5.23: before, DP attention counted its groups in `dp_size`
    ep_size: int = 1
    enable_dp_attention: bool | None = None
    enable_dp_lm_head: bool | None = None
    moe_dense_tp_size: int | None = None
    moe_runner_backend: str | None = None
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    enable_eplb: bool | None = None
    disaggregation_mode: str | None = None
    disaggregation_bootstrap_port: int | None = None
    kt_weight_path: str | None = None
    weight_cache_mode: str | None = None
    enable_elastic_expert_backup: bool | None = None
    enable_paged_experts: bool | None = None
    tokenizer_worker_num: int = 1
    port: int | str | None = None
    random_seed: int | str | None = None
    startup_time: Any = None

    @property
    def configuration(self) -> str:
        """All that decides which tensors a server holds, in what shape, and how it hashes them."""
        sizes = f"tp{self.tp_size} pp{self.pp_size} dp{self._dp_ranks} ep{self.ep_size}"
        split = f"{self.enable_dp_attention} {self.enable_dp_lm_head} {self.moe_dense_tp_size}"
        kind = f"{self.device} {self.dtype} {self.quantization or 'unquantized'}"
        return f"sglang {self.version} {kind} {sizes} {split} {self.moe_runner_backend} {self.speculative_algorithm}"

    @property
    def keeps_weights_apart(self) -> str | None:
        """The option by which some weights lie where an update does not reach them."""
        options = {
            "--kt-weight-path": self.kt_weight_path,
            "--weight-cache-mode": self.weight_cache_mode not in {None, "off"},
            "--enable-elastic-expert-backup": self.enable_elastic_expert_backup,
            "--enable-paged-experts": self.enable_paged_experts,
        }
        return next((option for option, given in options.items() if given), None)

    @property
    def process(self) -> Process:
        """What tells this process of the server from the one that it will be after a restart."""
        seed = self.random_seed if isinstance(self.random_seed, int) else None
        if not self.startup_time:
            return Process(seed=seed)
        # In whatever form a server tells it: it is only compared.
        return Process(seed=seed, started=xxh3_128_hexdigest(msgspec.json.encode(self.startup_time, order="sorted")))

    @property
    def launch(self) -> Launch:
        """What tells this server from others, and how many processes hold its weights."""
        return Launch(
            port=self.port if isinstance(self.port, int) else None,
            seed=self.random_seed if isinstance(self.random_seed, int) else None,
            ranks=self.tp_size,
            dp_ranks=self._dp_ranks,
            spread=not self.enable_dp_attention and self.attn_dp_size == 1,
        )

    @property
    def _dp_ranks(self) -> int:
        """How many answers an update gets: replicas times groups of DP attention, one of which is 1."""
        return self.dp_size * self.attn_dp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangServerInfo:
    """How a server was started. Fingerprints of servers with equal `configuration` can be compared.

    Attributes:
        stages: pipeline stages.
        moves_experts: whether it moves experts between its ranks while it serves.
        keeps_weights_apart: the option by which some of its weights lie where an update does not reach them.
        drafts: whether a draft model proposes tokens, or draft layers do; `draft_path` is where it was loaded from.
        role: "prefill" or "decode" where these are apart, None for a server that does both.
        bootstrap_port: where a prefill server is asked for keys and values.
    """

    version: str
    configuration: str
    model_path: str | None
    dialect: Dialect
    launch: Launch
    process: Process
    stores: PrefixStores
    stages: int = 1
    moves_experts: bool = False
    keeps_weights_apart: str | None = None
    drafts: bool = False
    draft_path: str | None = None
    role: str | None = None
    bootstrap_port: int | None = None


def read_model_info(reply: Reply | NoReply, url: str) -> ModelInfo | str:
    """What it serves, or a sentence on why that cannot be said."""
    if isinstance(fault := _fault(reply, url, "/model_info"), str):
        return fault
    try:
        return fault.read_as(ModelInfo)
    except msgspec.ValidationError as error:
        return f"{url} is no SGLang server: its /model_info has another form ({error})"


def read_server_info(reply: Reply | NoReply, url: str) -> SglangServerInfo | str:
    """How it was started, or a sentence on why that cannot be said."""
    if isinstance(fault := _fault(reply, url, "/server_info"), str):
        return fault
    try:
        launch = fault.read_as(_Launch)
    except msgspec.ValidationError as error:
        return f"{url} is no SGLang server: its /server_info has another form ({error})"
    if launch.tokenizer_worker_num > 1:
        # Each worker has labels of its own: half of all probes would see an engine that was never told anything.
        return f"{url} runs {launch.tokenizer_worker_num} tokenizer workers: start it with --tokenizer-worker-num 1"
    return SglangServerInfo(
        version=launch.version,
        configuration=launch.configuration,
        model_path=launch.model_path,
        dialect=dialect_of(launch.version),
        launch=launch.launch,
        process=launch.process,
        stores=read_stores(fault),
        stages=launch.pp_size,
        moves_experts=bool(launch.enable_eplb),
        keeps_weights_apart=launch.keeps_weights_apart,
        drafts=(launch.speculative_algorithm or "").upper() not in _NO_DRAFT,
        draft_path=launch.speculative_draft_model_path,
        role=None if launch.disaggregation_mode in {None, "null"} else launch.disaggregation_mode,
        bootstrap_port=launch.disaggregation_bootstrap_port,
    )


def _fault(reply: Reply | NoReply, url: str, path: str) -> Reply | str:
    if isinstance(reply, NoReply):
        return reply.reason
    if reply.status in {401, 403}:
        return f"{url} wants a key for {path}, or another one than it got: --engine-key-file holds its --api-key"
    if not reply.ok:
        return f"{url}{path} answered {reply.status}: {reply.short_message}"
    if reply.data is None:
        return f"{url} is no SGLang server: its {path} is no JSON object"
    return reply
