"""A group of services on one database: the leader is killed, stopped, cut off or ended, and another one goes on."""

import signal
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from refitd_hosts.group.leadership import EXIT_LEAD_LOST
from support.hubs import Group, leader_of, rows, until
from support.mini_vllm import mini_vllm
from support.postgres import PostgresServer
from support.servers import refitd_ended

_LEASE = "6"  # seconds: on a machine that does much else a leader must not lose the lead by itself


@pytest.fixture
def group(tmp_path: Path, postgres: PostgresServer) -> Generator[Group]:
    with mini_vllm(tmp_path) as engine:
        found = Group(tmp_path, postgres.database(), engine, "--lease", _LEASE)
        try:
            yield found
        finally:
            found.stop()


def test_a_leader_that_is_killed_in_mid_load_is_followed_by_another_which_proves_the_engine_again(group: Group) -> None:
    leader = group.start()
    group.until_served(leader, group.publish(1))
    group.engine.may_load.clear()
    second = group.publish(2)
    until(lambda: group.loads(second), "a load has begun")
    leader.kill()
    follower = leader_of(group.hubs)
    group.engine.may_load.set()
    group.until_served(follower, second)

    def outcomes() -> list[tuple[str, str | None]]:
        return rows(group.database, "SELECT version, outcome FROM attempts ORDER BY rowid")

    until(lambda: outcomes()[-1] == (second, "ACK"), "the database says so too")  # what has ended is written later
    assert (second, "TAINTED") in outcomes()
    group.check(2)
    assert rows(group.database, "SELECT epoch FROM leadership") == [(2,)]


def test_a_leader_that_was_stopped_past_its_takeover_ends_and_writes_and_loads_nothing(group: Group) -> None:
    leader = group.start()
    group.until_served(leader, group.publish(1))
    leader.process.send_signal(signal.SIGSTOP)
    follower = group.other(leader)
    until(follower.leads, "the other one leads")
    group.until_served(follower, group.publish(2))
    leader.process.send_signal(signal.SIGCONT)
    leader.died()
    assert leader.process.wait(10) == EXIT_LEAD_LOST
    group.check(2)
    assert follower.leads()


def test_one_that_stands_by_says_who_leads_and_is_not_ready(group: Group) -> None:
    leader = group.start()
    other = group.other(leader)
    for path in ("/readyz", "/v1/engines"):
        reply = httpx.get(f"{other.url}{path}", trust_env=False)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert reply.json()["type"] == "urn:refitd:problem:not-leading"
        assert leader.url in reply.json()["detail"]
    assert httpx.get(f"{other.url}/healthz", trust_env=False).status_code == 200
    assert "refitd_leader 0.0" in httpx.get(f"{other.url}/metrics", trust_env=False).text
    metrics = httpx.get(f"{leader.url}/metrics", trust_env=False).text
    assert "refitd_leader 1.0" in metrics
    assert "refitd_epoch 1.0" in metrics


def test_a_leader_that_is_asked_to_stop_gives_the_lead_back(group: Group) -> None:
    leader = group.start()
    group.until_served(leader, group.publish(1))
    leader.process.send_signal(signal.SIGTERM)
    follower = group.other(leader)
    until(follower.leads, "the other one leads")
    group.until_served(follower, group.publish(2))
    assert leader.process.wait(30) == 0
    group.check(2)


def test_while_the_database_is_away_no_service_leads_and_afterwards_one_goes_on(
    group: Group, postgres: PostgresServer
) -> None:
    leader = group.start()
    group.until_served(leader, group.publish(1))
    postgres.kill()
    leader.died()
    assert leader.process.wait(10) == EXIT_LEAD_LOST
    other = group.other(leader)
    second = group.publish(2)
    until(lambda: "cannot ask" in other.ask("/readyz")["detail"], "the one that stands by says what is wrong")
    postgres.start()
    until(other.leads, "it leads")
    group.until_served(other, second)
    group.check(2)


def test_a_service_alone_is_refused_on_the_root_of_a_group(group: Group, tmp_path: Path) -> None:
    leader = group.start()
    words = ("serve", "--root", str(group.root), "--state", str(tmp_path / "alone"), "--port", "0")
    status, said = refitd_ended(*words)
    assert status == 1
    assert "another refitd" in said
    assert leader.leads()
