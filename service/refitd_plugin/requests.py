"""Answers the channel's requests: what this engine is, and whether a version is ready."""

import logging
import os
import socket
from pathlib import Path
from threading import Event, Lock
from typing import assert_never

import msgspec
import torch

from refitd_client.checkpoint.opening import OpeningRefusedError, components
from refitd_client.contract.plugin import NEEDS_FULL, PROTOCOL, PluginRequest
from refitd_client.transport.group.host import available
from refitd_client.transport.ipc.shared import boot_id
from refitd_client.validation.contents import ReadingStoppedError
from refitd_client.validation.validate import Options
from refitd_plugin.channel import Reply, refused
from refitd_plugin.contents import contents_beside, digest
from refitd_plugin.port import EngineProcess, Stages
from refitd_plugin.rank_engine import RankEngine
from refitd_plugin.source import FullNeededError, SourceRefusedError
from refitd_plugin.turns import Deadline, short_turns
from refitd_plugin.update_source import FullVersion

logger = logging.getLogger("refitd_plugin")

PREPARE_SECONDS = 120.0
_HANDOVER_SECONDS = 10.0
_SLOW_SECONDS = 10.0


class RequestHandler:
    """Answers for one rank. `engine` is None where the plugin stands aside: see `aside`. `plugin` is its release."""

    def __init__(
        self, root: Path, process: EngineProcess, engine: RankEngine | None, aside: str | None, plugin: str
    ) -> None:
        self._root, self._process, self._engine, self._aside, self._plugin = root, process, engine, aside, plugin
        self._busy, self._turn, self._stop = Lock(), Lock(), Event()
        self._deadline = Deadline(PREPARE_SECONDS, _SLOW_SECONDS)

    def handle(self, request: PluginRequest) -> Reply:
        """Answer one request, in the channel's thread."""
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
        """Take the lease of a service that loads this engine."""
        if request.owner is None or not request.seconds > 0:
            return refused("a lead needs an owner, and seconds above 0")
        if self._engine is None:
            return refused(f"the plugin stands aside: {self._aside}")
        other = self._engine.lease.take(request.owner, request.seconds, request.peer)
        return {"ok": True} if other is None else refused(other)

    def _hello(self) -> Reply:
        process, engine, plan = self._process, self._engine, None
        if engine is not None and (known := engine.loading.plan) is not None:
            facts = {"replays": known.replays, "copies": len(known.copies), "loader": len(known.residual)}
            plan = facts | {"proven": known.proven, "reason": known.loader_only or ""}
        if engine is not None:
            engine.preparing.inspector.worker.begin()  # a service is there, which will have versions prepared
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
            "served": "" if engine is None else engine.served,
            "needs": "" if engine is None else engine.preparing.needs(self._root),
            "plan": plan,
            "kinds": [] if engine is None else ["full", "delta", "handover"],
            "backends": [] if engine is None else sorted(available()),
            "device": "" if engine is None else engine.preparing.device_name,
            "boot": boot_id(),
            "leads": engine is not None,
            "proves": engine is not None and engine.preparing.proves,
            "leader": "" if engine is None else engine.lease.leader() or "",
            "no_deltas": (self._aside or "") if engine is None else engine.no_deltas,
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
                with self._deadline.over(request.path, stop):
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
            self._stop = Event()
            return self._stop

    def _prepare_now(self, engine: RankEngine, request: PluginRequest, stop: Event) -> Reply:
        stages = Stages()
        options = Options(
            allow_missing=request.allow_missing,
            allow_extra=request.allow_extra,
            allow_dtype_cast=request.allow_dtype_cast,
        )
        path = str(self._root.joinpath(*components(request.path)))
        check = None if request.check is None else request.check == "bytes"
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
