"""How the dashboard says numbers, by its own module in a real Chromium."""

from pathlib import Path

import pytest
from playwright.async_api import Page

from support.attackers import listening
from support.services import serving

pytestmark = [pytest.mark.browser]

SPANS = {
    0.42: "0.42 ms",
    59_900: "59.9 s",
    119_700: "2 min 0 s",
    190_000: "3 min 10 s",
    7_199_000: "2 h 0 min",
}


async def test_a_span_has_no_sixty_seconds_and_no_sixty_minutes(page: Page, tmp_path: Path) -> None:
    async with serving(tmp_path) as stage, listening(stage.api) as server:
        await page.goto(f"http://127.0.0.1:{server.port}/")
        said = await page.evaluate("async spans => spans.map((await import('/assets/format.js')).span)", [*SPANS])
        assert said == [*SPANS.values()]
