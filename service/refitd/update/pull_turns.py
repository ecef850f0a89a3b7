"""Which hosts may pull from this service now, and which wait for their turn.

A host says with each report what it pulls, from where, or that it waits; the reply says how many are before it. Nothing
is said once. A place is held by who says so: a host that says nothing for `SILENT_SECONDS` has none any more, and after
a restart of this service those that pull hold theirs again by what they report. A host that was let in and has not
heard it is told again.

A host that lacks what it is to serve comes before one that pulls ahead; of these the one that has waited longest. Hosts
whose turn is near report every second. A free place waits for them, and for no others: where none of them is there, the
first that reports gets it. A place is kept for all that a host lacks of what it is to serve, as a delta and its base.
"""

from dataclasses import dataclass

from refitd.clock import Clock
from refitd.engine.refitd.host import SILENT_SECONDS
from refitd_client.bucket.address import is_bucket_url
from refitd_client.contract.follow import Following

PLACES = 4  # so that the link is full while one host checks what it has, and the next one hears of its turn
# A host hears of its turn up to a second late: of small versions so many are pulled at a time that a link of 40 Gbit/s,
# and not that second, decides how long they take.
PLACE_BYTES = 8 * 2**30
PLACE_SECONDS = 600.0  # after which a place counts no more: a host that lies, or is slow, holds no others up for long

TURNS_LOOK_SECONDS = 1.0  # between two looks at who has fallen silent


@dataclass(slots=True, kw_only=True)
class _Asking:
    """A host that waits: since when, when it was heard last (monotonic seconds), whether it waits now, and whether it
    was told that its turn is near.
    """

    since: float
    heard: float
    is_needed: bool
    waits: bool = True
    is_near: bool = False


@dataclass(slots=True, kw_only=True)
class _Place:
    """A host that may pull `version`: since when, and when it was heard last."""

    version: str
    since: float
    heard: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnGiven:
    """How many hosts pull before one that wants to, 0 where it may pull; `is_near`: its turn comes within the next."""

    ahead: int = 0
    is_near: bool = False


class PullTurns:
    """The hosts that pull, and those that wait. In memory alone."""

    def __init__(self, clock: Clock) -> None:
        """None yet."""
        self._clock = clock
        self._places: dict[str, _Place] = {}
        self._asking: dict[str, _Asking] = {}
        self._looked = 0.0

    def reported(self, told: Following, *, is_needed: bool, size: int | None) -> TurnGiven:
        """Take what a host says, and say whether it may pull.

        Args:
            told: what it says of itself.
            is_needed: whether it lacks what it is to serve.
            size: bytes of what it pulls or waits for; None where they are not known.
        """
        name, version, now = told.follower, told.pulling, self._clock.monotonic()
        self._forget(now)
        if version is None or is_bucket_url(told.source):
            self._left(name)
            return TurnGiven()
        place = self._places.get(name)
        if told.ahead is None and place is None:  # this service was started again, or the host is of an earlier release
            place = self._places[name] = _Place(version=version, since=now, heard=now)
            self._asking.pop(name, None)
        if place is not None and (told.ahead is None or is_needed or place.version == version):
            place.version, place.heard = version, now
            return TurnGiven()
        self._places.pop(name, None)
        mine = self._asking.setdefault(name, _Asking(since=now, heard=now, is_needed=is_needed))
        mine.heard, mine.waits, mine.is_needed = now, True, is_needed
        return self._turn(name, version, now, places_for(size))

    def _turn(self, name: str, version: str, now: float, places: int) -> TurnGiven:
        mine = self._asking[name]
        taken = sum(now - place.since <= PLACE_SECONDS for place in self._places.values())
        key = (not mine.is_needed, mine.since)
        before = [each for each in self._asking.values() if each.waits and (not each.is_needed, each.since) < key]
        if taken + sum(each.is_near or each.is_needed > mine.is_needed for each in before) < places:
            del self._asking[name]
            self._places[name] = _Place(version=version, since=now, heard=now)
            return TurnGiven()
        mine.is_near = taken + len(before) < 2 * places
        return TurnGiven(ahead=taken + len(before), is_near=mine.is_near)

    def _left(self, name: str) -> None:
        """It pulls nothing from here. It has waited since it began to, if it soon waits for another version."""
        self._places.pop(name, None)
        if (asking := self._asking.get(name)) is not None:
            asking.waits = asking.is_near = False

    def _forget(self, now: float) -> None:
        """Forget hosts that have fallen silent."""
        if now - self._looked < TURNS_LOOK_SECONDS:
            return
        self._looked = now
        for known in (self._places, self._asking):
            for name in [name for name, each in known.items() if now - each.heard > SILENT_SECONDS]:
                del known[name]


def places_for(size: int | None) -> int:
    """How many hosts may pull at a time, by the bytes of a version."""
    return PLACES if not size else max(PLACES, PLACE_BYTES // size)
