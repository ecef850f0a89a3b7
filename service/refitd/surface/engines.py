"""Routes of engines: the fleet."""

from fastapi import APIRouter, Response

from refitd.engine.address import AddressRefusedError, check_url
from refitd.engine.allow import host_of
from refitd.engine.dialing import refused
from refitd.problem import Kind, ProblemError
from refitd.rollout.hosts import guard_of
from refitd.surface.context import Service, ServiceOf
from refitd.surface.meant import engine_meant
from refitd.surface.present import present_engine
from refitd_client.contract.wire import Engine, NewEngine, Page

router = APIRouter(prefix="/v1/engines", tags=["engines"])


@router.get("")
async def list_engines(service: ServiceOf) -> Page[Engine]:
    """All engines."""
    return Page(items=[present_engine(record, service.ledger) for _, record in sorted(service.ledger.engines.items())])


@router.post("", status_code=201)
async def add_engine(engine: NewEngine, service: ServiceOf) -> Engine:
    """Take an engine in: it is brought to its run's target at once. 403 where nobody allowed its host."""
    await _check_host(service, engine.url)
    engine_id = service.fleet.add(engine)
    await service.ledger.durable()
    return _present(service, engine_id)


# An engine is named by its id or by its URL, which has slashes.
@router.get("/{engine_id:path}")
async def get_engine(engine_id: str, service: ServiceOf) -> Engine:
    """One engine, by its id or its URL."""
    return _present(service, engine_meant(engine_id, service.ledger))


@router.delete("/{engine_id:path}", status_code=204, response_class=Response)
async def remove_engine(engine_id: str, service: ServiceOf) -> None:
    """Let go of an engine. What it serves it goes on serving."""
    service.fleet.remove(engine_meant(engine_id, service.ledger))
    await service.ledger.durable()


@router.post("/{engine_id:path}/resync", status_code=202)
async def resync(engine_id: str, service: ServiceOf) -> Engine:
    """Load an engine again, whatever it claims to serve: now, or when it is reachable. This ends a quarantine."""
    meant = engine_meant(engine_id, service.ledger)
    service.fleet.resync(meant)
    await service.ledger.durable()
    return _present(service, meant)


async def _check_host(service: Service, url: str) -> None:
    try:
        host = host_of(check_url(url))
    except AddressRefusedError as error:
        raise ProblemError(Kind.BAD_ENGINE_URL, str(error)) from error
    if (reason := await refused(host, guard_of(service.settings, service.ledger))) is not None:
        raise ProblemError(Kind.ENGINE_NOT_ALLOWED, reason)


def _present(service: Service, engine_id: str) -> Engine:
    record = service.ledger.engines.get(engine_id)
    if record is None:
        raise ProblemError(Kind.UNKNOWN_ENGINE, f"no engine {engine_id}: 'refitd engines' lists what there is")
    return present_engine(record, service.ledger)
