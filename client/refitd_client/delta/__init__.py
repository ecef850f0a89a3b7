"""Sparse deltas: what changed since a version that engines serve, in a format of its own (docs/delta-format.md).

`find` compares, `writer` and `reader` are the file, `apply` takes a tensor from its base to the result. `maker` does it
all for the publisher, `plan` decides. Importing it imports no torch.
"""

from refitd_client.delta.apply import apply, check_fits
from refitd_client.delta.change import Change, Delta, DeltaRefusedError, index_type, union
from refitd_client.delta.find import changed
from refitd_client.delta.layout import Compression, Encoding
from refitd_client.delta.pieces import DeltaFile
from refitd_client.delta.plan import DeltaRules
from refitd_client.delta.reader import parse_delta, read_delta
from refitd_client.delta.writer import EncodedDelta, encode

__all__ = [
    "Change",
    "Compression",
    "Delta",
    "DeltaFile",
    "DeltaRefusedError",
    "DeltaRules",
    "EncodedDelta",
    "Encoding",
    "apply",
    "changed",
    "check_fits",
    "encode",
    "index_type",
    "parse_delta",
    "read_delta",
    "union",
]
