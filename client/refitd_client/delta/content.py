"""A delta as the content of a version: one file under an ending of its own, and nothing that a loader would take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from refitd_client.checkpoint.header import Entry
from refitd_client.contract.manifest import Claims, DeltaFacts
from refitd_client.contract.naming import DELTA_NAME
from refitd_client.contract.slot import ShardLayout
from refitd_client.contract.states import Kind
from refitd_client.delta.change import Delta, elements_of
from refitd_client.delta.layout import Compression, Encoding
from refitd_client.delta.shadow import Changes
from refitd_client.delta.writer import EncodedDelta, encode
from refitd_client.tensors.source import refused
from refitd_client.write.content import Content
from refitd_client.write.reserve import Reserve
from refitd_client.write.version_folder import Staging


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWeights:
    """The file. `entries` are the tensors of the model that results, changed or not."""

    encoded: EncodedDelta
    entries: Sequence[Entry]
    reserve: Reserve | None = None

    @property
    def tensors(self) -> dict[str, list[Entry]]:
        """What the model that results has: the manifest sums it up."""
        return {DELTA_NAME: list(self.entries)}

    @property
    def size(self) -> int:
        """The bytes that the file takes."""
        return self.encoded.size

    @property
    def layout(self) -> list[ShardLayout]:
        """It takes no slot: those are for full versions."""
        return []

    def stage(self, staging: Staging) -> Callable[[], None]:
        """Leave all to do: the changes are copies, and the caller may change its tensors."""
        return partial(self.write, staging)

    def write(self, staging: Staging) -> None:
        """Write the file.

        Raises:
            NoSpaceError: there is no room for it.
        """
        reserved = None if self.reserve is None else self.reserve.take()
        if reserved is None:
            staging.require_space(self.size)
        with staging.file(DELTA_NAME, reserved) as file:
            file.write_all(self.encoded.parts())
            file.write(file.digest)
        if self.reserve is not None:
            self.reserve.expect(self.size, reserved)


def content_of(
    delta: Delta,
    entries: Sequence[Entry],
    fingerprints: dict[str, str],
    encoding: Encoding,
    compression: Compression,
    reserve: Reserve | None = None,
) -> Content:
    """The content of a version that is a delta. It has neither index nor companions: those are its base's.

    Raises:
        DeltaRefusedError: its header would be too large, or zstd is missing.
    """
    facts = DeltaFacts(
        file=DELTA_NAME,
        encoding=encoding.value,
        compression=compression.value,
        tensors=len(delta.changes),
        changed=delta.changed,
        elements=sum(elements_of(entry.dtype, entry.shape) for entry in entries),
    )
    weights = DeltaWeights(encoded=encode(delta, encoding, compression), entries=entries, reserve=reserve)
    claims = Claims(kind=Kind.DELTA, base=delta.base, fingerprints=fingerprints, delta=facts)
    return Content(weights=weights, index=b"", companions=(), claims=claims)


def check_finite(changes: Changes) -> None:
    """See that no changed element is NaN or infinite; the others were looked at when they were published.

    Raises:
        InvalidWeightsError: one is. It names the tensor.
    """
    for name, count in changes.nonfinite.items():
        raise refused(
            name, f"has {count} changed values that are NaN or infinite: the training step that made it went wrong"
        )
