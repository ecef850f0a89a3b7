"""Tensors that are exported from one process to another on a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from refitd_client.transport.offer_file import ExportedTensors
from support.exporting import offer_of

pytestmark = pytest.mark.gpu

SHAPES = {"large": (4096, 1536), "small": (3, 5), "odd": (7,), "scalar": ()}
READER = """
import sys
from pathlib import Path
import torch
from refitd_client.fingerprint import fingerprints
from support.exporting import imported
from refitd_client.transport.memory import ImportedMemory
torch.cuda.init(), torch.zeros(1, device="cuda")
taker = ImportedMemory()
with imported(Path(sys.argv[1]), b"s" * 32) as found:
    for _ in range(2):  # the second time nothing is opened
        copies = {name: tensor.clone() for name, tensor in taker.tensors(found.offer).items()}
    torch.cuda.synchronize()
    assert tuple(fingerprints(copies.values())) == found.offer.fingerprints
    assert found.is_exported
taker.keep(None)
print("equal")
"""


def test_another_process_copies_what_was_lent(tmp_path: Path) -> None:
    tensors = weights()
    tensors["row"] = torch.randn(10, 64, device="cuda").bfloat16()[3]  # in the middle of an allocation
    with ExportedTensors(tmp_path, offer_of("run~v000001", tensors), b"s" * 32) as exported:
        command = [sys.executable, "-c", READER, str(exported.path)]
        said = subprocess.run(command, check=False, capture_output=True, text=True)
        assert (said.stdout, said.returncode) == ("equal\n", 0), said.stderr
        assert exported.take_back(0.0)


BEYOND = """
import sys
from pathlib import Path
import torch
from msgspec.structs import replace
from refitd_client.transport.device import DeviceMemory, DriverError
from support.exporting import imported
torch.cuda.init(), torch.zeros(1, device="cuda")
memory = DeviceMemory()
with imported(Path(sys.argv[1]), b"s" * 32) as found:
    place = found.offer.layout.tensors[0].place
    memory.tensor(place, "U8", (1,))
    size = memory._opened[place.allocation].size
    try:
        memory.tensor(replace(place, offset=place.offset + 2**40), "U8", (1,))
    except DriverError as error:
        print(size, error)
memory.keep(set())
"""


def test_the_driver_says_how_large_another_process_s_allocation_is_so_that_nothing_beyond_it_is_read(
    tmp_path: Path,
) -> None:
    tensors = {"w": torch.zeros(64 * 2**20, dtype=torch.uint8, device="cuda")}
    with ExportedTensors(tmp_path, offer_of("run~v000001", tensors), b"s" * 32) as exported:
        command = [sys.executable, "-c", BEYOND, str(exported.path)]
        said = subprocess.run(command, check=False, capture_output=True, text=True)
        size, _, refusal = said.stdout.partition(" ")
        assert said.returncode == 0, said.stderr
        assert int(size) >= 64 * 2**20
        assert refusal.endswith(f"of an allocation that has {size}\n")
        assert exported.take_back(0.0)


def weights() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape, device="cuda").bfloat16() for name, shape in SHAPES.items()}
