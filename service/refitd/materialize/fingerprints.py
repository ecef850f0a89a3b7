"""The fingerprints of a checkpoint's tensors from all its bytes, where none are written down, or those are doubted."""

from threading import Event

import numpy as np
from numpy.typing import NDArray

from refitd.materialize.files import Checkpoint, in_threads, reading
from refitd.materialize.rewrite import width_in
from refitd_client.checkpoint.strict_header import TensorSpec
from refitd_client.files.file_bytes import fill
from refitd_client.fingerprint import bits_of, fingerprint
from refitd_client.fingerprint.definition import MASK, ROW
from refitd_client.validation.contents import ReadingStoppedError

_CHUNK_BYTES = 4 * 2**20


def fingerprints_of(checkpoint: Checkpoint, stop: Event) -> dict[str, int]:
    """Read all shards, several at a time, and return the fingerprints by the tensors' names.

    Raises:
        ReadingStoppedError: `stop` was set.
        OSError: a file cannot be read.
    """

    def one(name: str, stop: Event) -> dict[str, int]:
        header, room = checkpoint.headers[name], np.empty(_CHUNK_BYTES, np.uint8)
        with reading(checkpoint.folder, name) as fd:
            return {tensor: _of(fd, header.data_start, spec, room, stop) for tensor, spec in header.tensors.items()}

    parts = in_threads(one, list(checkpoint.headers), stop)
    return {name: value for part in parts for name, value in part.items()}


def _of(fd: int, data_start: int, spec: TensorSpec, room: NDArray[np.uint8], stop: Event) -> int:
    width = width_in(spec.dtype)
    step = _CHUNK_BYTES // (ROW * width) * ROW * width  # parts begin at whole rows
    total = 0
    for begin in range(spec.start, spec.end, step):
        if stop.is_set():
            raise ReadingStoppedError
        data = room[: min(step, spec.end - begin)]
        fill(fd, data.data, data_start + begin)
        total += fingerprint(bits_of(data, width), first=(begin - spec.start) // width)
    return total & MASK
