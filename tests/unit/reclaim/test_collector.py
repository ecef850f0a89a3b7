"""What a sweep believes of the root."""

from collections.abc import Sequence
from pathlib import Path

from refitd.catalog.files import DiskFiles, Unreadable
from refitd.clock import SystemClock
from refitd.reclaim.books import Books
from refitd.root.scan import FoundFolder, Listing, ListingFailed
from refitd.state.journal.journal import Journal
from refitd.state.records import UpdateRecord
from refitd.state.store import Store
from refitd.update.targets import Targets
from refitd_client.contract.states import UpdateState
from support.records import version


class Halved(DiskFiles):
    """A root whose listing leaves out what `hidden` names; each folder itself can be looked at."""

    def __init__(self, root: Path, listed: Sequence[str], there: Sequence[str]) -> None:
        super().__init__(root)
        self._listed = listed
        self._there = there

    async def scan(self) -> Listing | ListingFailed:
        known = {v.path: v for v in (version(step) for step in range(1, 4))}
        found = tuple(FoundFolder(run="run", order=known[path].order, path=path) for path in self._listed)
        return Listing(found, frozenset({"run"}))

    async def signatures(self, paths: Sequence[str]) -> dict[str, str | Unreadable | None]:
        return {path: "there" if path in self._there else None for path in paths}


def facts(folder: Path, *, listed: Sequence[str], there: Sequence[str]) -> Books:
    store = Store(Journal(folder), SystemClock())
    for step in (1, 2):
        store.put_version(version(step))
    store.put_version(version(3, path="run/named-by-the-trainer"))
    return Books(store, Targets(store), Halved(folder, listed, there))


ONE, TWO, NAMED = "run/v000001", "run/v000002", "run/named-by-the-trainer"


async def test_a_listing_that_leaves_out_what_is_there_is_not_believed(tmp_path: Path) -> None:
    for listed in ([], [TWO]):
        listing = await facts(tmp_path / str(len(listed)), listed=listed, there=[ONE, TWO, NAMED]).listing()
        assert isinstance(listing, ListingFailed)
        assert listing.reason == "run/v000001 is there and was not listed"


async def test_a_folder_with_a_name_of_its_own_counts_as_listed(tmp_path: Path) -> None:
    listing = await facts(tmp_path, listed=[TWO], there=[TWO, NAMED]).listing()
    assert isinstance(listing, Listing)
    assert [found.path for found in listing.found] == [TWO, NAMED]


def held_back(store: Store) -> bool:
    """Whether the sweep takes the run for one that is being rolled back."""
    (run,) = Books(store, Targets(store), Halved(Path("unused"), [], [])).views().runs
    return run.rolling_back


def test_a_run_goes_back_only_from_something_newer(tmp_path: Path) -> None:
    """A version that was barred long ago does not make every later step a rollback."""
    store = Store(Journal(tmp_path), SystemClock())
    store.put_version(version(1, barred=True))
    store.put_version(version(2))
    rolling = UpdateRecord(
        number=1, run="run", version=version(2).id, cause="notice", started_at="now", state=UpdateState.ROLLING
    )
    store.put_update(rolling, "rolling")
    assert not held_back(store)
    store.put_version(version(3, barred=True))
    assert held_back(store)
