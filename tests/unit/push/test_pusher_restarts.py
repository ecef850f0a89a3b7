"""A hub that comes again pushes on, unless another publisher has its run by then."""

import asyncio
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from refitd.clock import SystemClock
from refitd.policy.strategy import Strategy
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.update.targets import Targets
from refitd_client.bucket.pointer import BucketVersion, Pointer, advanced
from refitd_client.contract.naming import Order
from refitd_client.contract.states import VersionState
from refitd_hosts.push.pusher import Pusher, _as_here
from support.buckets import RUN, ScriptedBucket, counted, publish_folder
from support.checkpoints import publish, tensors
from support.pushing import has, pushed
from support.records import version


def id_of(step: int) -> str:
    return f"exp~trial~v{step:06d}"


@dataclass
class Hub:
    folder: Path
    store: Store
    bucket: ScriptedBucket = field(default_factory=ScriptedBucket)

    def has(self, *steps: int) -> None:
        for step in steps:
            has(self.store, self.folder / "root", step)

    def push(self, *steps: int) -> Pointer:
        """What a process of the hub leaves that has these good versions as well, one after the other."""
        for step in steps[:-1]:
            self.push(step)
        self.has(*steps[-1:])
        return pushed(self.store, self.folder / "root", self.bucket)

    def bar(self, *steps: int) -> None:
        for step in steps:
            self.store.put_version(self.store.versions[id_of(step)].having(barred=True))

    @property
    def fault(self) -> str:
        return self.store.faults.push or ""


@pytest.fixture
def hub(tmp_path: Path) -> Generator[Hub]:
    journal = Journal(tmp_path / "state")
    yield Hub(tmp_path, Store(journal, SystemClock()))
    journal.close()


def test_a_hub_that_comes_again_goes_on_with_its_run(hub: Hub) -> None:
    first, again = hub.push(1), hub.push()  # there is nothing new, and it collects
    assert again.versions == first.versions
    assert again.writer != first.writer
    assert [version.order for version in hub.push(2).versions] == [Order(1, 2), Order(1, 1)]
    assert not hub.fault


def test_a_hub_that_comes_again_leaves_its_run_to_another_publisher_without_a_newer_version_and_says_so(
    hub: Hub,
) -> None:
    hub.push(1)
    trainer = publish_folder(hub.bucket.sibling(), publish(hub.folder / "elsewhere", RUN, 2, tensors(2)))
    pointer = hub.push()
    assert pointer == trainer.pointer
    assert pointer.target == id_of(2)
    assert "has exp~trial~v000002, which is not from here" in hub.fault
    publish_folder(hub.bucket.sibling(), publish(hub.folder / "elsewhere", RUN, 3, tensors(3)), run=trainer)
    assert hub.push(4).target == id_of(4)  # with a newer version it takes the run, as any publisher
    assert not hub.fault


def test_a_hub_that_takes_a_run_says_nothing_of_another_publisher_s_version_with_the_id_of_one_of_its_own(
    hub: Hub,
) -> None:
    publish_folder(hub.bucket, publish(hub.folder / "elsewhere", RUN, 1, tensors(9)))
    hub.has(1, 2)
    own = hub.store.versions[id_of(1)]
    hub.store.put_version(own.having(pinned=True, barred=True))
    pointer = hub.push()
    assert [(version.id, version.pinned, version.barred) for version in pointer.versions] == [
        (id_of(2), False, False),
        (id_of(1), False, False),
    ]
    assert _as_here(hub.store.versions, own.id)(pointer).target == id_of(2)  # nor is it wanted


def test_a_hub_that_wants_what_the_store_does_not_have_any_more_says_so_until_it_wants_something_else(hub: Hub) -> None:
    """It keeps more versions than the store, and rolls back to one of these: followers of the store cannot. The next
    version waits there as long as here.
    """
    hub.push(1, 2, 3)
    assert counted(hub.bucket) == [id_of(3), id_of(2)]
    hub.bar(2, 3)
    assert hub.push().target is None
    assert "engines here are to serve exp~trial~v000001, which is not in the store any more" in hub.fault
    first = hub.store.start_update(RUN, id_of(1), "rolled back")
    hub.store.put_update(replace(first, paused_since="now"), "paused")
    pointer = hub.push(4)
    assert (pointer.newest, pointer.target) == (Order(1, 4), None), "followers stay"
    hub.store.put_update(first, "resumed")
    assert hub.push().target == id_of(4)
    assert not hub.fault


def test_versions_that_are_pushed_in_a_pause_are_wanted_when_it_ends(hub: Hub) -> None:
    hub.push(1)
    update = hub.store.start_update(RUN, id_of(1), "newest")
    hub.store.put_update(replace(update, paused_since="now"), "paused")
    pointer = hub.push(2)
    assert (pointer.newest, pointer.target) == (Order(1, 2), id_of(1))
    hub.store.put_update(update, "goes on")
    assert hub.push().target == id_of(2)


def test_followers_do_not_go_to_what_a_rollback_has_left_and_the_hub_has_deleted(hub: Hub) -> None:
    hub.push(1, 2, 3)
    hub.store.put_version(replace(hub.store.versions[id_of(2)], state=VersionState.DELETED))
    hub.bar(3)
    pointer = hub.push()
    assert {each.id: each.barred for each in pointer.versions} == {id_of(3): True, id_of(2): True}
    assert pointer.target is None


def test_the_end_of_a_run_is_said_in_the_store_and_a_new_version_takes_it_back(hub: Hub) -> None:
    assert not hub.push(1).is_closed
    hub.store.close_run(RUN)
    closed = hub.push()
    assert closed.is_closed
    newer = BucketVersion(id=id_of(2), digest="xxh3:2")
    assert not advanced(closed, newer, writer="a trainer", keep=2, now=0.0).is_closed


def test_it_is_said_once_of_a_run_that_its_versions_are_not_pushed(hub: Hub) -> None:
    """A store gets versions that have files, and this trainer wants none."""
    said = list[str]()
    pusher = Pusher(hub.store, Targets(hub.store, Strategy()), hub.folder / "root", hub.bucket, keep=2)
    hub.store.say = lambda kind, subject, text, **more: said.append(f"{subject}: {text}")  # pyright: ignore[reportAttributeAccessIssue]
    for step in (1, 2):
        hub.store.put_version(version(step, state=VersionState.ANNOUNCED, handed=True, metadata={"durable": "never"}))
        assert asyncio.run(pusher._push_run("run", collects=False)) is False
    (text,) = [text for text in said if "pushed" in text]
    assert "run~v000001: it gets files only where an engine does not take it (durable=never)" in text
    assert "only versions with files are pushed to" in text
