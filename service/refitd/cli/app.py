"""The command line: all commands together, and a suggestion where the name is that of another tool's command.

A command's module is imported when it is called: all of them take a second, most of which is the service's.
"""

import re
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from importlib import import_module
from inspect import getdoc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from refitd.parts import CommandLine, parts
from refitd.text import plain_refusal
from refitd_client.contract.naming import installed_release

_KEEP_LINES = "\b"  # begins a paragraph whose lines stay as they are, as in every tool that Typer's parser knows
EXIT_CODES_HELP = (
    "Exit codes: 0 done · 1 failed or refused · 2 wrong usage, or no --yes and no terminal to ask on · "
    "3 the service cannot be reached or is not ready · 4 not authorised · 5 timed out · 130 interrupted"
)


def help_of(command: Callable[..., object]) -> str:
    """Its docstring; paragraphs flow to the terminal's width, and examples keep their lines."""
    paragraphs = (getdoc(command) or "").split("\n\n")
    return "\n\n".join(part if part.startswith(_KEEP_LINES) else " ".join(part.split()) for part in paragraphs)


_NONE_OF = re.compile(r"'(.*)' is not (?:one of )?('.*')\.?")  # Typer's words for what is none of some values


def plainly(message: str) -> str:
    """Why a value is refused, in plain words, and with the value that was meant."""
    told = plain_refusal(message)
    if (none_of := _NONE_OF.fullmatch(told)) is None:
        return told
    typed, values = none_of.groups()
    meant = get_close_matches(typed.lower(), re.findall("'([^']+)'", values), 1)
    return f"{told.removesuffix('.')}. Did you mean {meant[0]!r}?" if meant else told


class Command(TyperCommand):
    """A command whose switches show no type, and whose refusals are plain sentences."""

    def parse_args(self, ctx: Any, args: Any) -> Any:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = plainly(error.message)
            raise

    def get_params(self, ctx: Any) -> Any:
        return _switches_untyped(super().get_params(ctx))


class Group(TyperGroup):
    """A group whose switches show no type."""

    def get_params(self, ctx: Any) -> Any:
        return _switches_untyped(super().get_params(ctx))


def _switches_untyped(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


PANELS = ("Run it", "Look", "Change")
_RUN, _LOOK, _CHANGE = PANELS
_OF_THE_CORE: Mapping[str, CommandLine] = {
    "serve": CommandLine(
        _RUN, "refitd.cli.serve", "Run the service.", is_first=True, words=("start", "run", "up", "server", "daemon")
    ),
    "status": CommandLine(
        _LOOK,
        "refitd.cli.versions",
        "Show runs, engines and versions at one glance.",
        is_first=True,
        words=("info", "health", "ps", "update", "updates"),
    ),
    "top": CommandLine(
        _LOOK, "refitd.cli.top", "Watch engines and versions, live.", words=("watch", "monitor", "dashboard")
    ),
    "versions": CommandLine(
        _LOOK, "refitd.cli.versions", "List versions, newest first.", words=("ls", "list", "checkpoints", "models")
    ),
    "explain": CommandLine(
        _LOOK,
        "refitd.cli.versions",
        "Say why a run, a version or an engine is where it is.",
        is_first=True,
        words=("why", "describe", "show", "get"),
    ),
    "log": CommandLine(
        _LOOK,
        "refitd.cli.log",
        "List what was decided, newest first, and why.",
        words=("events", "history", "logs", "audit", "decisions"),
    ),
    "wait": CommandLine(_LOOK, "refitd.cli.wait", "Wait until engines serve a version.", is_first=True),
    "engines": CommandLine(
        _LOOK,
        "refitd.cli.engines",
        "List engines, or change which there are.",
        words=("workers", "replicas", "servers", "fleet"),
    ),
    "runs": CommandLine(_LOOK, "refitd.cli.runs", "List runs, or say which have ended."),
    "publish": CommandLine(
        _CHANGE,
        "refitd.cli.publish",
        "Publish a checkpoint, and tell the service.",
        is_first=True,
        words=("push", "announce", "notify"),
    ),
    "rollback": CommandLine(
        _CHANGE,
        "refitd.cli.reclaim",
        "Bring a run's engines back to an earlier good version.",
        is_first=True,
        words=("revert", "undo", "restore"),
    ),
    "pause": CommandLine(_CHANGE, "refitd.cli.versions", "Bring no engine of a run to a newer version for now."),
    "resume": CommandLine(
        _CHANGE, "refitd.cli.versions", "Let the updates of a run go on.", words=("unpause", "continue")
    ),
    "pin": CommandLine(
        _CHANGE, "refitd.cli.versions", "Keep a version, whatever the keep rules say.", words=("keep", "hold")
    ),
    "unpin": CommandLine(_CHANGE, "refitd.cli.versions", "Leave a version to the keep rules again."),
    "reclaim": CommandLine(
        _CHANGE,
        "refitd.cli.reclaim",
        "Delete what nothing needs any more, now.",
        words=("gc", "prune", "clean", "cleanup", "delete", "rm"),
    ),
}


def _in_order(commands: Mapping[str, CommandLine]) -> dict[str, CommandLine]:
    return {name: line for panel in PANELS for name, line in commands.items() if line.panel == panel}


COMMANDS = _in_order(dict(_OF_THE_CORE) | {name: line for part in parts() for name, line in part.commands.items()})
"""The commands of the core and of the rings, by name, in the order of the panels of --help."""
MEANT: Mapping[str, str] = {word: name for name, line in COMMANDS.items() for word in line.words} | dict.fromkeys(
    ("resync", "reload", "refresh"), "engines resync"
)


class Commands(Group):
    """All commands, each made when it is asked for. Suggests refitd's own command for the name of another tool's."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._listed: Collection[str] | None = None  # while the help is written

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in COMMANDS if self._listed is None or name in self._listed]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (listed := COMMANDS.get(cmd_name)) is None:
            return None
        if self._listed is not None:  # that line alone, because modules of commands take a second
            return TyperCommand(cmd_name, help=listed.line, rich_help_panel=listed.panel)
        module = import_module(listed.module)
        made = getattr(module, "app", None)  # of a command that has commands of its own
        if made is None:
            made = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
            function, epilog = getattr(module, cmd_name), getattr(module, "EPILOGS", {}).get(cmd_name)
            made.command(cls=Command, help=help_of(function), epilog=epilog)(function)
        command = get_command(made)
        command.name, command.epilog = cmd_name, command.epilog or EXIT_CODES_HELP
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help: of the first commands, or of all where `refitd help all` asks for it."""
        self._listed = [name for name, line in COMMANDS.items() if line.is_first or "all" in ctx.args]
        super().format_help(ctx, formatter)
        self._listed = None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """What was typed. `refitd help COMMAND` is `refitd COMMAND --help`."""
        if args[:1] == ["help"]:
            if args[1:] == ["all"]:
                ctx.args = ["all"]
                typer.echo(ctx.get_help())
                ctx.exit()
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        """The command that the first word names."""
        word = args[0] if args else ""
        if word in COMMANDS or word.startswith("-"):
            return super().resolve_command(ctx, args)
        meant = MEANT.get(word) or next(iter(get_close_matches(word, COMMANDS, 1)), None)
        return ctx.fail(f"No such command {word!r}." + (f" Did you mean {meant!r}?" if meant else ""))


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
        typer.echo(f"refitd {installed_release()}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
]


@app.callback(epilog=EXIT_CODES_HELP)
def refitd(version: Version = False) -> None:
    """Keep inference engines on the trainer's latest weights, through the file system.

    \b
    refitd serve --root /shared/weights --engine http://127.0.0.1:30000
    refitd publish out/checkpoint-123 --root /shared/weights --run exp --step 123
    refitd status

    'refitd help all' lists every command.
    """
