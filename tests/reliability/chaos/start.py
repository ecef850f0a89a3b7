"""Starts the processes of a run, and ends them, whatever happens in between."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from chaos.book import RUN
from chaos.follower import Follower
from chaos.load import Load
from chaos.midload import MidLoad
from chaos.models import START_UP
from chaos.plan import VLLM
from chaos.reference import PROMPTS, Reference, UnfitReferenceError, agree, answer_now
from chaos.stack import SGLANG, Stack
from chaos.trainer import Trainer
from refitd_client import RefitClient
from support.servers import ADMIN_KEY, API_KEY, SGLANG_VENV, EmbeddedServer, RefitdServer, Server, SglangServer
from support.vllm import VLLM_VENV, VllmServer

TOKEN = "of-the-service"
LOAD_DELAYS = {"embedded-1": 0.03, "embedded-2": 0.08}  # seconds, so that a kill hits in mid-load
KEEP_LAST = 3
QUICK = {
    "--probe-interval": "0.2",
    "--scan-interval": "0.2",
    "--settle": "0.2",
    "--keep-last": str(KEEP_LAST),
}
_SGLANG_FLAGS = ("--dtype", "float32", "--log-level-http", "warning")


@contextmanager
def running(folder: Path, models: Path, seed: str) -> Generator[Stack]:
    """Start everything; end everything, whatever happens."""
    with ExitStack() as cleanup:
        reference = _reference(folder, models, cleanup)
        engines: dict[str, Server] = {
            name: EmbeddedServer(_made(folder / name), models / START_UP, "--defects", "--load-delay", str(delay))
            for name, delay in LOAD_DELAYS.items()
        }
        mid_load = None
        for engine in engines.values():
            cleanup.callback(engine.kill)
            engine.start()
        if SGLANG_VENV:
            sglang = SglangServer(_made(folder / SGLANG), models / START_UP, *_SGLANG_FLAGS)
            cleanup.callback(sglang.kill)
            _check_kind(sglang.start(), models, reference)
            engines[SGLANG], mid_load = sglang, MidLoad(sglang)
        if VLLM_VENV:
            vllm = VllmServer(_made(folder / VLLM), models / START_UP, "--dtype", "float32")
            cleanup.callback(vllm.kill)
            _check_answers(vllm.start(), reference)
            engines[VLLM] = vllm
        yield _with_service(folder, models, seed, engines, reference, mid_load, cleanup)


def _reference(folder: Path, models: Path, cleanup: ExitStack) -> Reference:
    server = EmbeddedServer(_made(folder / "reference"), models / START_UP)
    cleanup.callback(server.kill)
    reference = cleanup.enter_context(Reference(server.start().url, models))
    reference.learn()
    return reference


def _check_kind(sglang: SglangServer, models: Path, reference: Reference) -> None:
    """A clean SGLang has to answer as the reference does. Then it is started again, as clean as before."""
    with Reference(sglang.url, models) as other:
        agree(reference, other)
    sglang.restart()


def _check_answers(vllm: VllmServer, reference: Reference) -> None:
    """A clean vLLM has to answer as the reference does."""
    for number in range(len(PROMPTS)):
        if answer_now(VLLM, vllm.url, number) != reference.expected(START_UP, number):
            raise UnfitReferenceError(f"{VLLM} answers prompt {number} differently with {START_UP}")


def _with_service(
    folder: Path,
    models: Path,
    seed: str,
    engines: dict[str, Server],
    reference: Reference,
    mid_load: MidLoad | None,
    cleanup: ExitStack,
) -> Stack:
    root, flags = _made(folder / "root"), [*_keys(folder), *(word for pair in QUICK.items() for word in pair)]
    refitd = RefitdServer(_made(folder / "refitd"), root, [engine.url for engine in engines.values()], *flags)
    cleanup.callback(refitd.kill)
    refitd.start()
    token = str(folder / "keys" / "--token-file")
    trainer = Trainer([str(root), RUN, refitd.url, token], folder / "publisher.log")
    cleanup.callback(trainer.kill)
    trainer.start()
    follower = Follower(refitd.url, TOKEN)
    cleanup.callback(follower.stop)
    follower.start()
    load = Load({name: engine.url for name, engine in engines.items()}, seed)
    cleanup.callback(load.stop)
    load.start()
    client = cleanup.enter_context(RefitClient(refitd.url, token=TOKEN))
    stack = Stack(root, models, engines, refitd, client, trainer, follower, load, reference, mid_load)
    by_url = {engine.url: engine.id for engine in client.engines().items}
    stack.ids = {name: by_url[engine.url] for name, engine in engines.items()}
    return stack


def _keys(folder: Path) -> list[str]:
    keys = _made(folder / "keys")
    flags: list[str] = []
    for flag, secret in {
        "--engine-key-file": API_KEY,
        "--engine-admin-key-file": ADMIN_KEY,
        "--token-file": TOKEN,
    }.items():
        (keys / flag).write_text(secret)
        flags += [flag, str(keys / flag)]
    return flags


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
