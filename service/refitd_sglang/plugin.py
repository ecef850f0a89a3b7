"""SGLang's entry point (`sglang.srt.plugins`, SGLang 0.5.11 and later): `refitd = refitd_sglang.plugin:register`.

One function is wrapped, `update_weights_from_disk` of whatever object has it, and the end of `ModelRunner.__init__` is
waited for, to open the channel before the first update. A folder without `refit.json`, an update that names some
tensors only, and engines that the plugin does not handle go straight through to SGLang's own function.
"""

import logging
import sys
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_sglang.answer import Answer
from refitd_sglang.settings import SettingError, Settings, read_settings
from refitd_sglang.transaction import Outcome

logger = logging.getLogger("refitd_sglang")
_SCHEDULER = "sglang.srt.managers.scheduler"  # the processes that hold weights have it
_RUNNER_INIT = "sglang.srt.model_executor.model_runner.ModelRunner.__init__"


def plugin_version() -> str:
    """The installed release of refitd."""
    try:
        return version("refitd")
    except PackageNotFoundError:
        return "unknown"


def register() -> None:
    """Wrap SGLang's function, or say once why not. Never raises."""
    try:
        settings = read_settings()
        if settings.on and _SCHEDULER in sys.modules:
            _register(settings)
    except SettingError as error:
        logger.warning("refitd stands aside: %s", error)
    except Exception:
        logger.warning("refitd stands aside: it could not be set up", exc_info=True)


def _register(settings: Settings) -> None:
    hooks: Any = import_module("sglang.srt.plugins.hook_registry")
    from refitd_sglang.versions import Aside, find_layout, sglang_version

    layout = find_layout()
    if isinstance(layout, Aside):
        logger.warning("refitd stands aside: SGLang %s is not one that it knows: %s", sglang_version(), layout.reason)
        return
    plugin = Plugin(layout, settings)
    hooks.HookRegistry.register(layout.target, plugin.update, hooks.HookType.AROUND)
    hooks.HookRegistry.register(_RUNNER_INIT, plugin.started, hooks.HookType.AFTER)


class Plugin:
    """The two hooks, and the engines of this process (one, but for tests)."""

    def __init__(self, layout: Any, settings: Settings) -> None:
        self._layout = layout
        self._settings = settings
        self._engines: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._told: set[str] = set()

    def started(self, _: None, runner: Any, *args: Any, **kwargs: Any) -> None:
        """After `ModelRunner.__init__`. Never raises."""
        try:
            updater = getattr(runner, "weight_updater", runner)
            self._engine(updater)
        except Exception:
            logger.warning("refitd could not look at the model", exc_info=True)

    def update(self, stock: Any, updater: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Around `update_weights_from_disk`. Raises only what stock SGLang raises where the plugin is inert."""
        try:
            engine, call = self._engine(updater), self._call(stock, updater, args, kwargs)
        except Exception:
            self._warn("refitd stands aside: a call could not be understood", exc_info=True)
            engine = call = None
        if engine is not None and call is None:
            engine.lost_track()
        if engine is None or call is None:
            return stock(updater, *args, **kwargs)
        answer = self._updated(engine, call)
        return answer.outcome is Outcome.SERVED, answer.message  # SGLang writes what failed into its log

    def _updated(self, engine: Any, call: Any) -> Answer:
        try:
            self._open_channel(engine, call.path)
            answer = engine.update(call)
        except Exception as error:  # a bug, or a store that is gone: say what is known, and let the engine live
            logger.exception("refitd failed in an update")
            outcome = Outcome.UNKNOWN if engine.touched else Outcome.REFUSED
            answer = Answer(outcome=outcome, reason=f"{type(error).__name__}: {error}")
        logger.info("refitd: %s", answer.told)
        return replace(answer, plugin=plugin_version())

    def _engine(self, updater: Any) -> Any:
        """This rank's engine, made when it is first seen; None where the plugin stands aside for it."""
        from refitd_sglang.versions import Runner

        runner = Runner(updater)
        key = runner.itself
        if key not in self._engines:
            self._engines[key] = seat = _Seat(runner, self._layout, self._settings)
            if seat.aside is not None:
                self._warn(f"refitd stands aside, updates are SGLang's own: {seat.aside}")
            seat.open_channel(self._settings.root)
        return self._engines[key].engine

    def _call(self, stock: Any, updater: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is asked for; None where it is nothing for the plugin."""
        from refitd_sglang.call import Call
        from refitd_sglang.offered import is_promised
        from refitd_sglang.source import is_version

        said = self._layout.arguments(updater, args, kwargs)
        path = said["model_path"]
        if said.get("weight_name_filter") is not None or not (is_version(path) or is_promised(path)):
            return None

        def again(path: str, load_format: str, recapture: bool) -> tuple[bool, str]:
            extra = {"recapture_cuda_graph": recapture} if "recapture_cuda_graph" in said else {}
            return stock(updater, path, load_format, **extra)

        return Call(said["model_path"], said["load_format"], bool(said.get("recapture_cuda_graph")), again)

    def _open_channel(self, engine: Any, path: str) -> None:
        from refitd_sglang.source import place_of

        place = place_of(path, self._settings.root)
        for seat in self._engines.values():
            if seat.engine is engine:
                seat.open_channel(place.root if (place.root / SERVICE_FOLDER).is_dir() else None)

    def _warn(self, text: str, *, exc_info: bool = False) -> None:
        """Once: an engine is updated every few seconds."""
        if text not in self._told:
            self._told.add(text)
            logger.warning(text, exc_info=exc_info)


class _Seat:
    """One rank: its engine, or why there is none, and its channel."""

    def __init__(self, runner: Any, layout: Any, settings: Settings) -> None:
        from refitd_sglang.engine import Engine
        from refitd_sglang.ranks import Ranks, default_store

        self._runner = runner
        self._channel: Any = None
        self.aside: str | None = runner.aside()
        self.engine: Any = None
        store = default_store() if self.aside is None and runner.size > 1 else None
        if self.aside is None and runner.size > 1 and store is None:
            self.aside = "the ranks have no store to speak through"
        if self.aside is None:
            ranks = Ranks(store, runner.rank, runner.size, settings.wait)
            self.engine = Engine(runner, layout.loader, ranks, root=settings.root, check_bytes=settings.check_bytes)

    def open_channel(self, root: Path | None) -> None:
        """Open it once, when the root is known."""
        from refitd_sglang.channel import Channel
        from refitd_sglang.desk import Desk

        if self._channel is None and root is not None:
            if self.engine is not None:
                self.engine.root = root
            desk = Desk(root, self._runner, self.engine, self.aside, plugin_version())
            self._channel = Channel(root, self._runner.rank, desk.handle)
            self._channel.open()
