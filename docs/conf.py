"""How `make docs` builds the site from the pages in this folder: Sphinx, MyST for Markdown, the theme furo.

The pages are plain Markdown, so that they read as well where the repository is browsed; the site's contents are made
from the links of `index.md`. Links within the site are checked while it is built, and a page that is in no list of
contents is an error.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pygments.lexers.special import TextLexer
from sphinx.addnodes import pending_xref

if TYPE_CHECKING:
    from docutils.nodes import document
    from sphinx.application import Sphinx

project = "refitd"
copyright = "the authors of refitd"  # noqa: A001 Sphinx' name for it
html_title = "refitd"
html_theme = "furo"
html_copy_source = False
html_favicon = "../service/refitd/dashboard/icon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]

extensions = ["myst_parser", "sphinxcontrib.mermaid"]
exclude_patterns = ["generate"]
nitpicky = True
smartquotes = False  # they would make one dash of the two before an option

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # as where the repository is browsed: [text](page.md#a-heading)
myst_fence_as_directive = ["mermaid"]

# `make docs-links` asks these; the build itself needs no network.
linkcheck_timeout = 20
linkcheck_ignore = [r"http://127\.0\.0\.1:.*"]  # what a reader's own services listen on


def _links_to_folders(app: "Sphinx", doctree: "document") -> None:
    """Links to folders are for those who browse the repository; the site has none, and shows their text."""
    for link in list(doctree.findall(pending_xref)):
        page = Path(app.env.doc2path(app.env.docname))
        is_page = link["refdomain"] == "doc"
        if link["reftype"] == "myst" and not is_page and (page.parent / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def _contents(_app: "Sphinx", page: str, source: list[str]) -> None:
    """Each section of the first page is a part of the table of contents."""
    if page == "index":
        for section in source[0].split("\n## ")[1:]:
            pages = re.findall(r"^- \[.+?\]\((.+?)\.md\)", section, re.MULTILINE)
            lines = ["```{toctree}", ":hidden:", f":caption: {section.partition(chr(10))[0]}", "", *pages, "```"]
            source[0] += "\n" + "\n".join(lines) + "\n"


def setup(app: "Sphinx") -> dict[str, Any]:
    """What this file adds to Sphinx."""
    app.add_lexer("flat", TextLexer)  # the vector of delta-format.md
    app.connect("source-read", _contents)
    app.connect("doctree-read", _links_to_folders)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
