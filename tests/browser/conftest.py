"""A real Chromium. Without one, or without Playwright, these tests are skipped: `make browser` gets both."""

import os
import shutil
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("playwright", reason="make browser installs it")
from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright, expect

# Without these Chromium looks up its maker's hosts.
QUIET = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
# The name of a site whose owner has it lead to this machine.
REBOUND = ["--host-resolver-rules=MAP evil.test 127.0.0.1"]

expect.set_options(timeout=20_000)  # a test that fails waits for so long; one that passes waits for nothing


def chromium() -> str | None:
    """The browser to use."""
    names = ("chromium-headless-shell", "chromium", "google-chrome")
    return os.environ.get("REFITD_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """A browser of its own for each test: nothing is left over from another."""
    if (path := chromium()) is None:
        pytest.skip("there is no Chromium: make browser installs one")
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=path, args=QUIET + REBOUND)
        yield started
        await started.close()


@pytest.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A page that must not log an error, raise one, or ask any host but the service."""
    context = await browser.new_context(viewport={"width": 1280, "height": 900})
    page = await context.new_page()
    faults: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        # Chromium logs each answer of 400 and above, and each connection that was lost: tests bring those about.
        if message.type == "error" and "Failed to load resource" not in message.text:
            faults.append(message.text)

    def asked(request: Request) -> None:
        if "://127.0.0.1:" not in request.url:
            faults.append(f"asks {request.url}")

    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", heard)
    page.on("request", asked)
    page.set_default_timeout(20_000)
    yield page
    assert faults == []
