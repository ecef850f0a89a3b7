"""The disk updates of slime and miles as versions, deltas among them.

Both write `weight_v000012/` into `--update-weight-disk-dir` (miles deltas alone) and then call, on every rank, what
`--custom-update-weight-post-write-path` names:

>>> # my_refit.py, beside the trainer:     --custom-update-weight-post-write-path my_refit.publish
>>> from refitd_client.trainers.slime import DiskUpdates
>>> publish = DiskUpdates("/shared/weights", "exp/trial", "http://127.0.0.1:8700")

A full update is published as the folder that it is. A delta (`--update-weight-delta-encoding`) is applied to a copy of
the model in host memory, and what results is published, as refitd's own delta where that is worth it. The format, as
both trainers write it (read in their sources, November 2026):

    model.safetensors.index.json       metadata: version, base_version (six digits), delta_encoding, compression_format
                                       (zstd), checksum_format; weight_map: the tensors that changed
    model-0000i-of-0000n.safetensors   for each of them a U8 array, one zstd frame; `__metadata__`: its checksum after
    xor                                new ^ old, byte by byte
    overwrite                          u32 count, u32 positions of bytes, the new bytes; little-endian

`base_version` 000000 is the checkpoint that the trainer was started with (`--hf-checkpoint`).
"""

import importlib
import os
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
import torch.distributed
import xxhash
import zstandard
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from refitd_client.checkpoint.index import MAX_INDEX_BYTES
from refitd_client.contract.decoding import converted, from_json
from refitd_client.contract.naming import INDEX_NAME
from refitd_client.errors import InvalidWeightsError, StorageError
from refitd_client.files.plain_file import read_plain
from refitd_client.publisher import WeightPublisher
from refitd_client.trainers import options_of
from refitd_client.write.source_folder import open_checkpoint

Bytes = NDArray[np.uint8]
_SLIME_VERSION = re.compile(r"weight_v(\d{6,13})")


class _Facts(msgspec.Struct):
    """The metadata of a delta's index, as far as this module knows it."""

    version: str
    base_version: str
    delta_encoding: str
    compression_format: str
    checksum_format: str


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


class SlimeDelta:
    """A delta that slime or miles has written: it leads from the weights of `base` to those of `version`."""

    def __init__(self, folder: Path, index: _Index | None = None) -> None:
        """Read its index.

        Raises:
            InvalidWeightsError: it cannot be read, or is none of a delta.
        """
        self._folder, self._index = folder, index or _index_of(folder)
        try:
            self._facts = converted(self._index.metadata, _Facts)
            self.version, self.base = int(self._facts.version), int(self._facts.base_version)
        except (msgspec.ValidationError, ValueError) as error:
            raise InvalidWeightsError(f"{folder / INDEX_NAME} is no index of a delta of slime's: {error}") from error

    def apply(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Change the weights of its base, in place.

        Raises:
            InvalidWeightsError: it does not lead to what its checksums say. The weights are of no use any more.
        """
        tensors = self._index.weight_map
        for file in sorted(set(tensors.values())):
            if Path(file).name != file:
                raise InvalidWeightsError(f"{self._folder / INDEX_NAME} names {file!r}, which is no file beside it")
            names = [name for name, place in tensors.items() if place == file]
            _apply(self._folder / file, names, self._facts, weights)


class DiskUpdates:
    """Publishes what slime or miles has written. Its call is their hook: `hook(args, version_dir, rollout_engines)`."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        run: str,
        service_url: str | None = None,
        *,
        base_model: str | os.PathLike[str] | None = None,
        wait: float = 0.0,
        **publisher: Any,
    ) -> None:
        """Remember the arguments. The run is taken by the first update, on rank 0.

        Args:
            root: the folder that the service watches; not the one that the trainer writes into.
            run: the run's name, such as `experiment/trial`.
            service_url: the service to send notices to; deltas need it, because it says what engines serve.
            base_model: the checkpoint that version 0 stands for; by default the trainer's `--hf-checkpoint`.
            wait: seconds to wait after each publication until engines serve it (0: do not wait). Needs `service_url`.
            publisher: fields of `PublishOptions`.

        Raises:
            ValueError: `wait` is negative, or given without `service_url`.
            TypeError: an option is none of a publisher's.
        """
        if wait < 0 or (wait > 0 and service_url is None):
            raise ValueError(f"wait is {wait}: it is seconds, and needs the service_url of the service to ask")
        self._place, self._options = (root, run, service_url), options_of(publisher, type(self))
        self._base_model = None if base_model is None else Path(base_model)
        self._wait = wait
        self._publisher: WeightPublisher | None = None
        self._number = 0  # of the update whose weights `_held` has, in memory or in a version's folder
        self._held: dict[str, torch.Tensor] | Path | None = None

    def __call__(self, args: Any, folder: str | os.PathLike[str], rollout_engines: object = None) -> None:
        """Publish an update, on rank 0; other ranks return at once.

        Args:
            args: the trainer's arguments, for `hf_checkpoint`.
            folder: the update. The trainers also call with the folder above, when they have emptied it.
            rollout_engines: the trainer's own engines, which this leaves alone.

        Raises:
            InvalidWeightsError: the update cannot be read, is a delta of another version than the one before it here,
                or does not result in what its checksums say.
            RefitError: as `WeightPublisher.publish` and `Publication.wait` raise it.
        """
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return
        place = Path(folder)
        named = _SLIME_VERSION.fullmatch(place.name)
        if named is None:
            return
        if self._publisher is None:
            self._publisher = WeightPublisher(*self._place, options=self._options)
        number, index = int(named[1]), _index_of(place)
        if "delta_encoding" in index.metadata:
            weights = self._changed(SlimeDelta(place, index), place, number, args)
            publication = self._publisher.publish(weights, step=number, transport="delta" if self._place[2] else None)
        else:
            publication = self._publisher.publish(place, step=number)
            self._number, self._held = number, publication.path  # the trainer may delete its own
        if self._wait:
            publication.wait(self._wait)

    def close(self) -> None:
        """Release the run."""
        publisher, self._publisher, self._held = self._publisher, None, None
        if publisher is not None:
            publisher.close()

    def _changed(self, delta: SlimeDelta, folder: Path, number: int, args: Any) -> dict[str, torch.Tensor]:
        """Apply a delta to the weights of its base; the weights."""
        if delta.version != number:
            raise InvalidWeightsError(f"{folder} says that it is version {delta.version:06d}")
        weights = self._at(delta.base, folder, self._base_model or Path(args.hf_checkpoint))
        self._held = None  # until all of it is applied: half a delta is no base
        delta.apply(weights)
        self._number, self._held = number, weights
        return weights

    def _at(self, number: int, folder: Path, base_model: Path) -> dict[str, torch.Tensor]:
        """The weights of a version, in memory."""
        if number == 0:
            return load_weights(base_model)
        if number == self._number and self._held is not None:
            return load_weights(self._held) if isinstance(self._held, Path) else self._held
        raise InvalidWeightsError(
            f"{folder} is a delta of version {number:06d}, whose weights are not here: the first delta of a training "
            "is one of version 000000, and each further one of the version before it; restart the trainer"
        )


def _index_of(folder: Path) -> _Index:
    try:
        return from_json(read_plain(folder / INDEX_NAME, MAX_INDEX_BYTES, follow=True), _Index)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidWeightsError(f"{folder / INDEX_NAME} cannot be read: {error}") from error


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, in memory of their own.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        files = list(open_checkpoint(folder).shards)
        # Copies: what the library gives is mapped, and changes with the file.
        return {name: tensor.clone() for file in files for name, tensor in load_file(file).items()}
    except (OSError, SafetensorError) as error:
        raise StorageError(f"the base {folder} cannot be read: {error}") from error


def _apply(file: Path, names: list[str], facts: _Facts, weights: Mapping[str, torch.Tensor]) -> None:
    """Change the tensors that a file of a delta is about, each when its checksum is right."""
    check = _CHECKSUMS.get(facts.checksum_format)
    change = _CHANGES.get(facts.delta_encoding)
    if check is None or change is None or facts.compression_format != "zstd":
        known = f"{'/'.join(_CHANGES)}, zstd and {'/'.join(_CHECKSUMS)}"
        raise InvalidWeightsError(f"{file.parent} is a delta by {facts}: this release of refitd knows {known}")
    try:
        with cast("Any", safe_open)(file, framework="numpy") as opened:
            checksums: dict[str, str] = opened.metadata() or {}
            held = set(opened.keys())
            for name in names:
                if name not in held or name not in checksums or name not in weights:
                    raise InvalidWeightsError(
                        f"{file} lacks tensor {name} or its checksum, or the base does", tensor=name
                    )
                old = cast("Bytes", weights[name].reshape(-1).view(torch.uint8).numpy())
                new = change(opened.get_tensor(name), old)
                if new.size != old.size or check(new) != checksums[name]:
                    raise InvalidWeightsError(f"{file} does not lead to the checksum of tensor {name}", tensor=name)
                old[:] = new
    except (OSError, SafetensorError, zstandard.ZstdError, ValueError, IndexError) as error:
        raise InvalidWeightsError(f"{file} cannot be applied: {error}") from error


def _xor(frame: Bytes, old: Bytes) -> Bytes:
    return np.bitwise_xor(old, _unpacked(frame, old.size))


def _overwrite(frame: Bytes, old: Bytes) -> Bytes:
    data = _unpacked(frame, 4 + 5 * old.size)
    count = int(data[:4].view("<u4")[0])
    if data.size != 4 + 5 * count:
        raise ValueError(f"{count} changes take {4 + 5 * count} bytes, and there are {data.size}")
    new = old.copy()
    new[data[4 : 4 + 4 * count].view("<u4")] = data[4 + 4 * count :]
    return new


def _unpacked(frame: Bytes, most: int) -> Bytes:
    """Decompress a frame of at most so many bytes."""
    packed = frame.tobytes()
    size = zstandard.frame_content_size(packed)
    if not 0 <= size <= most:
        raise ValueError(f"a frame says that it holds {size} bytes, of at most {most}")
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False), np.uint8)


def _blake3(data: Bytes) -> str:
    blake3: Any = importlib.import_module("blake3")  # the trainer has it where it uses it
    return blake3.blake3(data.data).hexdigest()


_CHANGES: dict[str, Callable[[Bytes, Bytes], Bytes]] = {"xor": _xor, "overwrite": _overwrite}
_CHECKSUMS: dict[str, Callable[[Bytes], str]] = {
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data.data),
    "adler32": lambda data: f"{zlib.adler32(data.data):08x}",
    "blake3": _blake3,
}
