"""Updates over time in a real Chromium: charts that zoom, a lane for each engine, a grid for many."""

import asyncio
from pathlib import Path

import pytest
from crowd import ENGINES, VERSIONS, crowd, opened
from playwright.async_api import Locator, Page, expect

from support.attackers import QuietServer, listening
from support.services import Stage, serving

pytestmark = [pytest.mark.browser]


async def drawn(page: Page, server: QuietServer) -> Locator:
    """Open the dashboard; return its section of charts and lanes once they are there."""
    await opened(page, server)
    section = page.locator("section.history")
    await expect(section.locator("canvas").first).to_be_visible()
    await expect(section.locator(".lanes svg[role=img]").first).to_be_visible()
    return section


async def trained(stage: Stage, steps: int) -> None:
    for step in range(1, steps + 1):
        await stage.served(step)


async def test_dragging_over_a_chart_zooms_all_charts_and_lanes_and_a_double_click_goes_back(
    page: Page, tmp_path: Path
) -> None:
    async with crowd(tmp_path) as (api, _), listening(api) as server:
        section = await drawn(page, server)
        await expect(section.locator("p.told")).to_contain_text("100 updates in sight, 2 with a failure")
        await expect(section.locator(".lanes g text")).to_have_count(0)  # too narrow for a number
        chart = section.locator(".u-over").first
        box = await chart.bounding_box()
        assert box is not None
        await page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 40)
        await page.mouse.down()
        await page.mouse.move(box["x"] + box["width"] * 0.99, box["y"] + 40, steps=4)
        await page.mouse.up()
        await expect(section.locator("p.told")).to_contain_text("9 updates in sight, 2 with a failure")
        await expect(section.locator(".lanes g text").first).to_be_visible()
        await expect(section.get_by_role("button", name="Follow the newest updates")).to_have_attribute(
            "aria-pressed", "false"
        )
        await chart.dblclick()
        await expect(section.locator("p.told")).to_contain_text("100 updates in sight")


async def test_the_keyboard_zooms_and_moves_through_all_thousand_updates(page: Page, tmp_path: Path) -> None:
    async with crowd(tmp_path) as (api, _), listening(api) as server:
        section = await drawn(page, server)
        told = section.locator("p.told")
        await section.get_by_role("button", name="Show all updates").press("Enter")
        await expect(told).to_contain_text(f"{VERSIONS:,} updates in sight")
        for name, expected in (("Zoom in", "500"), ("Earlier", "500"), ("Zoom in", "250"), ("Zoom out", "500")):
            await section.get_by_role("button", name=name).press("Enter")
            await expect(told).to_contain_text(f"{expected} updates in sight")
        await section.get_by_role("button", name="Follow the newest updates").press("Enter")
        await expect(told).to_contain_text("100 updates in sight")


async def test_a_lane_shows_what_an_engine_served_its_loads_and_when_it_was_away(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage, listening(stage.api) as server:
        await trained(stage, 2)
        stage.engines["b"].down = True
        async with asyncio.timeout(10):
            while stage.store.engines["b:1"].state != "UNREACHABLE":
                await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)
        section = await drawn(page, server)
        lanes = section.locator(".lanes svg[role=img]")
        await expect(lanes).to_have_count(2)
        await expect(lanes.nth(1)).to_have_attribute(
            "aria-label", "b:1: serves step 2; 2 loads in sight, 0 failed, 1 outage"
        )
        await expect(lanes.nth(1).locator("rect.loading")).to_have_count(2)
        await expect(lanes.nth(1).locator("title").filter(has_text="UNREACHABLE since")).to_have_count(1)
        await expect(lanes.nth(0).locator("title").filter(has_text="serves step 2, the newest")).to_have_count(1)
        stage.engines["b"].down = False
        await stage.served(3)
        await expect(lanes.nth(1)).to_have_attribute(
            "aria-label", "b:1: serves step 3; 3 loads in sight, 0 failed, 1 outage"
        )


async def test_two_hundred_engines_are_a_grid_in_which_each_is_found_by_mouse_and_keyboard(
    page: Page, tmp_path: Path
) -> None:
    async with crowd(tmp_path) as (api, _), listening(api) as server:
        await opened(page, server)
        cells = page.locator(".grid button")
        await expect(cells).to_have_count(ENGINES)
        away = page.get_by_role("button", name="gpu-007: away, step 998, 2 steps behind")
        await expect(away).to_have_class("bad")
        await away.click()
        row = page.locator("table.engines tbody th")
        await expect(row).to_have_count(1)
        await expect(row).to_have_text("gpu-007 vLLM")
        await expect(page.locator(".lanes svg[role=img]")).to_have_count(1)
        await expect(page.locator(".lanes .name")).to_have_text("gpu-007")
        await page.keyboard.press("ArrowRight")
        await expect(cells.nth(8)).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(row.filter(has_text="gpu-008")).to_have_count(1)
        await page.keyboard.press("End")
        await expect(cells.last).to_be_focused()
        await page.keyboard.press("Home")
        await expect(cells.first).to_be_focused()
        await expect(page.locator(".grid button[tabindex='0']")).to_have_count(1)
        await cells.nth(8).click()  # once more: all are shown again
        await expect(page.get_by_role("navigation", name="Pages of engines")).to_contain_text(f"of {ENGINES}")
