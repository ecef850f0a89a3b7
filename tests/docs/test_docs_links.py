"""Links of README and pages lead somewhere where the repository is browsed: files that are there, headings that are.

`make docs` checks the site's links; README is not in it, and pages link to files that are not.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import PAGES, TREE, name_of

_LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)|(?:src|srcset|href)=\"([^\"]+)\"")
_FENCES = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(rf"{_FENCES.pattern}|`[^`\n]*`", _FENCES.flags)
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_ELSEWHERE = ("http://", "https://", "mailto:")


def links_of(page: Path) -> Iterator[str]:
    for found in _LINK.finditer(_CODE.sub("", page.read_text())):
        link = found[1] or found[2]
        if not link.startswith(_ELSEWHERE):
            yield link


def anchors_of(page: Path) -> set[str]:
    """What code hosts make of headings: lower case, without punctuation, hyphens for spaces; numbered when repeated."""
    anchors: list[str] = []
    for heading in _HEADING.findall(_FENCES.sub("", page.read_text())):
        slug = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        before = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", anchor) is not None for anchor in anchors)
        anchors.append(f"{slug}-{before}" if before else slug)
    return set(anchors)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_link_leads_to_a_file_and_a_heading_that_are_there(page: Path) -> None:
    broken: list[str] = []
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not (target.exists() and target.is_relative_to(TREE)):
            broken.append(link)
        elif anchor and anchor not in anchors_of(target):
            broken.append(f"{link}: there is no such heading")
    assert not broken


def test_a_page_is_called_in_the_list_of_pages_as_it_calls_itself() -> None:
    """The site's sidebar has the pages' own titles, its first page those of the list."""
    index = TREE / "docs/index.md"
    listed = re.findall(r"^- \[(.+?)\]\((.+?\.md)\)", index.read_text(), re.MULTILINE)
    titles = {path: _HEADING.findall((index.parent / path).read_text())[0] for _, path in listed}
    assert {path: title for title, path in listed} == titles
