"""`refitd fsck`: whether journal, disk and engines agree, and what to do where they do not."""

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any

import structlog
import typer

from refitd.cli.exits import ExitCode
from refitd.cli.flags import option, settings_from, takes_settings
from refitd.cli.output import bar, speaking
from refitd_client.errors import RefitError

Repair = Annotated[bool, typer.Option("--repair", help="Mend what can be mended safely")]
Deep = Annotated[
    bool, typer.Option("--deep", help="Read every byte of every good version, and hold it against its digest")
]
AskEngines = Annotated[bool, typer.Option("--ask-engines/--no-engines", help="Ask the engines, or leave them in peace")]
_SETTINGS = "root state engines engines_file engine_allow path_map engine_key_file engine_admin_key_file incoming_ttl"


@takes_settings(
    option("repair", Repair, default=False),
    option("deep", Deep, default=False),
    option("ask_engines", AskEngines, default=True),
    only=_SETTINGS,
)
def fsck(**flags: Any) -> None:
    """Compare journal, disk and engines; say what disagrees; with --repair, mend what can be mended safely.

    It takes the settings of 'refitd serve', from the same flags and variables, and is meant for a service that is
    stopped: it keeps one from starting meanwhile. On the root of a running service it only looks.

    Repairs move a corrupt journal aside and begin an empty one; mark versions whose files changed as lost; finish what
    a killed sweep began; and resume engines that are paused though they serve what they should. Nothing goes that is
    not proved to be refitd's and unneeded. Ends with 0 where they agree (again), else with 1.

    \b
    refitd fsck --root /shared/weights --engine http://10.0.0.7:30000
    refitd fsck --root /shared/weights --deep --no-engines
    refitd fsck --root /shared/weights --engines-file engines.yaml --repair
    """
    # Here, because only this command needs so much of the service.
    from refitd.cli.findings import fsck_document, fsck_summary, fsck_table
    from refitd.diagnose.fsck.check import check
    from refitd.diagnose.fsck.disk import NoProgress
    from refitd.root.ownership import StartRefusedError

    json = bool(flags.pop("json", False))
    wanted: dict[str, bool] = {name: bool(flags.pop(name)) for name in ("repair", "deep", "ask_engines")}
    with speaking(json=json) as out:
        settings = settings_from(flags)
        with _quiet(), bar(out, "fsck") as shown:
            try:
                report = asyncio.run(check(settings, shown or NoProgress(), **wanted))
            except StartRefusedError as error:
                raise RefitError(str(error)) from error
        out.show(fsck_document(report), fsck_table(report), fsck_summary(report))
        if report.open:
            raise typer.Exit(ExitCode.FAILED)


@contextmanager
def _quiet() -> Generator[None]:
    """Silence the logs of the service's parts: stdout is for the findings."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
