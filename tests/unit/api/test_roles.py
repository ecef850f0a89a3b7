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
from refitd.api.auth import HEALTH, OPEN, Door, Gate
from refitd.api.roles import LOOKS, OPENS, TokenRole, may
from refitd.settings import Settings
from refitd.tokens import Tokens

TOKENS = Tokens(write=("write",), read=("read",), publish=("publish", "publish-2"), follow=("follow", "follow-2"))
PAGE = Path(__file__).resolve().parents[3] / "docs/security.md"
ROUTES = sorted(
    (method.upper(), path)
    for path, methods in routes().openapi()["paths"].items()
    for method in methods
    if path not in OPEN
)


def test_every_route_has_a_line_and_every_line_a_route() -> None:
    assert sorted(OPENS) == ROUTES


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
    for token in ("write", "read", "publish", "publish-2", "follow", "follow-2"):
        role = TokenRole(token.removesuffix("-2"))
        opens = role is TokenRole.WRITE or (role is TokenRole.READ and looks) or role in OPENS[method, route]
        assert await _status(method, path, token) == (200 if opens else 403), token
    assert await _status(method, path, "unknown") == 401


async def test_the_only_changes_are_a_trainers_notice_and_a_followers_report() -> None:
    changes = {(role, route) for route, roles in OPENS.items() for role in roles if route[0] not in LOOKS}
    assert changes == {
        (TokenRole.PUBLISH, ("POST", "/v1/versions")),
        (TokenRole.FOLLOW, ("PUT", "/v1/hosts/{name}")),
    }


def test_a_path_that_is_longer_than_a_route_is_not_that_route() -> None:
    for path in ("/v1/versions/a/wait/b", "/v1/versions/a/b", "/v1/versions/", "/v1//versions", "/v1/versions\n"):
        assert not may(frozenset({TokenRole.PUBLISH}), "GET", path), path
    assert not may(frozenset({TokenRole.FOLLOW}), "PUT", "/v1/hosts/a/b")
    assert may(frozenset({TokenRole.FOLLOW}), "HEAD", "/v1/versions/a/manifest")


async def test_health_needs_no_role() -> None:
    for path in HEALTH:
        assert await _status("GET", path, "unknown") == 200


@pytest.mark.parametrize("name", ["publishers_token_file", "followers_token_file"])
def test_a_role_without_a_write_token_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("one\ntwo\n")
    with pytest.raises(ValueError, match="leaves every change open"):
        Settings(root=tmp_path, **{name: file})


def test_tokens_of_roles_come_from_files_with_one_a_line(tmp_path: Path) -> None:
    for name in ("write", "publish", "follow"):
        (tmp_path / name).write_text(f"{name}-old\n{name}-new\n")
    settings = Settings(
        root=tmp_path,
        token_file=tmp_path / "write",
        publishers_token_file=tmp_path / "publish",
        followers_token_file=tmp_path / "follow",
    )
    assert settings.tokens().publish == ("publish-old", "publish-new")
    assert settings.tokens().follow == ("follow-old", "follow-new")


def test_the_page_has_the_table() -> None:
    told = set(re.findall(r"^\| `(\w+) (/[^`]+)` \| (.*?) \| (.*?) \|$", PAGE.read_text(), flags=re.MULTILINE))
    expected = {
        (method, path, *("yes" if role in roles else "" for role in (TokenRole.PUBLISH, TokenRole.FOLLOW)))
        for (method, path), roles in OPENS.items()
        if roles
    }
    assert told == expected
