"""Who may ask for which route, by the role of the token that comes with a request. Pure.

write    everything
read     what only looks
follow   what a follower sends: its reports, and what it pulls
"""

import re
from enum import StrEnum


class TokenRole(StrEnum):
    """What a token is for."""

    WRITE = "write"
    READ = "read"
    FOLLOW = "follow"


LOOKS = frozenset({"GET", "HEAD", "OPTIONS"})
FOLLOWERS: frozenset[tuple[str, str]] = frozenset(
    {
        ("GET", "/v1/overview"),
        ("GET", "/v1/versions"),
        ("GET", "/v1/versions/{version_id}"),
        ("GET", "/v1/versions/{version_id}/manifest"),
        ("GET", "/v1/versions/{version_id}/files/{name}"),
        ("PUT", "/v1/hosts/{name}"),
        ("GET", "/v1/events"),
    }
)
"""What a token to follow opens: a route that is not among these opens to `write`, and to `read` where it only looks."""
# A name in a path has no slash, as in the routes that these are.
_FOLLOWED = [(method, re.compile(re.sub(r"\{\w+\}", "[^/]+", path))) for method, path in FOLLOWERS]


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
    return TokenRole.FOLLOW in roles and any(asked == each and route.fullmatch(path) for each, route in _FOLLOWED)
