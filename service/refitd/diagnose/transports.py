"""How fast each transport brings a version from this trainer's host to a run's engines: each that can work is tried.

What is published are a model's own weights, changed a little each time: the lowest bit of one element in a hundred is
the other one, and back again the next time. So a delta is one of about a hundredth. The last version has the weights as
they are in the model's folder, so that engines answer as before.

    answered   from the call of `publish` until the last engine had taken the version, or was proved to serve it
    held       of it, how long `publish` kept the trainer
    paused     how long the engine that took longest generated nothing; not known of engines on hosts that follow

The first publication by each transport begins processes, groups and copies. It is not counted.
"""

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal, Protocol, cast

from refitd.catalog.refusals import DOCTORS_RUN
from refitd.observe.history import STANDSTILL
from refitd_client.contract.states import Kind
from refitd_client.contract.wire import Notice
from refitd_client.errors import PublishError, RefitError, ServiceProblemError
from refitd_client.http.connection import Connection
from refitd_client.http.publisher_client import newest_known, open_client, root_name
from refitd_client.publish.publication import StagedPublication
from refitd_client.publish.publisher import WeightPublisher
from refitd_client.publish.route import hindrances
from refitd_client.transport.group.choice import TRANSPORTS, Choice, Transport
from refitd_client.transport.ipc.shared import SharedTensors

if TYPE_CHECKING:
    import torch

TRIED = tuple(each for each in TRANSPORTS if each != "auto")
EVERY = 100  # of how many elements one is changed
_ASK_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportFigures:
    """What one transport took: in `unit`, milliseconds, of each publication, and the bytes of one. `medians_ms` has the
    medians of `answered`, `held` and `paused`, of those that have values. `ranks` counts the processes that sent, each
    its part of the weights. `reason` says why there are no figures, or not all: it cannot work here, it failed, or
    something else went in its place.
    """

    transport: str
    ranks: int = 1
    answered: list[float] = field(default_factory=list[float])
    held: list[float] = field(default_factory=list[float])
    paused: list[float] = field(default_factory=list[float])
    unit: Literal["ms"] = "ms"
    medians_ms: dict[str, float] = field(default_factory=dict[str, float])
    bytes: int | None = None
    reason: str | None = None

    def with_medians(self) -> "TransportFigures":
        """The same with the medians of what was measured."""
        measured = {"answered": self.answered, "held": self.held, "paused": self.paused}
        return replace(self, medians_ms={name: median(values) for name, values in measured.items() if values})


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportComparison:
    """All transports beside each other. `fastest` answered first, by the median; None where none worked. `auto` is what
    `transport="auto"` takes here, for the reason `auto_why`. `of_ranks` is the same where several ranks send.
    """

    run: str
    device: str
    model_bytes: int
    engines: list[str]
    figures: list[TransportFigures]
    fastest: str | None
    auto: str
    auto_why: str
    ranks: int = 1
    of_ranks: "TransportComparison | None" = None


class BenchTrainer(Protocol):
    """What publishes a model's weights: of `nbytes` bytes, from so many `ranks`."""

    @property
    def ranks(self) -> int:
        """How many processes have the weights."""
        ...

    @property
    def nbytes(self) -> int:
        """The bytes of all weights."""
        ...

    def flip(self) -> None:
        """Change the weights a little, or change them back."""
        ...

    def publish(self, step: int, transport: Transport) -> StagedPublication:
        """Publish them. Raises what a publisher does."""
        ...

    def hindrances(self) -> tuple[Choice, dict[str, str]]:
        """What `auto` would take, and why transports cannot work, by their names. Raises ServiceError."""
        ...


class OneTrainer:
    """A process that has all weights (`BenchTrainer`)."""

    ranks = 1

    def __init__(
        self, publisher: WeightPublisher, connection: Connection, run: str, tensors: "Mapping[str, torch.Tensor]"
    ) -> None:
        """Publish nothing yet.

        Args:
            publisher: of the run.
            connection: where the service is.
            run: the run.
            tensors: what is published; changed and changed back.
        """
        self._publisher, self._connection, self._run, self._tensors = publisher, connection, run, tensors

    @property
    def nbytes(self) -> int:
        """As `BenchTrainer`."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def flip(self) -> None:
        """As `BenchTrainer`."""
        flip(self._tensors)

    def publish(self, step: int, transport: Transport) -> StagedPublication:
        """As `BenchTrainer`."""
        return self._publisher.publish(self._tensors, step=step, transport=transport)

    def hindrances(self) -> tuple[Choice, dict[str, str]]:
        """As `BenchTrainer`."""
        return hindrances(self._tensors, self._connection, self._run)


@contextmanager
def tensors_on(folder: Path, device: str) -> Generator["dict[str, torch.Tensor]"]:
    """A model's tensors on a device, by name; those on the CPU in memory that engines on this host can read.

    Args:
        folder: has its `*.safetensors`.
        device: `cpu`, or a GPU as torch names it.

    Raises:
        PublishError: there is no such file, a tensor is twice there, or the device is not there or has no room.
        OSError: a file cannot be read.
    """
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]  # torch takes seconds

    from refitd_client.tensors import DTYPES

    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            loaded = load_file(file, device=device)
        except RuntimeError as error:  # of torch: no such device, or no room on it
            raise PublishError(f"{file} cannot be loaded onto {device}: {error}") from error
        if twice := found.keys() & loaded.keys():
            raise PublishError(f"{folder} has {min(twice)} in two files")
        found |= loaded
    if not found:
        raise PublishError(f"{folder} has no *.safetensors: name a model's folder, as save_pretrained writes it")
    if device != "cpu":
        yield found
        return
    specs = {name: (DTYPES[str(each.dtype).removeprefix("torch.")], tuple(each.shape)) for name, each in found.items()}
    shared = SharedTensors(specs)
    try:
        for name, tensor in found.items():
            shared.tensors[name].copy_(tensor)
        yield shared.tensors
    finally:
        shared.close()


def flip(tensors: "Mapping[str, torch.Tensor]") -> None:
    """Change the lowest bit of one element in a hundred of each tensor. A second call changes it back.

    Numbers of one byte stay as they are: their lowest bit is a large part of their value.
    """
    import torch

    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.element_size() in integers:
            tensor.view(integers[tensor.element_size()]).view(-1)[::EVERY] ^= 1


def check_place(connection: Connection, root: Path, *, takes_engines: bool) -> None:
    """Ask the service whether versions of this root would be taken, before one is written. Nothing is.

    The notice is one that it refuses: of a hand-over that has failed, and that it knows nothing of.

    Args:
        connection: where the service is.
        root: where versions would be written.
        takes_engines: the run is new, and free engines are to follow it.

    Raises:
        ServiceError: the service does not answer, or does not take the token.
        ValueError: it watches another root, follows another service, or has no free engine.
    """
    notice = Notice(
        run=DOCTORS_RUN,
        step=1,
        kind=Kind.HANDOVER,
        failed="a look before a bench",
        root=root_name(root),
        engines="mine",
    )
    with open_client(connection, try_for=_ASK_SECONDS) as client:
        try:
            client.announce(notice)
        except ServiceProblemError as error:
            match error.problem.slug:
                case "other-root" | "run-followed":
                    raise ValueError(error.problem.detail) from error
                case "run-not-followed" if takes_engines:
                    runs = sorted({engine.run for engine in client.engines().items if engine.run is not None})
                    named = f"--run {runs[0]}" if len(runs) == 1 else f"--run with one of {', '.join(runs) or 'them'}"
                    raise ValueError(f"no engine is free: try the engines of a run, {named}") from error
                case "unknown-version" | "run-not-followed":
                    return
                case _:
                    raise


class TransportBench:
    """Publishes by one transport after the other, as the only publisher of the run."""

    def __init__(
        self,
        trainer: BenchTrainer,
        connection: Connection,
        run: str,
        *,
        publications: int,
        between: float,
        timeout: float,
    ) -> None:
        """Publish nothing yet.

        Args:
            trainer: the only one of the run.
            connection: where the service is.
            run: the run.
            publications: how many are counted for each transport.
            between: seconds in which a trainer would compute, from the end of one publication to the next. Meanwhile
                engines open the files that have followed the last one.
            timeout: seconds that each may take.
        """
        self._trainer = trainer
        self._connection = connection
        self._run = run
        self._publications = publications
        self._between = between
        self._timeout = timeout
        known = newest_known(connection, run)
        self._step = 0 if known is None else known.step
        self._flipped = False

    def compare(self, device: str, say: Callable[[str], None]) -> TransportComparison:
        """Try all.

        Args:
            device: where the tensors are, for the answer.
            say: is called with what begins.

        Raises:
            ServiceError: the service does not answer, or no engine follows the run.
            PublishError, VersionFailedError, EngineFailedError, WaitTimeoutError: already the first version, by files,
                was not served.
        """
        say("the first version, by files")
        self._publish("disk").wait(self._timeout)
        with open_client(self._connection, try_for=_ASK_SECONDS) as client:
            engines = [engine.id for engine in client.engines(self._run).items]
        auto, hindered = self._trainer.hindrances()
        figures: list[TransportFigures] = []
        try:
            for transport in TRIED:
                why = hindered.get(transport)
                figures.append(
                    self._tried(cast("Transport", transport), partial(say, transport))
                    if why is None
                    else self._none(transport, why)
                )
        finally:  # also where it is interrupted: engines are not left on changed weights
            say("the weights as they are, by files")
            self._restore()
        return _compared(self._run, device, self._trainer, engines, figures, auto)

    def _none(self, transport: str, why: str) -> TransportFigures:
        return TransportFigures(transport=transport, ranks=self._trainer.ranks, reason=why)

    def _tried(self, transport: Transport, say: Callable[[], None]) -> TransportFigures:
        say()
        found = TransportFigures(transport=transport, ranks=self._trainer.ranks)
        size = reason = None
        for number in range(self._publications + 1):
            try:
                answered, held, publication = self._measured(transport)
                paused = self._paused(publication.version_id)
                committed = publication.committed(self._timeout)
                publication.wait(self._timeout, "sealed")
            except RefitError as error:
                return self._none(transport, str(error))
            if (instead := _instead(transport, publication)) is not None:
                return self._none(transport, instead)
            if number == 0:
                continue
            if transport == "delta" and committed.kind is not Kind.DELTA:
                reason = f"full versions went: {committed.why_full}"
            size = committed.bytes if transport in {"disk", "delta"} else self._trainer.nbytes
            found.answered.append(answered)
            found.held.append(held)
            if paused is not None:
                found.paused.append(paused)
        return replace(found, bytes=size, reason=reason).with_medians()

    def _measured(self, transport: Transport) -> tuple[float, float, StagedPublication]:
        """Milliseconds until it was answered, and in which the trainer was held; and the publication."""
        time.sleep(self._between)
        self._trainer.flip()
        self._flipped = not self._flipped
        began = time.perf_counter()
        publication = self._publish(transport)
        held = answered = (time.perf_counter() - began) * 1000
        if publication.handed is None or not publication.handed.engines:
            publication.wait(self._timeout)
            answered = (time.perf_counter() - began) * 1000
        return answered, held, publication

    def _publish(self, transport: Transport) -> StagedPublication:
        self._step += 1
        return self._trainer.publish(self._step, transport)

    def _paused(self, version: str) -> float | None:
        with open_client(self._connection, try_for=_ASK_SECONDS) as client:
            loads = [engine.last_attempt for engine in client.engines(self._run).items]
        mine = [
            load.timings for load in loads if load is not None and load.version == version and "pause" in load.timings
        ]
        return max((sum(timings.get(stage, 0.0) for stage in STANDSTILL) for timings in mine), default=None)

    def _restore(self) -> None:
        if self._flipped:
            self._trainer.flip()
            self._flipped = False
        self._publish("disk").wait(self._timeout)


def _instead(transport: Transport, publication: StagedPublication) -> str | None:
    """Why what was asked for did not happen; None where it did."""
    handed = publication.handed
    if transport in {"disk", "delta"} or handed is None or handed.reason is None:
        return None
    return handed.reason


def _compared(
    run: str, device: str, trainer: BenchTrainer, engines: list[str], figures: list[TransportFigures], auto: Choice
) -> TransportComparison:
    worked = [each for each in figures if each.answered]
    fastest = min(worked, key=lambda each: median(each.answered), default=None)
    return TransportComparison(
        run=run,
        device=device,
        model_bytes=trainer.nbytes,
        engines=engines,
        figures=figures,
        fastest=None if fastest is None else fastest.transport,
        auto=auto.transport,
        auto_why=auto.why,
        ranks=trainer.ranks,
    )
