"""`refitd serve` runs the service. `refitd adopt` makes an emptied root the service's again."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from refitd.cli.exits import EXIT_CODES_HELP
from refitd.cli.flags import settings_from, takes_settings
from refitd.cli.output import speaking
from refitd.cli.render import sentence
from refitd.settings import Settings
from refitd_client.errors import RefitError

if TYPE_CHECKING:
    from refitd.state.records import Origin

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
        help="Log in JSON, as --log-format json does; settings that cannot be used are one JSON document on stdout",
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
    if json and flags.get("log_format") is None:
        flags["log_format"] = "json"
    # Here, because only this command needs so much of the service.
    from refitd.diagnose.preflight import check_start

    with speaking(json=json):
        settings = settings_from(flags)
        check_start(settings)
    # Outside of `speaking`: its errors are bugs.
    from refitd.app import serve as run_service

    raise typer.Exit(run_service(settings))


@takes_settings(only="root state")
def adopt(**flags: Any) -> None:
    """Adopt a root that was emptied as the service's root again. Do so when its file system is mounted, and its content
    is gone for good.

    A service does not accept an empty folder as its root, because a file system that is not mounted looks the same: it
    answers notices with 503, and marks nothing as lost and deletes nothing. After this command, missing versions count
    as LOST, and a trainer that is started again begins a new generation. A running service notices the command. A root
    in memory that a reboot has emptied does not need this: starting the service is enough.

    \b
    refitd adopt --root /shared/weights
    refitd adopt --root /shared/weights --state /var/lib/refitd
    """
    json = bool(flags.pop("json", False))
    with speaking(json=json) as out:
        settings = settings_from(flags)
        is_new = _adopted(settings)
        told = "is the root of this journal from now on" if is_new else "is the root of this journal already"
        out.show({"root": str(settings.root), "adopted": is_new}, sentence(f"{settings.root} {told}."))


def _adopted(settings: Settings) -> bool:
    # Here, because only this command needs them.
    from refitd.root.mark import RootRefusedError
    from refitd.root.mark import adopt as adopted

    root, (place, origin) = settings.root.resolve(), _journal_of(settings)
    if origin is None or origin.root is None:
        raise RefitError(f"{place} knows no root yet: start the service, which takes {root} as it is")
    try:
        return adopted(root, origin.root)
    except (OSError, RootRefusedError) as error:
        raise RefitError(str(error)) from error


def _journal_of(settings: Settings) -> "tuple[str, Origin | None]":
    from refitd.state.journal import reads
    from refitd.state.journal.condition import Sound, examine_journal, reading
    from refitd.state.journal.sqlite_file import JOURNAL_NAME

    if settings.database is not None:
        from refitd.state.journal.group_reading import examine_group

        condition, place = examine_group(settings.database), settings.database.shown
        if isinstance(condition, Sound):
            return place, condition.origin
    else:
        path = settings.state_folder / JOURNAL_NAME
        place = str(path)
        if isinstance(examine_journal(path, thorough=False), Sound):
            with reading(path) as connection:
                return place, reads.read_origin(connection)
    raise RefitError(f"{place} is no journal that can be read: name the service's --state; refitd fsck says more")
