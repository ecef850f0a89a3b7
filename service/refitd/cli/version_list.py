"""Versions as `refitd versions` and `refitd status` list them. Pure: wire types in, Rich renderables out."""

from collections.abc import Sequence

from rich.console import RenderableType

from refitd.cli import render
from refitd.cli.table import INDENT, Table
from refitd.text import one_line
from refitd_client.contract.states import Kind
from refitd_client.contract.wire import Version

_CUT = "…"
_WHERE_THE_REST_IS = f"Where a reason ends in '{_CUT}', 'refitd explain VERSION' has all of it."


def version_list(versions: Sequence[Version], window: int | None, told: Sequence[str] = ()) -> list[RenderableType]:
    """Versions, one a row, each with the reason why it is where it is in one line at most.

    Args:
        versions: in the order in which they stand.
        window: columns that there are, to which reasons are cut; None for as many as it takes, as into a pipe.
        told: sentences that stand above the list: a reason with which one ends is not said again.
    """
    if not versions:
        return [render.sentence("No versions.", "dim")]
    words = [_in_short(version, window, told) for version in versions]
    table = _table(versions, words, with_kind=True)
    if window is not None and table.width > window and all(version.kind is Kind.FULL for version in versions):
        table = _table(versions, words, with_kind=False)
    is_cut = any(reason is not None and reason.endswith(_CUT) for reason in words)
    return [table, render.sentence(_WHERE_THE_REST_IS, "dim")] if is_cut else [table]


def _table(versions: Sequence[Version], words: Sequence[str | None], *, with_kind: bool) -> Table:
    kind = ("KIND",) if with_kind else ()
    table = Table("VERSION", "STEP", *kind, "STATE", "SIZE", "ENGINES", "SEEN", right={"STEP", "SIZE"}, words="WHY")
    for version, reason in zip(versions, words, strict=True):
        table.add_row(
            render.cell(version.id),
            f"{version.step:,}",
            *((version.kind.value,) if with_kind else ()),
            render.version_state(version),
            render.size(version.bytes),
            render.engines_on(version),
            render.when(version.created_at),
            words=render.cell(reason),
        )
    return table


def _in_short(version: Version, window: int | None, told: Sequence[str]) -> str | None:
    """Why a version is where it is: all of it, or what fits into a line that stands beneath its row."""
    reason = render.why(version)
    if reason is None:
        return None
    if any(sentence.endswith(reason) for sentence in told):
        return f"'refitd explain {version.id}'"
    line = one_line(reason)
    if window is None or len(line) <= (room := max(window - INDENT, 1)):
        return reason if window is None else line
    end = line.rfind("; ", 0, room + 1)  # as a rule between two of several faults: as many as the window has room for
    return line[: room - 1 if end < 0 else end].rstrip() + _CUT
