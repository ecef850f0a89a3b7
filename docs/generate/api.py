"""The page of the HTTP API, from the service's own OpenAPI document."""

from collections.abc import Iterator, Mapping
from typing import Any

from generate.markdown import code, page, plain, prose, table
from refitd.api.api import routes
from refitd.api.auth import FOLLOWERS
from refitd.problem import Slug

INTRODUCTION = """\
# HTTP API

The service's own document is at `/openapi.json`, and a page to try it at `/docs`. In Python there is `RefitClient` of
`refitd_client`, in a shell there are the [commands](cli.md).

Bodies are JSON; a field that is not listed here is refused. Lists come in pages, `{items, next_cursor}`: pass
`next_cursor` on for the next one, until it is null. Times of day are RFC 3339 in UTC, durations in milliseconds.
"""
TOKENS = """\
What a route needs where tokens are set ([security](../security.md)): "write" the write token; "read" a read token or
the write token, where a read token is set; "open" none. "follow": a token to follow opens it as well.
"""
ERRORS = """\
Every error is a problem document ([RFC 9457](https://www.rfc-editor.org/rfc/rfc9457)), `application/problem+json`, with
`type`, `title`, `status`, `detail` and `instance`. `detail` says what to do. `type` is `urn:refitd:problem:` and one of
these:
"""


def api_page() -> str:
    """The page."""
    document = routes().openapi()
    return page(
        INTRODUCTION,
        TOKENS,
        *_routes(document["paths"]),
        "## Errors",
        ERRORS,
        table(
            ["type", "status", "title"],
            ((code(kind.slug), str(kind.status), plain(kind.title)) for kind in Slug),
        ),
        "## Types",
        *(_type(name, schema) for name, schema in document["components"]["schemas"].items() if "Page_" not in name),
    )


def _routes(paths: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    last = ""
    for path, operations in paths.items():
        for method, operation in operations.items():
            tag = operation["tags"][0]
            yield "" if tag == last else f"## Routes: {tag}"
            yield _route(method.upper(), path, operation)
            last = tag


def _route(method: str, path: str, operation: Mapping[str, Any]) -> str:
    told = [prose(paragraph) for paragraph in operation["description"].split("\n\n")]
    roles = [_token(operation.get("security")), *(["follow"] if (method, path) in FOLLOWERS else [])]
    facts = [f"Token: {', '.join(roles)}."]
    if "requestBody" in operation:
        facts.append(f"Body: {_content(operation['requestBody'])}.")
    facts.append(f"Answer: {', '.join(_answers(operation['responses']))}.")
    rows = [
        (code(each["name"]), each["in"], _type_of(each["schema"]), _limits(each))
        for each in operation.get("parameters", [])
        if each["in"] != "path"
    ]
    parameters = table(["parameter", "in", "type", ""], rows) if rows else ""
    return page(f"### {method} {path}", *told, " ".join(facts), parameters)


def _token(security: Any) -> str:
    if security is None:
        return "open"
    return "read" if {} in security else "write"


def _answers(responses: Mapping[str, Any]) -> Iterator[str]:
    """What a route answers with when all is well, the usual status first."""
    for status, response in responses.items():
        if status.startswith("2"):
            content = _content(response)
            note = "" if response["description"] == "Successful Response" else f" ({plain(response['description'])})"
            yield f"{status} {content}{note}".replace(" )", ")").strip()


def _content(body: Mapping[str, Any]) -> str:
    for media, content in body.get("content", {}).items():
        if media != "application/json":
            return code(media)
        return _type_of(content["schema"])
    return ""


def _limits(parameter: Mapping[str, Any]) -> str:
    schema = parameter["schema"]
    kinds = [schema, *schema.get("anyOf", [])]
    low = next((each["minimum"] for each in kinds if "minimum" in each), None)
    high = next((each["maximum"] for each in kinds if "maximum" in each and each["maximum"] < 2**53), None)
    parts = [] if low is None else [f"{low} to {high}" if high is not None else f"from {low}"]
    if schema.get("default") is not None:
        parts.append(f"default {code(_shown(schema['default']))}")
    return "; ".join(parts)


def _type_of(schema: Mapping[str, Any]) -> str:
    match schema:
        case {"$ref": str(reference)}:
            return _link(reference.rpartition("/")[2])
        case {"anyOf": list(kinds)}:
            return " or ".join(_type_of(kind) for kind in kinds)
        case {"enum": list(values)}:
            return " or ".join(code(value) for value in values)
        case {"type": "array", "items": dict(items)}:
            return f"list of {_type_of(items)}"
        case {"type": "object", "additionalProperties": dict(values)}:
            return f"map of {_type_of(values)}"
        case {"type": str(kind)}:
            return kind
        case _:
            return "any"


def _link(name: str) -> str:
    if name.startswith("Page_"):
        return f"page of {_link(name.removeprefix('Page_').removesuffix('_'))}"
    return f"[{name}](#type-{name.lower()})"


def _type(name: str, schema: Mapping[str, Any]) -> str:
    told = [prose(paragraph) for paragraph in schema.get("description", "").split("\n\n")]
    if "enum" in schema:
        return page(f"### Type {name}", *told, f"One of {', '.join(code(value) for value in schema['enum'])}.")
    needed = schema.get("required", [])
    rows = [
        (code(field), _type_of(kind), _default(kind, field in needed))
        for field, kind in schema.get("properties", {}).items()
    ]
    return page(f"### Type {name}", *told, table(["field", "type", "default"], rows))


def _default(schema: Mapping[str, Any], needed: bool) -> str:
    if needed:
        return "needed"
    default = schema.get("default")
    return "" if default in (None, "") else code(_shown(default))


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)
