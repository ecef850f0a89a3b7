"""`refitd areal`: AReaL speaks to facades of its engines, and refitd writes their weights."""

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from pydantic import SecretStr

from refitd.api.options import LOOPBACK
from refitd.cli.output import Json, TokenFile, speaking
from refitd.cli.publish import Root, Run
from refitd.engine.address import check_url
from refitd.tokens import FacadeTokens

Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="URL=PORT",
        help="An engine and the port of its facade (0: any free one, printed); repeatable",
    ),
]
Host = Annotated[str, typer.Option("--host", help="Address that facades listen on; beyond loopback only with a token")]
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
Checkpoints = Annotated[
    Path | None,
    typer.Option(
        "--checkpoints",
        metavar="DIR",
        help="Folder that AReaL saves checkpoints in, its cluster.fileroot: none from elsewhere is taken "
        "(default: --weights)",
    ),
]
FacadeTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--facade-token-file",
        metavar="FILE",
        envvar="REFITD_FACADE_TOKEN_FILE",
        help="File with the token that opens the facades, or several, one a line; else REFITD_FACADE_TOKEN. "
        "Needed beyond loopback. AReaL sends it from AREAL_LLM_SERVER_ADDRS=areal:TOKEN@HOST:PORT",
    ),
]
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
    checkpoints: Checkpoints = None,
    facade_token_file: FacadeTokenFile = None,
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
    refitd areal --root /shared/weights --run exp/trial --engine http://127.0.0.1:30000=31000 --checkpoints /data/areal
    refitd areal --root /shared/weights --run exp/trial --watch /nfs/name_resolve/me/exp/trial --weights /nfs/...
    """
    with speaking(json=json):
        ports = dict(map(_parse, engine or ()))
        if (watch is None) is not (weights is None):
            raise ValueError("--watch and --weights belong together")
        if not ports and watch is None:
            raise ValueError("name engines (--engine URL=PORT) or a record to watch (--watch, --weights)")
        taken_from = _taken_from(checkpoints, weights)
        tokens = _tokens(facade_token_file, host if ports else None)
        # Here, because only this command needs so much of the service.
        from refitd.observe.logs import configure_logs
        from refitd_front.areal.facade import Facade
        from refitd_front.areal.group_calls import GroupCalls, spool_of
        from refitd_front.areal.record import RecordWatch
        from refitd_front.areal.serve import allow_many_connections, serve_facades
        from refitd_front.areal.updates import Updates

        configure_logs("json" if json else "auto")
        allow_many_connections()
        updates = Updates(root, run, url, checkpoints=taken_from, timeout=update_timeout, token_file=token_file)
        updates.open()
        groups = GroupCalls(updates, spool_of(root, run))
        groups.open()
        keys = {"api_key": engine_key_file, "admin_key": engine_admin_key_file}
        facades = {at: (Facade(at, updates, groups, **keys, tokens=tokens), port) for at, port in ports.items()}
        follower = None if watch is None or weights is None else RecordWatch(watch, weights.absolute(), updates)
    asyncio.run(serve_facades(facades, host, updates, groups, follower, partial(_say, json=json)))


def _taken_from(checkpoints: Path | None, weights: Path | None) -> Path:
    """The folder that checkpoints are taken from.

    Raises:
        ValueError: none is named, or the watch would look elsewhere.
    """
    named = checkpoints or weights
    if named is None:
        raise ValueError("name the folder that AReaL saves checkpoints in, its cluster.fileroot (--checkpoints DIR)")
    if weights is not None and not weights.absolute().is_relative_to(named.absolute()):
        raise ValueError(f"--weights {weights} is not in --checkpoints {named}: checkpoints are taken from there alone")
    return named.absolute()


def _tokens(file: Path | None, host: str | None) -> FacadeTokens:
    """The tokens of the facades, which can be read now. `host` is where they listen, None where there are none.

    Raises:
        ValueError: they cannot be used, or there are none and other machines can reach the host.
    """
    secret = os.environ.get("REFITD_FACADE_TOKEN")
    tokens = FacadeTokens(file=file, secret=None if secret is None else SecretStr(secret))
    try:
        tokens.read()
    except OSError as error:
        raise ValueError(f"the token file {error.filename} cannot be read: {error.strerror}") from error
    if host is not None and host not in LOOPBACK and not tokens.are_set:
        raise ValueError(f"host {host} is reachable from other machines: set --facade-token-file first")
    return tokens


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
