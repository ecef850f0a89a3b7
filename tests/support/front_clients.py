"""Trainers that do not install without GPUs, as the calls that they make to their engines' addresses. Each says where
it was read: the file, and the commit or release.
"""

import base64
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from .areal_trainer import TrainerRank, announced, named

Tensors = Mapping[str, Any]


class CallRefusedError(Exception):
    """A call has failed, as the trainer sees it. The message is what was answered."""


class SlimeEngines:
    """slime with `--rollout-external-engine-addrs`: all of its engines, each in an actor of its own.

    Read: `slime/backends/sglang_utils/external.py` (130027a), `sglang_engine.py` there (03b32d8), and in
    `slime/backends/megatron_utils/update_weight` `update_weight_from_disk.py` (5a3552f) and
    `update_weight_from_distributed.py` (abdc435).
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._actors = ThreadPoolExecutor(2 * len(addresses))

    def attach(self) -> list[int]:
        """Find out what the engines are, and wait until they are well; the GPUs of each."""
        gpus: list[int] = []
        for address in self._addresses:
            info = self._get(address, "server_info").json()
            gpus.append(int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1))
            for path in ("health_generate", "flush_cache", "get_server_info"):  # asked again, for ever, until it is 200
                self._get(address, path, headers={"Authorization": "Bearer None"})
        return gpus

    def update_from_disk(self, folder: Path, number: int) -> None:
        self._hold()
        self._all("update_weights_from_disk", {"model_path": str(folder), "weight_version": str(number)})
        self._all("continue_generation", {})

    def connect(self, ranks: Sequence[TrainerRank], gpus: Sequence[int]) -> None:
        """Make a group of all engines' GPUs with each rank, those of the trainer's pipeline stages."""
        for stage, rank in enumerate(ranks):
            group = f"slime-pp_{stage}"
            offsets = [sum(gpus[:place]) + 1 for place in range(len(gpus))]
            bodies = [announced(rank.port, offset, sum(gpus), group) for offset in offsets]
            joining = self._begun("init_weights_update_group", bodies)
            rank.make(sum(gpus), group)
            _ended(joining)
            assert rank.done() == ""

    def update_from_distributed(self, ranks: Sequence[TrainerRank], shares: Sequence[Tensors], number: int) -> None:
        """Each stage sends its share, one bucket at a time."""
        self._hold()
        for stage, (rank, share) in enumerate(zip(ranks, shares, strict=True)):
            names = list(share)
            for begin in range(0, len(names), 4):
                bucket = {name: share[name] for name in names[begin : begin + 4]}
                body = named(bucket, f"slime-pp_{stage}") | {"flush_cache": False, "weight_version": str(number)}
                body.pop("abort_all_requests")
                taking = self._begun("update_weights_from_distributed", [body] * len(self._addresses))
                rank.send(bucket)
                _ended(taking)
                assert rank.done() == ""
        self._all("continue_generation", {})

    def _hold(self) -> None:
        self._all("pause_generation", {})
        for address in self._addresses:
            self._get(address, "flush_cache")

    def _all(self, path: str, body: Mapping[str, Any]) -> None:
        _ended(self._begun(path, [body] * len(self._addresses)))

    def _begun(self, path: str, bodies: Iterable[Mapping[str, Any]]) -> list[Callable[[], Any]]:
        posts = zip(self._addresses, bodies, strict=True)
        return [self._actors.submit(_post, f"{address}/{path}", body).result for address, body in posts]

    def _get(self, address: str, path: str, **how: Any) -> requests.Response:
        reply = requests.get(f"{address}/{path}", timeout=60, **how)
        if reply.status_code != 200:
            raise CallRefusedError(reply.text)
        return reply


def _post(url: str, body: Mapping[str, Any]) -> Any:
    """As slime's and verl's `_make_request`: an error of HTTP is raised, and an answer is read as JSON."""
    reply = requests.post(url, json=body or {}, timeout=120)
    if not reply.ok:
        raise CallRefusedError(reply.text)
    return reply.json()


def _ended(calls: Iterable[Callable[[], Any]]) -> None:
    for call in calls:
        call()


class VerlServer:
    """verl's `ServerAdapter` of a SGLang, by its `AsyncHttpServerAdapter`.

    Read: `verl/workers/rollout/sglang_rollout/sglang_rollout.py` and `http_server_engine.py` there (verl 0.9.1).
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def release(self) -> None:
        _post(f"{self._address}/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    def update(self, tensors: Tensors) -> None:
        """A bucket. verl pickles handles of GPU memory, here it is the names."""
        serialized = [base64.b64encode(pickle.dumps(list(tensors))).decode()]
        body = {"serialized_named_tensors": serialized, "load_format": None, "flush_cache": False}
        _post(f"{self._address}/update_weights_from_tensor", body)
