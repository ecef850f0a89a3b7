"""The report: a table to read, and the same as JSON with machine and command."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from support.run_notes import run_notes

Value = int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure; where it `must_be` something, anything else fails the run. `details` say what was found."""

    name: str
    value: Value
    must_be: str | None = None
    is_met: bool = True
    details: Sequence[str] = ()


@dataclass(slots=True)
class Report:
    """The figures in order."""

    lines: list[Line] = field(default_factory=list[Line])

    def add(self, name: str, value: Value) -> None:
        """A figure that cannot fail."""
        self.lines.append(Line(name=name, value=value))

    def at_least(self, name: str, value: int, least: int) -> None:
        """A figure that has to be large enough."""
        self.lines.append(Line(name=name, value=value, must_be=f"≥ {least:,}", is_met=value >= least))

    def none_of(self, name: str, found: Sequence[str]) -> None:
        """Something that must not have happened."""
        self.lines.append(Line(name=name, value=len(found), must_be="0", is_met=not found, details=found))

    def counts(self, name: str, counter: "Counter[str]") -> None:
        """A figure for each key, the largest first."""
        for key, count in counter.most_common():
            self.add(f"{name} {key}", count)

    @property
    def is_good(self) -> bool:
        """Whether everything is as it must be."""
        return all(line.is_met for line in self.lines)

    def show(self, console: Console) -> None:
        """Print the table, and what was found where nothing should have been."""
        table = Table("", "", "must be", "", box=None)
        for line in self.lines:
            mark = "" if line.must_be is None else "ok" if line.is_met else "FAILED"
            value = f"{line.value:,}" if isinstance(line.value, int) else str(line.value)
            table.add_row(line.name, value, line.must_be or "", mark)
        console.print(table)
        for line in self.lines:
            for detail in line.details:
                console.print(f"{line.name}: {detail}", highlight=False, markup=False, soft_wrap=True)

    def document(self, command: str, rounds: Sequence[str]) -> dict[str, Any]:
        """Everything that is committed."""
        return {
            "command": command,
            **run_notes("refitd", "httpx", "fastapi", "uvicorn", "torch"),
            "figures": [asdict(line) for line in self.lines],
            "rounds": list(rounds),
        }
