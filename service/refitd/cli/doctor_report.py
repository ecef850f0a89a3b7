"""How a report looks to people, and to machines. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from refitd.cli.output import clean
from refitd.cli.table import Table
from refitd.diagnose.doctor.check import Report
from refitd.diagnose.doctor.finding import Verdict

_STYLES: Mapping[Verdict, str] = {
    Verdict.OK: "green",
    Verdict.WARNING: "yellow",
    Verdict.FAILED: "bold red",
    Verdict.UNKNOWN: "cyan",
}


def findings_table(report: Report) -> Table:
    """One line a finding, with what to do behind an arrow."""
    table = Table("", "CHECK", "SUBJECT", words="FOUND → TO DO")
    for finding in report.findings:
        verdict = Text(finding.verdict, style=_STYLES[finding.verdict])
        told = finding.text if finding.fix is None else f"{finding.text} → {finding.fix}"
        table.add_row(verdict, clean(finding.check), clean(finding.subject), words=clean(told))
    return table


def summary(report: Report) -> Text:
    """The report in one line."""
    counts = Counter(finding.verdict for finding in report.findings)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    return Text(told, style="bold red" if report.failed else "bold green")


def document(report: Report) -> dict[str, Any]:
    """The report for machines."""
    return {"root": report.root, "healthy": not report.failed, "findings": report.findings}
