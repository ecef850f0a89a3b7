"""The command line: all commands together, and a suggestion where the name is that of another tool's command.

A command's module is imported when it is called: all of them take a second, most of which is the service's.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
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

# How --help prints commands, and how they refuse what was typed.
#
# In --help a docstring's paragraphs flow to the terminal's width, examples keep their lines, and switches show no
# type. Nothing of a service's client is imported here: `refitd --help` answers at once.


_KEEP_LINES = "\b"  # begins a paragraph whose lines stay as they are, as in every tool that Typer's parser knows
EXIT_CODES_HELP = (
    "Exit codes: 0 done · 1 failed or refused · 2 wrong usage, or no --yes and no terminal to ask on · "
    "3 the service cannot be reached or is not ready · 4 not authorised · 5 timed out · 130 interrupted"
)


def help_of(command: Callable[..., object]) -> str:
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


_BARE = frozenset({"--allow-missing"})
"""Options that may be written without a value, which is empty then."""


class Command(TyperCommand):
    """A command whose switches show no type, and whose refusals are plain sentences."""

    def parse_args(self, ctx: Any, args: Any) -> Any:
        """What was typed, by parameter."""
        typed = zip(args, [*args[1:], "-"], strict=False)
        args = [f"{each}=" if each in _BARE and after.startswith("-") else each for each, after in typed]
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


def _switches_untyped(parameters: Sequence[Any]) -> Sequence[Any]:
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
        "refitd.cli.status",
        "Show runs, engines and versions at one glance.",
        is_first=True,
        words=("info", "health", "ps", "update", "updates"),
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


def _made(name: str) -> Any:
    """The command of this name: a function of its module, or the module's `app`, which has commands of its own."""
    module, panel = import_module(COMMANDS[name].module), COMMANDS[name].panel
    if hasattr(module, "app"):
        group = get_command(module.app)
        group.name, group.rich_help_panel, group.epilog = name, panel, EXIT_CODES_HELP  # pyright: ignore
        return group
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    command, epilog = getattr(module, name), getattr(module, "EPILOGS", {}).get(name, EXIT_CODES_HELP)
    alone.command(cls=Command, help=help_of(command), epilog=epilog, rich_help_panel=panel)(command)
    return get_command(alone)


class _OnDemand(MutableMapping[str, Any]):
    """Commands by name. One is made when it is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _made(name)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS

    def __setitem__(self, name: str, command: Any) -> None:
        raise TypeError(f"{name} is not in COMMANDS")

    __delitem__: Any = None

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Commands(Group):
    """All commands. Suggests refitd's own command where the name is that of another tool's command."""

    def __init__(self, **given: Any) -> None:
        """Made by Typer, which knows of none."""
        super().__init__(**given)
        self.commands = _OnDemand()
        self._listed: Collection[str] | None = None  # while the help is written

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of the commands, in the order of the panels."""
        return [name for name in self.commands if self._listed is None or name in self._listed]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command; for the list of the help one with that line alone, because modules of commands take a second."""
        if self._listed is None:
            return super().get_command(ctx, cmd_name)
        listed = COMMANDS[cmd_name]
        return TyperCommand(cmd_name, help=listed.line, rich_help_panel=listed.panel)

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
