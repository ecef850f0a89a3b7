"""Sparse deltas: what changed since a version that engines serve, in a format of its own (docs/delta-format.md).

`change` compares and applies, `head`, `writer` and `reader` are the file. `maker` does it all for the publisher.
Importing this package imports no torch.
"""

from refitd_client.delta.change import (
    Change,
    Delta,
    DeltaRefusedError,
    apply,
    changed,
    check_fits,
    index_type,
    union,
)
from refitd_client.delta.reader import DeltaFile, parse_delta, read_delta
from refitd_client.delta.writer import EncodedDelta, encode

__all__ = [
    "Change",
    "Delta",
    "DeltaFile",
    "DeltaRefusedError",
    "EncodedDelta",
    "apply",
    "changed",
    "check_fits",
    "encode",
    "index_type",
    "parse_delta",
    "read_delta",
    "union",
]
