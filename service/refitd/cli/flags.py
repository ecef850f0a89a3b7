"""The flags of `refitd serve`, made from `Settings`: each setting's name, type, default and description are said once.

A flag hands on what was typed as text, and `Settings` reads it as it reads the environment: there is one way to write
a value and one place that refuses it.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin

import typer
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from rich.markup import escape

from refitd.settings import Settings, Size

# In this order in --help; a setting that is in none is under "Other".
PANELS: Mapping[str, tuple[str, ...]] = {
    "Weights": ("root", "run", "trainers", "lora", "lora_keep", "base_model", "path_map"),
    "Engines": ("engines", "engines_file", "discover", "engine_allow"),
    "API": (
        "host",
        "port",
        "allowed_hosts",
        "token",
        "token_file",
        "read_token",
        "read_token_file",
        "engine_key_file",
        "engine_admin_key_file",
        "insecure",
    ),
    "Journal, log and traces": ("state", "log_format", "otlp_endpoint"),
    "Webhooks": ("webhooks", "webhooks_file", "webhook_secret_file", "webhook_events", "stalled_after"),
    "Keeping": ("keep_last", "keep_every", "disk_budget", "reclaim_foreign", "reclaim_interval", "incoming_ttl"),
    "Slots": ("slots", "slot_ttl"),
    "Deltas": ("copies", "copies_folder"),
    "Looking": ("watch", "scan_interval", "settle", "settle_timeout", "allow_dtype_cast", "probe_interval"),
    "Loading": ("strategy", "max_unavailable", "canary", "canary_check", "quorum", "pause_mode", "load_timeout"),
}
_SPECIAL_NAMES = {  # one at a time, and repeatable
    "engines": "engine",
    "discover": "discover",
    "webhooks": "webhook",
    "allowed_hosts": "allowed-host",
}
_VALUES: Mapping[str, str] = {
    "engines": "URL",
    "discover": "PLACE",
    "webhooks": "URL",
    "lora": "NAME",
    "path_map": "PATH",
    "engine_allow": "HOSTS",
    "allowed_hosts": "NAME",
    "canary": "ENGINE",
    "canary_check": "URL",
    "otlp_endpoint": "URL",
}
_NEEDED: Mapping[str, str] = {"root": "name the folder that trainers publish into, such as --root /shared/weights"}
_PLACEHOLDERS: Mapping[type, str] = {Path: "PATH", int: "N", float: "SECONDS"}


def parameters() -> list[Parameter]:
    """One keyword parameter for each setting but the secrets, which other users could read in the list of processes."""
    fields = Settings.model_fields
    placed = [name for names in PANELS.values() for name in names if name in fields]
    rest = [name for name in fields if name not in placed]
    return [_parameter(name, fields[name]) for name in [*placed, *rest] if not is_secret(fields[name])]


def settings_from(flags: Mapping[str, Any]) -> Settings:
    """The settings: flags that were given, else the environment, else the defaults.

    Raises:
        ValueError: one of them cannot be used; the message names its flag and its variable.
    """
    given = {name: _as_text(value) for name, value in flags.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        faults = (_fault(fault["loc"], fault["msg"], fault["type"]) for fault in error.errors())
        raise ValueError("\n".join(faults)) from error


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + _SPECIAL_NAMES.get(name, name).replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"REFITD_{name.upper()}"


def _as_text(value: Any) -> Any:
    return ",".join(cast("list[str]", value)) if isinstance(value, list) else value


def _fault(location: Iterable[int | str], message: str, kind: str) -> str:
    name = str(next(iter(location), ""))
    told = message.removeprefix("Value error, ")
    if not name:
        return told
    named = f"{flag(name)} ({variable(name)})"
    return f"{named} is needed: {_NEEDED.get(name, 'it has no default')}" if kind == "missing" else f"{named}: {told}"


def _parameter(name: str, field: FieldInfo) -> Parameter:
    is_switch, is_list = field.annotation is bool, name in _SPECIAL_NAMES
    kind: Any = bool if is_switch else list[str] if is_list else str
    option = typer.Option(
        f"{flag(name)}/--no-{flag(name)[2:]}" if is_switch and field.default else flag(name),
        metavar=None if is_switch else placeholder(name, field.annotation),
        help=escape(_help(field)),
        show_default=False,
        rich_help_panel=next((panel for panel, members in PANELS.items() if name in members), "Other"),
    )
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


def _help(field: FieldInfo) -> str:
    default = default_of(field)
    return f"{field.description} [{default}]" if default else f"{field.description}"


def default_of(field: FieldInfo) -> str:
    """What a setting is where nobody says it: "needed" where somebody has to, and nothing where nothing is set."""
    default: Any = getattr(field.default, "value", field.default)
    if field.is_required():
        return "needed"
    if default is None or default is False or default == []:
        return ""
    if isinstance(default, list):
        return ",".join(cast("list[str]", default))
    return f"{default:g}" if isinstance(default, float) else f"{default}"


def placeholder(name: str, annotation: Any) -> str:
    """What stands for a setting's value, such as SECONDS, or the values that there are."""
    if name in _VALUES:
        return _VALUES[name]
    for part in (annotation, *get_args(annotation)):
        if part == Size:
            return "SIZE"
        if get_origin(part) is Literal:
            return "|".join(get_args(part))
        if isinstance(part, type) and issubclass(part, StrEnum):
            return "|".join(part)
        if isinstance(part, type) and part in _PLACEHOLDERS:
            return _PLACEHOLDERS[part]
    return name.upper()


def is_secret(field: FieldInfo) -> bool:
    """Whether a setting has no flag: it is for the environment alone."""
    return SecretStr in (field.annotation, *get_args(field.annotation))
