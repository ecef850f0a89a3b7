"""Whether an engine serves the target: its path, label, checksums, and a trial of a few tokens. Pure.

Path and label are only names (SGLang sets the path before it loads), so contents decide where they can be compared:
with what a clean load of the version gave before, and with what the engine held before this load.
"""

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from refitd.engine.fingerprints import comparable
from refitd.engine.http import NoReply, Reply
from refitd.engine.port import Target

OTHER_TENSORS = "its tensors are not those that a clean load of this version gave"
TRIAL: dict[str, Any] = {
    "input_ids": [1, 2, 3],  # in every vocabulary, and no tokenizer is needed
    "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
    "return_logprob": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Says:
    """What an engine says of itself after a load. `fingerprint` is None where the server cannot tell."""

    model_path: str | None
    weight_version: str | None
    fingerprint: str | None


def doubt(says: Says, target: Target, *, unchanged: bool) -> str | None:
    """Why the engine does not serve the target, None where it does as far as can be proved.

    `unchanged` says that the files are still those that were checked. Where they are not, a trainer may have written
    there between the last look and the end of the load, and only a clean load's record proves what was read.
    """
    if says.model_path != target.path:
        return f"it says that it serves {says.model_path}, not {target.path}"
    if says.weight_version != target.label:
        return f"it says weight_version {says.weight_version!r}, not {target.label!r}"
    is_proved = says.fingerprint is not None and says.fingerprint == target.fingerprint
    if not unchanged and not is_proved:
        return "its files changed meanwhile, or it is not known whether they did"
    if says.fingerprint is None:
        return None
    recorded = target.fingerprint if comparable(says.fingerprint, target.fingerprint) else None
    if recorded is not None and says.fingerprint != recorded:
        return OTHER_TENSORS
    if recorded is None and says.fingerprint == target.not_fingerprint:
        return "its tensors have not changed, and the files of the two versions differ"
    return None


class _Rank(msgspec.Struct):
    checksums: dict[str, str]


class _Ranks(msgspec.Struct):
    ranks: list[_Rank]


def checksums_in(reply: Reply) -> list[dict[str, str]] | None:
    """The checksums of each rank's tensors, by their names; None where the reply has none. Ranks come in any order."""
    if not reply.ok:
        return None
    try:
        checksums = [rank.checksums for rank in reply.read_as(_Ranks).ranks]
    except msgspec.ValidationError:
        return None
    return checksums if checksums and all(checksums) else None


def digest_of(checksums: list[dict[str, str]]) -> str:
    """One digest over all ranks' tensors."""
    each = sorted(msgspec.json.encode(rank, order="sorted") for rank in checksums)
    return f"xxh3:{xxhash.xxh3_128(b''.join(each)).hexdigest()}"


class _Meta(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, Any]]
    weight_version: str | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta


def trial_fault(reply: Reply | NoReply, label: str) -> str | None:
    """Why the answer to `TRIAL` is not in order: no tokens, no number where a log-probability belongs, another label.

    `label` is the weight_version that the answer must claim, where the server names one.
    """
    meta = _read_trial(reply)
    if isinstance(meta, str):
        return meta
    if meta.weight_version not in (None, label):
        return f"a trial was answered by version {meta.weight_version!r}, not {label!r}"
    return None


def read_scores(reply: Reply | NoReply) -> tuple[tuple[float, int], ...] | str:
    """The log-probability and the id of each token of an answer to `TRIAL`, or why the answer is not in order."""
    meta = _read_trial(reply)
    return (
        meta if isinstance(meta, str) else tuple((logprob, token) for logprob, token, _ in meta.output_token_logprobs)
    )


def _read_trial(reply: Reply | NoReply) -> _Meta | str:
    if isinstance(reply, NoReply):
        return f"no answer to a trial: {reply.reason}"
    if not reply.ok:
        return f"a trial was answered {reply.status}: {reply.short_message}"
    try:
        meta = reply.read_as(_Answer).meta_info
    except msgspec.ValidationError as error:
        return f"the answer to a trial cannot be read: {error}"
    if not meta.output_token_logprobs:
        return "a trial brought no tokens"
    if not all(math.isfinite(logprob) for logprob, _, _ in meta.output_token_logprobs):
        return "a trial brought tokens whose log-probability is no number"
    return meta
