"""Errors become problem documents (RFC 9457)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from refitd.observe.telemetry import Telemetry
from refitd.problem import ProblemError, Slug
from refitd.state.journal.journal import JournalError
from refitd.text import clean, one_line, plain_refusal

_TEXT_SHOWN = 60  # characters of a text that came
_MOST_BITS = 128  # of a number that is shown


def fault_sentence(fault: Mapping[str, Any]) -> str:
    """Say what is wrong.

    Args:
        fault: as pydantic has it; the first part of its `loc` is where in the request it is (`query`, `body`).
    """
    place, *path = (str(part) for part in fault["loc"])
    place = "headers" if place == "header" else place
    field = f"{one_line('.'.join(path))} in the {place}" if path else f"the {place}"
    match fault["type"]:
        case "json_invalid":
            return f"the {place} is no JSON: {plain_refusal(fault['ctx']['error'])}, at character {path[0]}"
        case "missing":
            return f"{field} is missing"
        case "unexpected_keyword_argument" | "extra_forbidden":
            return f"{field} is no field of this request"
        case _:
            return f"{field} is {_came(fault['input'])}: {plain_refusal(fault['msg'])}"


def _came(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return repr(clean(value if len(value) <= _TEXT_SHOWN else value[:_TEXT_SHOWN] + "…"))
        case int() if value.bit_length() > _MOST_BITS:
            return "a number of too many digits"
        case int() | float():
            return str(value)
        case list():
            return "a JSON array"
        case _:
            return "a JSON object"


def response(error: ProblemError, path: str) -> Response:
    """Return the problem document for a request path. Names of files need not be UTF-8, the document has to be."""
    document = error.document(path)
    document = replace(document, detail=document.detail.encode(errors="backslashreplace").decode())
    return Response(
        msgspec.json.encode(document),
        status_code=error.kind.status,
        media_type="application/problem+json",
        headers=error.headers,
    )


log = structlog.get_logger("refitd")

_NOT_JSON = "send the body with content-type: application/json (curl -H 'content-type: application/json' -d '{…}')"
_SLUGS = {404: Slug.NOT_FOUND, 405: Slug.METHOD_NOT_ALLOWED, 413: Slug.TOO_LARGE}


def answer(error: ProblemError, scope: Scope) -> Response:
    """Return the response for a problem, counted where the application has telemetry."""
    telemetry: Telemetry | None = getattr(scope["app"].state, "telemetry", None)
    if telemetry is not None:
        telemetry.meters.refused(error.kind)
    return response(error, scope["path"])


def install(app: FastAPI) -> None:
    app.add_exception_handler(ProblemError, _problem)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(JournalError, _journal)
    app.add_exception_handler(Exception, _bug)


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


async def _problem(request: Request, error: Exception) -> Response:
    if not isinstance(error, ProblemError):
        raise error
    return answer(error, request.scope)


async def _validation(request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    if not _is_json(request) and any(fault["loc"][:1] == ("body",) for fault in error.errors()):
        return answer(ProblemError(Slug.BAD_REQUEST, _NOT_JSON), request.scope)
    faults = "; ".join(fault_sentence(fault) for fault in error.errors())
    return answer(ProblemError(Slug.BAD_REQUEST, faults), request.scope)


async def _http(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    kind = _SLUGS.get(error.status_code, Slug.BAD_REQUEST)
    return answer(ProblemError(kind, str(error.detail), error.headers), request.scope)


async def _journal(request: Request, error: Exception) -> Response:
    if not isinstance(error, JournalError):
        raise error
    return answer(ProblemError(Slug.DISK_FULL, f"{error}; {error.remedy}"), request.scope)


async def _bug(request: Request, error: Exception) -> Response:
    log.error("unexpected error", path=request.url.path, exc_info=error)
    return answer(ProblemError(Slug.INTERNAL, "the service's log has the details"), request.scope)
