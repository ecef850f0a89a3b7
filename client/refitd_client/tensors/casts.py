"""Which dtype a tensor is published in, where that is another than the trainer's. Pure.

Masters in fp32 are published in the dtype that the engines serve. A cast rounds each element by itself, so that casting
a part and taking a part of the cast are the same. Integers, booleans and 8-bit floats (whose scales only the model
knows) are left as they are, whatever is asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True)
class Casts:
    """The first pattern that a published name matches decides; without one the dtype stays. Dtypes by torch's names."""

    rules: tuple[tuple[str, str], ...] = ()

    def target(self, name: str, dtype: str) -> str:
        """The dtype in which a tensor is published."""
        if dtype not in FLOATS:
            return dtype
        return next((new for pattern, new in self.rules if fnmatchcase(name, pattern)), dtype)


def casts(dtype: Any) -> Casts:
    """Read what a caller asks for: a dtype for all tensors, a mapping of patterns (`*.router.*`) to dtypes, or None.

    Dtypes are torch's (`torch.bfloat16`) or their names (`"bfloat16"`).

    Raises:
        ValueError: a dtype is none that weights can be cast to.
    """
    if dtype is None:
        return Casts()
    rules = cast("Mapping[Any, Any]", dtype) if isinstance(dtype, Mapping) else {"*": dtype}
    return Casts(tuple((str(pattern), _dtype(new)) for pattern, new in rules.items()))


def _dtype(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in FLOATS:
        raise ValueError(f"dtype {dtype}: weights are cast to one of {', '.join(sorted(FLOATS))}")
    return name
