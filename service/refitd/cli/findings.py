"""What doctor and fsck print: a table of findings and a line that sums them up; and the document of --json. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rich.text import Text

from refitd.cli.output import clean
from refitd.cli.table import Table
from refitd.diagnose.doctor.check import DoctorReport
from refitd.diagnose.doctor.finding import CheckVerdict
from refitd.diagnose.fsck.check import FsckReport
from refitd.diagnose.fsck.disagreement import Severity

_STYLES: Mapping[CheckVerdict | Severity, str] = {
    CheckVerdict.OK: "green",
    CheckVerdict.WARNING: "yellow",
    CheckVerdict.FAILED: "bold red",
    CheckVerdict.UNKNOWN: "cyan",
    Severity.ERROR: "bold red",
    Severity.WARNING: "yellow",
    Severity.INFO: "dim",
}


def doctor_table(report: DoctorReport) -> Table:
    """One line a finding, with what to do behind an arrow."""
    rows = ((Text(f.verdict, _STYLES[f.verdict]), f.check, f.subject, f.text, f.fix) for f in report.findings)
    return _table("CHECK", rows)


def doctor_summary(report: DoctorReport) -> Text:
    """How many findings of each verdict there are."""
    counts = Counter(finding.verdict for finding in report.findings)
    counted = ", ".join(f"{counts[verdict]} {verdict}" for verdict in CheckVerdict if counts[verdict])
    return Text(counted, style="bold red" if report.failed else "bold green")


def doctor_document(report: DoctorReport) -> dict[str, Any]:
    """The report for machines."""
    return {"root": report.root, "healthy": not report.failed, "findings": report.findings}


def fsck_table(report: FsckReport) -> Table | str:
    """One line a finding, the worst first, with what to do behind an arrow; nothing where there are none."""
    if not report.findings:
        return ""
    rows: list[tuple[Text, str, str, str, str | None]] = []
    for finding in report.findings:
        word, to_do = Text(finding.severity, _STYLES[finding.severity]), finding.advice
        if finding.repaired:
            word, to_do = Text("repaired", "green"), None
        elif finding.outcome is not None:
            to_do = f"not repaired: {finding.outcome}"
        rows.append((word, finding.kind, finding.subject, finding.text, to_do))
    return _table("WHAT", rows)


def fsck_summary(report: FsckReport) -> Text:
    """How much disagrees, and how much of that can be repaired."""
    repaired = sum(finding.repaired for finding in report.findings)
    did = f"{repaired} repaired, " if repaired else ""
    asked = "" if report.asked else " No engine was asked: --engine URL or --engines-file asks them too."
    if not report.open:
        return Text(f"{did}journal, disk and engines agree.{asked}", style="bold green")
    count = len(report.open)
    mendable = sum(finding.repair is not None and finding.outcome is None for finding in report.open)
    hint = f": --repair can mend {mendable}" if mendable else ""
    return Text(f"{did}{count} disagreement{'s' * (count > 1)}{hint}.{asked}", style="bold")


def fsck_document(report: FsckReport) -> dict[str, Any]:
    """The report for machines."""
    return {
        "root": report.root,
        "journal": report.journal,
        "agrees": not report.open,
        "engines_asked": report.asked,
        "findings": report.findings,
    }


def _table(what: str, rows: Iterable[tuple[Text, str, str, str, str | None]]) -> Table:
    table = Table("", what, "SUBJECT", words="FOUND → TO DO")
    for word, name, subject, text, to_do in rows:
        table.add_row(word, clean(name), clean(subject), words=clean(text if to_do is None else f"{text} → {to_do}"))
    return table
