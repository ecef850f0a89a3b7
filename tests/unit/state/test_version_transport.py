"""How a version came to its engines: what was really done counts, not what its trainer asked for."""

import pytest

from refitd.state.version import VersionRecord
from refitd_client.contract.naming import Order
from refitd_client.contract.states import Kind, VersionState


@pytest.mark.parametrize(
    ("handed", "kind", "asked", "transport"),
    [
        (False, Kind.FULL, None, "disk"),
        (False, Kind.LORA, None, "disk"),
        (False, Kind.DELTA, "delta", "delta"),
        (True, Kind.FULL, None, "handover"),
        (True, Kind.FULL, "handover", "handover"),
        (True, Kind.FULL, "nccl", "nccl"),
        (True, Kind.FULL, "gloo", "gloo"),
        (False, Kind.FULL, "nccl", "disk"),
        (True, Kind.FULL, "carrier pigeon", "handover"),
    ],
)
def test_it_is_what_carried_the_version(handed: bool, kind: Kind, asked: str | None, transport: str) -> None:
    version = VersionRecord(
        run="run",
        order=Order(1, 1),
        path="run/v000001",
        state=VersionState.SEALED,
        created_at="2026-01-01T00:00:00Z",
        kind=kind,
    ).having(handed=handed, metadata={} if asked is None else {"transport": asked})
    assert version.transport == transport
