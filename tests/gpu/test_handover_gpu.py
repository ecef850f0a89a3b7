"""Tensors that are lent from one process to another on a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from refitd_client.handover.lent import Lent
from refitd_client.handover.making import offer_of

pytestmark = pytest.mark.gpu

SHAPES = {"large": (4096, 1536), "small": (3, 5), "odd": (7,), "scalar": ()}
READER = """
import sys
from pathlib import Path
import torch
from refitd_client.fingerprint import fingerprints
from refitd_client.handover.lent import borrowed
from refitd_client.handover.taking import Taker
torch.cuda.init(), torch.zeros(1, device="cuda")
taker = Taker()
with borrowed(Path(sys.argv[1]), b"s" * 32) as found:
    for _ in range(2):  # the second time nothing is opened
        copies = {name: tensor.clone() for name, tensor in taker.tensors(found.offer).items()}
    torch.cuda.synchronize()
    assert tuple(fingerprints(copies.values())) == found.offer.fingerprints
    assert found.is_lent
taker.keep(None)
print("equal")
"""


def test_another_process_copies_what_was_lent(tmp_path: Path) -> None:
    weights = {name: torch.randn(shape, device="cuda").bfloat16() for name, shape in SHAPES.items()}
    weights["row"] = torch.randn(10, 64, device="cuda").bfloat16()[3]  # in the middle of an allocation
    with Lent(tmp_path, offer_of("run~v000001", weights), b"s" * 32) as lent:
        command = [sys.executable, "-c", READER, str(lent.path)]
        said = subprocess.run(command, check=False, capture_output=True, text=True)
        assert (said.stdout, said.returncode) == ("equal\n", 0), said.stderr
        assert lent.take_back(0.0)
