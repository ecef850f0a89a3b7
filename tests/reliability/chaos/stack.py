"""The processes of a training job: engines, refitd, a publisher, and what watches them. Nothing outlives a run."""

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from chaos.book import RUN, Book, Published
from chaos.follower import Follower
from chaos.load import Load
from chaos.midload import MidLoad
from chaos.models import NAMES, START_UP
from chaos.reference import Reference
from chaos.trainer import Trainer
from refitd_client import RefitClient
from refitd_client.contract.manifest import parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME, Order
from refitd_client.contract.states import EngineState
from refitd_client.contract.wire import Engine
from refitd_client.errors import ServiceError
from support.servers import RefitdServer, Server

SGLANG = "sglang"


@dataclass(frozen=True, slots=True)
class Begun:
    """A publication that was ordered. `mark` is where the publisher's lines about it begin."""

    step: int
    model: str
    mark: int


@dataclass
class Stack:
    """All of it. `ids` are the service's names of the engines."""

    root: Path
    models: Path
    engines: dict[str, Server]
    refitd: RefitdServer
    client: RefitClient
    trainer: Trainer
    follower: Follower
    load: Load
    reference: Reference
    mid_load: MidLoad | None
    book: Book = field(default_factory=Book)
    ids: dict[str, str] = field(default_factory=dict[str, str])
    _step: int = 1
    _recent: list[str] = field(default_factory=lambda: [START_UP])

    @property
    def run_folder(self) -> Path:
        """Where versions are."""
        return self.root / RUN

    def publish(self, chance: random.Random) -> Begun:
        """Have the next step published, with a model that no engine has at the moment."""
        model = chance.choice([name for name in NAMES if name not in self._recent])
        self._recent = [*self._recent[-1:], model]
        return Begun(self._step, model, self.trainer.publish(self._step, self.models / model, model))

    def published(self, begun: Begun, within: float) -> None:
        """Wait until it is, and write it down."""
        self.trainer.until("published", begun.mark, within)
        self.note(begun)

    def note(self, begun: Begun) -> None:
        """Write down what is known of a publication. A trainer that did not hear of its end will do the step again."""
        line = self.trainer.said("published", begun.mark)
        if line is not None:
            self.book.add(Published(Order(line["generation"], begun.step), begun.model))
            self._step = begun.step + 1
        self.reread()

    def reread(self) -> None:
        """Write down what is on disk: a publisher may have died between naming a version and saying so."""
        for manifest in self.run_folder.glob(f"v*/{MANIFEST_NAME}"):
            with suppress(FileNotFoundError):  # it was collected just now, so it was known before
                said = parse_manifest(manifest.read_bytes())
                self.book.add(Published(said.order, said.metadata["model"]))

    def not_in_sync(self) -> str | None:
        """Why the fleet does not serve the newest version, None if it does."""
        newest = self.book.newest
        try:
            engines = self.client.engines().items
        except ServiceError as error:
            return f"the service does not answer: {error}"
        late = [_sentence(engine) for engine in engines if not _serves(engine, newest)]
        return f"{newest.id} is not everywhere: {'; '.join(late)}" if late else None

    def converge(self, within: float) -> str | None:
        """Wait until the fleet serves the newest version and each engine answers. Why not, None if it does."""
        ends = time.monotonic() + within
        while (reason := self.not_in_sync()) is not None:
            if time.monotonic() > ends:
                return reason
            self.follower.change(0.1)
        moment, newest = time.monotonic(), self.book.newest
        for name, asked in self.load.asked.items():
            # Of an engine that was killed the service may still say what it served before: it has to show it itself.
            if asked.killed is not None and not self.load.is_answered_by(name, newest, self.reference.expected, within):
                return f"{name} was started again, and {newest.id} does not answer there"
            asked.floor, asked.killed = newest.order, None
            answer = self.load.answer_sent_after(name, moment, within)
            if answer is None:
                return f"{name} is in sync and does not answer"
            if not answer.spans and answer.tokens != self.reference.expected(newest.model, answer.prompt):
                return f"{name} is in sync with {newest.id} and answers {answer.tokens} to prompt {answer.prompt}"
        return None


def _serves(engine: Engine, version: Published) -> bool:
    facts = (engine.state, engine.version, engine.weight_version, engine.paused)
    return facts == (EngineState.IN_SYNC, version.id, version.label, False)


def _sentence(engine: Engine) -> str:
    return f"{engine.url} is {engine.state} on {engine.version}, paused: {engine.paused} ({engine.reason})"


def kill(server: Server) -> None:
    """SIGKILL at once, and only then see to what is left."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.kill()
