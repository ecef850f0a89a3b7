"""`refitd front`: a trainer speaks the protocol of its engines, and refitd writes their weights."""

import asyncio
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from pydantic import SecretStr

from refitd.api.options import LOOPBACK
from refitd.cli.options import Json, TokenFile
from refitd.cli.output import speaking
from refitd.cli.publish import Run
from refitd.engine.address import check_url
from refitd.tokens import FrontTokens

_ENGINES = "Engines"
Service = Annotated[
    str, typer.Option("--service", "--url", metavar="URL", envvar="REFITD_URL", help="Where the service is")
]
FrontRoot = Annotated[
    Path | None,
    typer.Option(
        "--root", metavar="DIR", envvar="REFITD_ROOT", help="Folder that the service watches; else it is asked for it"
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help="Address that stands for all engines of the run. Without it and --engine: 127.0.0.1:8701",
    ),
]
Named = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="URL=[HOST:]PORT",
        rich_help_panel=_ENGINES,
        help="An engine, and an address for it alone, for a trainer that calls each of its engines; repeatable. Port 0 "
        "is any free one, which is printed. HOST is 127.0.0.1 unless it is said",
    ),
]
Router = Annotated[
    str | None,
    typer.Option(metavar="URL", rich_help_panel=_ENGINES, help="Router that gets the requests, and not the engines"),
]
MaxBehind = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="STEPS",
        rich_help_panel=_ENGINES,
        help="How far an engine may be behind: one that is further gets no requests",
    ),
]
ApiKey = Annotated[
    Path | None,
    typer.Option(
        "--engine-key-file",
        metavar="FILE",
        rich_help_panel=_ENGINES,
        help="File with the engines' API key, which requests then carry",
    ),
]
AdminKey = Annotated[
    Path | None,
    typer.Option(
        "--engine-admin-key-file",
        metavar="FILE",
        rich_help_panel=_ENGINES,
        help="File with the engines' admin API key, by which the front ends requests that run",
    ),
]
Checkpoints = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR",
        help="Folder that the trainer saves checkpoints in, for updates by disk; one from elsewhere is refused. "
        "Repeatable. AReaL's is its cluster.fileroot",
    ),
]
BaseModel = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Checkpoint that the engines were started with, for a first update by changes alone"
    ),
]
FrontTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--front-token-file",
        metavar="FILE",
        envvar="REFITD_FRONT_TOKEN_FILE",
        help="File with the token that trainers have to send, or several, one a line; else REFITD_FRONT_TOKEN. Needed "
        "where other machines reach the front. It is sent as a bearer token, or in the URL: http://any:TOKEN@HOST:PORT",
    ),
]
UpdateTimeout = Annotated[
    float,
    typer.Option("--update-timeout", metavar="SECONDS", min=0.0, help="Longest wait until engines serve an update"),
]


def front(
    run: Run,
    root: FrontRoot = None,
    service: Service = "http://127.0.0.1:8700",
    listen: Listen = None,
    checkpoints: Checkpoints = None,
    base_model: BaseModel = None,
    engine: Named = None,
    router: Router = None,
    max_behind: MaxBehind = 0,
    engine_key_file: ApiKey = None,
    engine_admin_key_file: AdminKey = None,
    front_token_file: FrontTokenFile = None,
    token_file: TokenFile = None,
    update_timeout: UpdateTimeout = 600.0,
    json: Json = False,
) -> None:
    """Answer a trainer's calls in its engines' place, until SIGTERM or Ctrl-C.

    Give the trainer this address, and leave the rest of it as it is: vLLM's weight transfer, SGLang's routes for
    weights and AReaL's are understood. What the trainer sends becomes a version; its call is answered when every engine
    of the run serves it. Requests for answers go on to the engines. --json makes what the front says JSON lines.

    \b
    refitd front --run exp/trial --checkpoints /data/checkpoints
    refitd front --run exp/trial --listen 0.0.0.0:8701 --front-token-file /run/secrets/front
    """
    with speaking(json=json):
        addresses = dict(map(_parse, engine or ()))
        for_all = _address(listen or "127.0.0.1:8701", "--listen")
        tokens = _tokens(front_token_file, [host for host, _ in (for_all, *addresses.values())])
        # Here, because only this command needs so much of the service.
        from refitd.engine.http import Key
        from refitd.observe.logs import configure_logs
        from refitd_client import PublishOptions
        from refitd_client.front import NamedVersions
        from refitd_client.http.connection import connect_to
        from refitd_front.engines import OneEngine, RunEngines
        from refitd_front.front import Front, allow_many_connections, serve_fronts
        from refitd_front.passing import EngineKeys, EngineProxy
        from refitd_front.sessions import Sessions, spool_of
        from refitd_front.versions import Versions

        configure_logs("json" if json else "auto")
        allow_many_connections()
        connection = connect_to(service, token_file=token_file)
        named = NamedVersions(connection, run, root, PublishOptions(token_file=token_file))
        versions = Versions(
            named,
            checkpoints=[each.absolute() for each in checkpoints or ()],
            base_model=None if base_model is None else base_model.absolute(),
            timeout=update_timeout,
        )
        versions.open()
        sessions = Sessions(versions, spool_of(named.root, run))
        sessions.open()
        keys = EngineKeys(
            reads=None if engine_key_file is None else Key(engine_key_file),
            changes=Key(engine_admin_key_file or engine_key_file),
            takes_callers=not tokens.are_set,
        )
        has_key = engine_key_file is not None
        connect = partial(EngineProxy, keys=keys)
        fronts = {
            url: (Front(url, OneEngine(connect(url)), versions, sessions, tokens=tokens, has_key=has_key), *address)
            for url, address in addresses.items()
        }
        if listen is not None or not addresses:
            behind = None if router is None else check_url(router)
            engines = RunEngines(service, token_file, run, connect, router=behind, max_behind=max_behind)
            fronts[run] = Front(run, engines, versions, sessions, tokens=tokens, has_key=has_key), *for_all
    asyncio.run(serve_fronts(fronts, versions, sessions, partial(_say, json=json)))


def _tokens(file: Path | None, hosts: Iterable[str]) -> FrontTokens:
    """The tokens of the front, which can be read now. `hosts` are where it listens.

    Raises:
        ValueError: they cannot be used, or there are none and other machines can reach a host.
    """
    secret = os.environ.get("REFITD_FRONT_TOKEN")
    tokens = FrontTokens(file=file, secret=None if secret is None else SecretStr(secret))
    try:
        tokens.read()
    except OSError as error:
        raise ValueError(f"the token file {error.filename} cannot be read: {error.strerror}") from error
    reachable = [host for host in hosts if host not in LOOPBACK]
    if reachable and not tokens.are_set:
        raise ValueError(f"host {reachable[0]} is reachable from other machines: set --front-token-file first")
    return tokens


def _say(name: str, url: str, *, json: bool) -> None:
    """Say that it is ready: a line to people, a JSON object on a line to machines, as the log is."""
    if json:
        print(msgspec.json.encode({"event": "ready", "for": name, "url": url}).decode(), flush=True)
    else:
        print(f"refitd front: {name} ready on {url}", flush=True)


def _address(text: str, option: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{option} {text!r}: write HOST:PORT, such as 127.0.0.1:8701")
    return host.strip("[]"), int(port)


def _parse(text: str) -> tuple[str, tuple[str, int]]:
    url, equals, address = text.rpartition("=")
    if not equals:
        raise ValueError(f"--engine {text!r}: write URL=PORT, such as http://127.0.0.1:30000=31000")
    return check_url(url), _address(f"127.0.0.1:{address}" if address.isdecimal() else address, "--engine")
