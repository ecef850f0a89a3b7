"""A hub group whose database is restored from a backup, while its hosts go on: none goes back, and an operator's word
has them obey.
"""

import shutil
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from refitd_client.contract.states import EngineState, WaitOutcome
from support.command_line import refitd
from support.hosts import RUN, Host, hosts, until
from support.postgres import PostgresServer

ONE, TWO = f"{RUN}~v000001", f"{RUN}~v000002"
_LEASE = "6"  # seconds: on a machine that does much else a leader must not lose the lead by itself


class Backup:
    """Copies of a group's database and of its root. No service may run while one is made or put back."""

    def __init__(self, postgres: PostgresServer, database: str, root: Path, copy: Path) -> None:
        self._server, self._root, self._copy = postgres.uri("postgres"), root, copy
        self._name = urlsplit(database).path.removeprefix("/")
        self._do(f'CREATE DATABASE "{self._name}-backup" TEMPLATE "{self._name}"')
        shutil.copytree(root, copy)

    def restore(self, *, root: bool) -> None:
        """Put the database back, and the root with it or not."""
        self._do(f'DROP DATABASE "{self._name}" WITH (FORCE)')
        self._do(f'CREATE DATABASE "{self._name}" TEMPLATE "{self._name}-backup"')
        if root:
            shutil.rmtree(self._root)
            shutil.copytree(self._copy, self._root)

    def _do(self, statement: str) -> None:
        with psycopg.connect(self._server, autocommit=True) as connection:
            connection.execute(statement.encode())


def at_hub(hub: Host) -> tuple[EngineState, str | None]:
    record = hub.client.engine("one")
    return record.state, record.version


@pytest.mark.parametrize("root", [False, True], ids=["database", "database-and-root"])
def test_hosts_of_a_group_whose_database_is_restored_from_a_backup_go_back_to_nothing_and_say_why_they_wait(
    root: bool, tmp_path: Path, postgres: PostgresServer
) -> None:
    """The epoch of the restored group is below the one that hosts have heard; where the root is restored as well, it
    does not know what they serve.
    """
    database = postgres.database()
    with hosts(tmp_path, "--state", database, "--lease", _LEASE) as all_:
        hub, one = all_.hub, all_.led("one")
        assert hub.client.wait(all_.publish(1), timeout=30).outcome is WaitOutcome.SERVED
        hub.refitd.stop()
        backup = Backup(postgres, database, hub.root, tmp_path / "backup")
        for _ in range(2):  # takeovers since
            hub.refitd.start()
            until(lambda: at_hub(hub)[0] is EngineState.IN_SYNC, hub, one)
            hub.refitd.stop()
        hub.refitd.start()
        assert hub.client.wait(all_.publish(2), timeout=60).outcome is WaitOutcome.SERVED
        heard = one.following()["fence"]
        hub.refitd.stop()
        backup.restore(root=root)
        hub.refitd.start()
        why = f"has led with epoch {heard} since"
        until(lambda: why in (one.following()["fault"] or ""), hub, one)
        assert why in " ".join(refitd("status", "--url", one.refitd.url).output.split())
        one.refitd.restart()
        until(lambda: why in (one.following()["fault"] or ""), hub, one)
        assert one.serves(2), "an epoch below the one that was heard is not obeyed"
        goal = ONE if root else TWO
        until(lambda: any(each.id == "one" for each in hub.client.engines().items), hub, one)
        until(lambda: hub.client.overview().runs[0].target == goal, hub, one)
        refitd("rollback", RUN, "--to", goal, "--yes", "--url", hub.refitd.url)
        until(lambda: at_hub(hub) == (EngineState.IN_SYNC, goal) and one.following()["refused"] is None, hub, one)
        assert one.serves(1 if root else 2)
        third = all_.publish(3)
        until(lambda: one.serves(3) and at_hub(hub) == (EngineState.IN_SYNC, third), hub, one)
