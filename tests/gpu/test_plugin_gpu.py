"""The plugin's code for a GPU: its kernels and the driver do what numpy and torch do; and whole updates with it.

    PYTHONPATH=client:service:tests python -m pytest -c /dev/null --rootdir . --noconftest tests/gpu -q -k plugin

Skipped without CUDA.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytest.importorskip("triton")

from safetensors.torch import save_file  # noqa: E402

from refitd_client.contract.plugin import UpdateOutcome  # noqa: E402
from refitd_client.delta.change import Change  # noqa: E402
from refitd_plugin.delta import in_place  # noqa: E402
from refitd_plugin.delta.in_place import (  # noqa: E402
    DevicePatch,
    HostPatch,
)
from refitd_plugin.delta.layout import (  # noqa: E402
    PlacedTensor,
    Route,
    lay_out,
)
from refitd_plugin.memory import copy_schedule, driver  # noqa: E402
from refitd_plugin.memory.driver import Registry  # noqa: E402
from refitd_plugin.memory.source import VersionPlace, mapped  # noqa: E402
from refitd_plugin.proof.contents import (  # noqa: E402
    contents_of,
    digest,
)
from refitd_plugin.update.recorder import PlanCopy  # noqa: E402
from support.mini_sglang import expected, tiny_weights, values  # noqa: E402
from support.tiny_rank import Rank, delta, version  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float64]


def bits(dtype: Any, count: int) -> Any:
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)


@pytest.fixture
def folder() -> Iterator[Path]:
    """On tmpfs: only there files are registered."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("kind", [np.uint32, np.uint64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_patch_on_the_device_does_what_one_in_host_memory_does(
    dtype: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole tensors, columns, transposed ones; in several chunks."""
    monkeypatch.setattr(in_place, "_SCRATCH", 60 * 1024)
    in_place._memory.cache_clear()
    random = np.random.default_rng(0)
    holders = [bits(dtype, 200_000), bits(dtype, 9_000)]
    row = {"row_index": 100, "column_place": 1, "whole": False}
    routes = [
        Route(holder=0, offset=0, begin=3000, rows=1, columns=100_000, row_index=100_000, row_place=1, column_place=1, whole=True),  # noqa: E501
        Route(holder=1, offset=50, begin=0, rows=100, columns=50, row_place=50, **row),
        Route(holder=1, offset=0, begin=6000, rows=30, columns=100, row_place=1, **row | {"column_place": 30}),
    ]  # fmt: skip
    changes, placements = {}, {}
    for number, (route, elements) in enumerate(zip(routes, (100_000, 10_000, 3_000), strict=True)):
        indices = np.sort(random.choice(elements, elements // 4, replace=False)).astype(kind)
        new = random.integers(0, 256, len(indices) * dtype.itemsize, dtype=np.uint8).view(f"u{dtype.itemsize}")
        changes[f"w{number}"] = Change(dtype="", shape=(), indices=indices, values=new, base=0, result=0)
        placements[f"w{number}"] = PlacedTensor("", (), (route,))
    laid = lay_out(changes, placements)
    there = [holder.cuda() for holder in holders]
    before = [holder.clone() for holder in holders]
    host, device = HostPatch(laid, holders), DevicePatch(laid, there)
    one, other = host.look(), device.look()
    assert (list(one.pieces), list(one.holders)) == (list(other.pieces), list(other.holders))
    host.write()
    device.write()
    assert [same(*pair) for pair in zip(holders, there, strict=True)] == [True, True]
    assert not same(before[0], there[0])
    device.undo()
    in_place._memory.cache_clear()
    assert [same(*pair) for pair in zip(before, there, strict=True)] == [True, True]


def same(some: Any, other: Any) -> bool:
    return torch.equal(some.view(torch.uint8), other.cpu().view(torch.uint8))


def copies(target: Any, source: Any) -> list[PlanCopy]:
    """Of the parts of a tensor `w`: whole rows that become one move, columns, and a transposed part."""
    parts = [
        (target[0:100], source[0:100]),
        (target[100:200], source[100:200]),
        (target[200:300, 10:138], source[200:300, 10:138]),
        (target[300:337, :100], source[300:400, 3:40].t()),
    ]
    return [PlanCopy("w", other.storage_offset(), tuple(other.shape), other.stride(), some) for some, other in parts]


def test_copies_from_registered_files_are_torchs_copies(folder: Path) -> None:
    """The file is looked at anew each time, and registered once."""
    data = bits(torch.bfloat16, 400 * 256).view(400, 256)
    save_file({"w": data}, folder / "model.safetensors")
    registry, target = Registry(), torch.zeros(400, 256, dtype=torch.bfloat16, device="cuda")
    wanted = torch.zeros(400, 256, dtype=torch.bfloat16)
    for copy in copies(wanted, data):
        copy.target.copy_(copy.source({"w": data}))
    for _ in range(2):
        source = mapped(VersionPlace(folder.parent, folder.name))
        files = source.registered(registry, 0)
        assert files is not None
        table = copy_schedule.table_of(copies(target, data), source.structure.headers)
        assert [len(moves) for moves in table.moves.values()] == [2]
        for ready in (
            copy_schedule.by_address(driver.to_device, table, files, torch.device("cuda", 0), source.tensors),
            copy_schedule.buffered(copies(target, data), lambda: {"w": data}),
        ):
            target.zero_()
            for step in ready.steps:
                step()
            torch.cuda.synchronize()
            assert same(wanted, target)
        assert len(registry) == 1
    del files, ready, source
    (folder / "model.safetensors").unlink()
    registry.begin()
    assert len(registry) == 0


@pytest.mark.parametrize("registers", [True, False])
def test_updates_of_a_model_on_a_gpu(folder: Path, registers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the loader, by replay and by delta, prepared or not, and undone."""
    root, startup = folder / "root", folder / "startup"
    (root / ".refitd").mkdir(parents=True)
    startup.mkdir()
    save_file(tiny_weights(0), startup / "model.safetensors")
    rank = Rank(startup, device="cuda")
    if not registers:
        rank.engine.loading.registry._refused = True
    for step, how in ((1, "load"), (2, "replay"), (3, "replay")):
        path = version(root, step, fingerprints=True)
        if step == 3:
            rank.engine.prepare(str(path))
        answer = rank.answer(path)
        assert (answer.outcome, answer.how, answer.proved) == (UpdateOutcome.SERVED, how, 6)
        assert rank.holds(step)
        assert answer.contents == digest(contents_of(rank.model))
    assert (len(rank.engine.loading.registry) == 2) == registers
    weights = tiny_weights(3)
    for step in (4, 5):
        after = {name: tensor.clone() for name, tensor in weights.items()}
        for name in ("q.weight", "down.weight", "turned.weight", "embed.weight"):
            after[name].view(-1)[step] = step
        path = delta(root, step, step - 1, weights, after)
        if step == 5:
            rank.engine.prepare(str(path))
        answer = rank.answer(path)
        assert (answer.outcome, answer.how, answer.proved) == (UpdateOutcome.SERVED, "delta", 6)
        assert values(rank.model) == expected(after)
        weights = after
    put = DevicePatch.write

    def failing(patch: DevicePatch) -> None:
        put(patch)
        raise RuntimeError("lost the device")

    monkeypatch.setattr(DevicePatch, "write", failing)
    after = {name: tensor.clone() for name, tensor in weights.items()}
    after["k.weight"].zero_()
    assert rank.answer(delta(root, 6, 5, weights, after)).outcome is UpdateOutcome.RESTORED
    assert values(rank.model) == expected(weights)
