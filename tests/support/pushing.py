"""A hub's versions, and one look of its pusher at them."""

import asyncio
from pathlib import Path

from refitd.policy.strategy import Strategy
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.update.targets import Targets
from refitd_client.bucket.pointer import MAX_BYTES, Pointer, parse_pointer, pointer_key
from refitd_client.contract.manifest import parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME, Order
from refitd_client.contract.states import VersionState
from refitd_hosts.push.pusher import Pusher
from support.buckets import RUN, ScriptedBucket
from support.checkpoints import publish, tensors


def has(store: Store, root: Path, step: int) -> None:
    """A good version of the hub."""
    folder = publish(root, RUN, step, tensors(step))
    record = VersionRecord(
        run=RUN, order=Order(1, step), path=f"{RUN}/{folder.name}", state=VersionState.SEALED, created_at=""
    ).having(digest=parse_manifest((folder / MANIFEST_NAME).read_bytes()).digest, owned=True)
    store.put_version(record)


def pushed(store: Store, root: Path, bucket: ScriptedBucket, *, follows: bool = False, keep: int = 2) -> Pointer:
    """What the pointer says when a hub has started and has pushed what there is to push."""
    return asyncio.run(has_pushed(store, Targets(store, Strategy(), follows=follows), root, bucket, keep=keep))


async def has_pushed(
    store: Store, targets: Targets, root: Path, bucket: ScriptedBucket, *, run: str = RUN, keep: int = 2
) -> Pointer:
    """The same in a test's own event loop."""
    pusher = Pusher(store, targets, root, bucket, keep=keep)
    await pusher._look(collects=True)
    found = await bucket.read(pointer_key(run), MAX_BYTES)
    assert found is not None
    return parse_pointer(found.data, run)
