"""A store gets versions that have files: where a trainer wants none of some, the service that pushes says so once."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from refitd.clock import SystemClock
from refitd.policy.strategy import Strategy
from refitd.state.journal.journal import Journal
from refitd.state.store import Store
from refitd.update.targets import Targets
from refitd_client.contract.states import VersionState
from refitd_hosts.push.plan import without_files
from refitd_hosts.push.pusher import Pusher
from support.buckets import ScriptedBucket
from support.records import version

WANTED_NONE: dict[str, Any] = {"state": VersionState.ANNOUNCED, "handed": True, "metadata": {"durable": "never"}}


@pytest.mark.parametrize(
    ("fields", "is_said"),
    [
        (WANTED_NONE, True),
        (WANTED_NONE | {"metadata": {}}, False),  # its files are to follow
        (WANTED_NONE | {"state": VersionState.SEALED}, False),  # it got some, since an engine did not take it
        (WANTED_NONE | {"state": VersionState.REJECTED}, False),
        ({"metadata": {"durable": "never"}}, False),  # a trainer's own word, of a version in files
    ],
)
def test_it_is_the_newest_of_the_run_if_its_trainer_wants_no_files(fields: dict[str, Any], is_said: bool) -> None:
    newest = version(2, **fields)
    assert without_files([version(1, **WANTED_NONE), newest]) == (newest if is_said else None)
    assert without_files([]) is None


def test_it_is_said_once_of_a_run_that_its_versions_are_not_pushed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state")
    store, said = Store(journal, SystemClock()), list[str]()
    pusher = Pusher(store, Targets(store, Strategy()), tmp_path / "root", ScriptedBucket(), keep=2)
    store.say = lambda kind, subject, text, **more: said.append(f"{subject}: {text}")  # pyright: ignore[reportAttributeAccessIssue]
    for step in (1, 2):
        store.put_version(version(step, **WANTED_NONE))
        assert asyncio.run(pusher._push_run("run", collects=False)) is False
    journal.close()
    (text,) = [text for text in said if "pushed" in text]
    assert "run~v000001: it gets files only where an engine does not take it (durable=never)" in text
    assert "only versions with files are pushed to" in text
