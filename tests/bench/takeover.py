"""Two services on one PostgreSQL: how soon the other one leads when the leader is killed or stopped in an update."""

import signal
import time
from pathlib import Path

from figures import Figure, spread

from refitd_hosts.group.leadership import EXIT_LEAD_LOST
from support.hubs import Group, leader_of, until
from support.mini_vllm import mini_vllm
from support.postgres import ABSENT, programs, running_postgres

KILLS = 50
STOPPED_EACH = 5  # one of so many is stopped, past its takeover, and goes on afterwards; the others are killed
TAKEOVERS = KILLS + KILLS // (STOPPED_EACH - 1)
LOAD_SECONDS = 0.5


def takeover(folder: Path) -> list[Figure]:
    """The time from SIGKILL or SIGSTOP until another service leads, in mid-update each time.

    After each the version that was under way is served, and at the end no version is lost and none had two updates.
    """
    if programs() is None:
        raise RuntimeError(ABSENT)
    killed: list[float] = []
    stopped: list[float] = []
    with running_postgres() as postgres, mini_vllm(folder, load_seconds=LOAD_SECONDS) as engine:
        group = Group(folder, postgres.database(), engine)
        try:
            group.start()
            for step in range(1, TAKEOVERS + 1):
                is_stopped = step % STOPPED_EACH == 0
                seconds = _one(group, step, is_stopped=is_stopped)
                (stopped if is_stopped else killed).append(seconds)
            group.check(TAKEOVERS)
        finally:
            group.stop()
    alone = {"leads lost without a kill": group.revived}
    return [
        _figure(f"takeover: SIGKILL in an update to another leader, worst of {len(killed)}", killed, 5.0, alone),
        _figure(f"takeover: SIGSTOP in an update to another leader, worst of {len(stopped)}", stopped, 8.0, alone),
    ]


def _one(group: Group, step: int, *, is_stopped: bool) -> float:
    """Publish, end the leader in mid-load; seconds until the other leads."""
    version = group.publish(step)
    until(lambda: group.revive() or group.loads(version), "a load has begun")
    leader = leader_of(group.hubs)
    other = group.other(leader)
    began = time.monotonic()
    leader.process.send_signal(signal.SIGSTOP if is_stopped else signal.SIGKILL)
    until(lambda: group.revive(leader) or other.leads(), "the other one leads")
    seconds = time.monotonic() - began
    group.until_served(other, version)
    if is_stopped:
        leader.process.send_signal(signal.SIGCONT)
        leader.died()
        if leader.process.wait(10) != EXIT_LEAD_LOST:
            raise RuntimeError(f"a leader that was followed ended otherwise: {leader.tail()}")
    leader.kill()
    leader.port = 0  # another program may have got it meanwhile
    leader.start()
    return seconds


def _figure(name: str, samples: list[float], limit: float, more: dict[str, int]) -> Figure:
    detail = {"spread": spread(samples), **more}
    return Figure(name=name, measured=round(max(samples), 2), unit="s", limit=limit, detail=detail)
