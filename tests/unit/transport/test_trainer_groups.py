"""NCCL's id in the store of a trainer's group of vLLM's: a pickle that is read and never loaded."""

import ctypes
import os
import pickle
from pathlib import Path

import pytest

from refitd_client.transport.membership import TransferError
from refitd_client.transport.trainer_groups import unique_id_in

ID = bytes(range(128))


class UniqueId(ctypes.Structure):
    """As `vllm.distributed.device_communicators.pynccl_wrapper.ncclUniqueId`."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_the_id_is_read_from_the_pickle_that_vllm_leaves(protocol: int) -> None:
    assert unique_id_in(pickle.dumps(UniqueId.from_buffer_copy(ID), protocol=protocol)) == ID


class Calls:
    """Whose pickle makes a folder."""

    def __reduce__(self) -> object:
        return os.mkdir, ("made",)


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        ID,
        pickle.dumps(Calls()),
        pickle.dumps(ID[1:]),
        pickle.dumps(ID.decode("latin-1")),
        pickle.dumps([ID, ID[::-1]]),
        pickle.dumps(ID)[:-1],
        pickle.dumps([ID, b"x" * 4096]),
        b"\x80\x04\x8e" + (2**62).to_bytes(8, "little") + ID + b".",
    ],
)
def test_what_holds_no_id_is_refused_and_nothing_of_it_is_called(
    pickled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TransferError, match="holds no unique id"):
        unique_id_in(pickled)
    assert list(tmp_path.iterdir()) == []
