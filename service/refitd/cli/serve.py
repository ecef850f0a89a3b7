"""`refitd serve` runs the service."""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from inspect import Parameter, Signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import typer
from pydantic import SecretStr, ValidationError
from pydantic.fields import FieldInfo
from rich.markup import escape

from refitd.cli.app import EXIT_CODES_HELP, plainly
from refitd.cli.options import Json
from refitd.cli.output import speaking
from refitd.engine.registry import PAUSE_MODES
from refitd.parts import parts
from refitd.settings import Settings, Size

# The flags are made from `Settings`: each setting's name, type, default and description are said once.
# A flag passes on what was typed as text, and `Settings` reads it as it reads the environment: a value has one form,
# and one place refuses it.


# In this order in --help; a setting that is in none is under "Other".
_CORE_PANELS: Mapping[str, tuple[str, ...]] = {
    "Begin with these": (
        "root",
        "engines",
        "base_model",
        "run",
        "trainers",
        "host",
        "port",
        "token_file",
        "state",
        "disk_budget",
        "keep_last",
        "slots",
        "strategy",
    ),
    "Weights": ("lora", "path_map"),
    "Engines": ("engines_file", "engine_allow"),
    "API": (
        "allowed_hosts",
        "token",
        "read_token_file",
        "followers_token_file",
        "engine_key_file",
        "engine_admin_key_file",
        "insecure",
    ),
    "TLS": ("tls_cert", "tls_key", "tls_client_ca", "ca_file", "client_cert", "client_key"),
    "Keeping": ("keep_every", "reclaim_foreign"),
    "Looking": ("scan_interval", "settle", "allow_dtype_cast", "prove", "probe_interval"),
    "Loading": (
        "canary_check",
        "quorum",
        "pause_mode",
        "load_timeout",
    ),
}
_OF_RINGS = [resolve_name(name) for part in parts() for name in part.settings]
PANELS: Mapping[str, tuple[str, ...]] = {
    panel: (*_CORE_PANELS.get(panel, ()), *(name for group in _OF_RINGS for name in group.panels.get(panel, ())))
    for panel in dict.fromkeys([*_CORE_PANELS, *(panel for group in _OF_RINGS for panel in group.panels)])
}
_SPECIAL_NAMES = {  # one at a time, and repeatable
    "engines": "engine",
    "discover": "discover",
    "follow": "follow",
    "allowed_hosts": "allowed-host",
}
_VALUES: Mapping[str, str] = {
    "engines": "URL",
    "pause_mode": "|".join(PAUSE_MODES),
    "lora": "NAME[:KEEP]",
    "strategy": "all|rolling[:N]|canary[:ENGINE]",
    "path_map": "PATH",
    "engine_allow": "HOSTS",
    "allowed_hosts": "NAME",
    "canary_check": "URL",
    **{name: value for group in _OF_RINGS for name, value in group.values.items()},
}
_NEEDED: Mapping[str, str] = {"root": "name the folder that trainers publish into, such as --root /shared/weights"}
_PLACEHOLDERS: Mapping[type, str] = {Path: "PATH", int: "N", float: "SECONDS"}


def parameters() -> list[Parameter]:
    """One keyword parameter for each setting but the secrets, which other users could read in the list of processes."""
    fields = Settings.model_fields
    placed = [name for names in PANELS.values() for name in names if name in fields]
    rest = [name for name in fields if name not in placed]
    return [_parameter(name, fields[name]) for name in [*placed, *rest] if not is_secret(fields[name])]


CommandT = TypeVar("CommandT", bound=Callable[..., None])


def takes_settings(*own: Parameter, only: str = "", json: Any = Json) -> Callable[[CommandT], CommandT]:
    """Give a command the flags of settings, then its own, then --json.

    Args:
        own: the command's own parameters.
        only: names of the settings that it takes, separated by spaces; by default all.
        json: its --json, where that means something else.
    """
    wanted = set(only.split()) or set(Settings.model_fields)
    shared = [parameter for parameter in parameters() if parameter.name in wanted]
    return takes(*shared, *own, option("json", json, default=False))


def takes(*own: Parameter) -> Callable[[CommandT], CommandT]:
    """Give a command these parameters. Typer reads them from its signature."""

    def decorate(command: CommandT) -> CommandT:
        command.__signature__ = Signature(own)  # pyright: ignore[reportFunctionMemberAccess]
        return command

    return decorate


def option(name: str, annotation: Any, *, default: Any = None) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def settings_from(flags: Mapping[str, Any]) -> Settings:
    """The settings: flags that were given, else the environment, else the defaults.

    Raises:
        ValueError: one of them cannot be used; the message names its flag and its variable.
    """
    typed: dict[str, Any] = {
        name: ",".join(cast("list[str]", value)) if isinstance(value, list) else value
        for name, value in flags.items()
        if value is not None
    }
    try:
        return Settings(**typed)
    except ValidationError as error:
        faults = (_fault(fault["loc"], fault["msg"], fault["type"]) for fault in error.errors())
        raise ValueError("\n".join(faults)) from error


def flag(name: str) -> str:
    return "--" + _SPECIAL_NAMES.get(name, name).replace("_", "-")


def variable(name: str) -> str:
    return f"REFITD_{name.upper()}"


def _fault(location: Iterable[int | str], message: str, kind: str) -> str:
    name = str(next(iter(location), ""))
    told = plainly(message)
    if not name:
        return told
    named = f"{flag(name)} ({variable(name)})"
    return f"{named} is needed: {_NEEDED.get(name, 'it has no default')}" if kind == "missing" else f"{named}: {told}"


def _parameter(name: str, field: FieldInfo) -> Parameter:
    is_switch, is_list, default = field.annotation is bool, name in _SPECIAL_NAMES, default_of(field)
    kind: Any = bool if is_switch else list[str] if is_list else str
    flag_option = typer.Option(
        f"{flag(name)}/--no-{flag(name)[2:]}" if is_switch and field.default else flag(name),
        metavar=None if is_switch else placeholder(name, field.annotation),
        help=escape(f"{field.description} [{default}]" if default else f"{field.description}"),
        show_default=False,
        rich_help_panel=next((panel for panel, members in PANELS.items() if name in members), "Other"),
    )
    return option(name, Annotated[kind | None, flag_option])


def default_of(field: FieldInfo) -> str:
    """A setting's default, for its help: "needed" where it has none, and nothing where it is not set by default."""
    default: Any = getattr(field.default, "value", field.default)
    if field.is_required():
        return "needed"
    if default is None or default is False or default == []:
        return ""
    if isinstance(default, list):
        return ",".join(cast("list[str]", default))
    return f"{default:g}" if isinstance(default, float) else f"{default}"


def placeholder(name: str, annotation: Any) -> str:
    """The placeholder of a setting's value, such as SECONDS, or the values that it can have."""
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


ENGINES_FILE_HELP = """\
The engines file is YAML and is read again when it changes. An entry is a URL, or a mapping:

engines:
  - http://10.0.0.7:30000
  - url: http://10.0.0.8:30000
    id: rollout-1                   # default: host:port
    run: exp/trial                  # default: --run, or the only run
    api_key_file: /run/keys/reads   # default: --engine-key-file
    admin_key_file: /run/keys/admin # default: --engine-admin-key-file
    root: /mnt/weights              # as it sees the root
    engine: sglang                  # default: found out by asking it
    pair: http://10.0.0.9:30000     # decodes what it prefills; a list of several

"""
EPILOGS = {"serve": ENGINES_FILE_HELP + EXIT_CODES_HELP}
"""What stands below the options of a command, by its name."""


LogJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Log in JSON on a terminal too; settings that cannot be used are one JSON document on stdout",
    ),
]


@takes_settings(json=LogJson)
def serve(**flags: Any) -> None:
    """Run the service until SIGTERM or Ctrl-C.

    Every flag is also a variable in the environment: --port is REFITD_PORT, --keep-last is REFITD_KEEP_LAST, and so
    on; --engine, which can be repeated, is REFITD_ENGINES, separated by commas. Flags win. The bearer token comes from
    --token-file or REFITD_TOKEN, never from a flag, which other users could read.

    \b
    refitd serve --root /shared/weights --engine http://10.0.0.7:30000 --engine http://10.0.0.8:30000
    refitd serve --root /shared/weights --engines-file engines.yaml --base-model /models/qwen3-8b
    refitd serve --root /shared/weights --host 0.0.0.0 --token-file /run/secrets/refitd --disk-budget 2TB
    """
    json = bool(flags.pop("json", False))
    # Here, because only this command needs so much of the service.
    from refitd.preflight import faults_of

    with speaking(json=json):
        settings = settings_from(flags)
        if faults := faults_of(settings):
            raise ValueError("\n".join(faults))
    # Outside of `speaking`: its errors are bugs.
    from refitd.app import serve as run_service

    raise typer.Exit(run_service(settings, json=json))
