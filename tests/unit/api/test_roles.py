"""A token opens the routes of its role and no other: every route is in the table, and every role is tried on each."""

import re
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from refitd.api.api import routes
from refitd.api.auth import FOLLOWERS, LOOKS, OPEN, Door, Gate, TokenRole, may
from refitd.settings import Settings
from refitd.tokens import Tokens

TOKENS = Tokens(write=("write",), read=("read",), follow=("follow", "follow-2"))
PAGE = Path(__file__).resolve().parents[3] / "docs/security.md"
ROUTES = sorted(
    (method.upper(), path)
    for path, methods in routes().openapi()["paths"].items()
    for method in methods
    if path not in OPEN
)


def test_what_followers_are_opened_are_routes() -> None:
    assert set(ROUTES) >= FOLLOWERS


async def _status(method: str, path: str, token: str) -> int:
    async def let_in(_: object) -> PlainTextResponse:
        return PlainTextResponse("in")

    door = Door(tokens=lambda: TOKENS, in_files=False, open=OPEN)
    every = Route("/{path:path}", let_in, methods=["GET", "POST", "PUT", "DELETE"])
    gate = Starlette(routes=[every], middleware=[Middleware(Gate, door=door)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://127.0.0.1") as http:
        answer = await http.request(method, path, headers={"Authorization": f"Bearer {token}"})
    return answer.status_code


@pytest.mark.parametrize(("method", "route"), ROUTES)
async def test_each_role_opens_what_the_table_says(method: str, route: str) -> None:
    path = re.sub(r"\{\w+\}", "x~v000001", route)
    looks = method in LOOKS
    for token in ("write", "read", "follow", "follow-2"):
        role = TokenRole(token.removesuffix("-2"))
        opens = role is TokenRole.WRITE or (role is TokenRole.READ and looks)
        opens = opens or (role is TokenRole.FOLLOW and (method, route) in FOLLOWERS)
        assert await _status(method, path, token) == (200 if opens else 403), token
    assert await _status(method, path, "unknown") == 401


def test_the_only_change_that_a_token_to_follow_opens_is_a_report() -> None:
    assert [route for route in FOLLOWERS if route[0] not in LOOKS] == [("PUT", "/v1/hosts/{name}")]


def test_a_path_that_is_longer_than_a_route_is_not_that_route() -> None:
    followers = frozenset({TokenRole.FOLLOW})
    for path in ("/v1/versions/a/manifest/b", "/v1/versions/a/b", "/v1/versions/", "/v1//versions", "/v1/versions\n"):
        assert not may(followers, "GET", path), path
    assert not may(followers, "PUT", "/v1/hosts/a/b")
    assert may(followers, "HEAD", "/v1/versions/a/manifest")


def test_a_role_without_a_write_token_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("one\ntwo\n")
    with pytest.raises(ValueError, match="leaves every change open"):
        Settings(root=tmp_path, followers_token_file=file)


def test_the_page_has_the_table() -> None:
    told = re.findall(r"^\| `(\w+) (/[^`]+)` \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert sorted(told) == sorted(FOLLOWERS)
