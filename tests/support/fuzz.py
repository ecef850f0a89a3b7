"""What the fuzzers share: bytes that are nearly right, and what a parser may do with them.

It begins with bytes that are right and changes bytes, tokens and lengths: that gets deeper than noise. Derandomized:
the same cases each time. `REFITD_FUZZ` is how many (default: 400 of each); where it is set, others each time.
"""

import os
import tracemalloc
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("REFITD_FUZZ", "0"))
FUZZ = settings(
    max_examples=CASES or 400,
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

Change = Callable[[bytes], bytes]


@st.composite
def changes(draw: st.DrawFn) -> Change:
    """One thing that is done to the bytes. Places are fractions, so that they fit whatever came before."""
    begin, end = sorted((draw(st.floats(0, 1)), draw(st.floats(0, 1))))
    kind = draw(st.sampled_from(["flip", "token", "replace", "cut", "twice", "move", "noise"]))
    token = draw(st.sampled_from(TOKENS) | st.binary(max_size=8))
    bit = draw(st.integers(0, 7))

    def change(data: bytes) -> bytes:
        i, j = int(begin * len(data)), int(end * len(data))
        match kind:
            case "flip":
                return data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :] if i < len(data) else data
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

    return change


def changed(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    """A seed with a few changes."""

    def apply(seed: bytes, several: list[Change]) -> bytes:
        for change in several:
            seed = change(seed)
        return seed

    return st.builds(apply, st.sampled_from(seeds), st.lists(changes(), max_size=5))


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
