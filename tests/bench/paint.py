"""How soon the dashboard shows something, and all of it: a real Chromium, 1,000 versions, 200 engines, nothing cached.

It needs what `make browser` installs, which the other scenarios do not: `make bench-paint`.
"""

import os
import shutil
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import stack
from figures import Figure, spread

if TYPE_CHECKING:
    from playwright.sync_api import Browser

OPENED = 20
QUIET = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
HERE = Path(__file__).parent
# Milliseconds since the navigation began, as the browser itself has them, and the compressed bytes that came.
LOOK = """() => ({
  paint: performance.getEntriesByName("first-contentful-paint")[0].startTime,
  now: performance.now(),
  code: [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
    .filter((each) => !each.name.includes("/v1/")).reduce((sum, each) => sum + each.encodedBodySize, 0),
})"""


def paint(folder: Path) -> list[Figure]:
    """First contentful paint; all rows of the first pages; the bytes of the page and what it loads."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, str(HERE / "crowded.py"), str(folder)]
    with stack.process(command, folder / "crowded.log", "refitd") as (_, (url,)), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium(), args=QUIET)
        _open(browser, url)  # the browser's own first page
        seen = [_open(browser, url) for _ in range(OPENED)]
        browser.close()
    paints, rows = [each["paint"] for each in seen], [each["now"] for each in seen]
    detail = {"first contentful paint, ms": spread(paints), "rows of engines, versions and log, ms": spread(rows)}
    size = max(each["code"] for each in seen)
    return [
        Figure(
            name=f"dashboard, nothing cached, {OPENED} times: first paint, median",
            measured=round(statistics.median(paints), 1),
            unit="ms",
            limit=1000,
            detail=detail,
        ),
        Figure(name="dashboard: compressed", measured=round(size / 1000, 1), unit="kB", limit=200),
    ]


def _open(browser: "Browser", url: str) -> dict[str, float]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(url)
    for table in ("engines", "updates", "log"):
        page.locator(f"table.{table} tbody tr").first.wait_for()
    found: dict[str, float] = page.evaluate(LOOK)
    context.close()
    return found


def _chromium() -> str:
    names = ("chromium-headless-shell", "chromium", "google-chrome")
    path = os.environ.get("REFITD_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise RuntimeError("there is no Chromium: make bench-paint installs one, or name it: REFITD_CHROMIUM=/path")
    return path
