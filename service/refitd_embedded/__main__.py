"""`python -m refitd_embedded`: one engine on a port, or many on as many."""

import argparse
import asyncio
import contextlib
import copy
import importlib.util
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refitd_embedded.engine import EmbeddedEngine

EXTRA = ("torch", "fastapi", "uvicorn")
DESCRIPTION = """\
A small, real inference engine on CPU that speaks SGLang's weight-update HTTP API: Qwen2 and Llama checkpoints,
continuous batching, log-probabilities, weights reloaded between two steps of its scheduler. Token ids in and out;
there is no tokenizer."""
EPILOG = """\
examples:
  python -m refitd_embedded --make-model DIR
      Write a Qwen2 checkpoint of 400,000 random parameters, to try things with. Its tokens are 0 to 31.
  python -m refitd_embedded --model-path DIR --port 9000
      One engine. Prints "refitd_embedded ready on http://127.0.0.1:9000" once it listens; SIGTERM stops it.
  python -m refitd_embedded --model-path DIR --port 9000 --replicas 64
      64 engines on the ports 9000 to 9063, each with weights of its own, in one process.
  python -m refitd_embedded --model-path DIR --defects
      An engine that mishandles bad checkpoints exactly as SGLang 0.5.23 does: it serves mixtures and NaN, "rolls
      back" onto the checkpoint that just failed, and dies of a torn file. To see what your tooling makes of it.

exit status: 0 after SIGTERM or SIGINT, 1 if the engine died, 2 for a wrong command line or checkpoint."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, load the checkpoint, serve until a signal stops it; the exit status."""
    arguments = _parser().parse_args(argv)
    if any(importlib.util.find_spec(name) is None for name in EXTRA):
        return _fail("refitd_embedded needs its extra: pip install '.[embedded]' in its clone")
    import torch

    from refitd_embedded.weights import CheckpointError

    torch.set_num_threads(1)
    try:
        if (folder := arguments.make_model) is not None:
            from refitd_embedded.demo import policy
            from refitd_embedded.model import read_config

            # One that was made before is made again: it is the same for the same seed.
            if folder.exists() and any(folder.iterdir()) and read_config(folder) != policy.CONFIG:
                return _fail(f"refitd_embedded: {folder} is not empty: name a new folder")
            print(policy.write(policy.fresh(arguments.random_seed), folder))
            return 0
        engines = _engines(arguments)
        sockets = _listen(arguments.host, arguments.port, arguments.replicas)
    except (OSError, ValueError, KeyError, CheckpointError) as problem:
        return _fail(f"refitd_embedded: {problem}")
    asyncio.run(_serve(engines, sockets, arguments))
    return 0


def _engines(arguments: argparse.Namespace) -> "list[EmbeddedEngine]":
    from refitd_embedded.engine import EmbeddedEngine, EngineOptions

    options = EngineOptions(
        seed=arguments.random_seed,
        most_running=arguments.max_running_requests,
        load_delay=arguments.load_delay,
        defects=arguments.defects,
        enable_lora=arguments.enable_lora,
    )
    first = EmbeddedEngine.open(arguments.model_path, options)
    return [first, *(first.replica(number, copy.deepcopy(first.decoder)) for number in range(1, arguments.replicas))]


async def _serve(engines: "list[EmbeddedEngine]", sockets: list[socket.socket], arguments: argparse.Namespace) -> None:
    from refitd_embedded.server import ApiKeys, create_app, serve

    keys, words = ApiKeys(api=arguments.api_key, admin=arguments.admin_api_key), list(sys.argv[1:])
    for flag in ("--api-key", "--admin-api-key"):  # /server_info shows the command line without the keys
        if flag in words[:-1]:
            words[words.index(flag) + 1] = "…"
    apps = []
    for engine, listener in zip(engines, sockets, strict=True):
        host, port = listener.getsockname()[:2]
        launch = {"host": host, "port": port, "random_seed": engine.options.seed, "launch_command": shlex.join(words)}
        apps.append((engine, create_app(engine, keys=keys, launch=launch)))
    await serve(apps, sockets)


def _listen(host: str, port: int, replicas: int) -> list[socket.socket]:
    """Bind before any server starts, so that a port in use is a clean error. Port 0: the system chooses each."""
    sockets: list[socket.socket] = []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as opened:
        for number in range(replicas):
            # It names its protocol: else asyncio sets no TCP_NODELAY, and each answer takes 40 ms more.
            listener = opened.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            address = host, port and port + number
            try:
                listener.bind(address)
            except OSError as problem:
                raise OSError(f"cannot listen on {address[0]}:{address[1]}: {problem}") from problem
            sockets.append(listener)
        opened.pop_all()
    return sockets


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m refitd_embedded",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model-path", type=Path, metavar="DIR", help="config.json and *.safetensors to start with")
    what.add_argument("--make-model", type=Path, metavar="DIR", help="write a tiny random Qwen2 there, and end")
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=30000, help="port of the first replica; 0 lets the system choose (%(default)s)")
    add("--replicas", type=_positive, default=1, metavar="N", help="engines on consecutive ports (%(default)s)")
    add("--api-key", metavar="KEY", help="bearer token for every route but /health")
    add("--admin-api-key", metavar="KEY", help="bearer token for the routes that change something")
    add("--max-running-requests", type=_positive, default=128, metavar="N", help="size of the batch (%(default)s)")
    seed = "for requests without a sampling_seed, and of a model that is made (%(default)s)"
    add("--random-seed", type=int, default=0, metavar="N", help=seed)
    add("--load-delay", type=float, default=0.0, metavar="SECONDS", help="make each load take that much longer")
    add("--enable-lora", action="store_true", help="load LoRA adapters, and compute with the one that a request names")
    add("--defects", action="store_true", help="mishandle bad checkpoints as SGLang does (see the examples)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} is not positive")
    return number


if __name__ == "__main__":
    sys.exit(main())
