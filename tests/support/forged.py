"""Versions as a careless or broken publisher would leave them: any files, with a manifest that agrees with them."""

import json
import shutil
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from refitd.engine.port import VersionFiles
from refitd_client.contract.manifest import DeltaFacts, FileDigest, Manifest, ManifestFile, TensorsSummary
from refitd_client.contract.naming import DELTA_NAME, MANIFEST_NAME, Order, version_folder, version_id
from refitd_client.contract.states import Kind
from refitd_client.delta import Change, Delta, encode, index_type
from refitd_client.fingerprint import fingerprints, to_text
from refitd_client.fingerprint.device import flat_bits
from refitd_client.validation.examine import structure

Weights = dict[str, Any]
_BITS = {"BF16": 16, "F32": 32, "F16": 16, "F8_E4M3": 8}
_NAMES = {
    "torch.bfloat16": "BF16", "torch.float32": "F32", "torch.float16": "F16", "torch.float8_e4m3fn": "F8_E4M3",
}  # fmt: skip


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


def files_of(root: Path, folder: Path) -> VersionFiles:
    """What the service would know of a version."""
    path = str(folder.relative_to(root))
    seen = structure(root, path)
    assert seen.manifest is not None
    id_ = version_id(seen.manifest.run, seen.manifest.order)
    return VersionFiles(version=id_, path=path, digest=seen.manifest.digest, signature=seen.signature)


def sign(folder: Path, run: str, step: int, fingerprints: dict[str, str] | None = None, **claims: Any) -> None:
    """Write the manifest of what lies in a folder."""
    files = {
        path.name: ManifestFile(size=path.stat().st_size, digest=_digest(path))
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST_NAME
    }
    manifest = Manifest(
        run=run,
        generation=1,
        step=step,
        files=files,
        tensors=_summary(folder),
        created_at="2026-01-01T00:00:00Z",
        fingerprints=fingerprints or {},
        **claims,
    )
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())


def _digest(path: Path) -> str:
    digest = FileDigest()
    digest.update(path.read_bytes())
    return digest.text


def fingerprints_of(weights: Weights) -> dict[str, str]:
    """As manifests have them."""
    return {name: to_text(number) for name, number in zip(weights, fingerprints(weights.values()), strict=True)}


def write_delta(
    folder: Path, run: str, step: int, base: int, before: Weights, after: Weights, *, also: Weights | None = None
) -> None:
    """Write a version that is a delta. `also` are fingerprints' tensors that the delta does not name."""
    changes = {name: change for name, tensor in after.items() if (change := _change(before[name], tensor)) is not None}
    made = Delta(base=_id(run, base), version=_id(run, step), changes=changes)
    folder.mkdir(parents=True)
    (folder / DELTA_NAME).write_bytes(encode(made).to_bytes())
    facts = DeltaFacts(
        file=DELTA_NAME,
        encoding="flat",
        compression="none",
        tensors=len(changes),
        changed=made.changed,
        elements=sum(tensor.numel() for tensor in after.values()),
    )
    prints = fingerprints_of(after | (also or {}))
    sign(folder, run, step, fingerprints=prints, kind=Kind.DELTA, base=made.base, delta=facts)


def _id(run: str, step: int) -> str:
    return version_id(run, Order(1, step))


def _change(before: Any, after: Any) -> Change | None:
    """Bits are compared: -0 is a change."""
    old, new = (host_bits(flat_bits(each)) for each in (before, after))
    indices = np.flatnonzero(old != new)
    first, last = fingerprints([before, after])
    return (
        Change(
            dtype=_NAMES[str(after.dtype)],
            shape=tuple(after.shape),
            indices=indices.astype(index_type(after.numel())),
            values=new[indices],
            base=first,
            result=last,
        )
        if len(indices)
        else None
    )


def host_bits(flat: Any) -> Any:
    """As unsigned integers."""
    array = flat.numpy()
    return array.view(f"u{array.itemsize}")


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
