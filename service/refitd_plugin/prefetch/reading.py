"""What a prefetch process does with an order: it looks as the rank's thread would, and says what it found."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import msgspec
import xxhash

from refitd_client.checkpoint.inventory import Reference
from refitd_client.checkpoint.opening import ChangedError, Folder, OpeningRefusedError
from refitd_client.validation.contents import ReadingStoppedError
from refitd_client.validation.validate import Options
from refitd_plugin.changes import DeltaChanges, is_delta, most_memory, open_changes
from refitd_plugin.layout import LaidOutDelta
from refitd_plugin.prefetch import messages
from refitd_plugin.prefetch.buffers import SharedBuffers
from refitd_plugin.prefetch.framed_socket import MOST_FILES
from refitd_plugin.source import FullNeededError, SourceRefusedError, VersionPlace, VersionSource, open_version
from refitd_plugin.startup import reference_in


@dataclass(frozen=True, slots=True)
class ReadResult:
    """A reply, and the files that go with it: `own` are to be closed afterwards."""

    reply: messages.Reply
    files: Sequence[int] = ()
    own: Sequence[int] = ()

    def close(self) -> None:
        """What is sent is the rank's."""
        for fd in self.own:
            os.close(fd)


class VersionReader:
    """A prefetch process's. What it remembers are the model, the placements that it was told, and its buffers."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._references: dict[str, Reference] = {}
        self._placements: tuple[int, messages.ReadOrder | None] = 0, None
        self._buffers = SharedBuffers()

    def read(self, order: messages.ReadOrder, stop: Event) -> ReadResult:
        """Carry out an order. Never raises."""
        began = time.perf_counter()
        if order.placements is not None:
            self._placements = order.along, order
        found = self._tried(order, stop)
        if isinstance(found.reply, messages.FullFound | messages.DeltaFound):
            found.reply.ms = round((time.perf_counter() - began) * 1000, 2)
        return found

    def _tried(self, order: messages.ReadOrder, stop: Event) -> ReadResult:
        try:
            is_changes = is_delta(f"{order.root}/{order.path}")
            return self._delta(order) if is_changes else self._whole(order, stop)
        except FullNeededError as error:
            return ReadResult(messages.Refusal("full", str(error)))
        except SourceRefusedError as error:
            return ReadResult(messages.Refusal("refused", str(error)))
        except ReadingStoppedError:
            return ReadResult(messages.Refusal("stopped"))
        except OSError as error:
            return ReadResult(messages.Refusal("unreadable", str(error)))
        except Exception as error:
            return ReadResult(messages.Refusal("unable", f"{type(error).__name__}: {error}"))

    def _whole(self, order: messages.ReadOrder, stop: Event) -> ReadResult:
        options = Options(
            allow_missing=order.allow_missing, allow_extra=order.allow_extra, allow_dtype_cast=order.allow_dtype_cast
        )
        place = VersionPlace(Path(order.root), order.path)
        source = open_version(place, self._reference(order.model), options, check_bytes=order.check_bytes, stop=stop)
        names = list(source.structure.headers)
        if len(names) > MOST_FILES:
            return ReadResult(messages.Refusal("unable", f"it has {len(names)} files"))
        layout = _layout(source)
        reply = messages.FullFound(
            signature=source.structure.signature,
            files=dict(source.structure.files),
            manifest=source.structure.manifest,
            inventory=source.inventory,
            layout=layout,
            headers=None if layout == order.layout else dict(source.structure.headers),
            names=names,
        )
        opened = _opened(source, names)
        return ReadResult(reply, opened, opened)

    def _reference(self, model: str) -> Reference:
        if model not in self._references:
            self._references[model] = reference_in(Path(model))
        return self._references[model]

    def _reference_or_none(self, model: str) -> Reference | None:
        try:
            return self._reference(model) if model else None
        except SourceRefusedError:
            return None

    def _delta(self, order: messages.ReadOrder) -> ReadResult:
        along, told = self._placements
        if order.along not in {0, along}:
            return ReadResult(messages.Refusal("unable", "it does not have these placements"))
        placements = None if told is None or not order.along else told.placements
        self._buffers.begin(order.busy)
        place = VersionPlace(Path(order.root), order.path)
        most = most_memory(self._reference_or_none(order.model))
        changes = open_changes(
            place, check_bytes=order.check_bytes, allocate=self._buffers.memory, placements=placements, most=most
        )
        return self._laid(order.along, changes, changes.laid or LaidOutDelta((), (), ()))

    def _laid(self, along: int, changes: DeltaChanges, laid: LaidOutDelta) -> ReadResult:
        groups = [
            messages.PlacedGroup(
                self._buffers.place(group.indices), self._buffers.place(group.values), group.table.tobytes()
            )
            for group in laid.groups
        ]
        numbers = sorted({array.buffer for group in groups for array in (group.indices, group.values)})
        buffers = [self._buffers.of(number) for number in numbers]
        reply = messages.DeltaFound(
            manifest=changes.manifest,
            files=list(changes.files),
            results=dict(changes.results),
            nbytes=changes.nbytes,
            along=along,
            names=list(laid.names),
            whole=list(laid.whole),
            groups=groups,
            buffers=[(buffer.number, len(buffer.memory)) for buffer in buffers],
            kept=self._buffers.numbers,
        )
        file = changes.kept.opened()
        return ReadResult(reply, [file, *(buffer.fd for buffer in buffers)], [file])


def _layout(source: VersionSource) -> str:
    """Equal where all headers are."""
    data = msgspec.msgpack.encode(dict(source.structure.headers))
    return xxhash.xxh3_128_hexdigest(data)


def _opened(source: VersionSource, names: Sequence[str]) -> list[int]:
    """The weight files once more: those that were looked at."""
    fds: list[int] = []
    try:
        with Folder(source.place.root, source.place.path) as folder:
            for name in names:
                with folder.open(name, source.structure.files[name]) as fd:
                    fds.append(os.dup(fd))
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, OpeningRefusedError | ChangedError):
            raise SourceRefusedError(f"{source.place.folder} changed while it was looked at: {error}") from error
        raise
    return fds
