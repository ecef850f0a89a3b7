"""Fingerprints: 64 bits a tensor, the same on the CPU, on the GPU, and updated by a delta.

`host` says what they are and computes them with numpy, `kernel` on a GPU, `device` with torch.

>>> to_text(fingerprint(bits_of(np.arange(6, dtype=np.uint8), width_of("BF16"))))
'bbe84a0a4d1a6911'
"""

from refitd_client.contract.manifest import to_text
from refitd_client.fingerprint.host import (
    Bits,
    bits_of,
    fingerprint,
    fingerprints_together,
    share,
    terms,
    updated,
    width_of,
)
from refitd_client.fingerprint.tensors import Scan, ScanInput, begin_scan, fingerprints, scan

__all__ = [
    "Bits",
    "Scan",
    "ScanInput",
    "begin_scan",
    "bits_of",
    "fingerprint",
    "fingerprints",
    "fingerprints_together",
    "scan",
    "share",
    "terms",
    "to_text",
    "updated",
    "width_of",
]
