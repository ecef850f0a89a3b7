"""`make demo-svg`: the README's terminal session, drawn from a demo that really runs.

    recorded_demo.py FILE

Times differ from run to run, so the picture is taken anew by hand and not held by a test.
"""

import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from refitd_embedded.demo import DemoOptions, main
from refitd_embedded.demo.table import Display

WIDTH = 96
COLOURS = TerminalTheme(
    (13, 17, 23),
    (230, 237, 243),
    [(13, 17, 23), (255, 123, 114), (63, 185, 80), (210, 153, 34), (68, 147, 248), (188, 140, 255), (57, 197, 207),
     (230, 237, 243)],
)  # fmt: skip


def record(out: Path) -> int:
    """Run the demo, and write what its terminal showed at the end; the demo's exit status."""
    painted = mock.patch.object(Display, "of", return_value=Display(painted=True))
    with redirect_stderr(io.StringIO()) as progress, redirect_stdout(io.StringIO()) as printed, painted:
        status = main(DemoOptions())
    shown = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    shown.print(Text.assemble(("$ ", "green"), ("make demo", "bold")))
    shown.print(Text(progress.getvalue().rstrip(), style="dim"))
    shown.print(Text.from_ansi(printed.getvalue()))
    out.write_text(without_remote_fonts(shown.export_svg(title="make demo", theme=COLOURS)))
    return status


def without_remote_fonts(svg: str) -> str:
    """Rich's template names fonts of another server; a picture in a page is allowed to load none."""
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(record(Path(sys.argv[1])))
