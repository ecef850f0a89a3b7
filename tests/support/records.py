"""Records for tests of the pure cores: a test says only what it is about."""

from typing import Any

from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.follow import HostEngines
from refitd_client.contract.naming import Order, version_folder
from refitd_client.contract.states import EngineState, VersionState


def version(step: int, *, generation: int = 1, run: str = "run", **fields: Any) -> VersionRecord:
    """A sealed version with a digest of its own."""
    order = Order(generation, step)
    defaults: dict[str, Any] = {
        "path": f"{run}/{version_folder(order)}",
        "state": VersionState.SEALED,
        "created_at": "2026-01-01T00:00:00Z",
        "digest": f"digest-{generation}-{step}",
        "weights": f"weights-{generation}-{step}",
        "shards": "shards",
        "signature": f"signature-{generation}-{step}",
    }
    facts = defaults | fields
    own = {name: facts.pop(name) for name in ("path", "state", "created_at")}
    return VersionRecord(run=run, order=order, **own).having(**facts)


def engine(name: str = "a", **fields: Any) -> EngineRecord:
    """An engine of run "run" that is in sync with nothing."""
    facts: dict[str, Any] = {"url": f"http://{name}", "run": "run", "state": EngineState.IN_SYNC} | fields
    if facts.pop("pulls", False):
        facts.setdefault("host", HostEngines(follower=name))
    return EngineRecord(id=name, url=facts.pop("url")).having(**facts)
