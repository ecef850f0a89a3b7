"""Writes docs/reference from the code: settings, commands, API, SDK. `make reference` runs it, a unit test runs it too.

Each page is a pure function of what the code says of itself: whatever changes there changes a page, and the test that
holds the pages against the code says so.
"""

from pathlib import Path

from generate.api import api_page
from generate.commands import commands_page
from generate.sdk import sdk_page
from generate.settings import settings_page

FOLDER = Path(__file__).parents[1] / "reference"
NOTE = "<!-- Written from the code by `make reference` (docs/generate). Do not edit. -->\n\n"


def pages() -> dict[Path, str]:
    """Each page of the reference, whole."""
    made = {"settings.md": settings_page(), "cli.md": commands_page(), "api.md": api_page(), "sdk.md": sdk_page()}
    return {FOLDER / name: NOTE + text for name, text in made.items()}
