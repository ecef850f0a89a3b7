"""Pages of other sites in a real Chromium: of a site whose name leads to this machine (DNS rebinding), and of one that
sends requests across sites. They read and change nothing, neither at the service nor at a front for AReaL.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, Page

from support.attackers import listening
from support.front_app import front_of
from support.scripted_server import Server, answer, serve
from support.scripted_server import page as html
from support.services import Stage, serving

pytestmark = [pytest.mark.browser]

NAMES = ["evil.test", "127.0.0.1", "localhost"]
DATA = ["/v1/engines", "/v1/versions", "/v1/overview", "/v1/log", "/v1/events", "/v1/explain/run~v000001", "/metrics"]
CHANGES = {
    "/v1/versions": {"run": "evil", "step": 1},
    "/v1/engines": {"url": "http://127.0.0.1:9"},
    "/v1/rollback": {"run": "run"},
    "/v1/runs": {"run": "run", "closed": True},
    "/v1/reclaim": {},
}
AT_THE_FRONT = [
    "/generate",
    "/pause_generation",
    "/update_weights_from_disk",
    "/continue_generation",
    "/weights_checker",
]
ASK = "async ([path, method, body]) => (await fetch(path, {method, body})).status"
SEND = """async ([url, body]) => {
  await fetch(url, {method: "POST", mode: "no-cors", headers: {"Content-Type": "text/plain"}, body});
}"""
SEND_FORM = """url => {
  const form = document.createElement("form");
  Object.assign(form, {method: "POST", action: url, enctype: "text/plain"});
  document.body.append(form);
  form.submit();
}"""
READ = "async url => { try { return await (await fetch(url)).text() } catch (error) { return error.name } }"


@asynccontextmanager
async def fronting(engine: Server, folder: Path) -> AsyncIterator[int]:
    """The port of a front for this engine."""
    front, versions, _ = front_of(engine.url, folder)
    try:
        async with listening(front.app()) as server:
            yield server.port
    finally:
        await front.aclose()
        versions.close()


async def asked(page: Page, path: str, body: object = None) -> int:
    """Have a page ask its own address, by a POST where there is a body; the status."""
    method, sent = ("GET", None) if body is None else ("POST", json.dumps(body))
    return await page.evaluate(ASK, [path, method, sent])


async def posted(page: Page, url: str, body: object) -> int:
    """Have a script POST to another site, as any page may; what the browser is answered, which the page cannot see."""
    async with page.expect_response(url) as answered:
        await page.evaluate(SEND, [url, json.dumps(body)])
    return (await answered.value).status


async def posted_by_form(page: Page, url: str) -> int:
    """Have a form POST to another site; the status. The browser shows the answer then."""
    async with page.expect_navigation(url=url) as answered:
        await page.evaluate(SEND_FORM, url)
    shown = await answered.value
    assert shown is not None
    return shown.status


def known(stage: Stage) -> tuple[set[str], set[str]]:
    """The service's versions and engines."""
    return set(stage.store.versions), set(stage.store.engines)


async def test_a_page_whose_name_leads_to_the_service_reads_and_changes_nothing(
    browser: Browser, tmp_path: Path
) -> None:
    page = await browser.new_page()
    async with serving(tmp_path) as stage, listening(stage.api) as server:
        await stage.served(1)
        before = known(stage)
        await page.goto(f"http://127.0.0.1:{server.port}/v1/engines")
        for path in DATA:
            assert await asked(page, path) == 200, path
        await page.goto(f"http://evil.test:{server.port}/")
        for path in DATA:
            assert await asked(page, path) == 403, path
        for path, body in CHANGES.items():
            assert await asked(page, path, body) == 403, path
        assert known(stage) == before


async def test_a_page_whose_name_leads_to_a_front_does_not_reach_the_engine(browser: Browser, tmp_path: Path) -> None:
    page = await browser.new_page()
    with serve(answer(200, {"text": "ok"})) as engine:
        async with fronting(engine, tmp_path) as port:
            await page.goto(f"http://127.0.0.1:{port}/model_info")
            assert await asked(page, "/model_info") == 200
            engine.seen.clear()
            await page.goto(f"http://evil.test:{port}/health")
            for path in ("/model_info", "/v1/models"):
                assert await asked(page, path) == 403, path
            for path in AT_THE_FRONT:
                assert await asked(page, path, {}) == 403, path
            assert [seen.path for seen in engine.seen if seen.path != "/health"] == []


@pytest.mark.parametrize("name", NAMES)
async def test_what_a_page_of_another_site_posts_does_not_reach_the_engine(
    browser: Browser, tmp_path: Path, name: str
) -> None:
    """Neither by a script nor by a form. A page of another port of this machine is of another site, too."""
    page = await browser.new_page()
    with serve(answer(200, {"text": "ok"})) as engine, serve(html(200)) as other:
        async with fronting(engine, tmp_path) as port, httpx.AsyncClient(trust_env=False) as client:
            site, front = other.url.replace("127.0.0.1", name), f"http://127.0.0.1:{port}"
            await page.goto(site)
            for path in AT_THE_FRONT:
                assert await posted(page, front + path, {}) == 403, path
                assert await posted_by_form(page, front + path) == 403, path
                await page.goto(site)
            assert engine.seen == []
            assert (await client.post(f"{front}/generate", json={})).status_code == 200


@pytest.mark.parametrize("name", NAMES)
async def test_a_page_of_another_site_reads_and_changes_nothing_at_the_service(
    browser: Browser, tmp_path: Path, name: str
) -> None:
    page = await browser.new_page()
    async with serving(tmp_path) as stage, listening(stage.api) as server:
        await stage.served(1)
        before = known(stage)
        service = f"http://127.0.0.1:{server.port}"
        with serve(html(200)) as other:
            await page.goto(other.url.replace("127.0.0.1", name))
            for path in DATA:
                assert await page.evaluate(READ, service + path) == "TypeError", path
            for path, body in CHANGES.items():
                assert await posted(page, service + path, body) == 403, path
        assert known(stage) == before
