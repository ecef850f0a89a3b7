"""Liveness, readiness and metrics, open to everyone: they say nothing secret. And faults, which name files."""

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from refitd.problem import Kind, ProblemError
from refitd.surface.context import ServiceOf
from refitd.surface.metrics import registry_of
from refitd_client.contract.wire import Faults

router = APIRouter(tags=["health"])


@router.get("/", include_in_schema=False)
async def home() -> RedirectResponse:
    """To the API's documentation."""
    return RedirectResponse("/docs")


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """200 while the event loop turns."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(service: ServiceOf) -> dict[str, str]:
    """200 while the journal can be written and the root can be listed."""
    await service.ledger.durable()
    if service.ledger.root_fault is not None:
        raise ProblemError(Kind.NOT_READY, service.ledger.root_fault)
    return {"status": "ready"}


@router.get("/v1/faults")
async def faults(service: ServiceOf) -> Faults:
    """What cannot be done now, in sentences; null where nothing is wrong."""
    ledger = service.ledger
    return Faults(root=ledger.root_fault, engines=ledger.file_fault or ledger.discovery_fault or ledger.fleet_fault)


@router.get("/metrics", response_class=Response)
async def metrics(service: ServiceOf) -> Response:
    """Prometheus text format."""
    return Response(generate_latest(registry_of(service.ledger)), media_type=CONTENT_TYPE_LATEST)
