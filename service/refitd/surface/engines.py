"""Routes of engines: the fleet."""

from fastapi import APIRouter, Depends, Response

from refitd.problem import Kind, ProblemError
from refitd.surface.auth import authorize
from refitd.surface.context import Service, ServiceOf
from refitd.surface.present import present_engine
from refitd_client.contract.wire import Engine, NewEngine, Page

router = APIRouter(prefix="/v1/engines", tags=["engines"])
changes = Depends(authorize)


@router.get("")
async def list_engines(service: ServiceOf) -> Page[Engine]:
    """All engines."""
    return Page(items=[present_engine(record) for _, record in sorted(service.ledger.engines.items())])


@router.post("", status_code=201, dependencies=[changes])
async def add_engine(engine: NewEngine, service: ServiceOf) -> Engine:
    """Take an engine in: it is brought to its run's target at once."""
    engine_id = service.fleet.add(engine)
    await service.ledger.durable()
    return _present(service, engine_id)


@router.get("/{engine_id}")
async def get_engine(engine_id: str, service: ServiceOf) -> Engine:
    """One engine."""
    return _present(service, engine_id)


@router.delete("/{engine_id}", status_code=204, response_class=Response, dependencies=[changes])
async def remove_engine(engine_id: str, service: ServiceOf) -> None:
    """Let go of an engine. What it serves it goes on serving."""
    service.fleet.remove(engine_id)
    await service.ledger.durable()


@router.post("/{engine_id}/resync", status_code=202, dependencies=[changes])
async def resync(engine_id: str, service: ServiceOf) -> Engine:
    """Load an engine again, whatever it claims to serve; ends a quarantine."""
    service.fleet.resync(engine_id)
    return _present(service, engine_id)


def _present(service: Service, engine_id: str) -> Engine:
    record = service.ledger.engines.get(engine_id)
    if record is None:
        raise ProblemError(Kind.UNKNOWN_ENGINE, f"no engine {engine_id}: 'refitd engines' lists what there is")
    return present_engine(record)
