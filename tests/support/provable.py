"""Versions with fingerprints that a rank's prover reads, good ones and damaged ones."""

import os
from pathlib import Path

import torch

from refitd_client import PublishOptions, WeightPublisher
from refitd_plugin.memory.source import VersionSource, mapped, place_of

NAN = float("nan")


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Some of each width, one without elements, one long."""
    made = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(300, 70, generator=made).bfloat16(),
        "b": torch.randn(33, generator=made),
        "c": torch.randint(0, 100, (5, 4), generator=made, dtype=torch.int64),
        "d": torch.empty(0, 4),
        "e": torch.randn(2048, 65, generator=made).bfloat16(),
        "f": torch.tensor([True, False, True]),
        "g": torch.randn(9, generator=made).to(torch.float8_e4m3fn),
    }


def published(root: Path, step: int, tensors: dict[str, torch.Tensor], *, fingerprints: bool = True) -> VersionSource:
    """A version of these, opened as a rank opens it; values that are not finite are written as they are."""
    publisher = WeightPublisher(
        root, "run", options=PublishOptions(fingerprints=fingerprints, check_finite=False, max_shard_bytes=100_000)
    )
    with publisher:
        path = publisher.publish(tensors, step=step).path
    return mapped(place_of(str(path), root))


def damage(source: VersionSource, name: str) -> None:
    """Flip a bit of a tensor in its file, in a way that leaves no trace but the byte."""
    file, header = next((file, header) for file, header in source.structure.headers.items() if name in header.tensors)
    place = header.data_start + header.tensors[name].start
    path = source.place.folder / file
    times = path.stat()
    with path.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
