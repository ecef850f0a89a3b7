"""The page of settings, from `Settings` and the panels of `refitd serve --help`."""

from generate.markdown import code, page, plain, table
from refitd.cli.serve import PANELS, default_of, flag, is_secret, placeholder, variable
from refitd.settings import Settings

INTRODUCTION = """\
# Settings

Each setting of `refitd serve` is a flag and a variable in the environment; flags win. Durations are in seconds; sizes
in bytes, or with a unit (`200GB`, `1.5TiB`). Lists are separated by commas; `--engine` and `--discover` are
repeated instead. A switch is `1` or `0` in its variable. What other users could read in a list of processes has no
flag: tokens come from a variable or, better, from a file, which is read again when it changes
([security](../security.md)).

`refitd doctor` takes those that concern it ([commands](cli.md)).
"""


def settings_page() -> str:
    """The page."""
    panels = (page(f"## {panel}", _table(names)) for panel, names in PANELS.items())
    return page(INTRODUCTION, *panels)


def _table(names: tuple[str, ...]) -> str:
    return table(["setting", "default", "what"], (_row(name) for name in names))


def _row(name: str) -> tuple[str, str, str]:
    field = Settings.model_fields[name]
    names = [code(variable(name))] if is_secret(field) else [code(_usage(name)), code(variable(name))]
    default = default_of(field)
    shown = default if default in {"", "needed"} else code(default)
    return "<br>".join(names), shown, plain(f"{field.description}")


def _usage(name: str) -> str:
    annotation = Settings.model_fields[name].annotation
    return flag(name) if annotation is bool else f"{flag(name)} {placeholder(name, annotation)}"
