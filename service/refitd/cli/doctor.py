"""`refitd doctor`: live checks of root, service and engines, with a fix for each finding."""

import asyncio
import os
from collections.abc import Mapping
from inspect import Parameter, Signature
from typing import Annotated, Any

import typer

from refitd.cli.exits import ExitCode
from refitd.cli.flags import parameters, settings_from
from refitd.cli.options import Json
from refitd.cli.output import speaking
from refitd_client.http.connection import connect_to

_SETTINGS = frozenset(
    {
        "root",
        "state",
        "host",
        "port",
        "token_file",
        "read_token_file",
        "engines",
        "engines_file",
        "discover",
        "engine_allow",
        "engine_key_file",
        "engine_admin_key_file",
        "path_map",
        "trainers",
        "lora",
        "base_model",
        "watch",
        "keep_last",
        "slots",
        "copies",
        "copies_folder",
        "disk_budget",
    }
)


def doctor(**flags: Any) -> None:
    """Check what a job will need, live: the root, the service's own files, each engine, and what they share.

    It takes the settings of 'refitd serve', from the same flags and variables, beside a running service or before one
    starts. It asks the service what it knows of its engines: at --url, else at --host and --port, else at REFITD_URL.
    All that it writes is a probe file, which comes and goes on the root. What cannot be known from here is said to be
    unknown, never guessed. Ends with 0, or with 1 where something has to be mended first.

    \b
    refitd doctor --root /shared/weights --engine http://10.0.0.7:30000
    refitd doctor --root /shared/weights --engines-file engines.yaml --nccl --trainer-pid 4711
    refitd doctor --json | jq '.findings[] | select(.verdict != "ok")'
    """
    # Here, because only this command needs so much of the service.
    from refitd.cli.doctor_report import document, findings_table, summary
    from refitd.diagnose.doctor.check import check

    json, nccl, trainer = bool(flags.pop("json", False)), bool(flags.pop("nccl")), flags.pop("trainer_pid")
    with speaking(json=json) as out:
        url = _service_url(flags.pop("url"), flags)
        report = asyncio.run(check(settings_from(flags), nccl=nccl, trainer=trainer, url=url))
        out.show(document(report), findings_table(report), summary(report))
        if report.failed:
            raise typer.Exit(ExitCode.FAILED)


def _service_url(url: str | None, flags: Mapping[str, Any]) -> str | None:
    """Where the service is said to be; None where --host and --port, or their defaults, say it.

    Raises:
        ValueError: it is no URL of a service.
    """
    is_typed = flags["host"] is not None or flags["port"] is not None
    named = url or (None if is_typed else os.environ.get("REFITD_URL"))
    return connect_to(named).url if named else None


Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Where the service is; else --host and --port, else REFITD_URL"),
]
Nccl = Annotated[bool, typer.Option("--nccl", help="A broadcast is planned: check what NCCL needs")]
TrainerPid = Annotated[
    int | None, typer.Option("--trainer-pid", metavar="PID", min=1, help="The trainer's process, if it runs here")
]
_OWN = [
    Parameter("url", Parameter.KEYWORD_ONLY, default=None, annotation=Url),
    Parameter("nccl", Parameter.KEYWORD_ONLY, default=False, annotation=Nccl),
    Parameter("trainer_pid", Parameter.KEYWORD_ONLY, default=None, annotation=TrainerPid),
    Parameter("json", Parameter.KEYWORD_ONLY, default=False, annotation=Json),
]
# Typer reads a command's options from its signature.
_SHARED = [parameter for parameter in parameters() if parameter.name in _SETTINGS]
doctor.__signature__ = Signature([*_SHARED, *_OWN])  # pyright: ignore[reportFunctionMemberAccess]
