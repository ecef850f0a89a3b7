"""Whether a server computes with an adapter that it lists, shown by its answers.

A request that names an adapter can be answered by the model alone, or by an adapter that was loaded before: then its
answer is exactly that of a request without the adapter, or with the other one. Adapters may be that alike themselves: B
is zero before the first step, and a step may change nothing. What the files say decides then.

Answers of one server may differ in the last digit with the batch they are computed in. So an answer that differs shows
something only where the server repeats itself, and is asked again where it does not. Two adapters that are both applied
never agree in every digit of eight or more log-probabilities, unless they are equal.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np

from refitd_client.checkpoint.header import locate
from refitd_client.contract.naming import ADAPTER_CONFIG_NAME, ADAPTER_NAME
from refitd_client.errors import InvalidWeightsError
from refitd_client.files.plain_file import read_plain
from refitd_client.validation.lora import MAX_CONFIG_BYTES

ROUNDS = 3
_MAX_ADAPTER_BYTES = 2**34
_MAGNITUDE = {"F32": ("<u4", 0x7FFFFFFF), "F16": ("<u2", 0x7FFF), "BF16": ("<u2", 0x7FFF)}

Scores = tuple[object, ...]
"""The answer to a fixed prompt, token by token, with every digit of the log-probabilities that the server gives."""

Ask = Callable[[str | None], Awaitable[Scores | str | None]]


async def answered_instead(ask: Ask, adapter: str, others: Sequence[str | None]) -> tuple[list[str | None], str | None]:
    """Return which of `others` a server answers with where `adapter` is named, and why that cannot be told.

    Args:
        ask: has an adapter answer, or the model where it is None. A text says why the answer is not in order; None that
            it did not come in time, which says nothing of the adapter.
        adapter: the adapter that was loaded.
        others: names of adapters, None for the model without one. At least one.
    """
    for _ in range(ROUNDS):
        found: dict[str | None, Scores] = {}
        for each in (*others, adapter):
            scores = await ask(each)
            if not isinstance(scores, tuple):
                return [], scores
            found[each] = scores
        if same := [each for each in others if found[each] == found[adapter]]:
            return same, None
        if await ask(others[0]) == found[others[0]]:
            break
    return [], None


def unexplained(folder: Path, whose: str, other: Path | None) -> str | None:
    """Why it is wrong that an adapter answers exactly as another, or as the model; None where it is right. Blocks.

    Args:
        folder: of the adapter.
        whose: what its answers are equal to, for the sentence.
        other: the folder of the other adapter; None for the model.
    """
    doubt = f"requests that name it are answered exactly as by {whose}"
    try:
        explained = _changes_nothing(folder) if other is None else _is_same(folder, other)
    except (OSError, InvalidWeightsError) as error:
        return f"{doubt}, and its files cannot be read to see whether they are alike: {error}"
    if explained:
        return None
    differ = "its B matrices are not zero" if other is None else "the two differ"
    return f"{doubt}, and {differ}: the server does not compute with it"


def _changes_nothing(folder: Path) -> bool:
    """Whether every B of an adapter is zero, so that the model answers as without it."""
    for name, (dtype, data) in _tensors(folder).items():
        width, magnitude = _MAGNITUDE.get(dtype, ("<u1", 0xFF))
        if name.endswith(".lora_B.weight") and np.any(np.frombuffer(data, width) & magnitude):
            return False
    return True


def _is_same(folder: Path, other: Path) -> bool:
    """Whether two folders hold one adapter."""
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
