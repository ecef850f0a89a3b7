"""The plugin in one rank's process: its engine, or why updates are left to the engine's own code, and its channel."""

import logging
from dataclasses import replace
from pathlib import Path

from refitd_client.contract.naming import SERVICE_FOLDER, installed_release
from refitd_client.contract.plugin import Answer, UpdateOutcome
from refitd_plugin import ranks
from refitd_plugin.channel import Channel
from refitd_plugin.port import EngineProcess, UpdateCall
from refitd_plugin.rank_engine import RankEngine
from refitd_plugin.requests import RequestHandler
from refitd_plugin.settings import PluginSettings
from refitd_plugin.source import place_of

logger = logging.getLogger("refitd_plugin")
_OPENING_SECONDS = 2.0  # for a thread to begin and a socket to be made; the engine computes nothing meanwhile


class RankPlugin:
    """One rank's. `engine` is None where updates are the engine's own, and `aside` says why."""

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
        """Open the channel, unless it is open; why the service cannot have this rank load, None where it can.

        Args:
            root: refitd's root, where the settings do not name it.
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
        """Open it once, when the root is known; anew where a variable has named a root that is not there."""
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
