"""How a report looks to people, and to machines. Pure."""

from typing import Any

from rich.text import Text

from refitd.cli.output import clean
from refitd.cli.table import Table
from refitd.diagnose.fsck.check import Report
from refitd.diagnose.fsck.finding import Finding, Severity

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "dim"}


def findings_table(report: Report) -> Table | str:
    """Findings, one a line, the worst first; nothing where there are none."""
    if not report.findings:
        return ""
    table = Table("", "WHAT", "SUBJECT", words="FOUND → TO DO")
    for finding in report.findings:
        told = finding.text if finding.repaired else f"{finding.text} → {_to_do(finding)}"
        table.add_row(_word(finding), finding.kind, clean(finding.subject), words=clean(told))
    return table


def summary(report: Report) -> Text:
    """The report in one line."""
    repaired = sum(finding.repaired for finding in report.findings)
    did = f"{repaired} repaired, " if repaired else ""
    asked = "" if report.asked else " No engine was asked: --engine URL or --engines-file asks them too."
    if not report.open:
        return Text(f"{did}nothing disagrees.{asked}", style="bold green")
    count = len(report.open)
    mendable = sum(finding.repair is not None and finding.outcome is None for finding in report.open)
    hint = f": --repair can mend {mendable}" if mendable else ""
    return Text(f"{did}{count} disagreement{'s' * (count > 1)}{hint}.{asked}", style="bold")


def document(report: Report) -> dict[str, Any]:
    """The report for machines."""
    return {
        "root": report.root,
        "journal": report.journal,
        "agrees": not report.open,
        "engines_asked": report.asked,
        "findings": report.findings,
    }


def _word(finding: Finding) -> Text:
    if finding.repaired:
        return Text("repaired", style="green")
    return Text(finding.severity, style=_STYLES[finding.severity])


def _to_do(finding: Finding) -> str:
    return finding.advice if finding.outcome is None else f"not repaired: {finding.outcome}"
