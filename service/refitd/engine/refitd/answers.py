"""What a host's report means for the reconciler."""

from collections.abc import Callable
from dataclasses import replace

from refitd.engine.fingerprints import comparable
from refitd.engine.port import Process as ServerProcess
from refitd.engine.port import Reached, Unreached
from refitd_client.contract.follow import Following
from refitd_client.contract.hosts import HostEngines, OrderState
from refitd_client.contract.naming import parse_version_id, version_folder, version_label

NOTHING_PROVED = "(nothing that is proved)"
FIX = "look at the service there: it reports to what its --follow names, and its --engine names its engines"


def reached(told: Following, root: str) -> Reached | Unreached:
    """What a probe says of a host that reports.

    Args:
        told: what it says of itself.
        root: the root as engines of this kind are said to see it: versions are named by their paths in it.
    """
    if told.order is OrderState.AWAY or told.host is None or not told.host.count:
        why = told.order_reason or "it has no engine"
        return Unreached(reason=f"the host {told.follower} reports, and {why}", advice=FIX, recognised=True)
    path, label = named(told.serves, root)
    return Reached(
        model_path=path,
        weight_version=label,
        server_version=told.release,
        configuration=told.configuration,
        startup_path=None,
        process=ServerProcess(started=told.process),
        server="refitd",
        pulls=True,
        host=picture(told),
        serves=told.serves,
        desires=told.desired,
    )


def of_these(told: Following, digest_of: Callable[[str], str | None]) -> Following:
    """What a host says, without the versions of which it has others than this service, by their digests.

    Args:
        told: what it says of itself.
        digest_of: a version here, by its id; None where it is not known.
    """
    other = {id_ for id_, digest in told.digests.items() if digest_of(id_) not in {None, digest}}
    if not other:
        return told
    serves = None if told.serves in other else told.serves
    return replace(
        told,
        desired=None if told.desired in other else told.desired,
        ordered=None if told.ordered in other else told.ordered,
        serves=serves,
        proof=None if serves is None else told.proof,
    )


def picture(told: Following) -> HostEngines | None:
    """What a host says of its engines, and of what it does for them now; None where it names no engines."""
    if told.host is None:
        return None
    goes = told.order is OrderState.COMES and not waits_itself(told)
    is_loading = goes and told.ordered == told.desired
    return replace(
        told.host,
        upstream=told.upstream,
        pulling=told.pulling,
        pulled_bytes=told.pulled_bytes,
        source=told.source,
        ahead=told.ahead,
        store_fault=told.store_fault,
        loading=told.desired if is_loading else None,
    )


def waits_itself(told: Following) -> bool:
    """Whether what was ordered is there and good, and the host goes nowhere since its own operator has paused it."""
    return told.host is not None and told.host.waits is not None and told.order_reason == told.host.waits


def named(version: str | None, root: str) -> tuple[str, str | None]:
    """The path and label by which the reconciler knows a version that a host serves."""
    parsed = parse_version_id(version or "")
    if parsed is None:
        return NOTHING_PROVED, None
    run, order = parsed
    return f"{root}/{run}/{version_folder(order)}", version_label(order)


def doubt(proof: str | None, expected: str | None, not_expected: str | None) -> str | None:
    """Why a host that proves a version to itself is not believed, None where it is.

    Args:
        proof: the host's.
        expected: what another clean load of the version gave; None where none is on record.
        not_expected: what the contents before gave, where the files differ.
    """
    if proof is None:
        return None
    if comparable(proof, expected) and proof != expected:
        return "its engines' fingerprints are not those that the version has on other hosts"
    if proof == not_expected:
        return "its engines' fingerprints are those of what they served before"
    return None
