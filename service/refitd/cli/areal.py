"""`refitd areal`: AReaL speaks to facades of its engines, and refitd writes their weights."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from refitd.cli.options import Json, TokenFile
from refitd.cli.output import speaking
from refitd.cli.publish import Root, Run
from refitd.engine.address import check_url

Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="URL=PORT",
        help="An engine and the port of its facade (0: any free one, printed); repeatable",
    ),
]
Host = Annotated[str, typer.Option("--host", help="Address that facades listen on; whoever reaches it can generate")]
Watch = Annotated[
    Path | None,
    typer.Option(
        "--watch", metavar="DIR", help="Trial's folder in AReaL's name-resolve record: ROOT/USER/EXPERIMENT/TRIAL"
    ),
]
Weights = Annotated[
    Path | None, typer.Option("--weights", metavar="DIR", help="With --watch: where AReaL writes weight_update_vN/")
]
Url = Annotated[str, typer.Option("--url", metavar="URL", envvar="REFITD_URL", help="Where the service is")]
ApiKey = Annotated[Path | None, typer.Option("--engine-key-file", help="File with the engines' API key")]
AdminKey = Annotated[Path | None, typer.Option("--engine-admin-key-file", help="File with the engines' admin API key")]
UpdateTimeout = Annotated[
    float, typer.Option("--update-timeout", metavar="SECONDS", min=0.0, help="Longest time for one update")
]


def areal(
    root: Root,
    run: Run,
    engine: Engines = None,
    host: Host = "127.0.0.1",
    watch: Watch = None,
    weights: Weights = None,
    url: Url = "http://127.0.0.1:8700",
    token_file: TokenFile = None,
    engine_key_file: ApiKey = None,
    engine_admin_key_file: AdminKey = None,
    update_timeout: UpdateTimeout = 600.0,
    json: Json = False,
) -> None:
    """Stand between AReaL and its engines until SIGTERM or Ctrl-C.

    AReaL gets the facades' addresses instead of the engines' (AREAL_LLM_SERVER_ADDRS). Or its own update is switched
    off, and the record in which it announces its checkpoints is watched. --json makes what it says JSON lines.

    \b
    refitd areal --root /shared/weights --run exp/trial --engine http://127.0.0.1:30000=31000
    refitd areal --root /shared/weights --run exp/trial --watch /nfs/name_resolve/me/exp/trial --weights /nfs/...
    """
    with speaking(json=json):
        ports = dict(map(_parse, engine or ()))
        if (watch is None) is not (weights is None):
            raise ValueError("--watch and --weights belong together")
        if not ports and watch is None:
            raise ValueError("name engines (--engine URL=PORT) or a record to watch (--watch, --weights)")
        # Here, because only this command needs so much of the service.
        from refitd.areal.facade import Facade
        from refitd.areal.record import RecordWatch
        from refitd.areal.serve import serve_facades
        from refitd.areal.updates import Updates
        from refitd.logs import configure_logs

        configure_logs("json" if json else "auto")
        updates = Updates(root, run, url, timeout=update_timeout, token_file=token_file)
        updates.open()
        facades = {
            at: (Facade(at, updates, api_key=engine_key_file, admin_key=engine_admin_key_file), port)
            for at, port in ports.items()
        }
        follower = None if watch is None or weights is None else RecordWatch(watch, weights, updates)
    asyncio.run(serve_facades(facades, host, updates, follower, partial(_say, json=json)))


def _say(engine: str | None, facade: str | None, *, json: bool) -> None:
    """Say that it is ready: a line to people, a JSON object on a line to machines, as the log is."""
    if json:
        print(msgspec.json.encode({"event": "ready", "engine": engine, "facade": facade}).decode(), flush=True)
    else:
        print("refitd areal: ready" if engine is None else f"refitd areal: {engine} ready on {facade}", flush=True)


def _parse(text: str) -> tuple[str, int]:
    url, _, port = text.rpartition("=")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--engine {text!r}: write URL=PORT, such as http://127.0.0.1:30000=31000")
    return check_url(url), int(port)
