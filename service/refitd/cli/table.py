"""A table in which nothing is broken: columns are as wide as what is in them, and words go beneath their row where they
do not fit beside it.

Rich's own tables share the terminal's width among all columns: at 80 of them an id is broken in two, numbers lose
digits, and a reason becomes a column of twelve characters and thirteen lines. Nor are lines filled up with spaces.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

GAP = "  "
INDENT = 4  # columns, of words beneath their row


@dataclass(frozen=True, slots=True)
class _Row:
    cells: tuple[Text, ...]
    words: Text | None


class Table:
    """Rows under titles. Columns in `right` are aligned to the right; `words` titles the last, free column, if any.

    With `cut` each row is one line, which ends at the edge of the window; without it a row that is wider goes on below.
    """

    def __init__(self, *titles: str, right: Collection[str] = (), words: str | None = None, cut: bool = False) -> None:
        self._right = tuple(title in right for title in titles)
        self._cut = cut
        self._rows = [_Row(tuple(Text(title) for title in titles), None if words is None else Text(words))]

    def add_row(self, *cells: str | Text, words: str | Text | None = None) -> None:
        """One row, a cell for each title."""
        told = None if words is None else _text(words)
        self._rows.append(_Row(tuple(_text(cell) for cell in cells), told))

    @property
    def width(self) -> int:
        """Of all columns, in characters, without words."""
        widths = self._widths()
        return sum(widths) + len(GAP) * (len(widths) - 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """For Rich: the lines."""
        widths, (head, *rows) = self._widths(), self._rows
        has_room = head.words is not None and self._fits(head.words, options.max_width)
        title = self._line(head, widths, head.words if has_room else None)  # no stub of a title at the window's edge
        title.stylize("bold")
        title.truncate(options.max_width)
        yield title
        yield Text("─" * title.cell_len)
        for row in rows:
            if row.words is None or self._cut or self._fits(row.words, options.max_width):
                yield self._shown(self._line(row, widths, row.words))
            else:
                yield self._shown(self._line(row, widths, None))
                for line in row.words.wrap(console, max(options.max_width - INDENT, 1)):
                    line.rstrip()
                    yield Text(" " * INDENT).append_text(line)

    def _widths(self) -> list[int]:
        return [
            max(cell.cell_len for cell in column) for column in zip(*(row.cells for row in self._rows), strict=True)
        ]

    def _fits(self, words: Text, width: int) -> bool:
        return "\n" not in words.plain and self.width + len(GAP) + words.cell_len <= width

    def _line(self, row: _Row, widths: Iterable[int], words: Text | None) -> Text:
        cells = [cell.copy() for cell in row.cells]
        for cell, width, is_right in zip(cells, widths, self._right, strict=True):
            cell.align("right" if is_right else "left", width)
        line = Text(GAP).join(cells if words is None else [*cells, words])
        line.rstrip()
        return line

    def _shown(self, line: Text) -> Text:
        line.no_wrap, line.overflow = self._cut, "ellipsis" if self._cut else "fold"
        return line


def _text(cell: str | Text) -> Text:
    return Text(cell) if isinstance(cell, str) else cell
