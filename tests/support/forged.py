"""Versions as a careless or broken publisher would leave them: any files, with a manifest that agrees with them."""

import json
import shutil
from collections import Counter
from math import prod
from pathlib import Path

import xxhash

from refitd.catalog.examine import structure
from refitd.engine.port import Files
from refitd_client.contract.manifest import Manifest, ManifestFile, TensorsSummary
from refitd_client.contract.naming import MANIFEST_NAME, Order, version_folder, version_id

_BITS = {"BF16": 16, "F32": 32, "F16": 16}


def forge(root: Path, run: str, step: int, files: Path) -> Path:
    """Copy a folder's files to where a version belongs, and write the manifest that they would have."""
    folder = root / run / version_folder(Order(1, step))
    shutil.copytree(files, folder)
    sign(folder, run, step)
    return folder


def version_of(root: Path, files: Path) -> Path:
    """A folder's files as a version in the root, forged when they are first asked for."""
    run = f"contract/{files.name}"
    folder = root / run / version_folder(Order(1, 1))
    return folder if folder.is_dir() else forge(root, run, 1, files)


def files_of(root: Path, folder: Path) -> Files:
    """What the service would know of a version."""
    path = str(folder.relative_to(root))
    seen = structure(root, path)
    assert seen.manifest is not None
    id_ = version_id(seen.manifest.run, seen.manifest.order)
    return Files(version=id_, path=path, digest=seen.manifest.digest, signature=seen.signature)


def sign(folder: Path, run: str, step: int) -> None:
    """Write the manifest of what lies in a folder."""
    files = {
        path.name: ManifestFile(
            size=path.stat().st_size, digest=f"xxh3:{xxhash.xxh3_128(path.read_bytes()).hexdigest()}"
        )
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST_NAME
    }
    manifest = Manifest(
        run=run, generation=1, step=step, files=files, tensors=_summary(folder), created_at="2026-01-01T00:00:00Z"
    )
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())


def _summary(folder: Path) -> TensorsSummary:
    entries = [entry for path in sorted(folder.glob("*.safetensors")) for entry in _entries(path.read_bytes())]
    sizes = [prod(entry["shape"]) * _BITS[entry["dtype"]] // 8 for entry in entries]
    dtypes = Counter(str(entry["dtype"]) for entry in entries)
    return TensorsSummary(count=len(entries), bytes=sum(sizes), dtypes=dict(dtypes))


def _entries(data: bytes) -> list[dict[str, list[int]]]:
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError:
        return []
    return [entry for name, entry in header.items() if name != "__metadata__"]
