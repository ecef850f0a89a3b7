"""Who may ask for which route, by the role of the token that comes with a request. Pure.

    write    everything
    read     what only looks
    publish  what a trainer sends: notices, and what becomes of its versions
    follow   what a follower sends: its reports, and what it pulls

Every route is in the table, also those that only `write` and `read` open: a route that is not opens to no other role,
and a test asks for its line.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache


class TokenRole(StrEnum):
    """What a token is for."""

    WRITE = "write"
    READ = "read"
    PUBLISH = "publish"
    FOLLOW = "follow"


LOOKS = frozenset({"GET", "HEAD", "OPTIONS"})
_P, _F = TokenRole.PUBLISH, TokenRole.FOLLOW

# What else opens a route besides `write`, and `read` where it only looks.
OPENS: Mapping[tuple[str, str], frozenset[TokenRole]] = {
    ("GET", "/v1/overview"): frozenset({_F}),
    ("GET", "/v1/versions"): frozenset({_P, _F}),
    ("POST", "/v1/versions"): frozenset({_P}),
    ("GET", "/v1/versions/{version_id}"): frozenset({_P, _F}),
    ("GET", "/v1/versions/{version_id}/attempts"): frozenset(),
    ("GET", "/v1/versions/{version_id}/wait"): frozenset({_P}),
    ("PUT", "/v1/versions/{version_id}/pin"): frozenset(),
    ("DELETE", "/v1/versions/{version_id}/pin"): frozenset(),
    ("GET", "/v1/versions/{version_id}/manifest"): frozenset({_F}),
    ("GET", "/v1/versions/{version_id}/files/{name}"): frozenset({_F}),
    ("PUT", "/v1/hosts/{name}"): frozenset({_F}),
    ("GET", "/v1/hosts"): frozenset(),
    ("GET", "/v1/follow"): frozenset(),
    ("GET", "/v1/rollback"): frozenset(),
    ("POST", "/v1/rollback"): frozenset(),
    ("GET", "/v1/receivers"): frozenset({_P}),
    ("GET", "/v1/engines"): frozenset(),
    ("POST", "/v1/engines"): frozenset(),
    ("POST", "/v1/engines/move"): frozenset(),
    ("GET", "/v1/engines/{engine_id}"): frozenset(),
    ("DELETE", "/v1/engines/{engine_id}"): frozenset(),
    ("POST", "/v1/engines/{engine_id}/resync"): frozenset(),
    ("GET", "/v1/engines/{engine_id}/gate"): frozenset(),
    ("GET", "/v1/gate"): frozenset(),
    ("POST", "/v1/runs/close"): frozenset(),
    ("POST", "/v1/runs/reopen"): frozenset(),
    ("DELETE", "/v1/runs/{run}"): frozenset(),
    ("POST", "/v1/updates/pause"): frozenset(),
    ("POST", "/v1/updates/resume"): frozenset(),
    ("GET", "/v1/reclaim/plan"): frozenset(),
    ("POST", "/v1/reclaim"): frozenset(),
    ("GET", "/v1/log"): frozenset(),
    ("GET", "/v1/events"): frozenset({_F}),
    ("GET", "/v1/explain/{subject}"): frozenset(),
    ("GET", "/v1/history"): frozenset(),
    ("GET", "/v1/history/engines/{engine_id}"): frozenset(),
    ("GET", "/v1/faults"): frozenset(),
    ("GET", "/metrics"): frozenset(),
}


def may(roles: frozenset[TokenRole], method: str, path: str) -> bool:
    """Return whether a token of these roles opens a request.

    Args:
        roles: of the token.
        method: of the request.
        path: of the request, decoded.
    """
    if TokenRole.WRITE in roles or (TokenRole.READ in roles and method in LOOKS):
        return True
    asked = "GET" if method in LOOKS else method
    return any(asked == each and roles & opens and pattern.fullmatch(path) for each, pattern, opens in _patterns())


@cache
def _patterns() -> list[tuple[str, re.Pattern[str], frozenset[TokenRole]]]:
    """The lines of roles of their own: a name in a path has no slash, as in the routes that these are."""
    return [
        (method, re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path))), opens)
        for (method, path), opens in OPENS.items()
        if opens
    ]
