"""Where each version stands in lists that go over all runs. Pure.

"Newest first" means two things: across runs by the time of the first sight, within one run by generation and step. They
disagree where a run's earlier step is seen after a later one. So each version has a place, a number:

    the number of its first sight, counted up over all runs,
    or the place of the next version of its run, where that is smaller: a late step joins the step that it precedes.

Lists go by (place, generation, step), the greatest first. That is a total order, since only versions of one run share a
place. It is the order of (generation, step) within each run. A place never changes: a version that comes later is never
the reason for one that is smaller. So a cursor, which is such a key, neither skips nor repeats what was there before.
"""

from bisect import bisect_left, insort

from refitd_client.contract.naming import Order

Row = tuple[int, int, int]  # generation, step, place


class ListOrder:
    """The places of all versions that were ever seen, deleted ones among them."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Row]] = {}  # of each run, in the order of generation and step
        self._last = 0

    def remember(self, run: str, row: Row) -> None:
        """Take a version whose place is known already."""
        insort(self._rows.setdefault(run, []), row)
        self._last = max(self._last, row[2])

    def of(self, run: str, order: Order) -> int:
        """The place of a version. One that was not seen before gets its own now."""
        rows, key = self._rows.setdefault(run, []), (order.generation, order.step)
        at = bisect_left(rows, (*key, 0))
        if at < len(rows) and rows[at][:2] == key:
            return rows[at][2]
        if at < len(rows):
            place = rows[at][2]
        else:
            self._last = place = self._last + 1
        rows.insert(at, (*key, place))
        return place
