"""What a clerk does with an order: the very looks that the rank's thread would have, and a letter of what was found."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import msgspec
import xxhash

from refitd.catalog.contents import ReadingStoppedError
from refitd.catalog.inventory import Reference
from refitd.catalog.opening import ChangedError, Folder, OpeningRefusedError
from refitd.catalog.validate import Options
from refitd_sglang.ahead import letters
from refitd_sglang.ahead.line import MOST_FILES
from refitd_sglang.ahead.rooms import Rooms
from refitd_sglang.changes import Changes, is_delta, most_memory, open_changes
from refitd_sglang.laid import Laid
from refitd_sglang.source import FullNeededError, Place, Source, SourceRefusedError, open_version
from refitd_sglang.startup import reference_in


@dataclass(frozen=True, slots=True)
class Found:
    """A reply, and the files that go with it: `own` are to be closed afterwards."""

    reply: letters.Reply
    files: Sequence[int] = ()
    own: Sequence[int] = ()

    def close(self) -> None:
        """What is sent is the rank's."""
        for fd in self.own:
            os.close(fd)


class Reading:
    """A clerk's. What it remembers are the model, the ways that it was told, and its rooms."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._references: dict[str, Reference] = {}
        self._ways: tuple[int, letters.Order | None] = 0, None
        self._rooms = Rooms()

    def read(self, order: letters.Order, stop: Event) -> Found:
        """Carry out an order. Never raises."""
        began = time.perf_counter()
        if order.ways is not None:
            self._ways = order.along, order
        found = self._tried(order, stop)
        if isinstance(found.reply, letters.Whole | letters.Delta):
            found.reply.ms = round((time.perf_counter() - began) * 1000, 2)
        return found

    def _tried(self, order: letters.Order, stop: Event) -> Found:
        try:
            is_changes = is_delta(f"{order.root}/{order.path}")
            return self._delta(order) if is_changes else self._whole(order, stop)
        except FullNeededError as error:
            return Found(letters.Refusal("full", str(error)))
        except SourceRefusedError as error:
            return Found(letters.Refusal("refused", str(error)))
        except ReadingStoppedError:
            return Found(letters.Refusal("stopped"))
        except OSError as error:
            return Found(letters.Refusal("unreadable", str(error)))
        except Exception as error:
            return Found(letters.Refusal("unable", f"{type(error).__name__}: {error}"))

    def _whole(self, order: letters.Order, stop: Event) -> Found:
        options = Options(
            allow_missing=order.allow_missing, allow_extra=order.allow_extra, allow_dtype_cast=order.allow_dtype_cast
        )
        place = Place(Path(order.root), order.path)
        source = open_version(place, self._reference(order.model), options, check_bytes=order.check_bytes, stop=stop)
        names = list(source.structure.headers)
        if len(names) > MOST_FILES:
            return Found(letters.Refusal("unable", f"it has {len(names)} files"))
        layout = _layout(source)
        reply = letters.Whole(
            signature=source.structure.signature,
            files=dict(source.structure.files),
            manifest=source.structure.manifest,
            inventory=source.inventory,
            layout=layout,
            headers=None if layout == order.layout else dict(source.structure.headers),
            names=names,
        )
        opened = _opened(source, names)
        return Found(reply, opened, opened)

    def _reference(self, model: str) -> Reference:
        if model not in self._references:
            self._references[model] = reference_in(Path(model))
        return self._references[model]

    def _reference_or_none(self, model: str) -> Reference | None:
        try:
            return self._reference(model) if model else None
        except SourceRefusedError:
            return None

    def _delta(self, order: letters.Order) -> Found:
        along, told = self._ways
        if order.along not in {0, along}:
            return Found(letters.Refusal("unable", "it was not told which way"))
        ways = None if told is None or not order.along else told.ways
        self._rooms.begin(order.busy)
        place = Place(Path(order.root), order.path)
        most = most_memory(self._reference_or_none(order.model))
        changes = open_changes(place, check_bytes=order.check_bytes, room=self._rooms.memory, ways=ways, most=most)
        return self._laid(order.along, changes, changes.laid or Laid((), (), ()))

    def _laid(self, along: int, changes: Changes, laid: Laid) -> Found:
        groups = [
            letters.Group(self._rooms.place(group.indices), self._rooms.place(group.values), group.table.tobytes())
            for group in laid.groups
        ]
        numbers = sorted({array.room for group in groups for array in (group.indices, group.values)})
        rooms = [self._rooms.of(number) for number in numbers]
        reply = letters.Delta(
            manifest=changes.manifest,
            files=list(changes.files),
            results=dict(changes.results),
            nbytes=changes.nbytes,
            along=along,
            names=list(laid.names),
            whole=list(laid.whole),
            groups=groups,
            rooms=[(room.number, len(room.memory)) for room in rooms],
            kept=self._rooms.numbers,
        )
        file = changes.kept.opened()
        return Found(reply, [file, *(room.fd for room in rooms)], [file])


def _layout(source: Source) -> str:
    """Equal where all headers are."""
    data = msgspec.msgpack.encode(dict(source.structure.headers))
    return xxhash.xxh3_128_hexdigest(data)


def _opened(source: Source, names: Sequence[str]) -> list[int]:
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
