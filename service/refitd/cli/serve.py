"""`refitd serve` runs the service."""

from typing import Annotated, Any

import typer

from refitd.cli.flags import settings_from, takes_settings
from refitd.cli.help import EXIT_CODES_HELP
from refitd.cli.output import speaking

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
    from refitd.diagnose.preflight import check_start

    with speaking(json=json):
        settings = settings_from(flags)
        check_start(settings)
    # Outside of `speaking`: its errors are bugs.
    from refitd.app import serve as run_service

    raise typer.Exit(run_service(settings, json=json))
