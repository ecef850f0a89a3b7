"""Copies between two strided tensors as few plain dimensions. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StridedRows:
    """A copy of `rows` rows of `columns` elements. Strides count elements, of a side from row to row and in a row."""

    rows: int
    columns: int
    source_row: int
    target_row: int
    source_column: int
    target_column: int


def rows_of(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> StridedRows | None:
    """A copy of some shape, by the strides of its two sides, as rows; None where it has more dimensions than two.

    The source's longer strides are those of the rows.
    """
    merged = _merged(shape, source, target)
    match merged:
        case []:
            return StridedRows(1, 1, 1, 1, 1, 1)
        case [(size, some, other)] if some == 1:
            return StridedRows(1, size, size, size, 1, other)
        case [(size, some, other)]:  # a column of a matrix
            return StridedRows(size, 1, some, other, 1, 1)
        case [(rows, source_row, target_row), (columns, source_column, target_column)]:
            return StridedRows(rows, columns, source_row, target_row, source_column, target_column)
        case _:
            return None


def _merged(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int, int]]:
    """(size, stride in the source, stride in the target), the longest first, what lies without gaps on both sides made
    one.
    """
    dimensions = sorted(
        ((size, some, other) for size, some, other in zip(shape, source, target, strict=True) if size != 1),
        key=lambda each: each[1],
        reverse=True,
    )
    found: list[tuple[int, int, int]] = []
    for size, some, other in dimensions:
        if found and found[-1][1:] == (size * some, size * other):
            found[-1] = (found[-1][0] * size, some, other)
        else:
            found.append((size, some, other))
    return found
