"""The dashboard in a real Chromium, against the real service with engines in memory."""

import asyncio
import re
from pathlib import Path

import pytest
from axe_playwright_python.base import AXE_FILE_PATH
from crowd import ENGINES, VERSIONS, crowd, opened
from playwright.async_api import Browser, Page, expect

from refitd_client.contract.states import VersionState
from support.attackers import listening
from support.checkpoints import publish, tensors
from support.services import Stage, serving

pytestmark = [pytest.mark.browser]


async def until_label(stage: Stage, name: str, label: str) -> None:
    """Wait until an engine serves a step."""
    async with asyncio.timeout(10):
        while stage.engines[name].label != label:
            await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)


async def test_a_glance_says_whether_engines_are_on_the_newest_version_and_follows_live(
    page: Page, tmp_path: Path
) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage, listening(stage.api) as server:
        await stage.served(1)
        await opened(page, server)
        await expect(page.locator(".run h2")).to_contain_text("All 2 engines serve step 1, the newest.")
        await stage.served(2)
        await expect(page.locator(".run h2")).to_contain_text("All 2 engines serve step 2, the newest.")
        await expect(page.locator("table.updates tbody th").first).to_contain_text("2")
        await expect(page.locator("table.log tbody tr").nth(1)).to_contain_text("served: step 2")


async def test_what_is_wrong_is_said_in_words_and_by_a_shape(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage, listening(stage.api) as server:
        await stage.served(1)
        stage.engines["b"].down = True
        await opened(page, server)
        run = page.locator(".run")
        await expect(run.locator("h2")).to_contain_text("TROUBLED: 1 of 2 engines serve step 1")
        await expect(run.locator("li")).to_have_text("b:1 is UNREACHABLE: connection refused")
        first = page.locator("table.engines tbody tr").first  # who needs somebody comes first
        await expect(first).to_contain_text("away")
        await expect(first.locator(".why")).to_have_text(re.compile(r"^since .+ \(.+\): connection refused$"))
        await expect(first.locator(".state svg.mark path")).to_have_count(1)
        await expect(page.locator("#announcer")).to_contain_text("1 of 2 engines")


async def test_an_action_is_asked_about_and_escape_changes_nothing(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server:
        await stage.served(1)
        await opened(page, server)
        pause = page.get_by_role("button", name="Pause updates")
        await pause.click()
        dialog = page.get_by_role("dialog", name="Pause updates?")
        await expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()  # Enter alone changes nothing
        await page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0)
        await expect(pause).to_be_focused()
        assert stage.store.updates["run"].paused_since is None
        await pause.click()
        await dialog.get_by_role("button", name="Pause", exact=True).click()
        await expect(page.locator(".notice")).to_contain_text("Updates of run are paused.")
        await expect(page.locator(".run .facts")).to_contain_text("paused since")
        assert stage.store.updates["run"].paused_since is not None
        await page.get_by_role("button", name="Resume updates").click()
        await page.get_by_role("button", name="Resume", exact=True).click()
        await expect(pause).to_be_visible()


async def test_pin_rollback_resync_and_reclaim_are_carried_out(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server:
        for step in (1, 2, 3):
            await stage.served(step)
        await opened(page, server)
        await page.get_by_role("button", name="1", exact=True).click()
        await page.get_by_role("button", name="Pin …").click()
        await page.get_by_role("button", name="Pin", exact=True).click()
        await expect(page.locator("table.updates")).to_contain_text("pinned")
        assert stage.store.versions["run~v000001"].pinned
        await page.get_by_role("button", name="Unpin …").click()
        await page.get_by_role("button", name="Unpin", exact=True).click()
        await page.get_by_role("button", name="Reclaim …").click()
        await expect(page.get_by_role("dialog")).to_contain_text("run/v000001")
        await page.get_by_role("button", name="Delete", exact=True).click()
        async with asyncio.timeout(10):
            while "run~v000001" in stage.store.versions:
                await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)
        await page.get_by_role("button", name="2", exact=True).click()
        await page.get_by_role("button", name="Roll back to it").click()
        dialog = page.get_by_role("dialog", name="Roll back to run~v000002?")
        await expect(dialog).to_contain_text("go from run~v000003 back to run~v000002")
        await expect(dialog).to_contain_text("Barred for good: run~v000003.")
        await expect(dialog).to_contain_text("collection deletes its files")
        await expect(dialog).to_contain_text("To go forward again, publish anew")
        await dialog.get_by_role("button", name="Roll back", exact=True).click()
        await until_label(stage, "a", "2")
        await expect(page.locator("table.updates")).to_contain_text("barred")
        # What was ordered is no trouble, and what is barred does not look good.
        await expect(page.locator(".run h2")).to_contain_text("ROLLED BACK: The engine serves step 2.")
        await expect(page.locator(".run li")).to_contain_text("newer versions, up to step 3, are barred")
        await expect(page.locator("table.updates tbody tr").first.locator(".state")).to_have_class("state over")
        loads = len(stage.engines["a"].loads)
        await page.get_by_role("button", name="a:1", exact=True).first.click()
        await page.get_by_role("button", name="Resync …").click()
        await page.get_by_role("button", name="Resync", exact=True).click()
        async with asyncio.timeout(10):
            while len(stage.engines["a"].loads) == loads:
                await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)


async def test_the_token_is_asked_for_and_kept_for_this_tab_alone(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path, token="write", read_token="read") as stage, listening(stage.api) as server:
        await stage.served(1)
        await page.goto(f"http://127.0.0.1:{server.port}/")
        dialog = page.get_by_role("dialog", name="The service wants a token")
        await expect(dialog).to_contain_text("the one that the service was started with")
        await dialog.get_by_label("Token").fill("other")
        await page.keyboard.press("Enter")
        await expect(dialog).to_contain_text("is not known to the service")
        await dialog.get_by_label("Token").fill("read")
        await page.keyboard.press("Enter")
        await expect(page.locator("header .link")).to_have_text("live")
        await page.get_by_role("button", name="Pause updates").click()
        await page.get_by_role("button", name="Pause", exact=True).click()
        await expect(dialog).to_contain_text("The token that you gave may only look")
        await dialog.get_by_label("Token").fill("write")
        await page.keyboard.press("Enter")
        await expect(page.locator(".notice")).to_contain_text("paused")
        assert await page.evaluate("[localStorage.length, document.cookie, location.search]") == [0, "", ""]
        assert await page.evaluate("Object.values(sessionStorage)") == ["write"]
        other = await page.context.new_page()
        await other.goto(f"http://127.0.0.1:{server.port}/")
        await expect(other.get_by_role("dialog", name="The service wants a token")).to_be_visible()


async def test_a_lost_stream_is_said_and_what_was_missed_is_there_when_it_is_back(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        async with listening(stage.api) as server:
            await opened(page, server)
            port = server.port
        await expect(page.locator("header .link")).to_contain_text("not live")
        await expect(page.locator("html")).to_have_class("stale")
        await expect(page.locator("#announcer")).to_have_text("The connection to the service is lost.")
        await stage.served(2)
        async with listening(stage.api, port=port):
            await expect(page.locator("header .link")).to_have_text("live", timeout=20_000)
            await expect(page.locator("html")).not_to_have_class("stale")
            await expect(page.locator(".run h2")).to_contain_text("step 2")
            await expect(page.locator("table.log tbody tr").nth(1)).to_contain_text("served: step 2")


async def test_a_thousand_versions_and_two_hundred_engines_come_in_pages(page: Page, tmp_path: Path) -> None:
    async with crowd(tmp_path) as (api, _), listening(api) as server:
        await opened(page, server)
        rows = page.locator("table.engines tbody tr")
        await expect(rows).to_have_count(8)  # the grid shows the others
        await expect(page.get_by_role("navigation", name="Pages of engines")).to_contain_text(f"of {ENGINES}")
        await page.get_by_role("button", name="away 4").click()
        await expect(rows).to_have_count(4)
        await page.get_by_role("button", name=f"all {ENGINES}").click()
        await page.get_by_role("searchbox", name="Search engines").fill("gpu-13")
        await expect(rows).to_have_count(8)
        await expect(page.get_by_role("navigation", name="Pages of engines")).to_contain_text("of 10")
        await expect(page.locator("table.updates tbody tr")).to_have_count(25)
        await page.get_by_role("button", name="Older").first.click()
        await expect(page.locator("table.updates tbody th").first).to_contain_text(str(VERSIONS - 25))
        await page.get_by_role("button", name="Newer").click()
        await page.get_by_role("button", name="1,000", exact=True).click()
        await expect(page.locator("table.loads tbody tr")).to_have_count(20)
        await page.get_by_role("button", name=f"Show all {ENGINES}").click()
        await expect(page.locator("table.loads tbody tr")).to_have_count(ENGINES)
        assert await page.locator("*").count() < 12_000


async def test_everything_can_be_done_with_the_keyboard(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server:
        await stage.served(1)
        await opened(page, server)
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to the engines")).to_be_focused()
        fold = page.get_by_role("button", name="a:1", exact=True).first
        async with asyncio.timeout(10):
            while not await fold.evaluate("node => node === document.activeElement"):
                await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await expect(fold).to_have_attribute("aria-expanded", "true")
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("button", name="Resync …")).to_be_focused()
        await stage.served(2)  # drawing again takes the focus from nobody
        await expect(page.locator(".run h2")).to_contain_text("step 2")
        await expect(page.get_by_role("button", name="Resync …")).to_be_focused()


AXE = Path(AXE_FILE_PATH).read_text(encoding="utf-8")
LOOKS = {
    "light": {"viewport": {"width": 1280, "height": 900}},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 740}, "has_touch": True},
}


@pytest.mark.parametrize("look", LOOKS)
async def test_axe_finds_nothing_and_nothing_is_wider_than_the_screen(
    browser: Browser, tmp_path: Path, look: str
) -> None:
    async with crowd(tmp_path) as (api, store), listening(api, within=110.0) as server:
        store.faults.set(root="the root cannot be listed: Input/output error")
        # axe is put into the page by the test, past the page's own policy, which the other tests hold
        context = await browser.new_context(**LOOKS[look], bypass_csp=True)  # pyright: ignore[reportArgumentType]
        page = await context.new_page()
        await opened(page, server)
        await page.get_by_role("button", name="1,000", exact=True).click()
        await expect(page.locator("table.loads tbody tr").first).to_be_visible(timeout=60_000)
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await page.evaluate(AXE)
        assert await violations(page) == []
        await page.locator("table.engines button.fold").first.click()
        await page.get_by_role("button", name="Resync …").click()
        assert await violations(page) == []


async def violations(page: Page) -> list[str]:
    """What axe finds wrong."""
    found = await page.evaluate("axe.run()")
    return [f"{each['id']}: {node['html']}" for each in found["violations"] for node in each["nodes"]]


async def told(stage: Stage, run: str, step: int) -> None:
    """Publish a step of a run and wait for its verdict."""
    publish(stage.root, run, step, tensors(step))
    await stage.until(f"{run}~v{step:06d}", lambda record: record.state is VersionState.SEALED)


async def test_engines_are_brought_to_a_run_that_none_follows_and_one_that_has_ended_is_closed(
    page: Page, tmp_path: Path
) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage, listening(stage.api) as server:
        await told(stage, "old", 1)
        await stage.until("old~v000001", lambda record: record.served_at is not None)
        await told(stage, "new", 1)
        await opened(page, server)
        unfollowed = page.locator(".run.UNFOLLOWED")
        await expect(unfollowed.locator("h2")).to_contain_text("UNFOLLOWED: No engine follows this run")
        await unfollowed.get_by_role("button", name="Move engines here").click()
        dialog = page.get_by_role("dialog", name="Engines for new")
        await expect(dialog).to_contain_text("follows old, which would lose it")
        await dialog.get_by_label("a:1").check()
        await dialog.get_by_label("b:1").check()
        await dialog.get_by_role("button", name="Move", exact=True).click()
        await stage.until("new~v000001", lambda record: record.served_at is not None)
        await expect(unfollowed.locator("b")).to_have_text("old")
        await unfollowed.get_by_role("button", name="Close …").click()
        await page.get_by_role("dialog", name="Close the run?").get_by_role("button", name="Close", exact=True).click()
        await expect(page.locator("details.closed summary")).to_contain_text("1 closed run")
        await expect(page.locator(".run")).to_have_count(1)
        await page.locator("details.closed summary").click()
        await page.get_by_role("button", name="Reopen").click()
        await expect(unfollowed).to_have_count(1)
