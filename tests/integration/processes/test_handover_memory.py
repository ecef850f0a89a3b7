"""Tensors exported in shared memory: seen where they lie, held against fingerprints, by another process too."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from refitd_client.transport.memory import ImportedMemory, SharedTensors
from refitd_client.transport.offer import Offer, offer_with
from refitd_client.transport.offer_file import ExportedTensors
from support.exporting import offer_of

SECRET = b"s" * 32
SPECS: dict[str, tuple[str, tuple[int, ...]]] = {
    "w": ("BF16", (3, 5)),
    "b": ("F32", ()),
    "none": ("BF16", (0, 4)),
    "i": ("U8", (7,)),
}


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedTensors]:
    made = SharedTensors(SPECS, tmp_path)
    for number, tensor in enumerate(made.tensors.values()):
        tensor.fill_(number + 1)
    yield made
    made.close()


def offered(shared: SharedTensors) -> Offer:
    return offer_of("run~v000001", shared.tensors)


def changed(offer: Offer, **facts: Any) -> Offer:
    return offer_with(msgspec.structs.replace(offer.layout, **facts), offer.version, offer.fingerprints)


def test_what_is_lent_is_seen_where_it_lies(shared: SharedTensors) -> None:
    offer = offered(shared)
    taker = ImportedMemory()
    seen = taker.tensors(offer)
    assert {name: (each.dtype, each.shape) for name, each in seen.items()} == {
        name: (each.dtype, each.shape) for name, each in shared.tensors.items()
    }
    assert all(torch.equal(seen[name], each) for name, each in shared.tensors.items())
    shared.tensors["w"].fill_(9)  # the next step: nothing is opened again
    assert torch.equal(taker.tensors(offer)["w"], shared.tensors["w"])


READER = """
import sys
from pathlib import Path
import torch
from refitd_client.transport.memory import ImportedMemory
from refitd_client.transport.offer_file import ImportedTensors
found = ImportedTensors(Path(sys.argv[1]), b"s" * 32)
found.hold()
print(float(ImportedMemory().tensors(found.offer)["w"].float().sum()))
"""


def test_another_process_sees_it_too(shared: SharedTensors, tmp_path: Path) -> None:
    with ExportedTensors(tmp_path, offered(shared), SECRET) as exported:
        command = [sys.executable, "-c", READER, str(exported.path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        assert said.stdout == "15.0\n"
        assert exported.take_back(0.0)


def test_memory_that_is_not_as_the_offer_says_is_an_error(shared: SharedTensors) -> None:
    offer = offered(shared)
    first = msgspec.structs.replace(offer.layout.tensors[0], shape=(3, 5000))
    with pytest.raises(ValueError, match="more than the file has"):
        ImportedMemory().tensors(changed(offer, tensors=(first,)))
    shared.close()
    with pytest.raises(FileNotFoundError):
        ImportedMemory().tensors(offer)
    shared.path.symlink_to(os.devnull)
    with pytest.raises(OSError, match="it is a link"):
        ImportedMemory().tensors(offer)
