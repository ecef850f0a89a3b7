"""The slices of all ranks of an engine, and what is found in them together after a load.

    plan      a rank that has learned one keeps the table of its slices in the ranks' store, under its digest
    commit    its report has that digest, and what its slices add to fingerprints; the tables are read once for a plan

`slices` decides. A rank that cannot read what another one names says that the version is wrong: so whichever rank
decides first, no version is kept that some of them found wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from refitd_plugin.ranks import Ranks
from refitd_plugin.slices import EngineTable, RankSlices, SliceSums, SliceVerdict, decode_sums
from refitd_plugin.transaction import RankReport, RankState, Reports


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceCheck:
    """What a rank found in its slices after a load, and what that is to be held against: the fingerprints that are
    `expected`, as hex digits by name, of which the manifest (`says`) speaks. `names` and `elements` are those of the
    tensors, by the numbers of the table.
    """

    found: SliceSums
    names: Sequence[str]
    elements: Sequence[int]
    expected: Mapping[str, str]
    says: str


class EngineSlices:
    """See the module. As seen by one rank."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._read: dict[tuple[int, str], RankSlices] = {}
        self._known: tuple[tuple[str, ...], EngineTable] | None = None

    def publish(self, check: SliceCheck | None) -> None:
        """Keep this rank's table where the others read it.

        Raises:
            Exception: the store is gone.
        """
        if check is not None:
            mine = check.found.slices
            self._ranks.keep(mine.digest, mine.encode())

    def verdict(self, reports: Reports, check: SliceCheck | None) -> SliceVerdict:
        """What the ranks found together, where all have written.

        Args:
            reports: of all ranks.
            check: what this rank found; None where it does not know its slices.
        """
        present = [each for each in reports if each is not None and each.state is RankState.WRITTEN]
        if len(present) < len(reports):
            return SliceVerdict()  # another decision than to keep it
        if check is None or not all(each.slices for each in present):
            return SliceVerdict()
        try:
            slices = [self._slices_of(each, check.found.slices) for each in present]
            table = self._table(slices, check.elements)
            sums = [decode_sums(each.sums) for each in present]
            return table.verdict(sums, check.names, check.expected, check.says)
        except ValueError as error:
            return SliceVerdict(f"what the ranks found in their slices of tensors cannot be read: {error}")

    def _slices_of(self, report: RankReport, mine: RankSlices) -> RankSlices:
        """A rank's slices. Raises ValueError where it does not keep them."""
        if report.slices == mine.digest:
            return mine
        key = report.rank, report.slices
        if key not in self._read:
            text = self._ranks.read(*key)
            if text is None:
                raise ValueError(f"rank {report.rank} does not keep them")
            found = RankSlices.decode(text, mine.inventory)
            if found.digest != report.slices:
                raise ValueError(f"rank {report.rank} keeps others")
            self._read = {other: each for other, each in self._read.items() if other[0] != report.rank} | {key: found}
        return self._read[key]

    def _table(self, slices: Sequence[RankSlices], elements: Sequence[int]) -> EngineTable:
        digests = tuple(each.digest for each in slices)
        known = self._known
        if known is None or known[0] != digests:
            known = self._known = digests, EngineTable(slices, elements)
        return known[1]
