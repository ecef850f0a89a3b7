"""Which bytes of each tensor a rank needs, by its load plan: what a load of these bytes alone gives is the same."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refitd_client.transport.needs import NeedsRefusedError, encode, path_of, read_needs
from refitd_client.transport.schedule import Strip
from refitd_plugin.update.receiving import AnnouncedNeeds, needs_of, sizes_of, strips_of
from support.mini_sglang import TinyModel, expected, tiny_weights, values
from support.tiny_rank import Rank, version


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    """Two ranks whose load plans are proven: a load is learned from the first version, and tried with the second."""
    from support.tiny_rank import group, together

    startup = version(tmp_path / "startup", 0)
    members = group(startup, monkeypatch)
    for step in (1, 2):
        together(members, version(tmp_path / "root", step))
    return members


def needed(rank: Rank) -> dict[str, tuple[int, tuple[Strip, ...]]]:
    plan, served = rank.engine.loading.plan, rank.engine.restore_point.served_state
    found = needs_of(plan, sizes_of(served.source.structure))
    assert found is not None
    return {name: (each.nbytes, each.strips) for name, each in found.tensors.items()}


def test_a_rank_needs_its_rows_its_columns_and_the_whole_of_what_it_has_whole(ranks: list[Rank]) -> None:
    first, second = (needed(rank) for rank in ranks)
    assert (first["q.weight"], second["q.weight"]) == ((32, (Strip(0, 16, 1, 16),)), (32, (Strip(16, 16, 1, 16),)))
    columns = Strip(0, 6, 4, 12), Strip(6, 6, 4, 12)
    assert (first["down.weight"], second["down.weight"]) == ((48, columns[:1]), (48, columns[1:]))
    for name in ("embed.weight", "turned.weight", "norm.weight"):
        nbytes, strips = first[name]
        assert strips == (Strip(0, nbytes, 1, nbytes),)


def test_a_load_of_what_a_rank_needs_is_a_load_of_all(ranks: list[Rank]) -> None:
    """All other bytes may be anything."""
    for number, rank in enumerate(ranks):
        given = {}
        for name, tensor in tiny_weights(5).items():
            flat, junk = tensor.reshape(-1).view(torch.uint8), torch.full((tensor.nbytes,), 0x5A, dtype=torch.uint8)
            for each in needed(rank)[name][1]:
                for row in range(each.rows):
                    at = each.begin + row * each.pitch
                    junk[at : at + each.width] = flat[at : at + each.width]
            given[name] = junk.view(torch.bfloat16).reshape(tensor.shape)
        model = TinyModel(number, 2)
        model.load_weights(given.items())
        assert values(model) == expected(tiny_weights(5), number, 2)


@given(st.data())
def test_the_strips_of_a_copy_are_the_bytes_that_it_reads(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    part = whole
    for dim, size in enumerate(shape):
        begin = data.draw(st.integers(0, size - 1))
        part = part.narrow(dim, begin, data.draw(st.integers(1, size - begin)))
    part = part.permute(data.draw(st.permutations(range(len(shape)))))
    strips = strips_of(int(part.storage_offset()), part.shape, part.stride(), 4)
    assert strips is not None
    read = [at // 4 for each in strips for row in range(each.rows)
            for at in range(each.begin + row * each.pitch, each.begin + row * each.pitch + each.width, 4)]  # fmt: skip
    assert sorted(read) == sorted(part.reshape(-1).tolist())


def test_a_plan_that_is_not_proven_says_nothing(ranks: list[Rank]) -> None:
    plan = ranks[0].engine.loading.plan
    plan.proven = False
    assert needs_of(plan, {"q.weight": 32}) is None


def test_an_expert_that_no_copy_touches_is_not_needed(ranks: list[Rank]) -> None:
    plan = ranks[0].engine.loading.plan
    plan.unused = frozenset({"experts.7.up.weight"})
    found = needs_of(plan, {"experts.7.up.weight": 64, "q.weight": 32})
    assert found is not None
    assert found.tensors["experts.7.up.weight"].strips == ()
    assert not found.tensors["experts.7.up.weight"].is_partial


def test_what_a_rank_needs_is_written_where_a_trainer_reads_it_and_another_file_is_refused(
    ranks: list[Rank], tmp_path: Path
) -> None:
    root, announced = tmp_path / "root", AnnouncedNeeds()
    (root / ".refitd").mkdir()
    plan, served = ranks[0].engine.loading.plan, ranks[0].engine.restore_point.served_state
    sizes = sizes_of(served.source.structure)
    digest = announced.digest(plan, sizes, root, "0-1-ab.sock")
    found = read_needs(root, "0-1-ab.sock", digest)
    assert encode(found)[1] == digest
    assert found.fits(sizes)
    assert not found.fits({**sizes, "q.weight": 64})
    assert not found.fits({**sizes, "more": 1})
    path_of(root, "0-1-ab.sock", digest).write_bytes(b"{}")
    with pytest.raises(NeedsRefusedError, match="not what the rank has announced"):
        read_needs(root, "0-1-ab.sock", digest)
    with pytest.raises(NeedsRefusedError, match="no digest"):
        read_needs(root, "0-1-ab.sock", "../../secret")
