"""Routes of liveness, readiness and metrics, and what is wrong with the service.

The first two are open to everyone: they say nothing secret.
"""

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from refitd.api.context import ServiceOf
from refitd.observe.telemetry import Telemetry
from refitd.policy.readiness import not_ready, why_not_ready, why_rebuilding
from refitd.state.journal.journal import JournalError
from refitd.state.store import Store
from refitd_client.contract.wire import Faults

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """200 while the event loop turns."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(service: ServiceOf) -> dict[str, str]:
    """200 while the journal can be written and the root can be listed.

    503 until the first listing of the root after a start, and while a lost journal is rebuilt.
    """
    await service.store.durable()
    if (why := why_not_ready(service.store)) is not None:
        raise not_ready(why)
    return {"status": "ready"}


async def faults_now(store: Store) -> Faults:
    """Return what is wrong with the journal, the root, the list of engines, and what lies in the root."""
    try:
        await store.journal.durable(told=True)
        store.journal.check()
    except JournalError as error:
        fault = f"{error}; {error.remedy}"
    else:
        fault = why_rebuilding(store)
    return faults_of(store, fault)


def faults_of(store: Store, journal: str | None) -> Faults:
    """Return the store's faults with that of the journal."""
    faults = store.faults
    return Faults(
        root=faults.root,
        engines=faults.engines,
        journal=journal,
        disk=faults.disk,
        folders=faults.folders,
        upstream=faults.upstream,
        push=faults.push,
        tls=faults.tls,
    )


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Prometheus text format. `docs/metrics.md` lists what there is."""
    telemetry: Telemetry = request.app.state.telemetry
    return Response(generate_latest(telemetry.registry), media_type=CONTENT_TYPE_LATEST)
