"""What is news, and what is said of it. Pure.

    {"type": "version.rejected", "timestamp": "2026-11-21T12:00:00.000Z",
     "data": {"run": "grpo", "version": "grpo~v000123", "step": 123, "reason": "…", …}}

The shape is that of Standard Webhooks (https://www.standardwebhooks.com); docs/webhooks.md lists what is under `data`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from refitd_client.contract.states import EngineState, VersionState

NAMED_ENGINES = 50  # of those that are late, so that a large fleet makes no large message


class Topic(StrEnum):
    """What can be told."""

    SERVED = "served"  # a version is proved on every reachable engine of its run, for the first time
    REJECTED = "rejected"  # a version is proved bad, or its files are lost
    DEGRADED = "degraded"  # a version is served, and engines were left behind
    STALLED = "stalled"  # for a while no version was served, though there is one


_TYPES = {
    Topic.SERVED: "version.served",
    Topic.REJECTED: "version.rejected",
    Topic.DEGRADED: "rollout.degraded",
    Topic.STALLED: "rollout.stalled",
}
_BAD = frozenset({VersionState.REJECTED, VersionState.LOST})


@dataclass(frozen=True, slots=True)
class News:
    """Something that happened."""

    topic: Topic
    data: dict[str, Any]

    def body(self, at: str) -> str:
        """The message. `at` is when it happened, RFC 3339."""
        document = {"type": _TYPES[self.topic], "timestamp": at, "data": self.data}
        return msgspec.json.encode(document).decode()


def of_version(before: VersionRecord | None, after: VersionRecord) -> News | None:
    """What a change of a version is worth telling."""
    if after.served_at is not None and before is not None and before.served_at is None:
        return News(Topic.SERVED, _version(after) | {"served_at": after.served_at})
    if after.state in _BAD and (before is None or before.state is not after.state):
        reason = {"state": after.state.value, "code": after.code, "reason": after.reason}
        return News(Topic.REJECTED, _version(after) | reason)
    return None


def of_degraded(version: VersionRecord, engines: Sequence[EngineRecord]) -> News:
    """A version is served, but not by all `engines` of its run."""
    return News(Topic.DEGRADED, _version(version) | _late(version.id, engines))


def of_stalled(run: str, seconds: float, target: VersionRecord | None, engines: Sequence[EngineRecord]) -> News:
    """The engines of a run have been on their way for so long, and none is served."""
    wanted = {"run": run} if target is None else _version(target)
    return News(
        Topic.STALLED, wanted | {"seconds": round(seconds)} | _late("" if target is None else target.id, engines)
    )


def _version(version: VersionRecord) -> dict[str, Any]:
    return {
        "run": version.run,
        "version": version.id,
        "generation": version.order.generation,
        "step": version.order.step,
        "kind": version.kind.value,
    }


def _late(version: str, engines: Sequence[EngineRecord]) -> dict[str, Any]:
    late = [each for each in engines if each.serving != version or each.state is EngineState.UNREACHABLE]
    named = [{"id": each.id, "state": each.state.value, "reason": each.reason} for each in late[:NAMED_ENGINES]]
    return {"engines": len(engines), "late": len(late), "late_engines": named}
