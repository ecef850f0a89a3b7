"""What else moves weights from a trainer into SGLang, measured on the same machine and the same engine.

    Gloo, NCCL     /init_weights_update_group and /update_weights_from_distributed: a request for each parameter, one
                   request with a broadcast for each, and one broadcast of everything (load_format "flattened_bucket")
    checkpoint-engine   its parameter server and /update_weights_from_ipc

Each is timed from the weights on the trainer's GPU until the engine has answered. NCCL wants a GPU for each rank, so on
one GPU it is tried last, and what it says is written down: it leaves the engine with a broken group.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import httpx
import torch
from group import Group, joined
from rows import Row, refused, row, timed
from setting import Setting
from shapes import Weights, change, loaded

PATIENCE = 60.0  # seconds
WARM = 2


def peers(setting: Setting) -> list[Row]:
    weights = loaded(setting.engine_model)
    name = setting.engine_model.name
    rows: list[Row] = []
    for peer, rounds in _peers(setting):
        try:
            samples = list(rounds(setting, weights))
            rows.append(row(name, peer, samples))
        except Exception as error:  # whatever a peer makes of this machine is its result
            rows.append(refused(name, peer, error))
    return rows


Rounds = Callable[[Setting, Weights], Iterator[float]]


def _peers(setting: Setting) -> Iterator[tuple[str, Rounds]]:
    yield "Gloo, a broadcast per parameter", _by("gloo", _each)
    yield "checkpoint-engine", _checkpoint_engine
    yield "NCCL, a request per parameter", _by("nccl", _requests)
    if torch.cuda.device_count() > 1 and torch.cuda.current_device() > 0:  # the engine has the first one
        yield "NCCL, a broadcast per parameter", _by("nccl", _each)
        yield "NCCL, one broadcast of everything", _by("nccl", _bucket)


def _by(backend: str, send: Callable[[Group, Weights], None]) -> Rounds:
    def rounds(setting: Setting, weights: Weights) -> Iterator[float]:
        with joined(setting.engine, backend, timedelta(seconds=PATIENCE)) as group:
            for number in range(WARM + setting.rounds):
                change(weights, 0.01)
                took = timed(lambda: send(group, weights))
                if number >= WARM:
                    yield took

    return rounds


def _requests(group: Group, weights: Weights) -> None:
    for name, tensor in weights.items():
        group.send({name: tensor}, [tensor])


def _each(group: Group, weights: Weights) -> None:
    group.send(weights, list(weights.values()))


def _bucket(group: Group, weights: Weights) -> None:
    """The copy of the model that is made for it is part of it."""
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in weights.values()])
    group.send(weights, [flat], load_format="flattened_bucket")


def _checkpoint_engine(setting: Setting, weights: Weights) -> Iterator[float]:
    """As its documentation has it: a shared pool of page-locked memory, which is made in the first round."""
    from checkpoint_engine.ps import ParameterServer  # pyright: ignore[reportMissingImports] - where it is installed

    mine = torch.cuda.current_device()
    with _alone(), httpx.Client(base_url=setting.engine, timeout=PATIENCE, trust_env=False) as http:
        server: Any = ParameterServer(auto_pg=True)

        def ask(handles: list[tuple[str, str]]) -> None:
            answer = http.post("/update_weights_from_ipc", json={"zmq_handles": dict(handles)}).raise_for_status()
            if not answer.json()["success"]:
                raise RuntimeError(answer.json()["message"])

        def update(name: str) -> None:
            host = {key: tensor.cpu() for key, tensor in weights.items()}
            server.register_checkpoint(name, named_tensors=host, use_shared_memory_pool=True)
            server.init_process_group()
            server.gather_metas(name)
            server.update(name, ask)
            server.unregister_checkpoint(name)

        for number in range(WARM + setting.rounds):
            change(weights, 0.01)
            took = timed(lambda number=number: update(f"step-{number}"))
            if number >= WARM:
                yield took
    torch.cuda.set_device(mine)  # it takes the engine's for its own


@contextmanager
def _alone() -> Iterator[None]:
    """The variables of a world of one rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mine = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    before = {name: os.environ.get(name) for name in mine}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
