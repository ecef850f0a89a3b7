"""What ranks lend in parts: copies cut along any parts are those of the whole tensor, and the model is the same."""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from refitd_client.contract.plugin import UpdateOutcome
from refitd_client.sharded.export import offered_layout
from refitd_client.sharded.layout import AgreedLayout, Box, Claim, Split, boxes_of, lay_out, runs
from refitd_client.sharded.orders import LentPart
from refitd_client.transport import exporter
from refitd_client.transport.offer import (
    FORMAT_OF_RANKS,
    HostPlace,
    OfferedPart,
    OfferedTensor,
    OfferLayout,
    OfferRefusedError,
    fault_of_parts,
    offer_with,
    piece_name,
    seal,
    unseal,
)
from refitd_client.transport.offer_file import ExportedTensors, make_secret, read_secret
from refitd_client.transport.schedule import Strip, joined
from refitd_plugin.memory.imported import copies_together, cut_copies
from refitd_plugin.update.recorder import PlanCopy
from support.exporting import fill, shared
from support.lending import LendingRank, agreed_on, offer_of_ranks, split
from support.mini_sglang import tiny_weights
from support.tiny_rank import Rank, group, together, version

SECRET = b"s" * 32
NOWHERE = HostPlace("/dev/null", 0)


def parts_of(shape: tuple[int, ...], splits: list[list[Split]]) -> tuple[OfferedPart, ...]:
    """The parts of ranks that hold a tensor of 2-byte elements as their splits say."""
    found: list[OfferedPart] = []
    for number, some in enumerate(splits):
        for box in boxes_of(shape, some):
            lengths = ((run.at * 2, (run.end - run.begin) * 2) for run in runs(box, shape, 0, box.count))
            found += [OfferedPart(*strip, HostPlace(f"{number}", 0)) for strip in joined(lengths)]
    return tuple(found)


@st.composite
def tensors(draw: st.DrawFn) -> OfferedTensor:
    """A tensor in parts, of up to three dimensions of which up to two are split."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    counts = {dim: draw(st.integers(1, 4)) for dim in draw(st.sets(st.integers(0, len(shape) - 1), max_size=2))}
    ranks: list[list[Split]] = [[]]
    for dim, count in counts.items():
        ranks = [[*some, Split(dim, index, count)] for some in ranks for index in range(count)]
    return OfferedTensor("w", "BF16", shape, NOWHERE, parts_of(shape, ranks))


def memory_of(tensor: OfferedTensor, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """The pieces as ranks have them in memory."""
    flat, found = whole.reshape(-1), dict[str, torch.Tensor]()
    for number, part in enumerate(tensor.parts):
        rows = flat.as_strided((part.rows, part.width // 2), (part.pitch // 2, 1), part.begin // 2)
        found[piece_name(tensor.name, number)] = rows.reshape(-1).clone()
    return found


@st.composite
def selections(draw: st.DrawFn, whole: torch.Tensor) -> torch.Tensor:
    """What a loader may copy of a tensor: slices of it, turned or seen in another shape."""
    columns = [size for size in range(1, whole.numel() + 1) if whole.numel() % size == 0]
    some = whole.reshape(-1, draw(st.sampled_from(columns))) if draw(st.booleans()) else whole
    for dim in range(some.dim()):
        begin = draw(st.integers(0, some.shape[dim] - 1))
        some = some.narrow(dim, begin, draw(st.integers(1, some.shape[dim] - begin)))
    return some.transpose(0, -1) if draw(st.integers(0, 4)) == 0 else some


@given(data=st.data(), tensor=tensors())
def test_copies_that_are_cut_along_parts_are_those_from_the_whole_tensor(data: st.DataObject, tensor: Any) -> None:
    whole = torch.arange(prod(tensor.shape), dtype=torch.int16).reshape(tensor.shape)
    source = data.draw(selections(whole))
    gaps = [data.draw(st.integers(0, 2)) for _ in source.shape]
    room = torch.full([size + gap for size, gap in zip(source.shape, gaps, strict=True)], -1, dtype=torch.int16)
    wanted, where = room.clone(), tuple(slice(gap, None) for gap in gaps)
    target, other = room[where], wanted[where]
    other.copy_(source)
    plan = PlanCopy("w", int(source.storage_offset()), tuple(source.shape), source.stride(), target)
    pieces = memory_of(tensor, whole) | {"w": whole}
    for copy in cut_copies([plan], {"w": tensor}):
        copy.target.copy_(copy.source(pieces))
    assert torch.equal(room, wanted)


@given(tensors())
def test_parts_put_together_are_the_tensor(tensor: OfferedTensor) -> None:
    whole = torch.arange(prod(tensor.shape), dtype=torch.int16).reshape(tensor.shape)
    made, pieces = torch.full_like(whole, -1), memory_of(tensor, whole)
    for copy in copies_together(tensor, made):
        copy.target.copy_(copy.source(pieces))
    assert torch.equal(made, whole)


def test_a_slice_of_rows_and_one_of_columns_are_cut_and_only_a_turned_matrix_is_put_together() -> None:
    whole = torch.arange(48, dtype=torch.int16).reshape(8, 6)
    rows = OfferedTensor("w", "BF16", (8, 6), NOWHERE, parts_of((8, 6), [[Split(0, rank, 3)] for rank in range(3)]))
    columns = OfferedTensor("w", "BF16", (8, 6), NOWHERE, parts_of((8, 6), [[Split(1, rank, 2)] for rank in range(2)]))
    for source, counts in ((whole[2:7], (3, 2)), (whole[:, 1:5], (3, 2)), (whole[:, :3], (3, 1)), (whole.t(), (0, 0))):
        target = torch.empty_like(source.contiguous())
        plan = PlanCopy("w", int(source.storage_offset()), tuple(source.shape), source.stride(), target)
        for tensor, count in zip((rows, columns), counts, strict=True):
            names = [copy.name for copy in cut_copies([plan], {"w": tensor})]
            assert names == (["w"] if not count else [piece_name("w", number) for number in range(count)])


def test_strips_of_one_part_follow_each_other_in_the_rank_s_memory() -> None:
    """As of a cube that is split along two dimensions."""
    layout = lay_out(
        [[Claim(name="w", dtype="bfloat16", shape=(12,), boxes=(Box((0,), (12,)),), memory="w")]],
        inventory=lambda: None,
        max_shard_bytes=None,
        check_finite=True,
    )
    agreed = AgreedLayout(number=1, claims=[], layout=layout)
    lent = [LentPart("w", (Strip(2, 4), Strip(10, 2, 2, 6)), HostPlace("a", 100)), LentPart("w", (), HostPlace("b", 0))]
    (tensor,) = offered_layout(agreed, [lent], [""]).tensors
    assert tensor.parts == (
        OfferedPart(2, 4, 1, 0, HostPlace("a", 100)),
        OfferedPart(10, 2, 2, 6, HostPlace("a", 104)),
    )


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([(0, 12, 1, 12)], "its parts have not as many bytes as it has"),
        ([(0, 12, 1, 12), (10, 12, 1, 12)], "two of its parts overlap"),
        ([(0, 4, 3, 8), (2, 4, 3, 8)], "two of its parts overlap"),
        ([(0, 12, 1, 12), (14, 12, 1, 12)], "a part ends beyond it"),
        ([(0, 11, 1, 11), (11, 13, 1, 13)], "a part begins or ends within an element"),
        ([(0, 12, 2, 8)], "a part has no bytes, or rows that overlap"),
        ([(0, 0, 1, 0)], "a part has no bytes, or rows that overlap"),
        ([(-2, 24, 1, 24)], "a part has no bytes, or rows that overlap"),
        ([(0, 4, 3, 8), (4, 4, 3, 8)], None),
    ],
)
def test_an_offer_whose_parts_are_not_the_tensor_is_refused(
    parts: list[tuple[int, int, int, int]], fault: str | None
) -> None:
    tensor = OfferedTensor("w", "BF16", (3, 4), NOWHERE, tuple(OfferedPart(*each, NOWHERE) for each in parts))
    assert fault_of_parts(tensor) == fault
    layout = OfferLayout(host="a", boot="b", pid=1, life="c", tensors=(tensor,), format=FORMAT_OF_RANKS, lenders=())
    data = seal(offer_with(layout, "run~v000001", [0]), SECRET)
    if fault is None:
        assert unseal(data, SECRET).layout == layout
    else:
        with pytest.raises(OfferRefusedError, match=fault):
            unseal(data, SECRET)


def test_a_lock_that_is_none_of_a_rank_s_is_refused() -> None:
    """An engine opens the files that these names lead to."""
    for name in ("../.lender.lock", ".lender.lock", "v000001"):
        layout = OfferLayout(host="a", boot="b", pid=1, life="c", tensors=(), format=FORMAT_OF_RANKS, lenders=(name,))
        with pytest.raises(OfferRefusedError, match="a lock that no rank of a trainer has"):
            unseal(seal(offer_with(layout, "run~v000001", []), SECRET), SECRET)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "root" / ".refitd").mkdir(parents=True)
    (tmp_path / "root" / "run").mkdir()
    make_secret(tmp_path / "root")
    save_file(tiny_weights(0), tmp_path / "root" / "model.safetensors")
    yield tmp_path / "root"
    exporter.end(tmp_path / "root" / "run")


def startup(root: Path) -> Path:
    folder = root.parent / "startup"
    folder.mkdir(exist_ok=True)
    save_file(tiny_weights(0), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("case", range(6))
@pytest.mark.parametrize("size", [1, 2])
def test_a_model_that_is_lent_in_random_parts_is_the_one_that_its_files_give(
    root: Path, case: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rows, by columns, replicated, of one rank alone, uneven; in place, and copied where it is in own memory."""
    chance = torch.Generator().manual_seed(case)

    def number(below: int) -> int:
        return int(torch.randint(0, below, (), generator=chance))

    ranks, weights = 1 + number(4), tiny_weights(5)
    dims = {name: [0, tensor.dim() - 1, None][number(3)] for name, tensor in weights.items()}
    owners = {name: number(ranks) for name in weights if number(2)}
    members = group(startup(root), monkeypatch, size) if size > 1 else [Rank(startup(root))]
    for step in range(1, 1 + number(3)):  # with a plan, or without one
        together(members, version(root, step))
    lenders = list[LendingRank]()
    made = list[Any]()
    for rank, (tensors, parts) in enumerate(split(weights, dims, ranks, owners)):
        mine = tensors
        if number(2):
            made.append(shared(tensors, root))
            mine = made[-1].tensors
        lenders.append(LendingRank(root / "run", rank, mine, parts))
    agreed = agreed_on([each.claims for each in lenders])
    offer = offer_of_ranks("run~v000005", agreed, [each.lend(agreed) for each in lenders])
    with ExportedTensors(root / "run", offer, read_secret(root)) as exported:
        for member in members:
            member.engine._ranks.size = size
        path = root / "run" / "v000005"
        together_prepared(members, path, f"run/{exported.path.name}")
        answers = together(members, path)
        assert [each.outcome for each in answers] == [UpdateOutcome.SERVED] * size, answers
        assert all(each.holds(5) for each in members)
        assert exported.take_back(0.0)
    for each in [*lenders, *made]:
        each.close()


def together_prepared(members: list[Rank], path: Path, offer: str) -> None:
    for member in members:
        member.engine.prepare(str(path), offer=offer)


def test_when_a_rank_leaves_the_publication_nothing_is_taken_that_was_offered_before(root: Path) -> None:
    """Also where it comes back, and lends the same memory again."""
    rank = Rank(startup(root))
    (first, second) = split(tiny_weights(5), {"q.weight": 0}, 2, {})
    lenders = [LendingRank(root / "run", number, *each) for number, each in enumerate((first, second))]
    agreed = agreed_on([each.claims for each in lenders])
    offer = offer_of_ranks("run~v000005", agreed, [each.lend(agreed) for each in lenders])
    with ExportedTensors(root / "run", offer, read_secret(root)) as exported:
        path = root / "run" / "v000005"
        rank.engine.prepare(str(path), offer=f"run/{exported.path.name}")
        lenders[1].export.end()
        lenders[1].lend(agreed)
        assert rank.answer(path).outcome is UpdateOutcome.REFUSED
        assert rank.holds(0)
    for each in lenders:
        each.close()


def test_what_is_lent_again_at_the_same_places_is_read_anew(root: Path) -> None:
    """Also what is put together: the copies are made ready once, and what is there is read in each pause."""
    rank = Rank(startup(root))
    for step in (1, 2):
        rank.answer(version(root, step))
    made, lenders = list[Any](), list[LendingRank]()
    for number, (tensors, parts) in enumerate(split(tiny_weights(5), {"turned.weight": 1, "q.weight": 0}, 2, {})):
        made.append(shared(tensors, root))
        lenders.append(LendingRank(root / "run", number, made[-1].tensors, parts))
    agreed = agreed_on([each.claims for each in lenders])
    for step in (5, 6, 7):
        for there, (tensors, _) in zip(made, split(tiny_weights(step), {"turned.weight": 1, "q.weight": 0}, 2, {}),
                                       strict=True):  # fmt: skip
            fill(there, tensors)
        offer = offer_of_ranks(f"run~v{step:06d}", agreed, [each.lend(agreed) for each in lenders])
        with ExportedTensors(root / "run", offer, read_secret(root)) as exported:
            path = root / "run" / f"v{step:06d}"
            rank.engine.prepare(str(path), offer=f"run/{exported.path.name}")
            assert rank.answer(path).how == "replay"
            assert rank.holds(step)
        version(root, step)  # its files follow
    for each in [*lenders, *made]:
        each.close()
