"""The dashboard's files: complete, small, from this service alone, and closed to other sites' pages."""

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest

from refitd.api.auth import intrusion, other_name
from refitd.api.web_pages import DASHBOARD, FOLDER
from support.services import serving

VENDOR = FOLDER / "vendor"
MAX_BYTES = 200_000


async def test_the_dashboard_is_open_and_the_api_behind_it_is_not(tmp_path: Path) -> None:
    async with serving(tmp_path, token="write", read_token="read") as stage:
        answer = await stage.http.get("/")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "<title>refitd</title>" in answer.text
        assert (await stage.http.get("/v1/overview")).status_code == 401
        assert (await stage.http.post("/")).status_code == 405
        for path in (
            "/assets/",
            "/assets/index.html",
            "/assets/../pages.py",
            "/assets/%2e%2e/problem.py",
            "/assets/x.js",
        ):
            assert (await stage.http.get(path)).status_code in {401, 404}, path


async def test_pages_run_no_script_but_the_services_own(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        for path in DASHBOARD:
            policy = (await stage.http.get(path)).headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
    page = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script(?![^>]* src=)", page) == []
    assert " style=" not in page


def test_the_whole_dashboard_is_small() -> None:
    packed = [gzip.compress((FOLDER / name).read_bytes()) for name in DASHBOARD.values()]
    assert sum(map(len, packed)) < MAX_BYTES


async def test_pages_are_packed_for_browsers_that_take_it_and_scripts_have_their_type(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        packed = await stage.http.get("/assets/app.js", headers={"Accept-Encoding": "gzip"})
        plain = await stage.http.get("/assets/app.js", headers={"Accept-Encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert packed.content == plain.content == (FOLDER / "app.js").read_bytes()
    for answer in (packed, plain):
        assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"


def test_every_module_is_there_and_fetched_at_once_instead_of_one_after_the_other() -> None:
    page = (FOLDER / DASHBOARD["/"]).read_text()
    preloaded = set(re.findall(r'modulepreload" href="([^"]+)"', page)) | {"/assets/app.js"}
    assert preloaded == {path for path in DASHBOARD if path.endswith(".js")}
    for path in preloaded:
        source = (FOLDER / path.removeprefix("/assets/")).read_text()
        for imported in re.findall(r'(?:from|import)\s*"([^"\s]+)"', source):
            target = (FOLDER / path.removeprefix("/assets/")).parent / imported
            assert target.resolve().is_file(), (path, imported)


def test_nothing_is_fetched_from_elsewhere() -> None:
    for path, name in DASHBOARD.items():
        if "/vendor/" not in path:
            found = re.findall(rb"https?://[^\s\"'`)]+", (FOLDER / name).read_bytes())
            assert set(found) <= {b"http://www.w3.org/2000/svg"}, path


def test_what_others_wrote_is_byte_for_byte_what_they_published_with_its_licence() -> None:
    """vendor.json says what was taken from which package; `tests/browser/vendor` takes it again."""
    for name, package in json.loads((VENDOR / "vendor.json").read_text()).items():
        assert package["files"].keys() == {
            path.relative_to(VENDOR / name).as_posix() for path in (VENDOR / name).rglob("*") if path.is_file()
        }
        assert "LICENSE" in package["files"]
        for path, digest in package["files"].items():
            assert hashlib.sha256((VENDOR / name / path).read_bytes()).hexdigest() == digest, path


@pytest.mark.parametrize(
    ("headers", "changes", "is_let_in"),
    [
        ({}, True, True),  # curl, a trainer
        ({"host": "127.0.0.1:8700", "sec-fetch-site": "same-origin"}, True, True),
        ({"host": "localhost:8700", "origin": "http://localhost:8700"}, True, True),
        ({"host": "[::1]:8700", "origin": "http://[::1]:8700"}, True, True),
        ({"host": "127.0.0.1:8700", "sec-fetch-site": "none"}, True, True),
        ({"host": "127.0.0.1:8700", "sec-fetch-site": "cross-site"}, False, True),  # CORS keeps the answer
        ({"host": "127.0.0.1:8700", "sec-fetch-site": "cross-site"}, True, False),
        ({"host": "127.0.0.1:8700", "sec-fetch-site": "same-site"}, True, False),  # another port of this host
        ({"host": "127.0.0.1:8700", "origin": "http://evil.example"}, True, False),
        ({"host": "127.0.0.1:8700", "origin": "null"}, True, False),
        ({"host": "127.0.0.1:8700", "origin": "http://["}, True, False),  # no URL, and no bug
        ({"host": "refitd.example", "sec-fetch-site": "cross-site"}, True, False),
    ],
)
def test_another_sites_page_changes_nothing(headers: dict[str, str], *, changes: bool, is_let_in: bool) -> None:
    assert (intrusion(headers, changes=changes) is None) is is_let_in


@pytest.mark.parametrize(
    ("host", "is_let_in"),
    [
        *((name, True) for name in ("127.0.0.1:8700", "127.0.0.1", "localhost:8700", "a.localhost", "[::1]:8700")),
        *((name, True) for name in ("10.0.0.7:8700", "gpu-1:8700", "a.pods.example", "GPU-1", None)),
        *(
            (name, False)
            for name in ("evil.test:8700", "localhost.evil.test", "127.0.0.1.evil.test", "gpu-1.evil.test")
        ),
        *((name, False) for name in ("", "[", "a@127.0.0.1.evil.test", "pods.example.evil.test", "gpu-2")),
    ],
)
def test_a_name_that_its_owner_points_at_loopback_opens_nothing(host: str | None, *, is_let_in: bool) -> None:
    """DNS rebinding: for the browser the page and the service have one origin."""
    assert (other_name(host, ("gpu-1", "*.pods.example")) is None) is is_let_in


async def test_a_foreign_page_cannot_make_a_service_without_a_token_delete_anything(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        headers = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
        answer = await stage.http.post("/v1/reclaim", headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (403, "urn:refitd:problem:foreign-page")
