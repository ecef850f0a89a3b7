"""The weight update group that SGLang's own routes make with a trainer: rank 0 sends, the engine's ranks receive."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import httpx
import torch
import torch.distributed as dist

_NUMBERS = count(1)


@dataclass(frozen=True, slots=True)
class Group:
    """A group that stands."""

    name: str
    process_group: Any
    http: httpx.Client
    pool: ThreadPoolExecutor

    def send(self, tensors: Mapping[str, torch.Tensor], parts: Sequence[torch.Tensor], **order: Any) -> None:
        """Broadcast what the engine expects for `tensors`, in `parts`, and wait for its answer."""
        asked = self.ask(
            "/update_weights_from_distributed",
            names=list(tensors),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
            group_name=self.name,
            **order,
        )
        for work in [dist.broadcast(part, 0, group=self.process_group, async_op=True) for part in parts]:
            work.wait()
        asked.result()

    def ask(self, route: str, **order: Any) -> Future[None]:
        """Post it in a thread. The result raises what the engine refused."""

        def post() -> None:
            answer = self.http.post(route, json=order).raise_for_status().json()
            if not answer["success"]:
                raise RuntimeError(answer["message"])

        return self.pool.submit(post)


@contextmanager
def joined(engine: str, backend: str, patience: timedelta) -> Iterator[Group]:
    """A group of this process and the engine's ranks, taken apart in the end."""
    os.environ["NCCL_CUMEM_ENABLE"] = "0"  # as SGLang sets it: otherwise the first broadcast fails
    with (
        httpx.Client(base_url=engine, timeout=patience.total_seconds(), trust_env=False) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        ranks = 1 + int(http.get("/server_info").raise_for_status().json().get("tp_size", 1))
        name, port = f"bench-{backend}-{next(_NUMBERS)}", _free_port()
        group = Group(name, None, http, pool)
        asked = group.ask(
            "/init_weights_update_group",
            master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=ranks, group_name=name,
            backend=backend,
        )  # fmt: skip
        made = _made(backend, port, ranks, name, patience)
        asked.result()
        try:
            yield Group(name, made, http, pool)
        finally:
            group.ask("/destroy_weights_update_group", group_name=name).exception()
            with suppress(ValueError, RuntimeError, AssertionError):  # a group that failed is not one for torch
                dist.destroy_process_group(made)


def _made(backend: str, port: int, ranks: int, name: str, patience: timedelta) -> Any:
    """The trainer's end, by SGLang's own function: torch has no public one for a group beside the default one."""
    from sglang.srt.utils import init_custom_process_group  # pyright: ignore[reportMissingImports]

    return init_custom_process_group(
        backend=backend, init_method=f"tcp://127.0.0.1:{port}", world_size=ranks, rank=0, group_name=name,
        timeout=patience,
    )  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
