"""What the channel answers: who this engine is, and whether a version is ready."""

import os
import socket
import time
from pathlib import Path
from threading import Lock
from typing import Any, assert_never

from refitd.catalog.opening import OpeningRefusedError, components
from refitd.catalog.validate import Options
from refitd_sglang import PROTOCOL
from refitd_sglang.channel import Reply, Request, refused
from refitd_sglang.engine import Engine
from refitd_sglang.source import FullNeededError, SourceRefusedError
from refitd_sglang.versions import Runner, sglang_version


class Desk:
    """One rank's. `engine` is None where the plugin stands aside for `aside`."""

    def __init__(self, root: Path, runner: Runner, engine: Engine | None, aside: str | None, plugin: str) -> None:
        self._root, self._runner, self._engine, self._aside, self._plugin = root, runner, engine, aside, plugin
        self._busy = Lock()

    def handle(self, request: Request) -> Reply:
        """Answer one request, in the channel's thread."""
        match request.do:
            case "hello":
                return self._hello()
            case "prepare":
                return self._prepare(request)
            case "forget":
                if self._engine is not None:
                    self._engine.forget()
                return {"ok": True}
            case _:
                assert_never(request.do)

    def _hello(self) -> Reply:
        args, engine = self._runner.args, self._engine
        return {
            "ok": True,
            "protocol": PROTOCOL,
            "plugin": self._plugin,
            "sglang": sglang_version(),
            "state": "on" if engine is not None else "aside",
            "reason": self._aside or "",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "port": getattr(args, "port", None),
            "rank": self._runner.rank,
            "ranks": self._runner.size,
            "dp_rank": getattr(self._runner.itself, "dp_rank", None),
            "model": {"path": str(self._runner.config.model_path), "class": type(self._runner.model).__name__},
            "served": "" if engine is None else engine.served,
            "plan": None if engine is None else _plan(engine),
            "kinds": [] if engine is None else ["full", "delta"],
            "no_deltas": (self._aside or "") if engine is None else engine.no_deltas,
        }

    def _prepare(self, request: Request) -> Reply:
        if self._engine is None:
            return refused(f"the plugin stands aside: {self._aside}")
        if not self._busy.acquire(blocking=False):
            return refused("another version is being prepared")
        try:
            return self._prepared(self._engine, request)
        except FullNeededError as error:
            return refused(str(error)) | {"needs": "full"}
        except (SourceRefusedError, OpeningRefusedError, OSError) as error:
            return refused(str(error))
        finally:
            self._busy.release()

    def _prepared(self, engine: Engine, request: Request) -> Reply:
        began = time.perf_counter()
        options = Options(
            allow_missing=request.allow_missing,
            allow_extra=request.allow_extra,
            allow_dtype_cast=request.allow_dtype_cast,
        )
        path = str(self._root.joinpath(*components(request.path)))
        check = None if request.check is None else request.check == "bytes"
        way = engine.prepare(path, options, check_bytes=check)
        took = round((time.perf_counter() - began) * 1000, 2)
        facts = {"version": way.label, "kind": way.kind, "digest": way.digest, "bytes": way.nbytes, "ms": took}
        return {"ok": True} | facts


def _plan(engine: Engine) -> dict[str, Any] | None:
    plan = engine.loading.plan
    if plan is None:
        return None
    facts = {"replays": plan.replays, "copies": len(plan.copies), "loader": len(plan.residual)}
    return facts | {"proven": plan.proven, "reason": plan.whole or ""}
