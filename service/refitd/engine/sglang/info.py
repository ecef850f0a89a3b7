"""What a server says of itself, in /model_info and /server_info, and what its release of SGLang can do. Pure.

A reply that is not SGLang's becomes a sentence, so that a gateway, a web page or another service is named as such.
What each release can do was read from the released wheels:

    0.5.12  /weights_checker with action "checksum": the oldest release that can be driven
    0.5.18  /server_info goes on naming the start-up model; before, it named the one that was loaded last
    0.5.21  a flush works while requests are retracted
    0.5.22  a refused flush fails the update call; before, the scheduler asserts that it went well, and dies

So `retract`, which keeps requests in flight, is safe from 0.5.21 on. An older server pauses with `abort`, whatever was
asked for, and shows by a flush that nothing runs before it is told to load. SGLang's third mode, `in_place`, keeps what
the old weights computed for requests in flight, and an update may not (ADR 32).
A release that is not known yet is taken for the newest that is; one before a release (`0.5.21.dev7`, as a build from
source calls itself) may lack what that release brought.

Then what SGLang's replies mean: to a load, to a request for checksums, to a trial. The texts are SGLang's own
(`managers/scheduler_components/weight_updater.py` and `model_executor/model_runner_components/weight_updater.py` in
0.5.23). A reply that is not known for certain to leave the contents alone counts as `Unclear`: SGLang's "rolling back"
re-reads the checkpoint that has just failed.

Where refitd's plugin has carried out the update, its own words at the end of the message count. Each data-parallel rank
answers for all its tensor-parallel ones.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash
from xxhash import xxh3_128_hexdigest

from refitd.engine.http import NoReply, Reply
from refitd.engine.plugin import Launch
from refitd.engine.port import DRAFT_LEFT, DRAFT_UPDATED, Obstacle, Process
from refitd.engine.replies import (
    Loaded,
    Loading,
    ServerLabel,
    ServerRelease,
    ServerWords,
    Unclear,
    Untouched,
    fault_of_scores,
    meaning_of_answers,
    meaning_of_silence,
    read_form,
    read_trial_form,
    refused_at_the_door,
)
from refitd_client.contract.plugin import Answer, answers_in

OLDEST = (0, 5, 12)
_NAMES_STARTUP = (0, 5, 18)
_RETRACT_FLUSHES = (0, 5, 21)
_SURVIVES_FLUSH = (0, 5, 22)
PAUSE_MODES = {"retract": _RETRACT_FLUSHES, "abort": OLDEST}
"""What a server does with requests in flight, the best first, and the first release that survives a load with it."""
_NO_DRAFT = frozenset({"", "NGRAM", "UNO"})  # speculation without a model of its own
_APART = {
    "--kt-weight-path": "its experts on the CPU (KTransformers) are always those of a folder of their own",
    "--weight-cache-mode": "its weights are those of a process that other servers use as well, and an update ends it",
    "--enable-elastic-expert-backup": "its backup of the experts keeps those of the start, and brings them back",
    "--enable-paged-experts": "experts that are on the GPU already would stay as they are, and it takes no update",
}
_NEVER_CLEARED = frozenset({"aibrix", "eic", "simm"})  # storage backends that do nothing when they are cleared
_RELEASE = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?!\d)(?:\.?(dev|rc|a|b))?")


@dataclass(frozen=True, slots=True)
class SglangRelease:
    """What a release of SGLang can do.

    Attributes:
        number: None where it is not known; the server is treated with care then.
        is_early: whether it came before the release of its number, and may lack what that brought.
    """

    number: tuple[int, int, int] | None = None
    is_early: bool = False

    def _has(self, since: tuple[int, int, int], *, where_unknown: bool) -> bool:
        if self.number is None:
            return where_unknown
        return self.number > since if self.is_early else self.number >= since

    @property
    def supported(self) -> bool:
        return self._has(OLDEST, where_unknown=True)

    @property
    def names_startup(self) -> bool:
        """Whether its launch settings name the model that it was started with, whatever it loaded since."""
        return self._has(_NAMES_STARTUP, where_unknown=False)

    @property
    def dies_of_flush(self) -> bool:
        """Whether the flush that ends a load must not be refused."""
        return not self._has(_SURVIVES_FLUSH, where_unknown=False)

    @property
    def pause_modes(self) -> tuple[str, ...]:
        return tuple(m for m, since in PAUSE_MODES.items() if m == "abort" or self._has(since, where_unknown=False))

    def pause_mode(self, wanted: str) -> str:
        """`wanted` where the server survives it, else ("auto" too) the best mode that it does survive."""
        return wanted if wanted in self.pause_modes else self.pause_modes[0]


def release_of(version: str) -> SglangRelease:
    found = _RELEASE.match(version)
    if found is None or version.startswith("0.0.0"):  # 0.0.0: built from source without its tags
        return SglangRelease()
    return SglangRelease((int(found[1]), int(found[2]), int(found[3])), is_early=found[4] is not None)


_PATH_SHOWN = 1000  # characters of a path that a server names


class ModelInfo(msgspec.Struct, frozen=True):
    model_path: str
    weight_version: ServerLabel | None = None

    def other_than(self, path: str, label: str) -> str | None:
        """Why it is not what was loaded under these names; None where it is."""
        if self.model_path != path:
            return f"it says that it serves {self.model_path[:_PATH_SHOWN]}, not {path}"
        if self.weight_version != label:
            return f"it says weight_version {self.weight_version!r}, not {label!r}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStores:
    """Where a server keeps prefixes beyond its GPU: HiCache (host memory, and a storage backend) and LMCache.

    Their keys name tokens and not weights, so what the old weights computed would be read under the new ones. The flush
    of an update empties the GPU's cache and HiCache's host memory; a storage backend and LMCache are cleared by a call
    of their own, of older servers by another route. SGLang answers 200 as soon as HiCache is on, and ignores what the
    storage backend says: backends that do nothing when they are cleared are refused by name.

    `cleared`: it has stores that the call clears. A storage backend can be attached while the server runs, so this is
    also true of HiCache without one. `backend` is the one that it was started with. `unclearable` names a store that no
    call clears, None where there is none.
    """

    cleared: bool = False
    backend: str | None = None
    unclearable: str | None = None


class SglangServerInfo(msgspec.Struct, frozen=True):
    """How a server was started: the part of /server_info that matters here."""

    version: ServerRelease
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
    enable_hierarchical_cache: Any = None
    enable_lmcache: Any = None
    disaggregation_decode_enable_offload_kvcache: Any = None
    enable_unified_cache_external_linker: Any = None
    hicache_storage_backend: Any = None
    radix_cache_backend: Any = None

    @property
    def release(self) -> SglangRelease:
        return release_of(self.version)

    @property
    def configuration(self) -> str:
        """All that decides which tensors a server holds, in what shape, and how it hashes them: fingerprints of servers
        with an equal one can be compared.
        """
        sizes = f"tp{self.tp_size} pp{self.pp_size} dp{self._dp_ranks} ep{self.ep_size}"
        split = f"{self.enable_dp_attention} {self.enable_dp_lm_head} {self.moe_dense_tp_size}"
        kind = f"{self.device} {self.dtype} {self.quantization or 'unquantized'}"
        return f"sglang {self.version} {kind} {sizes} {split} {self.moe_runner_backend} {self.speculative_algorithm}"

    @property
    def role(self) -> str | None:
        """ "prefill" or "decode" where these are apart, None for a server that does both."""
        return None if self.disaggregation_mode in {None, "null"} else self.disaggregation_mode

    @property
    def drafts(self) -> bool:
        return (self.speculative_algorithm or "").upper() not in _NO_DRAFT

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
    def stores(self) -> PrefixStores:
        hicache, backend, radix = self.enable_hierarchical_cache, self.hicache_storage_backend, self.radix_cache_backend
        offloads, linker = self.disaggregation_decode_enable_offload_kvcache, self.enable_unified_cache_external_linker
        flags, unclearable = (hicache, self.enable_lmcache, offloads, linker), None
        if not all(isinstance(each, bool | None) for each in flags) or not all(
            isinstance(each, str | None) for each in (backend, radix)
        ):
            return PrefixStores(unclearable="a cache of a kind that refitd does not know")
        if linker:
            unclearable = "an external store (--enable-unified-cache-external-linker)"
        elif radix == "flexkv":
            unclearable = "FlexKV (--radix-cache-backend flexkv)"
        elif backend in _NEVER_CLEARED:
            unclearable = f"HiCache's storage backend '{backend}'"
        elif offloads and not hicache:
            unclearable = "a storage backend (--disaggregation-decode-enable-offload-kvcache)"
        cleared = bool(hicache or self.enable_lmcache)
        return PrefixStores(cleared=cleared, backend=backend if hicache else None, unclearable=unclearable)

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


def read_model_info(reply: Reply | NoReply, url: str) -> ModelInfo | str:
    return read_form(reply, ModelInfo, url, "/model_info", "SGLang")


def read_server_info(reply: Reply | NoReply, url: str) -> SglangServerInfo | str:
    server = read_form(reply, SglangServerInfo, url, "/server_info", "SGLang")
    if isinstance(server, SglangServerInfo) and server.tokenizer_worker_num > 1:
        # Each worker has labels of its own: half of all probes would see an engine that was never told anything.
        return f"{url} runs {server.tokenizer_worker_num} tokenizer workers: start it with --tokenizer-worker-num 1"
    return server


def draft_of(server: SglangServerInfo, startup_path: str | None) -> str | None:
    """What becomes of a server's draft model in an update; None where it has none. `startup_path`: the model that it
    was started with.
    """
    if not server.drafts:
        return None
    own = startup_path if server.model_path is None or not server.release.names_startup else server.model_path
    return DRAFT_UPDATED if server.speculative_draft_model_path in {None, "", own} else DRAFT_LEFT


def obstacles(server: SglangServerInfo, draft: str | None, *, plugged: bool, in_pair: bool) -> Iterator[Obstacle]:
    """What is in the way, the worst first, each with the option that ends it.

    SGLang's update from disk (0.5.23) loads one folder into the model and then into each draft model
    too. A draft model with a checkpoint of its own would be given the policy's tensors: where shapes differ the
    scheduler dies in the middle of the load, and where they agree the draft is wrong without an error. Draft layers
    that lie in the model's own checkpoint (NEXTN, MTP) are loaded from the same folder, as at the start.

    Args:
        draft: what becomes of its draft model, as from `draft_of`.
        plugged: whether refitd's plugin carries out its loads.
        in_pair: whether it is loaded together with the servers that it hands prompts to, or gets them from.
    """
    if (store := server.stores.unclearable) is not None:
        text = f"it keeps prefixes in {store}, which SGLang does not clear"
        yield Obstacle(text=text, fix="start it without this store, or with another storage backend of HiCache")
    elif (backend := server.stores.backend) is not None:
        text = f"it keeps prefixes in HiCache's storage backend '{backend}', which is cleared in each update"
        fix = "give each engine a store of its own: one on older weights writes prefixes that the others would read"
        yield Obstacle(text=text, fix=fix, blocks=False)
    if server.role is not None and not in_pair:
        other = "decode" if server.role == "prefill" else "prefill"
        text = (
            f"it is the {server.role} half of a pair (--disaggregation-mode {server.role}): updated alone, keys and "
            "values of one policy would be decoded by another"
        )
        fix = f"name it in the engines file together with its {other} servers, in one entry with 'pair'"
        yield Obstacle(text=text, fix=fix)
    if server.pp_size > 1:
        text = f"it has {server.pp_size} pipeline stages, and only the first answers for what was loaded"
        yield Obstacle(text=text, fix="start it with --tp-size in place of --pp-size")
    if server.enable_eplb:
        text = (
            "it moves experts between its ranks while it serves (--enable-eplb): what a rank holds then is neither "
            "what a load wrote there nor comparable with another load"
        )
        yield Obstacle(text=text, fix="start it without --enable-eplb (--init-expert-location may stay)")
    if (option := server.keeps_weights_apart) is not None:
        yield Obstacle(text=f"{_APART[option]} ({option})", fix=f"start it without {option}")
    if draft == DRAFT_LEFT and not plugged:
        model = server.speculative_draft_model_path
        text = f"its own update would load each version into its draft model {model} as well"
        fix = (
            "install this very refitd in the server's environment, which leaves the draft model as it was started, or "
            "start it without --speculative-draft-model-path"
        )
        yield Obstacle(text=text, fix=fix)
    elif draft == DRAFT_LEFT:
        text = f"draft: {DRAFT_LEFT}: answers stay right, and fewer of its proposals are taken as the model moves on"
        fix = "restart the server with a draft model that was trained since, or without one"
        yield Obstacle(text=text, fix=fix, blocks=False)


def adapter_obstacles(server: SglangServerInfo) -> Iterator[Obstacle]:
    if server.role is not None:
        text = f"it does the {server.role} of others (--disaggregation-mode), and refitd loads adapters into one server"
        yield Obstacle(text=text, fix="start a server that prefills and decodes")
    if server.launch.dp_ranks > 1:
        text = f"it has {server.launch.dp_ranks} data-parallel ranks, and SGLang loads adapters at run time into one"
        yield Obstacle(text=text, fix="start a server for each of them, without --dp-size or --attn-dp-size")


_REFUSES = "Failed to get weights iterator"
# Some kernels and models cannot be updated at all, which SGLang (0.5.23) says before it reads anything.
_TAKES_NONE = "Online weight updates "
WORDS = ServerWords(
    name="SGLang",
    one="an SGLang server",
    key="it was started with (--api-key)",
    admin_key="its --admin-api-key",
    elsewhere="is this an SGLang that refitd can drive? Name an engine's own address, not that of a gateway: gateways "
    "have no routes for weights",
)
TRIAL: dict[str, Any] = {
    "input_ids": [1, 2, 3],  # in every vocabulary, and no tokenizer is needed
    "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
    "return_logprob": True,
}


def what_happened(reply: Reply | NoReply, ranks: int = 1, *, drafts: bool = False) -> Loading:
    """Say what an update call did to an engine. `ranks`: data-parallel ranks of the engine. `drafts`: whether a draft
    model is loaded after the model, so that a refusal may be of the draft model alone.
    """
    if isinstance(reply, NoReply):
        return meaning_of_silence(reply)
    if (refused := refused_at_the_door(reply, WORDS)) is not None:
        return Untouched(refused)
    if reply.data is not None and (answers := answers_in(reply.message)):
        return _said_by_plugin(reply, answers, ranks)
    return _said_by_sglang(reply, reply.message.split(" | "), drafts=drafts)


def _said_by_plugin(reply: Reply, answers: list[Answer], ranks: int) -> Loading:
    """What the plugin says counts: SGLang's sentences of the same kind may be quoted in it. A rank whose cache was not
    flushed gives SGLang's sentence alone, and so counts as one that has not answered.
    """
    happened = meaning_of_answers(answers, ranks)
    return Unclear(_answered(reply)) if isinstance(happened, Loaded) and not _has_succeeded(reply) else happened


def _said_by_sglang(reply: Reply, ranks: list[str], *, drafts: bool) -> Loading:
    """Decide by the sentences of all data-parallel ranks, which SGLang joins. If they differ it is unclear."""
    if _has_succeeded(reply):
        return Loaded()
    # SGLang answers a request of a wrong form so, before it reaches the scheduler.
    is_validation = reply.is_incomplete and reply.data is not None and reply.data.get("object") == "error"
    takes_none = not drafts and all(rank.startswith(_TAKES_NONE) for rank in ranks)
    if is_validation or takes_none or all(_REFUSES in rank for rank in ranks):
        return Untouched(f"the engine refused: {reply.short_message}")
    return Unclear(_answered(reply))


def _answered(reply: Reply) -> str:
    return f"the engine answered {reply.status}: {reply.short_message}"


def _has_succeeded(reply: Reply) -> bool:
    return reply.ok and reply.data is not None and reply.data.get("success") is True


def was_done(reply: Reply | NoReply) -> bool:
    """Whether the server confirms that it carried out the call, which a proxy's page with a 200 does not."""
    return isinstance(reply, Reply) and reply.ok and reply.data is not None and "message" in reply.data


class _Rank(msgspec.Struct):
    checksums: dict[str, str]


class _Ranks(msgspec.Struct):
    ranks: list[_Rank]


def fingerprint_in(reply: Reply) -> str | None:
    """One digest over the checksums of all ranks' tensors, in any order; None where the reply has none."""
    try:
        ranks = reply.read_as(_Ranks).ranks if reply.ok else []
    except msgspec.ValidationError:
        return None
    checksums = [rank.checksums for rank in ranks]
    return digest_of(checksums) if checksums and all(checksums) else None


def digest_of(checksums: list[dict[str, str]]) -> str:
    each = sorted(msgspec.json.encode(rank, order="sorted") for rank in checksums)
    return f"xxh3:{xxhash.xxh3_128(b''.join(each)).hexdigest()}"


class _Meta(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, Any]]
    weight_version: ServerLabel | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta


@dataclass(frozen=True, slots=True)
class TrialAnswer:
    """The answer to `TRIAL`: the log-probability and the id of each token, and the label where the server names one."""

    scores: tuple[tuple[float, int], ...]
    label: str | None

    def fault(self, label: str) -> str | None:
        """Why it is not an answer of the version that has the label; None where it is, or says nothing of it."""
        if self.label in (None, label):
            return None
        return f"a trial was answered by version {self.label!r}, not {label!r}"


def read_trial(reply: Reply | NoReply) -> TrialAnswer | str:
    """The answer to `TRIAL`, or why it is not in order: no tokens, or no number where a log-probability belongs."""
    if isinstance(found := read_trial_form(reply, _Answer), str):
        return found
    scores = tuple((logprob, token) for logprob, token, _ in found.meta_info.output_token_logprobs)
    fault = fault_of_scores((logprob for logprob, _ in scores), are_enough=bool(scores))
    return fault or TrialAnswer(scores, found.meta_info.weight_version)


def trial_fault(reply: Reply | NoReply, label: str) -> str | None:
    """Why the answer to `TRIAL` is not in order, or not of the version that has the label; None where it is."""
    answer = read_trial(reply)
    return answer if isinstance(answer, str) else answer.fault(label)
