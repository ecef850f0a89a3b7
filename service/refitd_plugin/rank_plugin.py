"""The plugin in one rank's process: its engine, or why updates are left to the engine's own code; its channel, and the
answers to what the service asks there: what this engine is, and whether a version is ready.
"""

import logging
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock
from typing import assert_never

import msgspec
import torch

from refitd_client.checkpoint.opening import OpeningRefusedError, components
from refitd_client.contract.naming import SERVICE_FOLDER, installed_release
from refitd_client.contract.plugin import NEEDS_FULL, PROTOCOL, Answer, PluginRequest, UpdateOutcome
from refitd_client.transport.memory import boot_id
from refitd_client.transport.sending import available
from refitd_client.validation.contents import ReadingStoppedError
from refitd_client.validation.validate import Options
from refitd_plugin.channel import Channel, Reply, refused, short_turns
from refitd_plugin.memory.source import FullNeededError, SourceRefusedError, place_of
from refitd_plugin.port import EngineProcess, Stages, UpdateCall
from refitd_plugin.proof.contents import contents_beside, digest
from refitd_plugin.settings import PluginSettings
from refitd_plugin.update import ranks
from refitd_plugin.update.rank_engine import RankEngine
from refitd_plugin.update.update_source import FullVersion

logger = logging.getLogger("refitd_plugin")

PREPARE_SECONDS = 120.0
_ASIDE_FACTS: Reply = {"kinds": [], "backends": [], "plan": None, "proves": False}
_ASIDE_FACTS |= dict.fromkeys(("served", "needs", "device", "leader"), "")
_HANDOVER_SECONDS = 10.0


class StopAt(Event):
    """An event that is also set once a time has passed: a timer would be a thread, which takes long to begin beside
    SGLang's loop.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._ends = time.monotonic() + seconds

    def is_set(self) -> bool:
        return super().is_set() or time.monotonic() >= self._ends


class RequestHandler:
    """Answers for one rank. `engine` is None where the plugin stands aside: see `aside`. `plugin` is its release."""

    def __init__(
        self, root: Path, process: EngineProcess, engine: RankEngine | None, aside: str | None, plugin: str
    ) -> None:
        self._root, self._process, self._engine, self._aside, self._plugin = root, process, engine, aside, plugin
        self._busy, self._turn, self._stop = Lock(), Lock(), Event()

    def handle(self, request: PluginRequest) -> Reply:
        match request.do:
            case "hello":
                return self._hello()
            case "prepare":
                return self._prepare(request)
            case "contents":
                return self._contents()
            case "forget":
                if self._engine is not None:
                    self._replace()  # what is being prepared now is not wanted either
                    self._engine.forget()
                return {"ok": True}
            case "lead":
                return self._lead(request)
            case _:
                assert_never(request.do)

    def _lead(self, request: PluginRequest) -> Reply:
        if request.owner is None or not request.seconds > 0:
            return refused("a lead needs an owner, and seconds above 0")
        if self._engine is None:
            return refused(f"the plugin stands aside: {self._aside}")
        other = self._engine.lease.take(request.owner, request.seconds, request.peer)
        return {"ok": True} if other is None else refused(other)

    def _hello(self) -> Reply:
        process, engine = self._process, self._engine
        return {
            "ok": True,
            "protocol": PROTOCOL,
            "plugin": self._plugin,
            process.name: process.release,
            "state": "on" if engine is not None else "aside",
            "reason": self._aside or "",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "port": process.port,
            "seed": process.seed,
            "rank": process.rank,
            "ranks": process.size,
            "dp_rank": process.dp_rank,
            "model": {"path": process.model_path, "class": type(process.model).__name__},
            "boot": boot_id(),
            "leads": engine is not None,
        } | (_ASIDE_FACTS | {"no_deltas": self._aside or ""} if engine is None else self._engine_facts(engine))

    def _engine_facts(self, engine: RankEngine) -> Reply:
        plan = None
        if (known := engine.loading.plan) is not None:
            facts = {"replays": known.replays, "copies": len(known.copies), "loader": len(known.residual)}
            plan = facts | {"proven": known.proven, "reason": known.loader_only or ""}
        engine.preparing.worker.begin()  # a service is there, which will have versions prepared
        return {
            "served": engine.served,
            "needs": engine.preparing.needs(self._root),
            "plan": plan,
            "kinds": ["full", "delta", "handover"],
            "backends": sorted(available()),
            "device": engine.preparing.device_name,
            "proves": engine.preparing.proves,
            "leader": engine.lease.leader() or "",
            "no_deltas": engine.no_deltas,
        }

    def _prepare(self, request: PluginRequest) -> Reply:
        """Prepare a version. A preparation that is going on stops: the last request wins."""
        if self._engine is None:
            return refused(f"the plugin stands aside: {self._aside}")
        with short_turns():
            stop = self._replace()
            if not self._busy.acquire(timeout=_HANDOVER_SECONDS):
                return refused("another version is being prepared, and does not stop") | {"busy": True}
            try:
                return self._prepare_now(self._engine, request, stop)
            except ReadingStoppedError:
                return refused(f"stopped after {PREPARE_SECONDS:g} s, or because another version was to be prepared")
            except FullNeededError as error:
                return refused(str(error)) | {"needs": NEEDS_FULL}
            except (SourceRefusedError, OpeningRefusedError, OSError) as error:
                return refused(str(error))
            finally:
                self._busy.release()

    def _replace(self) -> Event:
        """Stop what is being prepared. Returns the event that stops the next preparation."""
        with self._turn:
            self._stop.set()
            self._stop = StopAt(PREPARE_SECONDS)
            return self._stop

    def _prepare_now(self, engine: RankEngine, request: PluginRequest, stop: Event) -> Reply:
        stages = Stages()
        options = Options(
            allow_missing=request.allow_missing,
            allow_extra=request.allow_extra,
            allow_dtype_cast=request.allow_dtype_cast,
        )
        path = str(self._root.joinpath(*components(request.path)))
        check = request.check != "headers"
        with stages.during("all"):
            offer = str(Path(*components(request.offer))) if request.offer else None
            update_source = engine.prepare(
                path, options, check_bytes=check, stages=stages, stop=stop, offer=offer, prove=request.prove
            )
        took = stages.ms.pop("all")
        logger.info("refitd prepared %s in %.1f ms %s", update_source.label, took, stages.ms)
        facts = {
            "version": update_source.label,
            "kind": update_source.kind,
            "digest": update_source.digest,
            "signature": update_source.signature,
        }
        if isinstance(update_source, FullVersion) and update_source.proof is not None:
            facts |= {"proof": msgspec.to_builtins(update_source.proof)}
        return {"ok": True, "bytes": update_source.nbytes, "ms": took, "stages": stages.ms} | facts

    def _contents(self) -> Reply:
        """The digest that a load of what is in memory now would have answered with."""
        if self._engine is None:
            return refused(f"the plugin stands aside: {self._aside}")
        if self._process.may_release:  # reading what was released kills the process
            return refused("the weights may be released at any time, so they are not looked at")
        tensor = next(self._process.model.parameters())
        with torch.cuda.device_of(tensor):  # a thread begins on the first GPU, whichever the rank has
            return {"ok": True, "contents": digest(contents_beside(self._process.model))}


_OPENING_SECONDS = 2.0  # for a thread to begin and a socket to be made; the engine computes nothing meanwhile


class RankPlugin:
    def __init__(self, process: EngineProcess, settings: PluginSettings) -> None:
        """Open the channel, where the settings name the root. Otherwise the first update does."""
        self.process, self._settings = process, settings
        self._channel: Channel | None = None
        self.aside = settings.fault or process.aside()
        self.engine: RankEngine | None = None
        store = ranks.default_store() if self.aside is None and process.size > 1 else None
        if self.aside is None and process.size > 1 and store is None:
            self.aside = "the ranks have no store to speak through"
        if self.aside is None:
            others = ranks.Ranks(store, process.rank, process.size, settings.wait)
            self.engine = RankEngine(process, others, settings)
        if settings.root is not None and not _is_root(settings.root):
            logger.warning("refitd waits for the service to make its root: %s", self._no_root(settings.root))
        self._open_channel(settings.root)

    def update(self, engine: RankEngine, call: UpdateCall) -> Answer:
        """Carry out one update. Never raises."""
        try:
            place = place_of(call.path, self._settings.root)
            self._open_channel(place.root if _is_root(place.root) else None)
            answer = engine.update(call)
        except Exception as error:  # a bug, or a store that is gone: say what is known, and let the engine live
            logger.exception("refitd failed in an update")
            outcome = UpdateOutcome.UNKNOWN if engine.touched else UpdateOutcome.REFUSED
            answer = Answer(outcome=outcome, reason=f"{type(error).__name__}: {error}")
        logger.info("refitd: %s", answer.log_line)
        return replace(answer, plugin=installed_release())

    def open(self, root: Path) -> str | None:
        """Open the channel, unless it is open; why the service cannot have this rank load, None where it can. `root`:
        refitd's root, where the settings do not name it.
        """
        place = root if self._channel is None or not _is_root(self._channel.root) else self._channel.root
        if not _is_root(place):
            lacks = self._no_root(self._settings.root or place)
            return f"{lacks}: mount it there, or set the variable that names it"
        self._open_channel(place)
        opened = self._channel is not None and self._channel.is_open(_OPENING_SECONDS)
        return self.aside if opened else f"it could not make its socket in {place}: the log of this server says why"

    def _no_root(self, place: Path) -> str:
        """Say that a folder is no root, and which variable names it."""
        variable = f"REFITD_{self.process.name.upper()}_ROOT is '{place}', and "
        return f"{variable if place == self._settings.root else ''}this server sees no root of refitd at {place}"

    def _open_channel(self, root: Path | None) -> None:
        """Open the channel once the root is known, and anew where a variable has named a root that is not there."""
        if self._channel is not None and root is not None and not _is_root(self._channel.root):
            if root == self._channel.root:
                return
            logger.warning("refitd opens its channel in %s: %s", root, self._no_root(self._channel.root))
            self._channel.give_up()
            self._channel = None
        if self._channel is None and root is not None:
            if self.engine is not None:
                self.engine.root = root
            handler = RequestHandler(root, self.process, self.engine, self.aside, installed_release())
            self._channel = Channel(root, self.process.rank, handler.handle)
            if self.engine is not None:
                self.engine.preparing.receiver.named(self._channel.name)
            self._channel.open()


def _is_root(folder: Path) -> bool:
    return (folder / SERVICE_FOLDER).is_dir()
