"""The command line, put together."""

from collections.abc import Callable, Mapping
from importlib.metadata import version as version_of
from typing import Annotated

import typer

from refitd.cli import engines, runs
from refitd.cli.adopt import adopt
from refitd.cli.areal import areal
from refitd.cli.demo import demo
from refitd.cli.doctor import doctor
from refitd.cli.exits import EXIT_CODES_HELP
from refitd.cli.fsck import fsck
from refitd.cli.help import Command, help_of
from refitd.cli.log import log
from refitd.cli.meant import Commands
from refitd.cli.plan import plan
from refitd.cli.publish import publish
from refitd.cli.reclaim import reclaim
from refitd.cli.rollback import rollback
from refitd.cli.serve import ENGINES_FILE_HELP, serve
from refitd.cli.status import status
from refitd.cli.top import top
from refitd.cli.versions import explain, pause, pin, resume, unpin, versions
from refitd.cli.wait import wait
from refitd.cli.webhooks import webhooks

app = typer.Typer(
    name="refitd",
    cls=Commands,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,  # a traceback is for a bug report, and locals could hold a token
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"refitd {version_of('refitd')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
]


@app.callback(epilog=EXIT_CODES_HELP)
def refitd(version: Version = False) -> None:
    """Keep inference engines on the trainer's latest weights, through the file system.

    \b
    refitd serve --root /shared/weights --engine http://127.0.0.1:30000
    refitd publish out/checkpoint-123 --root /shared/weights --run exp --step 123 --wait
    refitd status
    """


COMMANDS: Mapping[str, tuple[Callable[..., None], ...]] = {
    "Run it": (plan, doctor, serve, areal, demo, fsck, adopt),
    "Look": (status, top, versions, explain, log, wait, webhooks),
    "Change": (publish, rollback, pause, resume, pin, unpin, reclaim),
}
EPILOGS: Mapping[Callable[..., None], str] = {serve: ENGINES_FILE_HELP + EXIT_CODES_HELP}
for panel, commands in COMMANDS.items():
    for command in commands:
        epilog = EPILOGS.get(command, EXIT_CODES_HELP)
        app.command(cls=Command, help=help_of(command), epilog=epilog, rich_help_panel=panel)(command)
app.add_typer(engines.app, name="engines", rich_help_panel="Look", epilog=EXIT_CODES_HELP)
app.add_typer(runs.app, name="runs", rich_help_panel="Look", epilog=EXIT_CODES_HELP)
