"""/docs in a real Chromium: it asks no host but the service, does nothing against its policy, and logs no error."""

from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from support.attackers import listening
from support.services import serving

pytestmark = [pytest.mark.browser]


async def test_the_dashboard_leads_to_the_page_of_the_api_which_needs_nothing_but_the_service(
    page: Page, tmp_path: Path
) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server:
        await page.goto(f"http://127.0.0.1:{server.port}/")
        await page.get_by_role("link", name="API").click()
        await page.locator("[data-path='/v1/engines']").first.click()
        await page.get_by_role("button", name="Try it out").click()
        await page.get_by_role("button", name="Execute").click()
        await expect(page.locator(".live-responses-table")).to_contain_text('"next_cursor"')


async def test_behind_a_read_token_it_is_open_and_what_it_asks_wants_the_token(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path, token="write", read_token="read") as stage, listening(stage.api) as server:
        await page.goto(f"http://127.0.0.1:{server.port}/docs")
        await page.locator("[data-path='/v1/engines']").first.click()
        await page.get_by_role("button", name="Try it out").click()
        await page.get_by_role("button", name="Execute").click()
        answer = page.locator(".live-responses-table")
        await expect(answer).to_contain_text("this needs the bearer token")
        await page.get_by_role("button", name="Authorize").first.click()
        await page.get_by_label("auth-bearer-value").fill("read")
        await page.get_by_role("button", name="Apply credentials").click()
        await page.locator(".btn-done").click()
        await page.get_by_role("button", name="Execute").click()
        await expect(answer).to_contain_text('"next_cursor"')
