"""Reads a version as a service would, and says what is wrong with it."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from safetensors.numpy import load_file

from refitd_client.contract.manifest import FileDigest, Manifest, parse_manifest
from refitd_client.contract.naming import INDEX_NAME, MANIFEST_NAME, parse_version_folder


def versions(run: Path) -> list[str]:
    """The visible versions of a run."""
    return sorted(entry.name for entry in run.iterdir() if parse_version_folder(entry.name) is not None)


def leftovers(run: Path) -> list[str]:
    """The folders of publications that did not end."""
    return sorted(entry.name for entry in run.iterdir() if entry.name.startswith(".incoming-"))


def check(folder: Path) -> Manifest:
    """Hold a version's files against its manifest, its index against its shards."""
    manifest = parse_manifest((folder / MANIFEST_NAME).read_bytes())
    assert parse_version_folder(folder.name) == manifest.order
    assert {entry.name for entry in folder.iterdir()} == {MANIFEST_NAME, *manifest.files}
    for name, file in manifest.files.items():
        data = (folder / name).read_bytes()
        assert (len(data), f"xxh3:{xxhash.xxh3_128(data).hexdigest()}") == (file.size, file.digest), name
    assert msgspec.json.decode((folder / INDEX_NAME).read_bytes())["weight_map"] == where(folder)
    assert manifest.tensors.count == len(where(folder))
    return manifest


def check_by_blocks(folder: Path) -> Manifest:
    """Hold the files of a version, large ones among them, against its manifest by the product's own digest."""
    manifest = parse_manifest((folder / MANIFEST_NAME).read_bytes())
    assert {entry.name for entry in folder.iterdir()} == {MANIFEST_NAME, *manifest.files}
    for name, file in manifest.files.items():
        digest = FileDigest()
        digest.update((folder / name).read_bytes())
        assert ((folder / name).stat().st_size, digest.text) == (file.size, file.digest), name
    return manifest


def where(folder: Path) -> dict[str, str]:
    """The shard of each tensor, by the shards."""
    return {name: shard.name for shard in shards(folder) for name in load_file(shard)}


def tensors(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors, for dtypes that numpy has."""
    return {name: tensor for shard in shards(folder) for name, tensor in load_file(shard).items()}


def shards(folder: Path) -> list[Path]:
    """The shards, in order of name."""
    return sorted(folder.glob("*.safetensors"))


def whole(folder: Path) -> list[str]:
    """The visible versions, each of them held against its manifest."""
    names = versions(folder)
    for name in names:
        check(folder / name)
    return names


def files(folder: Path) -> dict[str, bytes]:
    """The content of a version's files, but for its manifest."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "refit.json"}
