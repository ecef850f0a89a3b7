"""The command line: all commands together, and a suggestion where the name is that of another tool's command."""

from collections.abc import Callable, Mapping
from importlib.metadata import version as version_of
from typing import Annotated, Any

import typer

from refitd.cli import engines, runs
from refitd.cli.areal import areal
from refitd.cli.demo import demo
from refitd.cli.doctor import doctor
from refitd.cli.exits import EXIT_CODES_HELP
from refitd.cli.fsck import fsck
from refitd.cli.log import log
from refitd.cli.options import Command, Group, help_of
from refitd.cli.plan import plan
from refitd.cli.publish import publish
from refitd.cli.reclaim import reclaim
from refitd.cli.rollback import rollback
from refitd.cli.serve import ENGINES_FILE_HELP, adopt, serve
from refitd.cli.status import status
from refitd.cli.top import top
from refitd.cli.versions import explain, pause, pin, resume, unpin, versions
from refitd.cli.wait import wait
from refitd.cli.webhooks import webhooks

MEANT: Mapping[str, str] = {
    **dict.fromkeys(("events", "history", "logs", "audit", "decisions"), "log"),
    **dict.fromkeys(("start", "run", "up", "server", "daemon"), "serve"),
    **dict.fromkeys(("ls", "list", "checkpoints", "models"), "versions"),
    **dict.fromkeys(("info", "health", "ps"), "status"),
    **dict.fromkeys(("workers", "replicas", "servers", "fleet"), "engines"),
    **dict.fromkeys(("watch", "monitor", "dashboard"), "top"),
    **dict.fromkeys(("why", "describe", "show", "get"), "explain"),
    **dict.fromkeys(("resync", "reload", "refresh"), "engines resync"),
    **dict.fromkeys(("revert", "undo", "restore"), "rollback"),
    **dict.fromkeys(("push", "update", "announce", "notify"), "publish"),
    **dict.fromkeys(("gc", "prune", "clean", "cleanup", "delete", "rm"), "reclaim"),
    **dict.fromkeys(("check", "diagnose", "test"), "doctor"),
    **dict.fromkeys(("repair", "verify", "scrub"), "fsck"),
    **dict.fromkeys(("unpause", "continue"), "resume"),
    **dict.fromkeys(("keep", "hold"), "pin"),
}


class Commands(Group):
    """Suggests refitd's own command where the name is that of another tool's command."""

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        """The command that the first word names."""
        if args and args[0] not in self.commands and args[0] in MEANT:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {MEANT[args[0]]!r}?")
        return super().resolve_command(ctx, args)


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
