"""The main job on real processes: a refitd that keeps an engine on what a trainer publishes, and questions about it."""

import threading
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from refitd_client import Notice, Publication, PublishOptions, RefitClient, WeightPublisher
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.contract.wire import Engine, Event, Version
from refitd_client.errors import ServiceError, ServiceProblemError

from .servers import ADMIN_KEY, API_KEY, EngineServer, RefitdServer

TOKEN = "of-the-service"
RUN = "exp/trial"
PROMPT = [5, 6, 7]
MOST_ENDED = 20  # a refused version is tried again after ever longer, so an answer has time between two loads
PATIENCE = 60.0  # seconds; a busy machine needs some, and nothing here takes them otherwise


@dataclass
class Served:
    """What an engine says of itself, and what it answers."""

    path: str
    label: str
    answer: list[int]


def served_by(engine: EngineServer) -> Served:
    """Ask an engine directly, past refitd."""
    return served_at(engine.url)


def served_at(url: str) -> Served:
    """Ask what is at a URL; again where an update has ended the answer early, as clients do."""
    headers = {"Authorization": f"Bearer {API_KEY}"}
    prompt = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
    }
    with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE, trust_env=False) as http:
        for _ in range(MOST_ENDED):
            reply = http.post("/generate", json=prompt).raise_for_status().json()
            info = http.get("/model_info").json()
            if reply["meta_info"]["finish_reason"]["type"] != "abort":
                return Served(info["model_path"], info["weight_version"], reply["output_ids"])
    raise AssertionError(f"updates have ended {MOST_ENDED} answers in a row")


@dataclass
class Job:
    """A root, a running refitd, its engine, and all events since its start."""

    root: Path
    refitd: RefitdServer
    engine: EngineServer
    client: RefitClient
    run: str = RUN
    events: list[Event] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def publish(self, model: Path, step: int) -> Publication:
        """Publish a model's folder as a trainer does, without waiting."""
        with WeightPublisher(self.root, self.run, self.refitd.url, options=PublishOptions(token=TOKEN)) as publisher:
            return publisher.publish(model, step=step)

    def serve(self, model: Path, step: int) -> Publication:
        """Publish, and wait until it is served and the events up to then are here."""
        publication = self.publish(model, step)
        publication.wait(timeout=PATIENCE)
        self.until(lambda event: event.subject == publication.version_id and event.text.startswith("served"))
        return publication

    def announce(self, path: Path | str | None, step: int, **more: Any) -> Version:
        """Send a notice, with nothing but the path that it names."""
        return self.client.announce(Notice(run=self.run, step=step, path=None if path is None else str(path), **more))

    def refused(self, path: Path | str, step: int, **more: Any) -> tuple[int, str, str]:
        """Send a notice that is refused; its status, the kind of problem and the explanation."""
        try:
            self.announce(path, step, **more)
        except ServiceProblemError as error:
            return error.problem.status, error.problem.slug, error.problem.detail
        raise AssertionError("the notice was taken")

    def rejected(self, path: Path | str | None, step: int) -> str:
        """Send a notice for a version that is rejected; the reason."""
        version = self.announce(path, step)
        result = self.client.wait(version.id, "sealed", timeout=PATIENCE)
        assert result.version.state is VersionState.REJECTED, result
        return result.version.reason or ""

    @property
    def engine_now(self) -> Engine:
        """The engine as the service sees it."""
        return self.client.engines().items[0]

    def states(self) -> list[str]:
        """The states that the engine went through, as the event log tells."""
        return [event.data["state"] for event in self.events if event.kind == "engine" and "state" in event.data]

    def until(self, what: Callable[[Event], bool], after: int = 0) -> Event:
        """Wait for an event behind `after`."""

        def found() -> Event | None:
            return next((event for event in self.events if event.seq > after and what(event)), None)

        with self.changed:
            event = self.changed.wait_for(found, PATIENCE)
        assert event is not None, f"it did not happen; the last events: {self.events[-20:]}\n{self.refitd.tail()}"
        return event

    def until_engine(self, state: EngineState, after: int = 0) -> Event:
        """Wait for the engine to get into a state."""
        return self.until(lambda event: event.kind == "engine" and event.data.get("state") == state, after)

    @property
    def now(self) -> int:
        """The last event so far."""
        return self.events[-1].seq if self.events else 0

    def listen(self) -> None:
        """Collect events until the service is gone for good."""
        with suppress(ServiceError), RefitClient(self.refitd.url) as client, closing(client.events("0")) as stream:
            for event in stream:
                with self.changed:
                    self.events.append(event)
                    self.changed.notify_all()


@contextmanager
def running(
    folder: Path,
    engine: EngineServer,
    *flags: str,
    root: Path | None = None,
    run: str = RUN,
    named: bool = True,
    first: Callable[[], object] | None = None,
) -> Generator[Job]:
    """Run a refitd for one engine, which it is told of or has to find, on a root of its own unless one is given.

    What `first` is for: see `RefitdServer`.
    """
    keys = folder / "keys"
    keys.mkdir(exist_ok=True)
    if root is None:
        root = folder / "root"
        root.mkdir()
    files = {"--engine-key-file": API_KEY, "--engine-admin-key-file": ADMIN_KEY, "--token-file": TOKEN}
    for flag, secret in files.items():
        (keys / flag).write_text(secret)
        flags = (*flags, flag, str(keys / flag))
    quick = ("--probe-interval", "0.2", "--scan-interval", "0.2", "--settle", "0.05")
    with (
        RefitdServer(folder, root, [engine.url] if named else [], *quick, *flags, first=first) as refitd,
        RefitClient(refitd.url, token=TOKEN) as client,
    ):
        job = Job(root, refitd, engine, client, run)
        threading.Thread(target=job.listen, daemon=True).start()
        yield job
