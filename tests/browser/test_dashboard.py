"""The dashboard in a real Chromium, against the real service with engines in memory."""

import asyncio
import re
from pathlib import Path

import pytest
from axe_playwright_python.base import AXE_FILE_PATH
from crowd import ENGINES, VERSIONS, crowd, opened
from playwright.async_api import Browser, Page, Route, expect

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


async def test_an_update_unfolds_into_the_stages_of_each_engine(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage, listening(stage.api) as server:
        await stage.served(1)
        await opened(page, server)
        await page.get_by_role("button", name="1", exact=True).click()
        detail = page.locator("table.updates tr.detail")
        await expect(detail).to_contain_text("run~v000001 is SEALED")
        await expect(detail).to_contain_text("It is kept: ")
        await expect(detail.locator("table.loads tbody tr")).to_have_count(2)
        await expect(detail.get_by_role("img", name="a:1: pause 0.5 ms, load 1 ms")).to_be_visible()


async def test_the_copy_for_engines_is_a_stage_with_a_colour_a_legend_and_its_place_before_the_pause(
    page: Page, tmp_path: Path
) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server:
        await stage.served(1)
        timings = {"pause": 40.0, "load": 300.0, "copy": 200.0, "validate": 100.0}
        stage.store.put_version(stage.store.versions["run~v000001"].having(timings=timings))
        await opened(page, server)
        await expect(page.get_by_role("list", name="Stages of an update")).to_contain_text("copy")
        bar = page.get_by_role("img", name="Step 1: validate 100 ms, copy 200 ms, pause 40 ms, load 300 ms")
        await expect(bar).to_be_visible()
        copy = bar.locator("rect.stage.copy")
        place = [
            await each.evaluate("rect => [rect.getBBox().x, rect.getBBox().height]")
            for each in (copy, bar.locator("rect.stage.pause"))
        ]
        assert place[0][0] < place[1][0]
        assert place[0][1] < place[1][1], "the engine serves meanwhile"
        colours = [
            await each.evaluate("rect => getComputedStyle(rect).fill") for each in await bar.locator("rect").all()
        ]
        assert len(set(colours)) == 4
        await page.get_by_role("button", name="1", exact=True).click()
        await expect(page.locator(".stage-times")).to_contain_text("copy")


async def test_where_no_token_is_wanted_it_says_so_and_asks_for_none(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server:
        await stage.served(1)
        await opened(page, server)
        await page.get_by_role("button", name="Token …").click()
        await expect(page.locator(".notice")).to_contain_text("This service wants no token")
        await expect(page.get_by_role("dialog")).to_have_count(0)


async def test_what_engines_go_on_to_serve_while_updates_are_paused_is_counted_as_served(
    page: Page, tmp_path: Path
) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server:
        await stage.served(1)
        await stage.http.post("/v1/runs", json={"run": "run", "paused": True})
        publish(stage.root, "run", 2, tensors(2))
        await stage.until("run~v000002", lambda record: record.state is VersionState.SEALED)
        await opened(page, server)
        rows = page.locator("table.updates tbody tr")
        await expect(rows.nth(0).locator("td.wide").first).to_have_text("0/1")
        await expect(rows.nth(1).locator("td.wide").first).to_have_text("1/1")


async def test_a_rejected_version_says_why(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server:
        await stage.served(1)
        weights = tensors(2)
        del weights["layer.1.weight"]
        publish(stage.root, "run", 2, weights)
        await stage.rejected("run~v000002")
        timed = stage.store.versions["run~v000002"].having(timings={"publish": 12.0, "validate": 3.0})
        stage.store.put_version(timed)  # as one that its trainer has announced
        await opened(page, server)
        await expect(page.locator(".run li").first).to_contain_text("Step 2 is REJECTED")
        await expect(page.locator(".run li").first).to_contain_text("layer.1.weight")
        row = page.locator("table.updates tbody tr").first
        await expect(row).to_contain_text("15 ms")
        await expect(row.locator(".stages")).to_contain_text("layer.1.weight")


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


async def test_a_rollback_names_its_goal_and_where_there_is_none_says_so(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server:
        await stage.served(1)
        await opened(page, server)
        back = page.get_by_role("button", name="Roll back …", exact=True)
        await back.click()
        await expect(page.locator(".notice")).to_contain_text("no version of run run before run~v000001 was served")
        await stage.served(2)
        await expect(page.locator(".run h2")).to_contain_text("step 2")
        await back.click()
        dialog = page.get_by_role("dialog", name="Roll back to run~v000001?")
        await expect(dialog).to_contain_text("from run~v000002 back to run~v000001")
        await page.keyboard.press("Escape")
        await expect(dialog).to_have_count(0)
        assert not any(version.barred for version in stage.store.versions.values())


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


async def test_an_engine_that_is_vllm_says_so_with_its_release_and_what_proves_what_it_serves(
    page: Page, tmp_path: Path
) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage, listening(stage.api) as server:
        vllm = stage.engines["b"]
        vllm.server, vllm.release, vllm.proof = "vLLM", "0.32.0", "vllm:xxh3:"
        await stage.served(1)
        await opened(page, server)
        row = page.locator("table.engines tbody tr").filter(has_text="b:1").first
        await expect(row.locator("th .tag")).to_have_text("vLLM")
        await expect(page.locator("table.engines th .tag")).to_have_count(1)
        await row.locator("button.fold").click()
        await expect(page.locator("tr.detail .facts")).to_contain_text("vLLM 0.32.0, stock")
        await expect(page.locator("tr.detail .facts")).to_contain_text("proof: digests of parameters")


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
        store.faults.set_root("the root cannot be listed: Input/output error")
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


async def test_a_service_that_is_not_there_yet_is_waited_for(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server:
        await page.route("**/v1/overview", lambda route: route.fulfill(status=503, json={"detail": "not yet"}))
        await page.goto(f"http://127.0.0.1:{server.port}/")
        await expect(page.locator(".waiting")).to_be_visible()
        await page.unroute("**/v1/overview")
        await expect(page.locator("header .link")).to_have_text("live")
        await expect(page.locator(".run h2")).to_contain_text("Nothing has been published yet.")


async def test_what_was_not_answered_is_asked_again_though_nothing_happens(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server:
        await stage.served(1)
        for what in ("log?*", "versions?*", "reclaim/plan", "history?*", "explain/*", "versions/*/attempts"):
            await page.route(f"**/v1/{what}", lambda route: route.abort(), times=1)
        await opened(page, server)
        await page.locator("table.updates button.fold").click()
        await expect(page.locator("table.loads tbody tr")).to_be_visible()
        await expect(page.locator("table.updates .sentences").first).to_contain_text("SEALED")
        await expect(page.get_by_text("in 1 place;")).to_be_visible()  # what the disk keeps


async def test_what_stands_below_the_charts_does_not_wait_for_them_for_ever(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server:
        await stage.served(1)
        await page.route("**/v1/history?*", lambda _: None)  # it is never answered
        await opened(page, server)
        await expect(page.locator("table.updates tbody tr")).to_have_count(1)


async def test_a_page_that_was_turned_shows_no_answer_to_what_was_asked_before(page: Page, tmp_path: Path) -> None:
    async with crowd(tmp_path) as (api, _), listening(api) as server:
        await opened(page, server)
        first = page.locator("table.updates tbody th").first
        await expect(first).to_have_text("1,000")
        held: list[Route] = []

        async def hold(route: Route) -> None:
            held.append(route)

        await page.route("**/v1/versions?*", hold, times=1)
        older, newer = (page.get_by_role("button", name=name, exact=True).first for name in ("Older", "Newer"))
        await older.click()
        await newer.click()
        await held[0].continue_()  # the page that is not wanted any more
        await older.click()
        await expect(first).to_have_text("975")
        await newer.click()
        await expect(first).to_have_text("1,000")


# The place in the page of the first version's button, at each frame from when it is there until all lanes are.
PLACES = """async () => {
  const places = new Set();
  const lanes = () => [...document.querySelectorAll(".lanes li svg")];
  for (let frames = 0; frames < 600; frames += 1) {
    await new Promise(requestAnimationFrame);
    const button = document.querySelector("table.updates button.fold");
    if (button !== null) places.add(Math.round(button.getBoundingClientRect().y + scrollY));
    if (button !== null && lanes().every((lane) => lane.querySelector("rect") !== null)) return [...places];
  }
}"""


async def test_a_version_stays_in_its_place_while_the_page_hears_of_engines(page: Page, tmp_path: Path) -> None:
    async with crowd(tmp_path) as (api, _), listening(api) as server:
        await page.goto(f"http://127.0.0.1:{server.port}/")
        assert len(await page.evaluate(PLACES)) == 1


async def test_while_nothing_is_published_only_engines_that_answer_are_said_to_wait(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage, listening(stage.api) as server:
        stage.engines["b"].down = True
        await opened(page, server)
        await expect(page.locator(".run p")).to_contain_text("1 engine waits, 1 is away.")


async def told(stage: Stage, run: str, step: int) -> None:
    """Publish a step of a run and wait for its verdict."""
    publish(stage.root, run, step, tensors(step))
    await stage.until(f"{run}~v{step:06d}", lambda record: record.state is VersionState.SEALED)


async def test_versions_of_several_runs_stand_in_the_order_in_which_they_came(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path, names=()) as stage, listening(stage.api) as server:
        for run, step in (("old", 100), ("new", 1), ("old", 101), ("new", 2)):
            await told(stage, run, step)
        await opened(page, server)
        rows = page.locator("table.updates tbody tr")
        await expect(rows.locator("th")).to_have_text(["2", "101", "1", "100"])
        await expect(rows.locator("td").filter(has_text=re.compile("^(old|new)$"))).to_have_text(["new", "old"] * 2)


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


async def test_an_engine_is_moved_to_a_run_by_its_name(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server:
        await stage.served(1)
        await opened(page, server)
        await page.locator("table.engines button.fold").click()
        await page.get_by_role("button", name="Move …").click()
        dialog = page.get_by_role("dialog", name="Move to another run?")
        await expect(dialog).to_contain_text("follows run, which would lose it")
        await dialog.get_by_label("Run").fill("next")
        await page.keyboard.press("Enter")
        await expect(page.locator(".notice")).to_contain_text("a:1 follows next from now on.")
        assert stage.store.engines["a:1"].run == "next"
