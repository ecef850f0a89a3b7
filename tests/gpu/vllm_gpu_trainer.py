"""A trainer with tensors on the first GPU, which sends them as vLLM's trainer classes (0.32) do, without vLLM.

NCCL is called by its C functions, as vLLM's bindings do, and IPC handles are torch's. The process is told what to do
over a pipe, and says what a call to vLLM's routes would say.
"""

import base64
import ctypes
import os
import pickle
import socket
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from support.forked import forking

LOOPBACK = "127.0.0.1"
ONE_GPU = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""Two ranks share a GPU: NCCL takes them for two hosts, since they have different NCCL_HOSTIDs."""
_FLOAT, _BYTE = 7, 1  # ncclFloat32, ncclUint8


class UniqueId(ctypes.Structure):
    """ncclUniqueId, which vLLM sends as a pickle of such a structure."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class GpuTrainer:
    """The process. `tell` begins something, `hear` waits for what it says."""

    def __init__(self) -> None:
        with socket.create_server((LOOPBACK, 0)) as free:
            self.port = int(free.getsockname()[1])
        context = forking()
        self._line, theirs = context.Pipe()
        self.process = context.Process(target=_trainer, args=(self.port, theirs))
        self.process.start()
        theirs.close()

    def tell(self, what: str, *given: Any) -> None:
        self._line.send((what, *given))

    def hear(self, within: float = 120.0) -> Any:
        assert self._line.poll(within), "the trainer has said nothing"
        return self._line.recv()


@contextmanager
def gpu_trainer() -> Generator[GpuTrainer]:
    """A trainer, killed at the end."""
    trainer = GpuTrainer()
    try:
        yield trainer
    finally:
        trainer.process.kill()
        trainer.process.join()


def call_of(tensors: Mapping[str, Any]) -> tuple[list[str], list[str], list[list[int]]]:
    """Names, dtypes and shapes, as a call has them."""
    kinds = [str(each.dtype).removeprefix("torch.") for each in tensors.values()]
    return list(tensors), kinds, [list(each.shape) for each in tensors.values()]


def _trainer(port: int, line: Connection) -> None:
    os.environ |= {**ONE_GPU, "NCCL_HOSTID": "trainer"}
    made: list[Any] = []
    orders: dict[str, Callable[..., None]] = {
        "join": lambda: made.append(_Group(port)),
        "broadcast": lambda tensors, buffer: _broadcast(made[0], tensors, buffer),
        "share": lambda tensors, buffer: _share(line, tensors, buffer),
    }
    while True:
        try:
            what, *given = line.recv()
        except EOFError:
            return
        orders[what](*given)
        line.send("done")


class _Group:
    """As `StatelessProcessGroup` and `PyNcclCommunicator`, rank 0 of 2."""

    def __init__(self, port: int) -> None:
        import torch
        import torch.distributed as distributed

        dist: Any = distributed
        torch.cuda.set_device(0)
        self._nccl = ctypes.CDLL("libnccl.so.2")  # torch's own, which is loaded
        store = dist.TCPStore(LOOPBACK, port, 2, is_master=True, use_libuv=False)
        unique_id = UniqueId()
        self._done(self._nccl.ncclGetUniqueId(ctypes.byref(unique_id)))
        store.set("broadcast_from/0/0", pickle.dumps(unique_id))
        self._group = ctypes.c_void_p()
        self._done(self._nccl.ncclCommInitRank(ctypes.byref(self._group), 2, unique_id, 0))
        one = torch.zeros(1, device="cuda")
        at, stream = ctypes.c_void_p(one.data_ptr()), _stream()
        self._done(self._nccl.ncclAllReduce(at, at, ctypes.c_size_t(1), _FLOAT, 0, self._group, stream))
        torch.cuda.synchronize()

    def broadcast(self, tensor: Any) -> None:
        at, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
        self._done(self._nccl.ncclBroadcast(at, at, size, _BYTE, 0, self._group, _stream()))

    def _done(self, error: int) -> None:
        assert error == 0, f"NCCL's error {error}"


def _stream() -> ctypes.c_void_p:
    import torch

    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def _broadcast(group: _Group, tensors: Sequence[Any], buffer: int | None) -> None:
    """Each by itself, or packed (`packed_nccl_broadcast_producer`)."""
    import torch

    there = [each.to("cuda") for each in tensors]
    for packed in there if buffer is None else _packed(there, buffer):
        group.broadcast(packed)
        torch.cuda.synchronize()


def _packed(tensors: Sequence[Any], buffer: int) -> Iterator[Any]:
    import torch

    together: list[Any] = []
    for each in tensors:
        together.append(each.reshape(-1).view(torch.uint8))
        if sum(map(len, together)) > buffer:
            yield torch.cat(together)
            together = []
    if together:
        yield torch.cat(together)


def _share(line: Connection, tensors: Mapping[str, Any], buffer: int | None) -> None:
    """As `IPCTrainerWeightTransferEngine`: say the handles of all, or of a buffer for each load of it, and wait until
    they are read. In the end say how much GPU memory is in use that was not before.
    """
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    cuda: Any = torch.cuda
    before, uuid = cuda.memory_allocated(), str(cuda.get_device_properties(0).uuid)

    def told(named: Mapping[str, Any], handles: object, sizes: list[int] | None) -> None:
        line.send((*call_of(named), base64.b64encode(pickle.dumps(handles)).decode(), sizes))
        assert line.recv() == ("read",)

    if buffer is None:
        ready = [each.to("cuda") for each in tensors.values()]
        cuda._sleep(3 * 10**9)  # more than a second, in which what is shared is not written yet
        there = [each.clone() for each in ready]
        told(tensors, [{uuid: reduce_tensor(each)[1]} for each in there], None)
        del there, ready
    else:
        shared = torch.empty(buffer, dtype=torch.uint8, device="cuda")
        handle = {uuid: reduce_tensor(shared)[1]}
        for load in _loads(tensors, buffer):
            flat = torch.cat([each.reshape(-1).view(torch.uint8) for each in load.values()])
            shared[: len(flat)].copy_(flat)
            cuda.current_stream().synchronize()
            told(load, handle, [each.nbytes for each in load.values()])
        del shared
    cuda.ipc_collect()
    line.send(cuda.memory_allocated() - before)


def _loads(tensors: Mapping[str, Any], buffer: int) -> Iterator[dict[str, Any]]:
    load: dict[str, Any] = {}
    for name, each in tensors.items():
        if load and sum(it.nbytes for it in load.values()) + each.nbytes > buffer:
            yield load
            load = {}
        load[name] = each
    yield load
