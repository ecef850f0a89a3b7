"""/docs is whole, comes from the service alone, and shows nobody anything that is not the same for everyone."""

import re
from pathlib import Path

from refitd.api.web_pages import API_PAGES
from support.services import serving


async def test_the_page_of_the_api_is_open_and_the_api_behind_it_is_not(tmp_path: Path) -> None:
    async with serving(tmp_path, token="write", read_token="read") as stage:
        for path in (*API_PAGES, "/openapi.json"):
            assert (await stage.http.get(path)).status_code == 200, path
            assert (await stage.http.post(path)).status_code == 405, path
        assert (await stage.http.get("/v1/engines")).status_code == 401
        for path in ("/docs/", "/docs/../swagger/start.js", "/docs/index.html", "/redoc", "/docs/oauth2-redirect"):
            assert (await stage.http.get(path)).status_code in {401, 404}, path


async def test_the_page_names_no_file_but_the_services_own(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        page = await stage.http.get("/docs")
        named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert {*API_PAGES} - {"/docs"} <= set(named)
        for path in named:
            assert (await stage.http.get(path)).status_code == 200, path
        assert re.findall(r"<script(?![^>]* src=)|style=", page.text) == []


async def test_its_policy_lets_no_script_style_or_connection_come_from_elsewhere(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        for path in API_PAGES:
            policy = (await stage.http.get(path)).headers["content-security-policy"]
            assert (
                "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src" in policy
            )
            assert "unsafe" not in policy
            assert "http" not in policy
