"""What a vLLM server says of itself, which of the routes for weights it has, and what is in the way of updates. Pure.

    0.16.0  `reload_weights(weights_path=…)` through /collective_rpc
    0.27.1  /weight_info and /update_weight_version: the oldest release that can be driven
    0.32.0  /weight_checker

All of these routes, and /pause, /resume, /reset_prefix_cache and /server_info, exist only in a server that was started
with VLLM_SERVER_DEV_MODE=1. What a server can do is read off the routes that it answers, not off its release: a GET of
a route that takes only POST answers 405 where the route exists and 404 where it does not, and changes nothing.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from refitd.engine.http import NoReply, Reply
from refitd.engine.plugin import Launch
from refitd.engine.port import Obstacle, Process
from refitd.engine.replies import FormT, ServerLabel, ServerRelease, ServerWords, read_form

DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
WORDS = ServerWords(
    name="vLLM",
    one="a vLLM server",
    key="the proxy before it wants",
    admin_key="the key that the proxy before it wants",
    elsewhere=f"start vLLM with {DEV_MODE} in its environment, and name its own address, not that of a gateway",
)
OLDEST = "0.27.1"
NEEDED = ("/collective_rpc", "/pause", "/resume", "/reset_prefix_cache", "/update_weight_version")
"""The routes, all POST, without which a server cannot be updated."""
CHECKER = "/weight_checker"
NEVER_LABELLED = "default"
LORA = "/v1/load_lora_adapter"
SLEEP, WAKE = "/sleep", "/wake_up"
_SLEEP_PAUSES = ((0, 32), (0, 34))  # releases in which it was read that /sleep with level 0 pauses, and nothing else
_DRAFTLESS = frozenset({"ngram", "ngram_gpu", "suffix"})  # methods of speculative decoding without a draft model
# They have no `reset_cache` (0.32.0), and vLLM takes that for success. Those that hand prefixes on, and keep none, are
# not among them.
_NEVER_RESET = frozenset(
    {"ExampleConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "LMCacheConnectorV1", "LMCacheMPConnector"}
)
_EXTENSION = "refitd_vllm."  # how the classes begin with which refitd extends vLLM's workers
INSIDE = (
    "install this very refitd in the server's environment, and start vLLM with --worker-extension-cls "
    "refitd_vllm.Worker, or with REFITD_VLLM_ROOT set to the root as the server sees it"
)
_CLOCK_DIGITS = 20  # of a number that a server's clock may tell, in nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one server can do, as its probe found it.

    Attributes:
        checker: whether it computes digests of its parameters.
        lora: whether it serves adapters (`--enable-lora`).
        loads_lora: whether it has the route that loads adapters at run time.
        cached_loras: adapters that it holds in memory; any other is read from its folder at each request for it.
        extension: the class that its workers were extended with (`--worker-extension-cls`); None without one.
        ranks: processes that hold its weights, over tensor, pipeline and data parallelism.
        stages: pipeline stages.
        replicas: data-parallel replicas behind this one server.
        sleeps: whether it can be put to sleep, so that its weights may not be in memory.
        pauses_at_once: whether /sleep with level 0 pauses. It answers when nothing runs any more, /pause 20 ms later.
        multimodal: whether it caches encoder outputs that a load makes stale.
        draft: whether a draft model stands beside the model, which a stock reload leaves as it is.
        moves_experts: whether it moves experts between ranks while it serves.
        packs_experts: whether it packed experts when it started, which no reload does again.
        keeps_prefixes: its KV connector, where that keeps prefixes and a reset of the prefix cache does not reach it.
    """

    checker: bool = False
    lora: bool = False
    loads_lora: bool = False
    cached_loras: int = 0
    extension: str | None = None
    ranks: int = 1
    stages: int = 1
    replicas: int = 1
    sleeps: bool = False
    pauses_at_once: bool = False
    multimodal: bool = False
    draft: bool = False
    moves_experts: bool = False
    packs_experts: bool = False
    keeps_prefixes: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServerInfo:
    """How a server was started. Contents of servers with equal `configuration` can be compared."""

    version: str
    configuration: str
    model_path: str
    process: Process
    capabilities: Capabilities
    launch: Launch


class _Model(msgspec.Struct, frozen=True):
    model: str
    dtype: str = "?"
    quantization: str | None = None
    enable_sleep_mode: bool = False
    multimodal_config: Any = None


class _Parallel(msgspec.Struct, frozen=True):
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enable_eplb: bool = False
    is_moe_model: bool | None = None
    worker_extension_cls: str = ""

    @property
    def group(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size


class _Device(msgspec.Struct, frozen=True):
    device: str = "?"


class _Lora(msgspec.Struct, frozen=True):
    max_loras: int = 1
    max_cpu_loras: int | None = None


class _Config(msgspec.Struct, frozen=True):
    model_config: _Model
    parallel_config: _Parallel
    device_config: _Device = _Device()
    speculative_config: Any = None
    lora_config: _Lora | None = None
    kv_transfer_config: Any = None
    instance_id: str | None = None

    @property
    def drafts(self) -> bool:
        """Whether a draft model proposes tokens: some methods look them up in the prompt instead."""
        told = self.speculative_config
        method = cast("dict[str, Any]", told).get("method") if isinstance(told, dict) else None
        return told is not None and method not in _DRAFTLESS

    @property
    def keeps_prefixes(self) -> str | None:
        """The KV connector that no reset reaches, alone or among several; None where there is none."""
        told: list[Any] = [self.kv_transfer_config]
        for each in told:  # grows: one connector may stand for several
            if isinstance(each, dict):
                connector = cast("dict[str, Any]", each)
                if (name := connector.get("kv_connector")) in _NEVER_RESET:
                    return name
                extra = cast("dict[str, Any]", connector.get("kv_connector_extra_config") or {})
                told += cast("list[Any]", extra.get("connectors") or [])
        return None

    @property
    def numbered(self) -> bool:
        number = self.instance_id
        return number is not None and number.isascii() and number.isdecimal() and len(number) <= _CLOCK_DIGITS

    def configuration(self, version: str) -> str:
        """All that decides which tensors a server holds, in what shape."""
        model, parallel = self.model_config, self.parallel_config
        kind = f"{self.device_config.device} {model.dtype.removeprefix('torch.')} {model.quantization or 'unquantized'}"
        sizes = (
            f"tp{parallel.tensor_parallel_size} pp{parallel.pipeline_parallel_size} "
            f"dp{parallel.data_parallel_size} ep{int(parallel.enable_expert_parallel)}"
        )
        return f"vllm {version} {kind} {sizes}"


class _Told(msgspec.Struct, frozen=True):
    vllm_config: _Config


class Release(msgspec.Struct, frozen=True):
    version: ServerRelease


class Label(msgspec.Struct, frozen=True):
    """The answer to /weight_info: `weight_version` is `NEVER_LABELLED` until a program sets it."""

    weight_version: ServerLabel


def read_release(reply: Reply | NoReply, url: str) -> Release | str:
    return _read(reply, Release, url, "/version")


def read_label(reply: Reply | NoReply, url: str) -> Label | str:
    return _read(reply, Label, url, "/weight_info")


def missing(version: str, routes: Mapping[str, bool], url: str) -> Obstacle | None:
    """What a server lacks with which it could be updated; None where it lacks nothing. `routes`: whether each route of
    `NEEDED` exists.
    """
    if not any(routes.get(route) for route in NEEDED):
        fix = f"start vLLM with {DEV_MODE} in its environment"
        return Obstacle(text=f"{url} is vLLM {version} without its routes for weights: {fix}", fix=fix)
    lacking = [route for route in NEEDED if not routes.get(route)]
    if not lacking:
        return None
    text = f"{url} is vLLM {version} and has no {', '.join(lacking)}; refitd needs {OLDEST} or newer"
    return Obstacle(text=text, fix=f"install vLLM {OLDEST} or newer, and start it with {DEV_MODE}")


def read_server_info(
    version: str, reply: Reply | NoReply, routes: Mapping[str, bool], url: str
) -> VllmServerInfo | str:
    """How it was started, or a sentence on why that cannot be said. `reply`: to /server_info?config_format=json.
    `routes`: which of the optional routes exist.
    """
    answer = _read(reply, _Told, url, "/server_info")
    if isinstance(answer, str):
        return answer
    told = answer.vllm_config
    model, parallel = told.model_config, told.parallel_config
    return VllmServerInfo(
        version=version,
        configuration=told.configuration(version),
        model_path=model.model,
        process=Process(started=told.instance_id or None),
        # No worker knows the server's port; all know the number that vLLM draws from the clock at each start.
        launch=Launch(port=0, seed=int(told.instance_id or "") if told.numbered else None, ranks=parallel.group),
        capabilities=Capabilities(
            checker=routes.get(CHECKER, False),
            lora=told.lora_config is not None,
            loads_lora=routes.get(LORA, False),
            cached_loras=0
            if told.lora_config is None
            else told.lora_config.max_cpu_loras or told.lora_config.max_loras,
            extension=parallel.worker_extension_cls or None,
            ranks=parallel.group * parallel.data_parallel_size,
            stages=parallel.pipeline_parallel_size,
            replicas=parallel.data_parallel_size,
            sleeps=model.enable_sleep_mode,
            pauses_at_once=_sleep_pauses(version) and all(routes.get(route) for route in (SLEEP, WAKE)),
            multimodal=model.multimodal_config is not None,
            draft=told.drafts,
            moves_experts=parallel.enable_eplb,
            packs_experts=told.device_config.device == "cpu" and bool(parallel.is_moe_model),
            keeps_prefixes=told.keeps_prefixes,
        ),
    )


def _sleep_pauses(version: str) -> bool:
    number = re.match(r"(\d+)\.(\d+)", version)
    first, beyond = _SLEEP_PAUSES
    return number is not None and first <= (int(number[1]), int(number[2])) < beyond


def _read(reply: Reply | NoReply, form: type[FormT], url: str, path: str) -> FormT | str:
    if isinstance(reply, Reply) and is_dead(reply):
        return f"{url} answers, but its engine has died: restart it"
    return read_form(reply, form, url, path, "vLLM")


def is_dead(reply: Reply) -> bool:
    """Whether the server says that the process that generates has ended: every call is answered so until a restart."""
    return reply.status >= 500 and "EngineCore encountered an issue" in reply.short_message


def is_extended(can: Capabilities) -> bool:
    return (can.extension or "").startswith(_EXTENSION)


def obstacles(can: Capabilities, *, plugged: bool, adapters: bool = False) -> Iterator[Obstacle]:
    """What is in the way, the worst first. `plugged`: whether refitd's extension loads it. `adapters`: whether adapters
    are loaded, and never the model: then one that failed on a rank is seen.
    """
    if can.replicas > 1:
        text = f"it has {can.replicas} data-parallel replicas behind one address"
        yield Obstacle(text=text, fix="start a server for each of them, without --data-parallel-size")
    if can.keeps_prefixes is not None:
        text = f"its {can.keeps_prefixes} keeps prefixes that vLLM does not clear: they would outlive the weights"
        fix = "start it with another KV connector (OffloadingConnector, MooncakeStoreConnector) or with none"
        yield Obstacle(text=text, fix=fix)
    if not plugged:
        yield from _of_stock(can, adapters=adapters)
    if can.sleeps:
        text = "it can be put to sleep (--enable-sleep-mode), and is left alone while it is asleep or paused by another"
        yield Obstacle(text=text, fix="wake it up (POST /wake_up) before versions are published", blocks=False)


def _of_stock(can: Capabilities, *, adapters: bool) -> Iterator[Obstacle]:
    if can.moves_experts:
        text = "it moves experts between its processes (--enable-eplb), which a reload does not follow"
        yield Obstacle(text=text, fix="start it without --enable-eplb")
    if can.packs_experts:
        text = (
            "it computes on a CPU, where vLLM packs the experts when it starts and not after a reload: it would answer "
            "200 and serve garbage"
        )
        yield Obstacle(text=text, fix="start it anew on the version")
    if can.stages > 1:
        text = f"it has {can.stages} pipeline stages, and refitd does not update those"
        yield Obstacle(text=text, fix="start it with --tensor-parallel-size in place of --pipeline-parallel-size")
    elif can.ranks > 1 and can.replicas == 1 and not adapters:
        text = (
            f"{can.ranks} processes hold its weights, and after one failure vLLM takes their answers for those of "
            "other calls, so a mixture can look like a success"
        )
        yield Obstacle(text=text, fix=f"start one process, or {INSIDE}")
    if can.draft:
        text = "vLLM's reload leaves its draft model as it is: answers stay right, and fewer proposals are taken"
        yield Obstacle(text=text, fix="start it without --speculative-config", blocks=False)


def lacking_for_adapters(can: Capabilities, url: str) -> Obstacle | None:
    """What a server lacks to load adapters at run time; None where it lacks nothing. `url`: of the server."""
    if not can.lora:
        fix = "start vLLM with --enable-lora"
        return Obstacle(text=f"{url} serves no adapters: {fix}", fix=fix)
    if not can.loads_lora:
        fix = "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
        return Obstacle(text=f"{url} loads no adapters while it runs: {fix}", fix=fix)
    return None


def adapter_obstacles(can: Capabilities, keep: int) -> Iterator[Obstacle]:
    yield from obstacles(can, plugged=False, adapters=True)
    if can.cached_loras < keep:
        text = (
            f"it holds {can.cached_loras} of the {keep} adapters that stay loaded in memory, and reads any other from "
            "its folder when a request names it"
        )
        yield Obstacle(text=text, fix=f"start it with --max-cpu-loras {keep + 1} or more", blocks=False)


def stock_reason(can: Capabilities, found: str | None, unopened: str | None, *, opens: bool) -> str | None:
    """Why its loads are vLLM's own.

    Args:
        found: what the search for refitd's ranks says; None where they were found, or not searched for.
        unopened: why the extension has not opened its channel, as far as it was asked.
        opens: whether the asker has a channel opened that is not open: the service does, commands do not.
    """
    if found is None or not is_extended(can):
        return found
    later = "; the service has its channel opened when it first reaches the server"
    if opens:
        later = "" if unopened is None else f"; its channel was not opened: {unopened}"
    return f"{found}, though vLLM was started with --worker-extension-cls {can.extension}{later}"
