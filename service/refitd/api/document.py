"""/openapi.json says what the middleware does: which routes want a token, and that every error is a problem document.

FastAPI knows the routes; tokens and errors are not theirs (see `auth.py` and `errors.py`), so it cannot know of those.
"""

from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from refitd.api.auth import LOOKS, OPEN
from refitd_client.contract.wire import Problem

_BEARER = {"type": "http", "scheme": "bearer", "description": "A write token, or a read token for what only looks."}
_FASTAPIS_OWN = ("HTTPValidationError", "ValidationError")
_REFUSED = {"401": "A token is needed, or another one", "403": "The token does not open this"}
_WRONG = {"422": "The request does not have the right form"}


def documented(app: FastAPI) -> dict[str, Any]:
    """The document of the API, made once."""
    if app.openapi_schema is None:
        app.openapi_schema = _complete(FastAPI.openapi(app))
    return app.openapi_schema


def _complete(document: dict[str, Any]) -> dict[str, Any]:
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in _FASTAPIS_OWN:
        schemas.pop(name, None)
    schemas["Problem"] = TypeAdapter(Problem).json_schema()
    components["securitySchemes"] = {"bearer": _BEARER}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete_operation(operation, method.upper(), path)
    return document


def _complete_operation(operation: dict[str, Any], method: str, path: str) -> None:
    told = {"default": "What else can go wrong"} | _WRONG
    if path not in OPEN:
        # Looking needs a token only where the operator has set one for it.
        operation["security"] = [{"bearer": []}] if method not in LOOKS else [{}, {"bearer": []}]
        told |= _REFUSED
    operation["responses"] |= {status: _problem(text) for status, text in sorted(told.items())}


def _problem(description: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": description, "content": {"application/problem+json": {"schema": schema}}}
