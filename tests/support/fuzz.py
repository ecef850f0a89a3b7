"""What the fuzzers share: bytes that are nearly right, and what a parser may do with them.

It begins with bytes that are right and changes bytes, tokens and lengths: that gets deeper than noise. Derandomized:
the same cases each time. `REFITD_FUZZ` is how many (default: 150 of each); where it is set, others each time.
"""

import os
import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("REFITD_FUZZ", "0"))
FUZZ = settings(
    max_examples=CASES or 150,
    derandomize=not CASES,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
# What a case may take beyond its own size, several times over. A parser that builds what it reads takes far more.
MEMORY = 2 * 2**20

# Bits of JSON that mean something to a parser, and numbers at which something ends.
TOKENS = [b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\", b"\\u0000", b"\\ud800", b"\\u001b[2J", b"\\n", b"null"]
TOKENS += [b"true", b"-1", b"-0", b"1e3", b"NaN", b"0.5", b"\x00", b"\xff", b"\xed\xa0\x80", b"[" * 2000]
TOKENS += [b"__metadata__", b"../", b'{"a":' * 2000]
TOKENS += [str(2**power + more).encode() for power in (31, 32, 53, 63, 64, 128) for more in (-1, 0, 1)]
TOKENS += [b"dtype", b"shape", b"data_offsets", b"files", b"size", b"refit.json", b"F64", b"9" * 5000]

KINDS = ["flip", "token", "replace", "cut", "twice", "move", "noise"]


def changed(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    """A seed with a few changes.

    Hypothesis draws one number for all of them: drawing each by itself takes it longer than most parsers take.
    """

    def apply(number: bytes) -> bytes:
        random = Random(number)
        data = random.choice(seeds)
        for _ in range(random.randint(1, 5)):
            data = change(data, random)
        return data

    return st.binary(min_size=8, max_size=8).map(apply)


def change(data: bytes, random: Random) -> bytes:
    """Do one thing to the bytes, at their ends more often than elsewhere."""
    i, j = sorted(random.choice((0, len(data), *[random.randint(0, len(data))] * 6)) for _ in range(2))
    token = random.choice((random.choice(TOKENS), random.randbytes(random.randint(0, 8))))
    match random.choice(KINDS):
        case "flip":
            return data[:i] + bytes([data[i] ^ 1 << random.randint(0, 7)]) + data[i + 1 :] if i < len(data) else data
        case "token":
            return data[:i] + token + data[i:]
        case "replace":
            return data[:i] + token + data[i + len(token) :]
        case "cut":
            return data[:i] + data[j:]
        case "twice":
            return data[:j] + data[i:]
        case "move":
            return data[:i] + data[j:] + data[i:j]
        case _:
            return data[:i] + token * 3 + data[j:]


def within_bounds(size: int, act: Callable[[], Any]) -> Any:
    tracemalloc.start()
    try:
        return act()
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < MEMORY + 20 * size, f"{most} bytes for {size}"


def check_sentence(refusal: Exception | str) -> None:
    """It goes into logs, answers and terminals: it is short, and holds nothing that one of these would obey."""
    assert str(refusal).isprintable()
    assert len(str(refusal)) < 1500
