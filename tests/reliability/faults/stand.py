"""Where a real refitd is put to the test: on a root and a state folder of the test's choice, with a real engine."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from refitd_client import RefitClient
from refitd_client.contract.naming import Order, version_id
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Version
from support.jobs import PATIENCE, RUN, TOKEN, Job, served_by
from support.servers import ADMIN_KEY, API_KEY, EmbeddedServer, RefitdServer

LOOK_SECONDS = 0.05
QUICK = ("--probe-interval", "0.2", "--scan-interval", "0.2", "--settle", "0.05")


@dataclass(frozen=True)
class Subject:
    """The engine, the models that it may be given, and what it answers on each."""

    server: EmbeddedServer
    models: list[Path]
    answers: list[list[int]]

    @classmethod
    def of(cls, server: EmbeddedServer, models: list[Path]) -> "Subject":
        """Load one model after the other, past refitd."""
        subject = cls(server, models, [])
        for model in models:
            subject._load(model)
            subject.answers.append(served_by(server).answer)
        assert len({tuple(answer) for answer in subject.answers}) == len(models)
        return subject

    def begin_anew(self) -> None:
        """Its start-up weights, without a label, computing."""
        self._load(self.models[0])
        self.call("/continue_generation", {"torch_empty_cache": False})

    def model(self, step: int) -> Path:
        """What a step is published from: never the start-up model, never that of the step before."""
        return self.models[1 + step % (len(self.models) - 1)]

    def serves(self, step: int) -> bool:
        """Whether it computes with exactly the weights of a step."""
        return served_by(self.server).answer == self.answers[self.models.index(self.model(step))]

    def call(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Ask it something past refitd."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        url = f"{self.server.url}{path}"
        return httpx.post(url, json=body, headers=headers, timeout=PATIENCE, trust_env=False).raise_for_status()

    def _load(self, model: Path) -> None:
        body = {"model_path": str(model), "load_format": "auto", "weight_version": "default", "flush_cache": True}
        self.call("/pause_generation", {"mode": "retract"})
        self.call("/update_weights_from_disk", body)
        self.call("/continue_generation", {"torch_empty_cache": False})


@dataclass
class Stand(Job):
    """A job with words for what the faults are about. `root` is as this process sees it."""

    @property
    def process(self) -> psutil.Process:
        """The service."""
        return psutil.Process(self.refitd.pid)

    def state_of(self, step: int) -> VersionState:
        """What the service holds of a step."""
        return self.version(step).state

    def version(self, step: int) -> Version:
        """A step's version."""
        return self.client.version(id_of(step))

    def folders(self) -> list[str]:
        """What lies in the run's folder, but for the publisher's own files."""
        return sorted(path.name for path in (self.root / RUN).iterdir() if not path.name.startswith(".publisher"))

    def is_served(self, step: int) -> None:
        """Wait until a step is served. The service may not have found it yet."""
        self.until(lambda event: event.subject == id_of(step))
        result = self.client.wait(id_of(step), timeout=PATIENCE)
        assert result.outcome.value == "served", f"{result}\n{self.refitd.tail()}"

    def said(self, text: str) -> None:
        """Wait until the service has said something."""
        self.until(lambda event: text in event.text)

    def refused_to_reclaim(self) -> tuple[int, str]:
        """Ask for a sweep that cannot be done; the status and the kind of problem."""
        reply = self.ask("POST", "/v1/reclaim")
        assert reply.headers["content-type"] == "application/problem+json", reply.text
        return reply.status_code, reply.json()["type"].rpartition(":")[2]

    def get(self, path: str) -> httpx.Response:
        """Ask without the SDK, which would try again."""
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Ask without the SDK, which would try again."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        url = f"{self.refitd.url}{path}"
        return httpx.request(method, url, json=body, headers=headers, timeout=PATIENCE, trust_env=False)


def id_of(step: int) -> str:
    """The id of a step's version."""
    return version_id(RUN, Order(1, step))


@contextmanager
def standing(
    folder: Path,
    subject: Subject,
    *flags: str,
    root: Path | None = None,
    seen: Path | None = None,
    state: Path | None = None,
    engines: Sequence[str] | None = None,
    by: Sequence[str] = (),
    first: Callable[[], object] | None = None,
) -> Generator[Stand]:
    """Run a refitd for the engine, or for `engines`. `seen` is where the test and the engine see the root."""
    root = root or folder / "root"
    seen = seen or root
    seen.mkdir(exist_ok=True)
    keys = folder / "keys"
    keys.mkdir(exist_ok=True)
    files = {"--engine-key-file": API_KEY, "--engine-admin-key-file": ADMIN_KEY, "--token-file": TOKEN}
    words: list[str] = []
    for flag, secret in files.items():
        (keys / flag).write_text(secret)
        words += [flag, str(keys / flag)]
    words += ["--base-model", str(subject.models[0]), "--path-map", str(seen), *QUICK, *flags]
    urls = [subject.server.url] if engines is None else engines
    with (
        RefitdServer(
            folder, root, urls, *words, "--state", str(state or folder / "state"), by=by, first=first
        ) as refitd,
        RefitClient(refitd.url, token=TOKEN) as client,
    ):
        stand = Stand(seen, refitd, subject.server, client)
        threading.Thread(target=stand.listen, daemon=True).start()
        yield stand


def until(what: Any, why: str = "it did not happen") -> None:
    """Wait for something outside the service, which nobody announces."""
    for _ in range(int(PATIENCE / LOOK_SECONDS)):
        with suppress(httpx.TransportError):
            if what():
                return
        threading.Event().wait(LOOK_SECONDS)
    raise AssertionError(why)
