"""`refitd fsck`: whether journal, disk and engines agree, and what to do where they do not."""

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Annotated, Any

import structlog
import typer

from refitd.cli.exits import ExitCode
from refitd.cli.flags import parameters, settings_from
from refitd.cli.options import Json
from refitd.cli.output import speaking
from refitd.cli.progress import bar
from refitd_client.errors import RefitError

_SETTINGS = frozenset(
    {
        "root",
        "state",
        "engines",
        "engines_file",
        "engine_allow",
        "path_map",
        "engine_key_file",
        "engine_admin_key_file",
        "incoming_ttl",
    }
)


def fsck(**flags: Any) -> None:
    """Compare journal, disk and engines; say what disagrees; with --repair, mend what can be mended safely.

    It takes the settings of 'refitd serve', from the same flags and variables, and is meant for a service that is
    stopped: it keeps one from starting meanwhile. On the root of a running service it only looks.

    Repairs move a corrupt journal aside and begin an empty one; mark versions whose files changed as lost; finish what
    a killed sweep began; and resume engines that are paused though they serve what they should. Nothing goes that is
    not proved to be refitd's and needed by nobody. Ends with 0 where nothing disagrees (any more), else with 1.

    \b
    refitd fsck --root /shared/weights --engine http://10.0.0.7:30000
    refitd fsck --root /shared/weights --deep --no-engines
    refitd fsck --root /shared/weights --engines-file engines.yaml --repair
    """
    # Here, because only this command needs so much of the service.
    from refitd.cli.fsck_report import document, findings_table, summary
    from refitd.diagnose.fsck.check import Wish, check
    from refitd.diagnose.fsck.telling import Untold
    from refitd.root.ownership import StartRefusedError

    json = bool(flags.pop("json", False))
    wish = Wish(repair=bool(flags.pop("repair")), deep=bool(flags.pop("deep")), engines=bool(flags.pop("ask_engines")))
    with speaking(json=json) as out:
        settings = settings_from(flags)
        with _quiet(), bar(out, "fsck") as shown:
            try:
                report = asyncio.run(check(settings, wish, shown or Untold()))
            except StartRefusedError as error:
                raise RefitError(str(error)) from error
        out.show(document(report), findings_table(report), summary(report))
        if report.open:
            raise typer.Exit(ExitCode.FAILED)


@contextmanager
def _quiet() -> Generator[None]:
    """The service's parts log what they do; here the findings say it, and stdout is for them alone."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


def _switch(name: str, flag: str, text: str, *, default: bool = False) -> Parameter:
    annotation = Annotated[bool, typer.Option(flag, help=text)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_OWN = [
    _switch("repair", "--repair", "Mend what can be mended safely"),
    _switch("deep", "--deep", "Read every byte of every good version, and hold it against its digest"),
    _switch("ask_engines", "--ask-engines/--no-engines", "Ask the engines, or leave them in peace", default=True),
    Parameter("json", Parameter.KEYWORD_ONLY, default=False, annotation=Json),
]
# Typer reads a command's options from its signature.
_SHARED = [parameter for parameter in parameters() if parameter.name in _SETTINGS]
fsck.__signature__ = Signature([*_SHARED, *_OWN])  # pyright: ignore[reportFunctionMemberAccess]
