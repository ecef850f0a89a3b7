"""The page of commands, from the command line itself."""

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import typer
import typer.main

from generate.markdown import code, page, plain, prose, table
from refitd.cli.app import COMMANDS, EXIT_CODES_HELP, app
from refitd.cli.app import PANELS as COMMAND_PANELS
from refitd.cli.serve import ENGINES_FILE_HELP, PANELS

INTRODUCTION = """\
# Commands

`refitd COMMAND --help` says the same. Commands that ask a service find it by `--url` or `REFITD_URL`, else at `http://127.0.0.1:8700`.
"""
EXAMPLES = "\b\n"  # begins a paragraph of examples


def commands_page() -> str:
    """The page."""
    return page(INTRODUCTION, _exit_codes(), *_sections())


def _exit_codes() -> str:
    return plain(EXIT_CODES_HELP).replace(" · ", "; ") + "."


def _sections() -> Iterator[str]:
    every: Any = typer.main.get_command(app)
    commands = {name: every.get_command(None, name) for name in every.list_commands(None)}
    for panel in COMMAND_PANELS:
        yield f"## {panel}"
        alone = [
            name for name, line in COMMANDS.items() if line.panel == panel and not hasattr(commands[name], "commands")
        ]
        yield from (_command(f"refitd {name}", commands[name]) for name in alone)
    for name, group in commands.items():
        if hasattr(group, "commands"):
            yield from _group(f"refitd {name}", group)


def _group(name: str, group: Any) -> Iterator[str]:
    """A group as a section, then its commands."""
    yield _command(name, group, heading="##")
    yield from (_command(f"{name} {each}", command) for each, command in group.commands.items())


def _command(name: str, command: Any, heading: str = "###") -> str:
    shown = [each for each in command.params if each.name != "help"]
    of_settings = [each for each in shown if getattr(each, "rich_help_panel", None) in PANELS]
    own = [each for each in shown if each not in of_settings]
    return page(f"{heading} {name}", *_help(command.help), _taken(name, of_settings), _options(own))


def _help(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        if paragraph.startswith(EXAMPLES):
            yield f"<!-- not run: examples of its help -->\n```sh\n{paragraph.removeprefix(EXAMPLES)}\n```"
        else:
            yield prose(paragraph)


def _taken(name: str, settings: list[Any]) -> str:
    """Which settings it takes: `serve` all of them."""
    if not settings:
        return ""
    if name == "refitd serve":
        told, _, example = ENGINES_FILE_HELP.strip().partition("\n\n")
        return page("It takes all [settings](settings.md).", plain(told), f"```yaml\n{example}\n```")
    return f"Of the [settings](settings.md) it takes {', '.join(code(each.opts[0]) for each in settings)}."


def _options(parameters: Iterable[Any]) -> str:
    rows = [(code(_usage(each)), _told(each)) for each in parameters]
    return table(["option", "what"], rows) if rows else ""


def _usage(parameter: Any) -> str:
    if not parameter.opts[0].startswith("-"):
        return parameter.metavar or parameter.name.upper()
    names = "/".join([*parameter.opts[:1], *parameter.secondary_opts[:1]])
    return names if _is_switch(parameter) else f"{names} {parameter.metavar or _choices(parameter)}"


def _is_switch(parameter: Any) -> bool:
    return getattr(parameter, "is_flag", False)


def _choices(parameter: Any) -> str:
    kind = type(parameter.default)
    return "|".join(str(each.value) for each in kind) if issubclass(kind, Enum) else parameter.name.upper()


def _told(parameter: Any) -> str:
    """Its text, with what stands in when it is left out. Rich's escapes are for terminals."""
    text = (parameter.help or "").replace("\\[", "[")
    variable = f" (or {parameter.envvar})" if parameter.envvar else ""
    default = parameter.default
    if parameter.required:
        return plain(f"{text}{variable}; needed")
    shown = parameter.show_default and not _is_switch(parameter) and default not in (None, "")
    return plain(f"{text}{variable} [{_value(default)}]") if shown else plain(f"{text}{variable}")


def _value(default: Any) -> str:
    value = getattr(default, "value", default)
    return f"{value:g}" if isinstance(value, float) else f"{value}"
