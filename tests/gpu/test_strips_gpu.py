"""On a GPU: slices where they lie in a model add what `fingerprint/tensors.py` finds, and ranks find out about theirs.

    PYTHONPATH=client:service:tests python -m pytest -c /dev/null --rootdir . --noconftest tests/gpu -q -s -k strips

Skipped without CUDA. `-s` shows the rates, which no test depends on.
"""

import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytest.importorskip("triton")

from refitd_client.checkpoint.finite import NO_RULE  # noqa: E402
from refitd_client.contract.plugin import UpdateOutcome  # noqa: E402
from refitd_client.fingerprint.batch import TALL, TILE_COLUMNS, MemoryStrip, StripScan  # noqa: E402
from refitd_client.fingerprint.device import INTEGERS, flat_bits  # noqa: E402
from refitd_client.fingerprint.host import ROW  # noqa: E402
from refitd_client.fingerprint.tensors import ElementRows, PartInput, Scan, part_scans  # noqa: E402
from support.sliced_rank import EXPERTS, SLICED, SlicedEngine, sliced_weights  # noqa: E402
from support.tiny_rank import delta  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda:0")
MEMORY = 2**24  # bytes that strips are drawn from
RULES = {1: (0x7F, 0x7F), 2: (0x7F80, 0x7F80), 4: (0x7F800000, 0x7F800000), 8: (0x7FF << 52, 0x7FF << 52)}


class Drawn:
    """A strip in some memory, on the GPU and as `tensors.py` takes it in host memory."""

    def __init__(self, memory: Any, chance: random.Random, width: int, kind: str) -> None:
        columns, rows = {
            "one row": (chance.choice([1, 5, ROW - 1, ROW, ROW + 1, chance.randint(1, 300_000)]), 1),
            "columns": (chance.choice([1, 7, TILE_COLUMNS, TILE_COLUMNS + 1, chance.randint(1, 900)]), 0),
            "turned": (chance.randint(1, 400), 0),
            "one column": (1, 0),
            "long rows": (chance.randint(ROW, 3 * ROW), 0),
        }[kind]
        rows = rows or chance.choice(
            [2, TALL - 1, TALL, TALL + 1, chance.randint(2, MEMORY // 16 // width // columns + 2)]
        )
        rows = min(rows, MEMORY // 4 // width // columns + 1)
        pitch = columns + chance.choice([0, 1, 3, ROW - 1, chance.randint(0, 70_000)])
        begin = chance.choice([0, 1, ROW - 1, ROW, chance.randint(0, 2**20), chance.randint(2**31, 2**34)])
        gap = chance.choice([0, 1, chance.randint(0, 9)])
        places = (columns + gap, 1) if kind != "turned" else (1, rows + gap)
        need = ((rows - 1) * places[0] + (columns - 1) * places[1] + 1) * width
        at = width * chance.randint(0, (MEMORY - need) // width)
        view = memory[at : at + need].view(INTEGERS[width]).as_strided((rows, columns), places)
        where = ElementRows(begin, columns, rows, pitch)
        rule = chance.choice([NO_RULE, RULES[width]])
        self.strip = MemoryStrip(view.data_ptr(), width, where, *places, rule)
        self.part = PartInput(flat_bits(view).cpu(), [where], rule)


def drawn(seed: int) -> list[Drawn]:
    chance = random.Random(seed)
    memory = torch.randint(0, 256, (MEMORY,), dtype=torch.uint8, device=DEVICE)
    kinds = ["one row", "columns", "turned", "one column", "long rows"]
    return [Drawn(memory, chance, width, kind) for width in (1, 2, 4, 8) for kind in kinds for _ in range(3)]


def expected(some: list[Drawn]) -> list[Scan]:
    return part_scans([one.part for one in some])


@pytest.mark.parametrize("seed", range(10))
def test_strips_add_what_their_elements_add_wherever_they_begin_and_whatever_lies_between(seed: int) -> None:
    """And the elements that are not finite are counted."""
    some = drawn(seed)
    scan = StripScan([one.strip for one in some], DEVICE)
    found = [scan.begin()() for _ in range(3)]
    assert found == [expected(some)] * 3


def test_a_strip_of_more_than_two_to_the_31_elements_between_its_rows() -> None:
    bits = torch.randint(0, 256, (2**31 + 100,), dtype=torch.uint8, device=DEVICE)
    where = ElementRows(7, 50, 2, 2**33 + 11)
    view = bits.as_strided((2, 50), (2**31 + 13, 1))
    scan = StripScan([MemoryStrip(view.data_ptr(), 1, where, 2**31 + 13, 1)], DEVICE)
    assert scan.begin()() == part_scans([PartInput(flat_bits(view).cpu(), [where])])


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    (folder / "root" / ".refitd").mkdir(parents=True)
    yield folder / "root"
    shutil.rmtree(folder)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_on_a_gpu_prove_all_tensors_and_find_a_bit_that_is_flipped(
    root: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks are on one GPU here. By the loader, by replays, by a delta; and undone."""
    engine = SlicedEngine(root, monkeypatch, size, device="cuda")
    everything = len(SLICED) + 1 + EXPERTS // size
    for step, how in ((1, "load"), (2, "replay"), (3, "replay")):
        answers = engine.take(step)
        assert [(each.outcome, each.how, each.proved) for each in answers] == [
            (UpdateOutcome.SERVED, how, everything)
        ] * size
        assert engine.holds(sliced_weights(step))
    after = {name: tensor.clone() for name, tensor in sliced_weights(3).items()}
    for name in ("q", "down", "turned", "embed"):
        after[name].view(-1)[5] = 5
    answers = engine.load(delta(root, 4, 3, sliced_weights(3), after))
    assert [(each.outcome, each.how, each.proved) for each in answers] == [
        (UpdateOutcome.SERVED, "delta", everything)
    ] * size
    for step, name in enumerate(SLICED if size > 1 else ["turned"], start=5):  # alone it has the others whole
        held = sliced_weights(step - 1) if step > 5 else after
        engine.spoil_once(size - 1, name)
        answers = engine.take(100 + step)
        assert {each.outcome for each in answers} == {UpdateOutcome.RESTORED}
        assert all(f"tensor {name} ha" in each.reason for each in answers), answers[0].reason
        assert engine.holds(held)
        assert {each.outcome for each in engine.take(step)} == {UpdateOutcome.SERVED}
