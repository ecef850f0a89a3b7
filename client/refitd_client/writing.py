"""One version, written: shards, index, companions, manifest, and then its name."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from refitd_client import checkpoint
from refitd_client.content import Content
from refitd_client.contract.manifest import Manifest, ManifestRefusedError, parse_manifest
from refitd_client.contract.naming import INDEX_NAME, MANIFEST_NAME, Order
from refitd_client.errors import PublishError
from refitd_client.mapped import Mappings
from refitd_client.progress import Laps, Meter, Progress
from refitd_client.run_folder import RunFolder
from refitd_client.staging import Staging, staged


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A committed version's manifest, and milliseconds of `stage`, `write`, `sync` and `commit`."""

    manifest: Manifest
    timings: dict[str, float]

    @property
    def bytes(self) -> int:
        """The bytes of all its files but the manifest."""
        return sum(file.size for file in self.manifest.files.values())


def write_version(
    folder: RunFolder,
    order: Order,
    content: Content,
    *,
    metadata: dict[str, str],
    progress: Callable[[Progress], None] | None,
    mappings: Mappings | None = None,
) -> Written:
    """Write a version, durably, and give it its name. Whatever is raised, no version is visible then.

    Raises:
        InvalidWeightsError: the weights turn out not to be publishable as they are read.
        PublishError: the metadata cannot be in a manifest.
        NoSpaceError, OSError: the file system would not.
    """
    laps = Laps()
    with _staged(folder, content, progress, laps, mappings) as staging:
        with laps.lap("write"):
            content.weights.write(staging)
        return _complete(folder, order, content, staging, laps, metadata)


def stage_version(
    folder: RunFolder,
    order: Order,
    content: Content,
    *,
    metadata: dict[str, str],
    progress: Callable[[Progress], None] | None,
    mappings: Mappings | None = None,
) -> Callable[[], Written]:
    """Copy a version's bytes, so that the caller may change its tensors; return what does the rest, in any thread.

    What is returned must be called. Until it has returned nothing is visible. Both raise as `write_version` does.
    """
    laps = Laps()
    with ExitStack() as stack:
        staging = stack.enter_context(_staged(folder, content, progress, laps, mappings))
        with laps.lap("stage"):
            seal = content.weights.stage(staging)
        held = stack.pop_all()

    def finish() -> Written:
        with held:
            with laps.lap("write"):
                seal()
            return _complete(folder, order, content, staging, laps, metadata)

    return finish


def _staged(
    folder: RunFolder,
    content: Content,
    progress: Callable[[Progress], None] | None,
    laps: Laps,
    mappings: Mappings | None,
) -> AbstractContextManager[Staging]:
    layout = content.weights.layout
    take = partial(folder.slots.take, layout)
    return staged(folder.path, Meter(content.size, progress), laps, take=take, mappings=mappings)


def _complete(
    folder: RunFolder, order: Order, content: Content, staging: Staging, laps: Laps, metadata: dict[str, str]
) -> Written:
    with laps.lap("write"):
        if content.index:
            with staging.file(INDEX_NAME) as file:  # after the shards: others take it for the sign that all is there
                file.write(content.index)
        for path in content.companions:
            checkpoint.copy_into(staging, path)
        manifest = _manifest(folder.run, order, staging, content, metadata)
    laps.times["write"] = max(0.0, laps.times["write"] - laps.times.get("sync", 0.0))
    with laps.lap("commit"):
        # Before the name: a version that anyone may have seen counts, even when it is gone after a crash.
        folder.record(order, staging.path)
    staging.commit(_checked(manifest), MANIFEST_NAME, folder.folder_of(order))
    folder.published(order)
    return Written(manifest=manifest, timings=laps.times)


def _manifest(run: str, order: Order, staging: Staging, content: Content, metadata: dict[str, str]) -> Manifest:
    return Manifest(
        run=run,
        generation=order.generation,
        step=order.step,
        files=staging.files,
        tensors=content.tensors,
        created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        metadata=metadata,
        kind=content.claims.kind,
        base=content.claims.base,
        fingerprints=content.claims.fingerprints,
        delta=content.claims.delta,
    )


def _checked(manifest: Manifest) -> bytes:
    data = manifest.to_json()
    try:
        parse_manifest(data)  # what is written is what the service can read
    except ManifestRefusedError as error:
        raise PublishError(
            f"the version's manifest would be refused ({error}): is the metadata text by text, and small?"
        ) from error
    return data
