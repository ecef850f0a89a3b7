"""How a rank looks at versions: ahead of an update through its clerk, and in its own thread where there is none."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, assert_never

from refitd.catalog.contents import ReadingStoppedError
from refitd.catalog.inventory import Reference
from refitd.catalog.validate import Options
from refitd_sglang.ahead import findings, letters
from refitd_sglang.ahead.clerk import Clerk
from refitd_sglang.changes import Changes, is_delta, most_memory, open_changes
from refitd_sglang.held import close_all
from refitd_sglang.laid import Ways
from refitd_sglang.source import FullNeededError, Place, Source, SourceRefusedError, open_version
from refitd_sglang.stages import Stages
from refitd_sglang.startup import folder_of, reference_in


class Looking:
    """One rank's. `startup` is the model that the server was started on; `map_room` maps a delta's memory to where the
    rank's device reads it.
    """

    def __init__(self, startup: str, config: Any, map_room: findings.Mapper) -> None:
        self._startup, self._config = startup, config
        self._folder: Path | None = None
        self._reference: Reference | None = None
        self._layout: findings.Layout | None = None
        self._rooms = findings.Rooms(map_room)
        self._told: tuple[int, Ways | None] = 0, None
        self._along = 0
        self.clerk = Clerk()

    def here(self, place: Place, options: Options, *, check_bytes: bool, stop: Event | None = None) -> Source | Changes:
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
        place: Place,
        options: Options,
        *,
        check_bytes: bool,
        stop: Event,
        ways: Callable[[], Ways | None],
        stages: Stages,
    ) -> Source | Changes:
        """The same while the engine serves. A delta is laid out by `ways`, where there are any. Raises as `here`."""
        delta = is_delta(str(place.folder))
        order = letters.Order(
            root=str(place.root),
            path=place.path,
            model=str(self._model_or_none() or "") if delta else str(self._model()),
            check_bytes=check_bytes,
            allow_missing=options.allow_missing,
            allow_extra=options.allow_extra,
            allow_dtype_cast=options.allow_dtype_cast,
            layout="" if self._layout is None else self._layout.name,
        )
        by = ways() if delta else None
        told = self._tell(order, by)
        asked = self.clerk.ask(order, stop)
        if asked is not None:
            self._told = told
            if (found := self._found(place, *asked, by, stages)) is not None:
                return found
        if self.clerk.generation:
            self.clerk.begin()
        return self.here(place, options, check_bytes=check_bytes, stop=stop)

    def known(self) -> Reference:
        """The model that the server was started with, by its files' headers."""
        if self._reference is None:
            self._reference = reference_in(self._model())
        return self._reference

    def _tell(self, order: letters.Order, by: Ways | None) -> tuple[int, Ways | None]:
        """Say along which ways; all of them, unless this very clerk was told. What it will have been told then."""
        generation, known = self._told
        if generation != self.clerk.generation:
            self._rooms.forget()
            known = None
        order.busy = self._rooms.busy
        if by is not None:
            if by is not known:
                self._along += 1
                order.ways, known = dict(by), by
            order.along = self._along
        return self.clerk.generation, known

    def _found(
        self, place: Place, reply: letters.Reply, files: list[int], by: Ways | None, stages: Stages
    ) -> Source | Changes | None:
        match reply:
            case letters.Whole():
                stages.add("clerk", reply.ms)
                self._layout = findings.layout_of(reply, self._layout)
                return findings.whole(place, reply, files, self._layout)
            case letters.Delta():
                stages.add("clerk", reply.ms)
                return findings.delta(place, reply, files, self._rooms, by)
            case letters.Refusal(kind="unable"):
                close_all(files)
                return None
            case letters.Refusal():
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
            self._folder = folder_of(self._startup, self._config)
        return self._folder


def _error(refusal: letters.Refusal) -> Exception:
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


def room_on(device: Any) -> findings.Mapper:
    """Maps rooms for a device, or for none."""
    if device is None:
        return findings.Plain
    from refitd_sglang.registered import Registered

    return partial(Registered, device=device.index or 0)
