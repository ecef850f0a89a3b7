"""Whether a command that a page shows is one: `refitd` with its options, a verb of `make`, a route that curl asks, an
extra that pip installs, a module, a file of the repository. Nothing is run.
"""

import math
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer.main

from refitd.api.api import routes
from refitd.cli.app import app

TREE = Path(__file__).parents[2]
VERBS = set(re.findall(r"^([a-z0-9-]+):[^#\n]*## ", (TREE / "Makefile").read_text(), re.MULTILINE))
EXTRAS = set(tomllib.loads((TREE / "pyproject.toml").read_text())["project"]["optional-dependencies"])
_SEPARATORS = {";", "&", "&&", "||", "|", "(", ")"}


def faults(line: str, *, whole: bool = True) -> Iterator[str]:
    """What is wrong with a line of a shell. Where it is not `whole`, the last option's value may be left out."""
    for words in _commands(line):
        yield from _named(words)
        match words:
            case ["refitd", *rest]:
                yield from _refitd(rest, whole=whole)
            case ["make", *rest]:
                verbs = [word for word in rest if "=" not in word and not word.startswith("-")]
                yield from (f"there is no 'make {verb}'" for verb in verbs if verb not in VERBS)
            case ["curl", *rest]:
                yield from (f"there is no route {path}" for path in map(_route, rest) if path and not _answers(path))
            case ["pip", "install", *rest]:
                asked = {extra for word in rest for extra in re.findall(r"[\w-]+", word.partition("[")[2])}
                yield from (f"there is no extra '{extra}'" for extra in sorted(asked - EXTRAS))
            case ["python", "-m", module, *_] if module.startswith("refitd") and find_spec(module) is None:
                yield f"there is no module {module}"
            case _:
                pass


def options() -> set[str]:
    """Every option of every command."""
    commands = list(_of_refitd().values())
    commands += [below for each in commands for below in getattr(each, "commands", {}).values()]
    return {option for each in commands for one in each.params for option in [*one.opts, *one.secondary_opts]}


def _named(words: list[str]) -> Iterator[str]:
    """Files of the repository that are not there."""
    named = (word for word in words if re.match(r"(?:deploy|tests|docs)/", word))
    yield from (f"there is no {word}" for word in named if not (TREE / word).exists())


def _route(word: str) -> str:
    """The path of a URL of the service's, nothing for other words."""
    found = re.match(r"https?://[^/]+:8700(/[^?]*)", word)
    return found[1] if found else ""


def _answers(path: str) -> bool:
    """Whether a route has that form; words in capitals stand for any part."""
    return any(re.fullmatch(re.sub(r"{\w+}", "[^/]+", route), path) for route in routes().openapi()["paths"])


def _commands(line: str) -> Iterator[list[str]]:
    """The commands of a line, without the assignments before them and the redirections behind."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    command: list[str] = []
    for word in [*lexer, ";"]:
        if word in _SEPARATORS:
            yield _bare(command)
            command = []
        else:
            command.append(word)


def _bare(words: list[str]) -> list[str]:
    while words and (re.match(r"\w+=", words[0]) or words[0] in {"sudo", "exec"}):
        words = words[1:]
    end = next((at for at, word in enumerate(words) if set(word) & {">", "<"}), len(words))
    return words[:end]


def _refitd(words: list[str], *, whole: bool) -> Iterator[str]:
    commands = _of_refitd()
    named = words[0] if words else ""
    if named.startswith("-"):
        return
    if named not in commands:
        yield f"there is no 'refitd {named}'"
        return
    command, rest = commands[named], words[1:]
    if rest and rest[0] in (below := getattr(command, "commands", {})):
        command, rest = below[rest[0]], rest[1:]
    yield from _options(f"refitd {named}", command, rest, whole=whole)


@cache
def _of_refitd() -> dict[str, Any]:
    every: Any = typer.main.get_command(app)
    return {name: every.get_command(None, name) for name in every.list_commands(None)}


def _options(name: str, command: Any, words: list[str], *, whole: bool) -> Iterator[str]:
    """Options that there are, each with its value, and no more arguments than there are."""
    known = {option: each for each in command.params for option in [*each.opts, *each.secondary_opts]}
    arguments = [each for each in command.params if not each.opts[0].startswith("-")]
    places = math.inf if any(each.nargs == -1 for each in arguments) else len(arguments)
    words = list(words)
    while words:
        word = words.pop(0)
        option, equals, _ = word.partition("=")
        if not word.startswith("-"):
            places -= 1
        elif option in {"--help", "-h"}:
            continue
        elif option not in known:
            yield f"'{name}' has no option {option}"
        elif not getattr(known[option], "is_flag", False) and not equals:
            if whole and not words:
                yield f"{option} of '{name}' wants a value"
            words = words[1:]
    if places < 0:
        yield f"'{name}' takes fewer arguments"
