"""How a rank looks at versions: ahead of an update through its prefetch worker, without one in its own thread."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, assert_never

from refitd_client.checkpoint.inventory import Reference
from refitd_client.validation.contents import ReadingStoppedError
from refitd_client.validation.validate import Options
from refitd_plugin.changes import DeltaChanges, is_delta, most_memory, open_changes
from refitd_plugin.held import close_all
from refitd_plugin.layout import Placements
from refitd_plugin.prefetch import findings, messages
from refitd_plugin.prefetch.worker import PrefetchWorker
from refitd_plugin.source import FullNeededError, SourceRefusedError, VersionPlace, VersionSource, open_version
from refitd_plugin.stages import Stages
from refitd_plugin.startup import folder_of, reference_in


class Looking:
    """One rank's. `startup` is the model that the server was started on, `revision` its one on the hub; `map_room`
    maps a delta's memory to where the rank's device reads it.
    """

    def __init__(self, startup: str, revision: str | None, map_buffer: findings.Mapper) -> None:
        self._startup, self._revision = startup, revision
        self._folder: Path | None = None
        self._reference: Reference | None = None
        self._layout: findings.KnownHeaders | None = None
        self._buffers = findings.MappedBuffers(map_buffer)
        self._told: tuple[int, Placements | None] = 0, None
        self._along = 0
        self.worker = PrefetchWorker()

    def here(
        self, place: VersionPlace, options: Options, *, check_bytes: bool, stop: Event | None = None
    ) -> VersionSource | DeltaChanges:
        """Look in this thread.

        Raises:
            SourceRefusedError: it is not one to load into this model.
            ReadingStoppedError: `stop` was set. OSError: it cannot be read.
        """
        if is_delta(str(place.folder)):
            return open_changes(place, check_bytes=check_bytes, most=most_memory(self._known_or_none()))
        return open_version(place, self.known(), options, check_bytes=check_bytes, stop=stop)

    def ahead(
        self,
        place: VersionPlace,
        options: Options,
        *,
        check_bytes: bool,
        stop: Event,
        placements: Callable[[], Placements | None],
        stages: Stages,
    ) -> VersionSource | DeltaChanges:
        """The same while the engine serves. A delta is laid out by `placements`, if there are any. Raises as `here`."""
        delta = is_delta(str(place.folder))
        order = messages.ReadOrder(
            root=str(place.root),
            path=place.path,
            model=str(self._model_or_none() or "") if delta else str(self._model()),
            check_bytes=check_bytes,
            allow_missing=options.allow_missing,
            allow_extra=options.allow_extra,
            allow_dtype_cast=options.allow_dtype_cast,
            layout="" if self._layout is None else self._layout.name,
        )
        by = placements() if delta else None
        told = self._tell(order, by)
        asked = self.worker.ask(order, stop)
        if asked is not None:
            self._told = told
            if (found := self._found(place, *asked, by, stages)) is not None:
                return found
        if self.worker.generation:
            self.worker.begin()
        return self.here(place, options, check_bytes=check_bytes, stop=stop)

    def known(self) -> Reference:
        """The model that the server was started with, by its files' headers."""
        if self._reference is None:
            self._reference = reference_in(self._model())
        return self._reference

    def _tell(self, order: messages.ReadOrder, by: Placements | None) -> tuple[int, Placements | None]:
        """Name the placements; send all of them, unless this very process has them. Returns what it will have then."""
        generation, known = self._told
        if generation != self.worker.generation:
            self._buffers.forget()
            known = None
        order.busy = self._buffers.busy
        if by is not None:
            if by is not known:
                self._along += 1
                order.placements, known = dict(by), by
            order.along = self._along
        return self.worker.generation, known

    def _found(
        self, place: VersionPlace, reply: messages.Reply, files: list[int], by: Placements | None, stages: Stages
    ) -> VersionSource | DeltaChanges | None:
        match reply:
            case messages.FullFound():
                stages.add("clerk", reply.ms)  # a word of the reply: it stays
                self._layout = findings.layout_of(reply, self._layout)
                return findings.whole(place, reply, files, self._layout)
            case messages.DeltaFound():
                stages.add("clerk", reply.ms)  # a word of the reply: it stays
                return findings.delta(place, reply, files, self._buffers, by)
            case messages.Refusal(kind="unable"):
                close_all(files)
                return None
            case messages.Refusal():
                close_all(files)
                raise _error(reply)
            case _:
                assert_never(reply)

    def _known_or_none(self) -> Reference | None:
        try:
            return self.known()
        except SourceRefusedError:
            return None

    def _model_or_none(self) -> Path | None:
        try:
            return self._model()
        except SourceRefusedError:
            return None

    def _model(self) -> Path:
        if self._folder is None:
            self._folder = folder_of(self._startup, self._revision)
        return self._folder


def _error(refusal: messages.Refusal) -> Exception:
    match refusal.kind:
        case "refused" | "unable":
            return SourceRefusedError(refusal.reason)
        case "full":
            return FullNeededError(refusal.reason)
        case "stopped":
            return ReadingStoppedError()
        case "unreadable":
            return OSError(refusal.reason)
        case _:
            assert_never(refusal.kind)


def buffer_mapper(device: Any) -> findings.Mapper:
    """Maps buffers for a device, or for none."""
    if device is None:
        return findings.PlainBuffer
    from refitd_plugin.registered import Registered

    return partial(Registered, device=device.index or 0)
