"""Attacks with files that take little room on a disk and much in memory, on a real service.

Whoever can write below the root leaves files with holes in them. The service looks at them with the memory that it
takes for any version, says what is wrong with them, and goes on.
"""

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from refitd_client import Notice, RefitClient
from refitd_client.contract.manifest import DeltaFacts, FileDigest, Manifest, ManifestFile, TensorsSummary
from refitd_client.contract.naming import DELTA_NAME, MANIFEST_NAME
from refitd_client.contract.states import Kind, VersionState
from refitd_client.fingerprint import fingerprint, to_text
from support.rawfiles import raw
from support.servers import RefitdProgram

pytestmark = [pytest.mark.e2e]

ELEMENTS = 2**26
CHANGED = ELEMENTS * 3 // 4
NAME = "layer.weight"
FULL, DELTA = "run~v000001", "run~v000002"
MORE = 160 * 2**20  # bytes: what a service may take for a version, however large its files say that they are
PATIENCE = 60.0  # seconds
KINDS = [Kind.FULL, Kind.DELTA]


def with_holes(path: Path, head: bytes, size: int, tail: bytes = b"") -> Path:
    """A file that begins and ends like this, and takes no room between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
        file.seek(size - len(tail))
        file.write(tail)
    assert path.stat().st_blocks * 512 < 2**20
    return path


def write_model(folder: Path, elements: int = ELEMENTS) -> Path:
    """One tensor of zeros."""
    header = {NAME: {"dtype": "BF16", "shape": [elements], "data_offsets": [0, 2 * elements]}}
    head = raw(json.dumps(header).encode())
    with_holes(folder / "model.safetensors", head, len(head) + 2 * elements)
    (folder / "config.json").write_text(json.dumps({"model_type": "test"}))
    return folder


def digest_of(path: Path) -> FileDigest:
    digest = FileDigest()
    with path.open("rb") as file:
        while data := file.read(2**20):
            digest.update(data)
    return digest


def sign(folder: Path, step: int, fingerprints: dict[str, str], *, is_delta: bool) -> None:
    """Write a manifest that agrees with what is there."""
    names = sorted(path.name for path in folder.iterdir())
    facts = DeltaFacts(
        file=DELTA_NAME, encoding="flat", compression="none", tensors=1, changed=CHANGED, elements=ELEMENTS
    )
    manifest = Manifest(
        run="run",
        generation=1,
        step=step,
        files={
            name: ManifestFile(size=(folder / name).stat().st_size, digest=digest_of(folder / name).text)
            for name in names
        },
        tensors=TensorsSummary(count=1, bytes=2 * ELEMENTS, dtypes={"BF16": 1}),
        created_at="2026-01-01T00:00:00Z",
        kind=KINDS[is_delta],
        base=FULL if is_delta else None,
        delta=facts if is_delta else None,
        fingerprints=fingerprints,
    )
    (folder / MANIFEST_NAME).write_bytes(manifest.to_json())


def junk(path: Path, _: str) -> None:
    """As large as any delta on this base may be, and zeros throughout."""
    with_holes(path, b"", 6 * ELEMENTS)


def a_good_delta(path: Path, zeros: str) -> None:
    """Most elements of the tensor change, each to what it is already: the values are a hole."""
    row = {"dtype": "BF16", "shape": [ELEMENTS], "changed": CHANGED, "base": zeros, "result": zeros}
    indices, size = np.arange(CHANGED, dtype=np.uint32).tobytes(), 2 * CHANGED
    metadata = {"format": "refit-delta/2", "base": FULL, "version": DELTA, "encoding": "flat", "compression": "none"}
    header = {
        "__metadata__": metadata | {"tensors": json.dumps({NAME: row})},
        f"indices:{NAME}": {"dtype": "U32", "shape": [CHANGED], "data_offsets": [0, 2 * size]},
        f"values:{NAME}": {"dtype": "BF16", "shape": [CHANGED], "data_offsets": [2 * size, 3 * size]},
        "digest": {"dtype": "U8", "shape": [16], "data_offsets": [3 * size, 3 * size + 16]},
    }
    head = raw(json.dumps(header).encode()) + indices
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + size)
    digest = digest_of(path).digest
    with path.open("ab") as file:
        file.write(digest)


@contextmanager
def service(tmp_path: Path, base: Path) -> Generator[tuple[RefitdProgram, RefitClient]]:
    """A service, and a client of it that waits as long as is needed."""
    refitd = RefitdProgram(tmp_path, tmp_path / "root", [], "--base-model", str(base))
    with refitd, RefitClient(refitd.url) as client:
        yield refitd, client


def ended(refitd: RefitdProgram, client: RefitClient, version: str) -> bool:
    """Kill the service as soon as it validates a version; False where the version is REJECTED and nothing is killed."""
    state = None
    for event in client.events("0"):
        if event.subject == version:
            state = client.version(version).state
        if state in {VersionState.VALIDATING, VersionState.REJECTED}:
            break
    if state is VersionState.VALIDATING:
        refitd.kill()
    return state is VersionState.VALIDATING


def most_memory(pid: int) -> int:
    """Bytes of memory that a process took at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize(("make", "ends"), [(junk, VersionState.REJECTED), (a_good_delta, VersionState.SEALED)])
def test_a_delta_with_holes_takes_no_more_memory_than_any_version(tmp_path: Path, make: object, ends: str) -> None:
    """Neither while it is judged, nor while a copy is made of it."""
    zeros = to_text(sum(fingerprint(np.zeros(2**20, np.uint16), first=at) for at in range(0, ELEMENTS, 2**20)) % 2**64)
    base = write_model(tmp_path / "base")
    full = write_model(tmp_path / "root/run/.incoming-1")
    sign(full, 1, {NAME: zeros}, is_delta=False)
    full.rename(tmp_path / "root/run/v000001")
    with service(tmp_path, base) as (refitd, client):
        assert client.wait(FULL, "sealed", timeout=PATIENCE).version.state is VersionState.SEALED
        before = most_memory(refitd.pid)
        folder = tmp_path / "root/run/.incoming-2"
        folder.mkdir()
        make(folder / DELTA_NAME, zeros)  # type: ignore[operator]
        sign(folder, 2, {NAME: zeros}, is_delta=True)
        folder.rename(tmp_path / "root/run/v000002")
        client.announce(Notice(run="run", step=2, kind=Kind.DELTA, base=FULL))
        found = client.wait(DELTA, "sealed", timeout=PATIENCE).version
        assert found.state is ends, found.reason
        if ends is VersionState.SEALED:
            for event in client.events("0"):
                if event.subject == DELTA and event.text.startswith("can be loaded from"):
                    break
        assert most_memory(refitd.pid) - before < MORE
        assert httpx.get(f"{refitd.url}/healthz").status_code == 200


def fill_holes(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as opened:
            for begin in range(0, file.stat().st_size, 2**24):
                opened.seek(begin)
                data = opened.read(2**24)
                opened.seek(begin)
                opened.write(data)


def test_a_version_over_which_the_service_dies_three_times_is_set_aside_and_the_next_one_is_taken(
    tmp_path: Path,
) -> None:
    """It is killed from outside here: what takes its memory may be something that nobody has thought of yet."""
    base = write_model(tmp_path / "base", 2**32)
    fill_holes(write_model(tmp_path / "root/run/v000001", 2**32))  # a file with holes is not written to its end
    flags = ["--base-model", str(base), "--settle", "0"]
    refitd = RefitdProgram(tmp_path, tmp_path / "root", [], *flags)
    killed, alive = 0, True
    while alive:  # a kill before it has noted that it validates anew does not count
        with refitd, RefitClient(refitd.url) as client:
            alive = ended(refitd, client, FULL)
            killed += alive
    assert killed >= 3
    with refitd, RefitClient(refitd.url) as client:
        found = client.wait(FULL, "sealed", timeout=PATIENCE).version
        assert found.state is VersionState.REJECTED
        assert "set aside: the service died 3 times while it validated this version" in (found.reason or "")
        write_model(tmp_path / "root/run/v000002", 1)
        client.announce(Notice(run="run", step=2))
        assert "shape" in (client.wait("run~v000002", "sealed", timeout=PATIENCE).version.reason or "")
        client.announce(Notice(run="run", step=1))
        assert ended(refitd, client, FULL)  # it is validated once more


def test_headers_that_one_file_gives_under_many_names_are_not_all_kept(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", 1)
    folder = tmp_path / "root/run/.incoming-1"
    text = json.dumps({"__metadata__": {"x": "x" * (2**20 - 100)}}).encode()
    folder.mkdir(parents=True)
    (folder / "0.safetensors").write_bytes(raw(text))
    for number in range(1, 400):
        os.link(folder / "0.safetensors", folder / f"{number}.safetensors")
    with service(tmp_path, base) as (refitd, client):
        before = most_memory(refitd.pid)
        folder.rename(tmp_path / "root/run/v000001")
        client.announce(Notice(run="run", step=1))
        found = client.wait(FULL, "sealed", timeout=PATIENCE).version
        assert found.state is VersionState.REJECTED
        assert "the headers of all files take more than the" in (found.reason or "")
        assert most_memory(refitd.pid) - before < MORE
