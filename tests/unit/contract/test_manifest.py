"""`refit.json` of today, of before deltas, and of whoever writes one: what is claimed of fingerprints and deltas."""

import json
from typing import Any

import pytest

from refitd_client.contract.manifest import (
    MAX_MANIFEST_BYTES,
    Claims,
    DeltaFacts,
    Manifest,
    ManifestFile,
    ManifestRefusedError,
    TensorsSummary,
    fitting_fingerprints,
    parse_manifest,
)
from refitd_client.contract.states import Kind

FACTS = DeltaFacts(file="weights.refit-delta", encoding="flat", compression="none", tensors=1, changed=2, elements=100)
DELTA = Manifest(
    run="exp/trial",
    generation=2,
    step=123,
    files={"weights.refit-delta": ManifestFile(size=9, digest="xxh3:00")},
    tensors=TensorsSummary(count=1, bytes=200, dtypes={"BF16": 1}),
    created_at="2026-11-21T12:00:00Z",
    kind=Kind.DELTA,
    base="exp~trial~v000122.g2",
    fingerprints={"w": "00000000000000ff"},
    delta=FACTS,
)


def test_a_deltas_manifest_comes_back() -> None:
    assert parse_manifest(DELTA.to_json()) == DELTA


def test_a_manifest_from_before_deltas_is_read() -> None:
    raw = json.loads(DELTA.to_json())
    for field in ("fingerprints", "delta", "kind", "base"):
        del raw[field]
    found = parse_manifest(json.dumps(raw).encode())
    assert (found.kind, found.base, found.fingerprints, found.delta) == (Kind.FULL, None, {}, None)
    assert Claims() == Claims(kind=found.kind, base=found.base, fingerprints=found.fingerprints, delta=found.delta)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base": None}, "kind, base or delta"),
        ({"delta": None}, "kind, base or delta"),
        ({"kind": "full"}, "kind, base or delta"),
        ({"base": "exp~other~v000122"}, "no earlier version of its run"),
        ({"base": "exp~trial~v000123.g2"}, "no earlier version of its run"),
        ({"base": "exp~trial~v000124.g2"}, "no earlier version of its run"),
        ({"base": "exp~trial~v000122.g3"}, "no earlier version of its run"),
        ({"base": "../../etc/passwd"}, "kind, base or delta"),
        ({"files": {}}, "which is not among its files"),
        ({"delta": {**json.loads(DELTA.to_json())["delta"], "changed": 101}}, "101 of 100 elements"),
        ({"delta": {**json.loads(DELTA.to_json())["delta"], "changed": "two"}}, "does not parse"),
        ({"fingerprints": {"w": "FF"}}, "16 hexadecimal digits"),
        ({"fingerprints": {"w": 255}}, "does not parse"),
        ({"fingerprints": {f"w{number}": "0" * 16 for number in range(200_001)}}, "more than 200000 fingerprints"),
    ],
)
def test_a_claim_that_cannot_be_is_refused(change: dict[str, Any], says: str) -> None:
    raw = json.loads(DELTA.to_json()) | change
    with pytest.raises(ManifestRefusedError, match=says):
        parse_manifest(json.dumps(raw).encode())


def test_a_model_with_many_tensors_still_has_a_manifest() -> None:
    """All of its fingerprints, or none of them: never a manifest too large to be read."""
    few = {f"model.layers.{number}.mlp.experts.gate_proj.weight": 0 for number in range(100_000)}
    many = {f"model.layers.{number}.mlp.experts.gate_proj.weight" + "x" * 500: 0 for number in range(100_000)}
    assert fitting_fingerprints(few) == dict.fromkeys(few, "0" * 16)
    assert fitting_fingerprints(many) == {}
    manifest = Manifest(
        run="exp", generation=1, step=1, files={}, tensors=DELTA.tensors, created_at="",
        fingerprints=fitting_fingerprints(few),
    )  # fmt: skip
    assert len(manifest.to_json()) < MAX_MANIFEST_BYTES
    assert parse_manifest(manifest.to_json()) == manifest
