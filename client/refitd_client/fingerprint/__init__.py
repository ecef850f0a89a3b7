"""Fingerprints: 64 bits a tensor, the same on the CPU, on the GPU, and updated by a delta.

`definition` says what they are, `host` computes them with numpy, `kernel` on a GPU, `twin` with torch's operations.

>>> to_text(fingerprint(bits_of(np.arange(6, dtype=np.uint8), width_of("BF16"))))
'bbe84a0a4d1a6911'
"""

from refitd_client.fingerprint.definition import to_text, to_texts, width_of
from refitd_client.fingerprint.host import Bits, bits_of, fingerprint, share, updated
from refitd_client.fingerprint.moved import Moved
from refitd_client.fingerprint.tensors import Look, Scan, begin_scan, fingerprints, scan

__all__ = [
    "Bits",
    "Look",
    "Moved",
    "Scan",
    "begin_scan",
    "bits_of",
    "fingerprint",
    "fingerprints",
    "scan",
    "share",
    "to_text",
    "to_texts",
    "updated",
    "width_of",
]
