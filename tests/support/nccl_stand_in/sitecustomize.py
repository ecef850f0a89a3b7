"""NCCL replaced by Gloo in vLLM's weight transfer, in each process that has this folder on its PYTHONPATH.

NCCL needs a GPU for each rank. Here a communicator of the same interface goes over Gloo, so that all else is real on a
machine without GPUs: vLLM's trainer classes, its rendezvous with the pickled id, the order and packing of broadcasts.
"""

import importlib.abc
import importlib.util
import os
import socket
import sys
from typing import Any, Self

_PYNCCL = "vllm.distributed.device_communicators.pynccl"
_GROUPS = "refitd_client.transport.trainer_groups"


class _Stream:
    """What is done on a stream is done at once here."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _gloo(unique_id: bytes, rank: int, size: int) -> Any:
    """The group of an id. Its 128 bytes hold the port of a store."""
    import torch

    store = torch.distributed.TCPStore("127.0.0.1", int.from_bytes(unique_id[:4], "little"), size, is_master=rank == 0)
    return torch.distributed.ProcessGroupGloo(store, rank, size)


def _of_a_trainer(module: Any) -> None:
    import torch
    from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

    class PyNcclCommunicator:
        def __init__(self, group: Any, device: object, library_path: str | None = None) -> None:
            self.group = group
            unique_id = ncclUniqueId()
            if group.rank == 0:
                with socket.create_server(("127.0.0.1", 0)) as free:
                    port = free.getsockname()[1]
                for at, byte in enumerate(port.to_bytes(4, "little") + os.urandom(124)):
                    unique_id.internal[at] = byte
            unique_id = group.broadcast_obj(unique_id, src=0)
            self.device = torch.device("cpu")
            self._group = _gloo(bytes(unique_id.internal), group.rank, group.world_size)
            self._group.allreduce([torch.zeros(1)]).wait()

        def broadcast(self, tensor: Any, src: int, stream: object = None) -> None:
            options = torch.distributed.BroadcastOptions()
            options.rootRank = src
            self._group.broadcast([tensor], options).wait()

        def destroy(self) -> None:
            self._group = None

    module.PyNcclCommunicator = PyNcclCommunicator
    torch.cuda.Stream = _Stream
    torch.cuda.stream = lambda stream: stream
    torch.cuda.current_stream = lambda *_, **__: _Stream()
    torch.accelerator.current_device_index = lambda: 0


def _of_a_member(module: Any) -> None:
    module._gpu = lambda number: "cpu"
    module.nccl_group = lambda store, rank, size, within: _gloo(store.get("0"), rank, size)


_REPLACES = {_PYNCCL: _of_a_trainer, _GROUPS: _of_a_member}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that call NCCL, and changes each when it has been imported."""

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name not in _REPLACES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            _REPLACES[name](module)

        spec.loader.exec_module = executed
        return spec


sys.meta_path.insert(0, _Finder())
if os.environ.get("REFITD_TEST_GPUS"):  # of a member: it has to see some
    import torch

    torch.cuda.device_count = lambda: int(os.environ["REFITD_TEST_GPUS"])
    torch.cuda.is_available = torch.distributed.is_nccl_available = lambda: True
