"""Whether an SGLang server computes with an adapter that it lists, shown by its answers.

A request that names an adapter can be answered by the model alone, or by an adapter that was loaded before: then its
answer is exactly that of a request without the adapter, or with the other one. Adapters may be that alike themselves: B
is zero before the first step, and a step may change nothing. What the files say decides then.

Answers of one server may differ in the last digit with the batch they are computed in. So an answer that differs shows
something only where the server repeats itself, and is asked again where it does not. Two adapters that are both applied
never agree in every digit of eight log-probabilities, unless they are equal.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from refitd.engine.http import CallFailure, NoReply, Reply
from refitd.engine.sglang.verify import TRIAL, read_scores
from refitd_client.checkpoint.header import locate
from refitd_client.contract.naming import ADAPTER_CONFIG_NAME, ADAPTER_NAME
from refitd_client.errors import InvalidWeightsError
from refitd_client.files.plain_file import read_plain
from refitd_client.validation.lora import MAX_CONFIG_BYTES

ROUNDS = 3
_MAX_ADAPTER_BYTES = 2**34
_MAGNITUDE = {"F32": ("<u4", 0x7FFFFFFF), "F16": ("<u2", 0x7FFF), "BF16": ("<u2", 0x7FFF)}

Ask = Callable[[dict[str, Any]], Awaitable[Reply | NoReply]]
Scores = tuple[tuple[float, int], ...]


async def answered_instead(ask: Ask, adapter: str, others: Sequence[str | None]) -> tuple[list[str | None], str | None]:
    """Return which of `others` a server answers with where `adapter` is named, and why that cannot be told.

    Args:
        ask: sends a request for tokens.
        adapter: the adapter that was loaded.
        others: names of adapters, None for the model without one. At least one.
    """
    for _ in range(ROUNDS):
        found: dict[str | None, Scores] = {}
        for each in (*others, adapter):
            scores = await _scores(ask, each)
            if not isinstance(scores, tuple):
                return [], scores
            found[each] = scores
        if same := [each for each in others if found[each] == found[adapter]]:
            return same, None
        if await _scores(ask, others[0]) == found[others[0]]:
            break
    return [], None


async def _scores(ask: Ask, adapter: str | None) -> Scores | str | None:
    """The tokens of a fixed prompt with their log-probabilities, or why there are none; None after a time-out."""
    # No two of these requests share cached prefixes, by which an answer can differ in its last digits.
    named = {} if adapter is None else {"lora_path": adapter}
    reply = await ask(TRIAL | {"extra_key": uuid4().hex} | named)
    if isinstance(reply, NoReply) and reply.lost is CallFailure.TIMED_OUT:
        return None  # many requests are before it: that says nothing of the adapter
    return read_scores(reply)


def changes_nothing(folder: Path) -> bool:
    """Whether every B of an adapter is zero, so that the model answers as without it. Blocks.

    Raises:
        OSError: its files cannot be read.
        InvalidWeightsError: they are no adapter's.
    """
    for name, (dtype, data) in _tensors(folder).items():
        width, magnitude = _MAGNITUDE.get(dtype, ("<u1", 0xFF))
        if name.endswith(".lora_B.weight") and np.any(np.frombuffer(data, width) & magnitude):
            return False
    return True


def is_same(folder: Path, other: Path) -> bool:
    """Whether two folders hold one adapter. Blocks.

    Raises:
        OSError: files cannot be read.
        InvalidWeightsError: they are no adapter's.
    """
    return _scale(folder) == _scale(other) and _tensors(folder) == _tensors(other)


def _tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    data = read_plain(folder / ADAPTER_NAME, _MAX_ADAPTER_BYTES)
    found = locate(folder / ADAPTER_NAME)
    return {name: (entry.dtype, data[start : start + entry.nbytes]) for name, (entry, start) in found.items()}


def _scale(folder: Path) -> tuple[object, object]:
    try:
        config = json.loads(read_plain(folder / ADAPTER_CONFIG_NAME, MAX_CONFIG_BYTES))
        return config.get("r"), config.get("lora_alpha")
    except (ValueError, AttributeError) as error:
        raise InvalidWeightsError(f"{folder} has no adapter's configuration: {error}") from error
