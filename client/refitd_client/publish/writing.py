"""One version, written: shards, index, companions, manifest, and then its name."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from refitd_client.contract.manifest import Manifest, ManifestRefusedError, fitting_fingerprints, parse_manifest
from refitd_client.contract.naming import INDEX_NAME, MANIFEST_NAME, Order
from refitd_client.errors import PublishError
from refitd_client.files.mapped import Mappings
from refitd_client.fingerprint import to_texts
from refitd_client.publish.run_folder import RunFolder
from refitd_client.write.content import Content
from refitd_client.write.progress import Laps, Meter, Progress
from refitd_client.write.source_folder import copy_into
from refitd_client.write.version_folder import Staging, staged


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenVersion:
    """A committed version's manifest, and milliseconds of `stage`, `write`, `sync` and `commit`."""

    manifest: Manifest
    timings: dict[str, float]

    @property
    def bytes(self) -> int:
        """The bytes of all its files but the manifest."""
        return sum(file.size for file in self.manifest.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionWriter:
    """Writes one version into a run's folder, in one go or in two."""

    folder: RunFolder
    order: Order
    metadata: dict[str, str]
    progress: Callable[[Progress], None] | None
    mappings: Mappings

    def write(self, content: Content) -> WrittenVersion:
        """Write the version, durably, and give it its name. After any error no version is visible.

        Raises:
            InvalidWeightsError: the weights turn out not to be publishable as they are read.
            PublishError: the metadata cannot be in a manifest.
            NoSpaceError, OSError: the file system would not.
        """
        laps = Laps()
        with self._staged(content, laps) as staging:
            with laps.lap("write"):
                content.weights.write(staging)
            return self._complete(content, staging, laps)

    def stage(self, content: Content) -> Callable[[], WrittenVersion]:
        """Copy the version's bytes, so that the caller may change its tensors; return what does the rest.

        That must be called, in any thread. Until it has returned nothing is visible. Both raise as `write` does.
        """
        laps = Laps()
        with ExitStack() as stack:
            staging = stack.enter_context(self._staged(content, laps))
            with laps.lap("stage"):
                seal = content.weights.stage(staging)
            held = stack.pop_all()

        def finish() -> WrittenVersion:
            with held:
                with laps.lap("write"):
                    seal()
                return self._complete(content, staging, laps)

        return finish

    def _staged(self, content: Content, laps: Laps) -> AbstractContextManager[Staging]:
        take = partial(self.folder.slots.take, content.weights.layout)
        meter = Meter(content.size, self.progress)
        return staged(self.folder.path, meter, laps, take=take, mappings=self.mappings)

    def _complete(self, content: Content, staging: Staging, laps: Laps) -> WrittenVersion:
        with laps.lap("write"):
            if content.index:
                with staging.file(INDEX_NAME) as file:  # after the shards: others take it for a sign that all is there
                    file.write(content.index)
            for path in content.companions:
                copy_into(staging, path)
        laps.times["write"] = max(0.0, laps.times["write"] - laps.times.get("sync", 0.0))
        claims = content.claims
        manifest = Manifest(
            run=self.folder.run,
            generation=self.order.generation,
            step=self.order.step,
            files=staging.files,
            tensors=content.tensors,
            created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            metadata=self.metadata,
            kind=claims.kind,
            base=claims.base,
            fingerprints=claims.fingerprints or fitting_fingerprints(to_texts(staging.fingerprints)),
            delta=claims.delta,
        )
        with laps.lap("commit"):
            # Before the name: a version that may have been seen counts, even when it is gone after a crash.
            self.folder.record(self.order, staging.path)
        try:
            staging.commit(_checked(manifest), MANIFEST_NAME, self.folder.folder_of(self.order))
        except BaseException:
            if staging.was_seen:
                self.folder.withdrawn(self.order)
            raise
        self.folder.published(self.order)
        return WrittenVersion(manifest=manifest, timings=laps.times)


def _checked(manifest: Manifest) -> bytes:
    data = manifest.to_json()
    try:
        parse_manifest(data)  # what is written is what the service can read
    except ManifestRefusedError as error:
        raise PublishError(
            f"the version's manifest would be refused ({error}): is the metadata text by text, and small?"
        ) from error
    return data
