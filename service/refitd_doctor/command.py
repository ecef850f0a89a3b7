"""`refitd doctor`: live checks of root, service and engines, with a fix for each finding; and repairs."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer
from rich.text import Text

from refitd.cli.output import ExitCode, bar, clean, speaking
from refitd.cli.render import Table
from refitd.cli.serve import option, settings_from, takes_settings
from refitd_client.http.connection import connect_to, use
from refitd_doctor.finding import CheckVerdict

if TYPE_CHECKING:
    from refitd_doctor.check import DoctorReport

Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Where the service is; else --host and --port, else REFITD_URL"),
]
Deep = Annotated[
    bool, typer.Option("--deep", help="Read every byte of every good version, and hold it against its digest")
]
Repair = Annotated[
    bool, typer.Option("--repair", help="Begin a damaged journal anew; take a root that was emptied for the root again")
]
_SETTINGS = """
    root state host port token_file read_token_file followers_token_file engines
    engines_file discover engine_allow engine_key_file
    engine_admin_key_file path_map trainers lora base_model keep_last slots disk_budget
    follow follow_token_file run push
    tls_cert tls_key tls_client_ca ca_file client_cert client_key
"""
_STYLES: Mapping[CheckVerdict, str] = {
    CheckVerdict.OK: "green",
    CheckVerdict.WARNING: "yellow",
    CheckVerdict.FAILED: "bold red",
    CheckVerdict.UNKNOWN: "cyan",
}


@takes_settings(
    option("url", Url),
    option("deep", Deep, default=False),
    option("repair", Repair, default=False),
    only=_SETTINGS,
)
def doctor(**flags: Any) -> None:
    """Check what a job will need, live: the root, the service's own files, each engine, and what they share.

    It takes the settings of 'refitd serve', from the same flags and variables, beside a running service or before one
    starts. It asks the service what it knows of its engines: at --url, else at --host and --port, else at REFITD_URL;
    and each hub of --follow whether it takes the token and has the run.
    All that it writes is a probe file, which comes and goes on the root, and an object that comes and goes in each
    object store of --follow and --push. What cannot be known from here is said to be unknown, never guessed. Ends with
    0, or with 1 where something has to be mended first.

    With --repair it mends first what a service does not mend by itself. A damaged journal is moved aside, and one
    begins that has the rows that are sound: this wants the service stopped. A root that was emptied is the service's
    again: this is for files that are gone for good. Missing versions then count as LOST, a trainer that is started
    again begins a new generation, and a running service goes on by itself. Nothing is deleted.

    \b
    refitd doctor --root /shared/weights --engine http://10.0.0.7:30000
    refitd doctor --root /shared/weights --engines-file engines.yaml
    refitd doctor --root /shared/weights --deep
    refitd doctor --root /shared/weights --state /var/lib/refitd --repair
    refitd doctor --root /dev/shm/weights --follow http://hub:8700 --follow-token-file token
    refitd doctor --root /dev/shm/weights --follow s3://bucket/prefix --engine http://127.0.0.1:30000
    refitd doctor --json | jq '.findings[] | select(.verdict != "ok")'
    """
    # Here, because only this command needs so much of the service.
    from refitd_doctor.check import check

    json = bool(flags.pop("json", False))
    wanted: dict[str, Any] = {name: bool(flags.pop(name)) for name in ("deep", "repair")}
    with speaking(json=json) as out:
        url = _service_url(flags.pop("url"), flags)
        settings = settings_from(flags)
        use(settings.client_tls)
        with _quiet(), bar(out, "doctor") as shown:
            if shown is not None:
                wanted["progress"] = shown
            report = asyncio.run(check(settings, url=url, **wanted))
        document = {"root": report.root, "healthy": not report.failed, "findings": report.findings}
        out.show(document, _table(report), _summary(report))
        if report.failed:
            raise typer.Exit(ExitCode.FAILED)


@contextmanager
def _quiet() -> Generator[None]:
    """Silence the logs of the service's parts and of watchdog: stdout is for the findings."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)  # watchdog logs an event that comes while its observer is stopped
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        structlog.configure(**before)


def _table(report: "DoctorReport") -> Table:
    """One line a finding, with what to do behind an arrow."""
    table = Table("", "CHECK", "SUBJECT", words="FOUND → TO DO")
    for found in report.findings:
        words = found.text if found.fix is None else f"{found.text} → {found.fix}"
        verdict = Text(found.verdict, _STYLES[found.verdict])
        table.add_row(verdict, clean(found.check), clean(found.subject), words=clean(words))
    return table


def _summary(report: "DoctorReport") -> Text:
    counts = Counter(finding.verdict for finding in report.findings)
    counted = ", ".join(f"{counts[verdict]} {verdict}" for verdict in CheckVerdict if counts[verdict])
    return Text(counted, style="bold red" if report.failed else "bold green")


def _service_url(url: str | None, flags: Mapping[str, Any]) -> str | None:
    """The URL that was given for the service; None where --host and --port, or their defaults, are to be used.

    Raises:
        ValueError: it is no URL of a service.
    """
    is_typed = flags["host"] is not None or flags["port"] is not None
    named = url or (None if is_typed else os.environ.get("REFITD_URL"))
    return connect_to(named).url if named else None
