"""What a server says of itself: /model_info (what it serves) and /server_info (how it was started). Pure.

A reply that is not SGLang's becomes a sentence, so that a gateway, a web page or another service is named as such.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from xxhash import xxh3_128_hexdigest

from refitd.engine.http import NoReply, Reply
from refitd.engine.plugin.rank_group import Launch
from refitd.engine.port import Process
from refitd.engine.sglang.dialect import Dialect, dialect_of


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
    ep_size: int = 1
    enable_dp_attention: bool | None = None
    enable_dp_lm_head: bool | None = None
    moe_dense_tp_size: int | None = None
    moe_runner_backend: str | None = None
    speculative_algorithm: str | None = None
    tokenizer_worker_num: int = 1
    port: int | str | None = None
    random_seed: int | str | None = None
    startup_time: Any = None

    @property
    def configuration(self) -> str:
        """All that decides which tensors a server holds, in what shape, and how it hashes them."""
        sizes = f"tp{self.tp_size} pp{self.pp_size} dp{self.dp_size} ep{self.ep_size}"
        split = f"{self.enable_dp_attention} {self.enable_dp_lm_head} {self.moe_dense_tp_size}"
        kind = f"{self.device} {self.dtype} {self.quantization or 'unquantized'}"
        return f"sglang {self.version} {kind} {sizes} {split} {self.moe_runner_backend} {self.speculative_algorithm}"

    @property
    def process(self) -> Process:
        """What tells this process of the server from the one that it will be after a restart."""
        seed = self.random_seed if isinstance(self.random_seed, int) else None
        return Process(seed=seed, started=_one_line(self.startup_time) if self.startup_time else None)

    @property
    def launch(self) -> Launch:
        """What tells this server from others, and how many processes hold its weights."""
        return Launch(
            port=self.port if isinstance(self.port, int) else None,
            seed=self.random_seed if isinstance(self.random_seed, int) else None,
            ranks=self.tp_size,
            dp_ranks=self.dp_size,
            spread=not self.enable_dp_attention,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """How a server was started. Fingerprints of servers with equal `configuration` can be compared."""

    version: str
    configuration: str
    model_path: str | None
    dialect: Dialect
    launch: Launch
    process: Process


def read_model_info(reply: Reply | NoReply, url: str) -> ModelInfo | str:
    """What it serves, or a sentence on why that cannot be said."""
    if isinstance(fault := _fault(reply, url, "/model_info"), str):
        return fault
    try:
        return msgspec.convert(fault.data, ModelInfo)
    except msgspec.ValidationError as error:
        return f"{url} is no SGLang server: its /model_info has another form ({error})"


def read_server_info(reply: Reply | NoReply, url: str) -> ServerInfo | str:
    """How it was started, or a sentence on why that cannot be said."""
    if isinstance(fault := _fault(reply, url, "/server_info"), str):
        return fault
    try:
        launch = msgspec.convert(fault.data, _Launch)
    except msgspec.ValidationError as error:
        return f"{url} is no SGLang server: its /server_info has another form ({error})"
    if launch.tokenizer_worker_num > 1:
        # Each worker has labels of its own: half of all probes would see an engine that was never told anything.
        return f"{url} runs {launch.tokenizer_worker_num} tokenizer workers: start it with --tokenizer-worker-num 1"
    return ServerInfo(
        version=launch.version,
        configuration=launch.configuration,
        model_path=launch.model_path,
        dialect=dialect_of(launch.version),
        launch=launch.launch,
        process=launch.process,
    )


def _one_line(told: Any) -> str:
    """A digest of what a server says, in whatever form: it is only compared."""
    return xxh3_128_hexdigest(msgspec.json.encode(told, order="sorted"))


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
