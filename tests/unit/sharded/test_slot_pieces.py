"""What ranks copy into a slot: each byte once, and all is there as far as the last of them says."""

import os
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refitd_client.contract.manifest import BLOCK, blocks
from refitd_client.contract.naming import STAGING_PROGRESS
from refitd_client.files.plain_file import NotPlainError, open_folder
from refitd_client.sharded.layout import Box, Claim, ShardedLayout, lay_out
from refitd_client.sharded.parts import sent_parts
from refitd_client.sharded.rank_slot import (
    WriterProgress,
    begin_progress,
    blocks_of,
    digests_of_files,
    open_progress,
    read_progress,
    slot_parts,
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[list[Claim]], ShardedLayout]:
    """Tensors cut by rows, by columns or not at all over two or three ranks, in files of a few hundred bytes."""
    ranks = draw(st.integers(1, 3))
    claims: list[list[Claim]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(1, 5))):
        shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 9)))
        dim, name = draw(st.sampled_from([0, 1, None])), f"t{number}"
        cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=ranks - 1, max_size=ranks - 1))) if (
            dim is not None) else []  # fmt: skip
        sides = list(zip([0, *cuts], [*cuts, shape[dim]], strict=True)) if dim is not None else []
        for rank in range(ranks):
            start, size = [0, 0], list(shape)
            if dim is not None:
                start[dim], size[dim] = sides[rank][0], sides[rank][1] - sides[rank][0]
            box = Box(tuple(start), tuple(size))
            claims[rank].append(
                Claim(
                    name=name,
                    dtype="float16",
                    shape=shape,
                    boxes=(box,) if prod(size) else (),
                    memory=name if prod(size) else None,
                )
            )
    most = draw(st.sampled_from([None, 200]))
    return claims, lay_out(claims, inventory=lambda: None, max_shard_bytes=most, check_finite=True)


@given(layouts(), st.integers(1, 40), st.sets(st.sampled_from(["t0", "t1", "t2"])))
def test_each_byte_is_copied_once_and_no_rank_says_that_it_is_further_than_it_is(
    made: tuple[list[list[Claim]], ShardedLayout], most: int, late: set[str]
) -> None:
    claims, layout = made
    sizes = [shard.size for shard in layout.shards.shards]
    written = [np.zeros(size, np.uint8) for size in sizes]
    for shard, file in zip(layout.shards.shards, written, strict=True):
        file[: len(shard.header)] += 1
    for own, parts in zip(claims, layout.parts, strict=True):
        sent = sent_parts(parts, own)
        mine = slot_parts(sent, layout.locations, sizes, made=late, most=most)
        places = [np.array([], np.int64) for _ in sizes]
        for part in mine:
            for piece in part.pieces:
                strip = piece.strip
                bytes_of = np.concatenate([strip.begin + row * strip.pitch + np.arange(strip.width)
                                           for row in range(strip.rows)])  # fmt: skip
                assert strip.rows == 1 or len(bytes_of) <= max(most, strip.width)
                places[part.file] = np.concatenate([places[part.file], bytes_of])
                written[part.file][bytes_of] += 1
        for part in mine:  # what remains at each of its words begins at or after the byte that it names
            for piece in part.pieces:
                done = [each for other in mine if other.file == part.file for each in other.pieces]
                rest = done[done.index(piece) + 1 :]
                assert all(each.strip.begin >= piece.reached for each in rest)
        for file, size in enumerate(sizes):
            last = [piece for part in mine if part.file == file for piece in part.pieces][-1:]
            assert all(piece.reached == size for piece in last)
        for is_late in (False, True):
            names = [part.sent.entry.name for part in mine if (part.sent.entry.name in late) == is_late]
            assert names == sorted(names, key=lambda name: (layout.locations[name].file, layout.locations[name].offset))
    assert all((file == 1).all() for file in written)


@given(st.lists(st.integers(0, 3 * BLOCK), min_size=1, max_size=4), st.integers(1, 4))
def test_the_blocks_that_ranks_digest_make_up_each_file(sizes: list[int], ranks: int) -> None:
    shares = [
        [f"{block.file} {block.begin} {block.end}".encode() for block in blocks_of(sizes)[rank::ranks]]
        for rank in range(ranks)
    ]
    found = digests_of_files(sizes, shares)
    assert found == [
        [f"{file} {begin} {end}".encode() for begin, end in blocks(size)] for file, size in enumerate(sizes)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> int:
    return open_folder(tmp_path)


def test_all_is_there_as_far_as_the_rank_says_that_has_come_least_far(tmp_path: Path, folder: int) -> None:
    begin_progress(tmp_path, 2, 3)
    ranks = [WriterProgress(open_progress(folder), ["b", "a"], rank) for rank in range(3)]
    read = open_progress(folder)
    assert read_progress(read, 2) == (0, 0)
    ranks[0].reached("a", 9)
    ranks[0].reached("b", 5)
    ranks[1].reached("a", 7)
    ranks[2].reached("b", 8)
    assert read_progress(read, 2) == (0, 0)
    ranks[2].reached("a", 8)
    ranks[1].reached("b", 2**40)
    assert read_progress(read, 2) == (7, 5)


def test_a_block_that_is_told_late_takes_nothing_back(tmp_path: Path, folder: int) -> None:
    begin_progress(tmp_path, 1, 1)
    rank = WriterProgress(open_progress(folder), ["a"], 0)
    rank.reached("a", 32)
    rank.reached("a", 16)
    assert read_progress(open_progress(folder), 1) == (32,)


@pytest.mark.parametrize("kind", ["none", "link", "fifo"])
def test_only_a_plain_file_is_opened(tmp_path: Path, folder: int, kind: str) -> None:
    if kind == "link":
        (tmp_path / "secret").write_bytes(b"12345678")
        (tmp_path / STAGING_PROGRESS).symlink_to("secret")
    elif kind == "fifo":
        os.mkfifo(tmp_path / STAGING_PROGRESS)
    with pytest.raises(FileNotFoundError if kind == "none" else NotPlainError):
        open_progress(folder)
