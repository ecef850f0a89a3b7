"""Why versions of a run in a bucket stay or go, in sentences. Pure: `pointer.py` has the rules.

Times are the store's, in seconds since 1970.
"""

from collections.abc import Iterable
from datetime import UTC, datetime

from refitd_client.bucket.pointer import (
    LEASE_SECONDS,
    UPLOAD_SECONDS,
    BucketLease,
    Pointer,
    RetiredVersion,
    leased,
)

_LATEST = 1e11  # seconds, about the year 5138
DEAD_UPLOAD = "its upload was broken off more than an hour ago, and a newer version counts: it never will"


def why_counting(pointer: Pointer, keep: int | None) -> dict[str, str]:
    """Why each version that counts is kept, by its id.

    Args:
        pointer: after a collection.
        keep: how many of the newest versions the collection keeps, None where it retires nothing.
    """
    found: dict[str, str] = {}
    for at, version in enumerate(pointer.versions):
        why = ["it is the newest version"] if at == 0 else []
        why += [f"it is one of the {keep} newest"] if keep is not None and 0 < at < keep else []
        why += ["it is pinned"] if version.pinned else []
        why += ["followers are to serve it"] if version.id == pointer.target else []
        why += [f"it is the base of the delta {other.id}" for other in pointer.versions if other.base == version.id]
        found[version.id] = ", ".join(why) or "its publisher has not retired it; --keep N retires what is older"
    return found


def why_retired(keep: int, now: float) -> str:
    """Why a collection has just retired a version."""
    return (
        f"it is not one of the {keep} newest, nor pinned, nor to be served, nor the base of a version that is kept: "
        f"a collection after {_time(now + LEASE_SECONDS)} deletes it"
    )


def why_waiting(pointer: Pointer, leases: Iterable[BucketLease], now: float) -> dict[str, str]:
    """Why retired versions are not deleted yet, by their ids; without those that may be deleted."""
    held = leased(pointer, leases, now)
    found: dict[str, str] = {}
    for retired in pointer.retired:
        lease, rests_until = held.get(retired.id), retired.at + LEASE_SECONDS
        if lease is not None and lease.ends >= rests_until:
            found[retired.id] = _held(retired, lease)
        elif now < rests_until:
            found[retired.id] = (
                f"it was retired less than ten minutes ago, and a follower may be about to pull it: "
                f"it is kept until {_time(rests_until)}"
            )
        elif lease is not None:
            found[retired.id] = _held(retired, lease)
    return found


def why_deleted(retired: RetiredVersion) -> str:
    """Why a retired version is deleted."""
    return f"it was retired at {_time(retired.at)}, and no follower has a lease of it"


def why_uploading(began: float) -> str:
    """Why an upload that has not ended, and can never count, is not deleted yet."""
    return (
        "its upload began less than an hour ago and has not ended, and a newer version counts: "
        f"it is kept until {_time(began + UPLOAD_SECONDS)}"
    )


def _held(retired: RetiredVersion, lease: BucketLease) -> str:
    until = f"until {_time(lease.ends)}"
    if lease.versions is None:
        return f"the note {lease.by} cannot be read, and counts as a lease of every version {until}"
    whose = f"a lease of follower {lease.by} {until}: the follower pulls or serves"
    return f"{whose} it" if retired.id in lease.versions else f"{whose} a delta that needs it"


def _time(seconds: float) -> str:
    if not 0.0 <= seconds < _LATEST:  # a pointer may hold any number
        return "an unknown time"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
