"""`refitd doctor`: live checks of root, service and engines, with a fix for each finding."""

import asyncio
import os
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from refitd.cli.exits import ExitCode
from refitd.cli.flags import option, settings_from, takes_settings
from refitd.cli.output import speaking
from refitd_client.http.connection import connect_to
from refitd_client.http.tls import use

Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Where the service is; else --host and --port, else REFITD_URL"),
]
Nccl = Annotated[bool, typer.Option("--nccl", help="A broadcast is planned: check what NCCL needs")]
TrainerPid = Annotated[
    int | None, typer.Option("--trainer-pid", metavar="PID", min=1, help="The trainer's process, if it runs here")
]
_SETTINGS = """
    root state host port token_file read_token_file publishers_token_file followers_token_file engines
    engines_file discover engine_allow engine_key_file
    engine_admin_key_file path_map trainers lora lora_keep base_model watch keep_last slots copies copies_folder
    disk_budget vllm_stock_ranks follow follow_token_file run push
    tls_cert tls_key tls_client_ca ca_file client_cert client_key
"""


@takes_settings(
    option("url", Url), option("nccl", Nccl, default=False), option("trainer_pid", TrainerPid), only=_SETTINGS
)
def doctor(**flags: Any) -> None:
    """Check what a job will need, live: the root, the service's own files, each engine, and what they share.

    It takes the settings of 'refitd serve', from the same flags and variables, beside a running service or before one
    starts. It asks the service what it knows of its engines: at --url, else at --host and --port, else at REFITD_URL;
    and each hub of --follow whether it takes the token and has the run.
    All that it writes is a probe file, which comes and goes on the root, and an object that comes and goes in each
    object store of --follow and --push. What cannot be known from here is said to be unknown, never guessed. Ends with
    0, or with 1 where something has to be mended first.

    \b
    refitd doctor --root /shared/weights --engine http://10.0.0.7:30000
    refitd doctor --root /shared/weights --engines-file engines.yaml --nccl --trainer-pid 4711
    refitd doctor --root /dev/shm/weights --follow http://hub:8700 --follow-token-file token
    refitd doctor --root /dev/shm/weights --follow s3://bucket/prefix --engine http://127.0.0.1:30000
    refitd doctor --json | jq '.findings[] | select(.verdict != "ok")'
    """
    # Here, because only this command needs so much of the service.
    from refitd.cli.findings import doctor_document, doctor_summary, doctor_table
    from refitd.diagnose.doctor.check import check

    json, nccl, trainer = bool(flags.pop("json", False)), bool(flags.pop("nccl")), flags.pop("trainer_pid")
    with speaking(json=json) as out:
        url = _service_url(flags.pop("url"), flags)
        settings = settings_from(flags)
        use(settings.client_tls)
        report = asyncio.run(check(settings, nccl=nccl, trainer=trainer, url=url))
        out.show(doctor_document(report), doctor_table(report), doctor_summary(report))
        if report.failed:
            raise typer.Exit(ExitCode.FAILED)


def _service_url(url: str | None, flags: Mapping[str, Any]) -> str | None:
    """The URL that was given for the service; None where --host and --port, or their defaults, are to be used.

    Raises:
        ValueError: it is no URL of a service.
    """
    is_typed = flags["host"] is not None or flags["port"] is not None
    named = url or (None if is_typed else os.environ.get("REFITD_URL"))
    return connect_to(named).url if named else None
