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
from refitd.cli.options import Json, TokenFile
from refitd.cli.output import speaking
from refitd.cli.publish import Root, Run
from refitd.engine.address import check_url
from refitd.tokens import FacadeTokens

Engines = Annotated[
    list[str],
    typer.Option(
        "--engine",
        metavar="URL=PORT",
        help="An engine and the port of its facade (0: any free one, printed); repeatable",
    ),
]
Host = Annotated[str, typer.Option("--host", help="Address that facades listen on; beyond loopback only with a token")]
Url = Annotated[str, typer.Option("--url", metavar="URL", envvar="REFITD_URL", help="Where the service is")]
ApiKey = Annotated[Path | None, typer.Option("--engine-key-file", help="File with the engines' API key")]
AdminKey = Annotated[Path | None, typer.Option("--engine-admin-key-file", help="File with the engines' admin API key")]
Checkpoints = Annotated[
    Path,
    typer.Option(
        metavar="DIR", help="Folder that AReaL saves checkpoints in, its cluster.fileroot: none from elsewhere is taken"
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
    engine: Engines,
    checkpoints: Checkpoints,
    host: Host = "127.0.0.1",
    facade_token_file: FacadeTokenFile = None,
    url: Url = "http://127.0.0.1:8700",
    token_file: TokenFile = None,
    engine_key_file: ApiKey = None,
    engine_admin_key_file: AdminKey = None,
    update_timeout: UpdateTimeout = 600.0,
    json: Json = False,
) -> None:
    """Stand between AReaL and its engines until SIGTERM or Ctrl-C.

    AReaL gets the facades' addresses instead of the engines' (AREAL_LLM_SERVER_ADDRS). --json makes what it says JSON
    lines.

    \b
    refitd areal --root /shared/weights --run exp/trial --engine http://127.0.0.1:30000=31000 --checkpoints /data/areal
    """
    with speaking(json=json):
        ports = dict(map(_parse, engine))
        tokens = _tokens(facade_token_file, host)
        # Here, because only this command needs so much of the service.
        from refitd.observe.logs import configure_logs
        from refitd_front.areal.facade import Facade, allow_many_connections, serve_facades
        from refitd_front.areal.group_calls import GroupCalls, spool_of
        from refitd_front.areal.updates import Updates

        configure_logs("json" if json else "auto")
        allow_many_connections()
        updates = Updates(
            root, run, url, checkpoints=checkpoints.absolute(), timeout=update_timeout, token_file=token_file
        )
        updates.open()
        groups = GroupCalls(updates, spool_of(root, run))
        groups.open()
        keys = {"api_key": engine_key_file, "admin_key": engine_admin_key_file}
        facades = {at: (Facade(at, updates, groups, **keys, tokens=tokens), port) for at, port in ports.items()}
    asyncio.run(serve_facades(facades, host, updates, groups, partial(_say, json=json)))


def _tokens(file: Path | None, host: str) -> FacadeTokens:
    """The tokens of the facades, which can be read now. `host` is where they listen.

    Raises:
        ValueError: they cannot be used, or there are none and other machines can reach the host.
    """
    secret = os.environ.get("REFITD_FACADE_TOKEN")
    tokens = FacadeTokens(file=file, secret=None if secret is None else SecretStr(secret))
    try:
        tokens.read()
    except OSError as error:
        raise ValueError(f"the token file {error.filename} cannot be read: {error.strerror}") from error
    if host not in LOOPBACK and not tokens.are_set:
        raise ValueError(f"host {host} is reachable from other machines: set --facade-token-file first")
    return tokens


def _say(engine: str, facade: str, *, json: bool) -> None:
    """Say that it is ready: a line to people, a JSON object on a line to machines, as the log is."""
    if json:
        print(msgspec.json.encode({"event": "ready", "engine": engine, "facade": facade}).decode(), flush=True)
    else:
        print(f"refitd areal: {engine} ready on {facade}", flush=True)


def _parse(text: str) -> tuple[str, int]:
    url, _, port = text.rpartition("=")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--engine {text!r}: write URL=PORT, such as http://127.0.0.1:30000=31000")
    return check_url(url), int(port)
