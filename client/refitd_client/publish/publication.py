"""A version that was published, its notice to the service, and the wait until it is served.

The notice only saves time: the service finds a version by itself, a little later.

What is left of a publication when its trainer goes on (`Background`) is done one at a time, in order, in a thread of
the publisher's. An error is raised once: to the caller that waits for that publication, or else by the next call of the
publisher, or by its `close`. At the end of the interpreter, and when a publisher is garbage-collected, what was begun
is finished first, and an error that no caller got is logged. A process that is killed leaves nothing visible.
"""

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock

from refitd_client.contract.states import Kind
from refitd_client.contract.wire import Notice, WaitResult
from refitd_client.errors import (
    Fault,
    NotFoundError,
    PublishError,
    ServiceError,
    ServiceProblemError,
    ServiceUnreachableError,
    WaitTimeoutError,
)
from refitd_client.http.connection import Connection, ServiceReach
from refitd_client.http.exchange import Served, judge
from refitd_client.http.publisher_client import no_token, open_client
from refitd_client.http.routes import WaitFor
from refitd_client.write.version_folder import Laps


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """What became of a version before its files: the engines that serve it now, and why not all do, or none.

    `transport` is how it goes, and `why` says why that way; None where `publish` was called without `transport`. By
    files alone there are no engines, and `reason` is None unless more was asked for. `timings` are milliseconds of
    `offer` (fingerprints, the offer's file), `notice`, and `taken`: from the call of `publish` until the last engine
    had answered. `sent` are milliseconds of a transfer over a process group by stage, None where there was none;
    `sent_bytes` are the bytes that it has brought to engine ranks, each rank's counted.
    """

    engines: tuple[str, ...] = ()
    reason: str | None = None
    timings: Mapping[str, float] | None = None
    sent: Mapping[str, float] | None = None
    sent_bytes: int = 0
    transport: str | None = None
    why: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all engines of the run serve the version."""
        return bool(self.engines) and self.reason is None


class PendingPublication:
    """A publication that goes on in the background. `was_read`: a caller has got its result or its error."""

    def __init__(self, future: "Future[Publication]") -> None:
        self._future = future
        self.was_read = False

    def log_error(self) -> None:
        """Log the error, if there is one and no caller gets it before."""

        def log(future: "Future[Publication]") -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None and not self.was_read:
                self.was_read = True
                _log.error("a publication has failed in the background, and nothing waited for it: %s", error)

        self._future.add_done_callback(log)

    def afterwards(self, call: Callable[[], None]) -> None:
        """Call something when the publication has ended, in whatever way; at once if it has."""
        self._future.add_done_callback(lambda _: call())

    def get(self, timeout: float | None = None) -> "Publication":
        """Wait for it, `timeout` seconds. Raises what the publication raised, or TimeoutError."""
        done, _ = wait([self._future], timeout)
        if not done:
            raise TimeoutError
        self.was_read = True
        return self._future.result()


class Turn:
    """One call of a publisher at a time: other threads wait, and a second call of the same thread is refused.

    Such a call comes from a signal handler, which interrupts the first one, or from a function that the first one
    calls, as `progress`. To wait for the first one it would have to wait for itself. `is_ending`: `close` came in the
    middle of the call that is under way.
    """

    def __init__(self) -> None:
        self._lock = RLock()  # a thread gets it twice, so that a handler can look who has it
        self._call: str | None = None
        self.is_ending = False

    @contextmanager
    def of(self, call: str) -> Generator[None, None, None]:
        """Begin a call, after those of other threads.

        Raises:
            PublishError: this thread is in a call already.
        """
        with self._lock:
            if self._call is not None:
                raise PublishError(
                    f"{call} was called in the middle of {self._call}, by a signal handler or by a function that the "
                    "publisher calls: there only close() can be called, which ends the publication"
                )
            self._call = call
            try:
                yield
            finally:
                self._call = None

    def end(self) -> bool:
        """Have the call that this thread is in end early. False if it is in none."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self.is_ending = self._call is not None
            return self.is_ending
        finally:
            self._lock.release()

    def require_open(self) -> None:
        """Raise PublishError if the call is to end early."""
        if self.is_ending:
            raise PublishError(
                "the publisher was closed in the middle of a publication, by a signal handler or a function that it "
                "calls: nothing of the step is visible, and it can be published again"
            )


class Background:
    """The thread, made when it is first needed."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._last: PendingPublication | None = None
        self._threads: set[int] = set()
        self.begun: list[PendingPublication] = []  # the last one, for finalizers: they must not know this object
        weakref.finalize(self, _log_errors, self.begun)  # at the end of the interpreter, too: threads have ended then

    def begin(self, work: "Callable[[], Publication]") -> PendingPublication:
        """Have `work` done by the thread. Call `settle` before."""
        if self._pool is None:
            # What the thread is given must not lead to this object: it would keep the publisher for ever.
            self._pool = ThreadPoolExecutor(1, "refitd-publisher", _note_thread, (self._threads,))
        self._last = PendingPublication(self._pool.submit(work))
        self.begun[:] = [self._last]
        return self._last

    def require_other_thread(self, call: str) -> None:
        """Raise PublishError in the thread itself: it would wait for what it does."""
        if threading.get_ident() in self._threads:
            raise PublishError(f"{call} was called by the thread that finishes a publication: call it in another one")

    def settle(self) -> None:
        """Wait for what is under way. Raises its error, if no caller has got it."""
        last = self._last
        if last is None:
            return
        try:
            if not last.was_read:
                last.get()
        finally:
            self._last = None if last.was_read else last  # an interrupted wait has read nothing

    def close(self) -> None:
        """Wait for what is under way, and end the thread. Raises as `settle` does."""
        try:
            self.settle()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None
                self._threads.clear()


def _note_thread(threads: set[int]) -> None:
    threads.add(threading.get_ident())


def _log_errors(begun: list[PendingPublication]) -> None:
    for pending in begun:
        pending.log_error()


NOTICE_DEADLINE = 2.5  # seconds in which new tries to send the notice begin; the last may take as long again
_NOT_NOW_SECONDS = 0.5  # seconds before a service that said "not now" is asked again

_log = logging.getLogger("refitd_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedFacts:
    """What is known of a version when it is committed: as in `Publication`."""

    notice: Notice
    bytes: int = 0
    digest: str = ""
    timings: dict[str, float] = field(default_factory=dict[str, float])
    base: str | None = None
    notice_error: ServiceError | None = field(default=None, compare=False)
    begun: str | None = None
    url: str | None = None
    in_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A version that was published. `committed` waits until it is on stable storage, and so do properties of what is
    known then. Before that nothing is visible under `path`, and nothing will be if the process is killed. A version is
    published even if its notice was lost: the service finds it a little later.

    `kind` says whether it is a delta. Where a delta was asked for, `why_full` is the reason for a full version, and
    `density` the share of all elements that changed since the version before. `handed` says which engines have taken
    it from memory, and how it goes; None where `publish` was called without `transport`.
    """

    run: str
    generation: int
    step: int
    path: Path
    version_id: str
    kind: Kind = Kind.FULL
    why_full: str | None = None
    density: float | None = None
    handed: Handed | None = None
    connection: Connection | None = field(default=None, repr=False)
    facts: CommittedFacts | None = field(default=None, repr=False)
    pending: PendingPublication | None = field(default=None, repr=False, compare=False)

    def committed(self, timeout: float | None = None) -> "Publication":
        """Wait until it is on stable storage, and the notice was sent.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Raises:
            WaitTimeoutError: the time is up; it goes on.
            InvalidWeightsError, StorageError, ServiceProblemError: what `publish` would have raised.
        """
        if self.pending is None:
            return self
        try:
            return replace(self.pending.get(timeout), handed=self.handed)
        except TimeoutError:
            raise WaitTimeoutError(f"{self.version_id} is not committed after {timeout:g} s; it goes on") from None
        except ServiceError as error:
            if isinstance(error.publication, Publication):
                error.publication = replace(error.publication, handed=self.handed)
            raise

    @property
    def notice(self) -> Notice:
        """What goes to the service."""
        return self._facts.notice

    @property
    def bytes(self) -> int:
        """Of its files; 0 where it has none."""
        return self._facts.bytes

    @property
    def digest(self) -> str:
        """The manifest's; empty where it has no files."""
        return self._facts.digest

    @property
    def timings(self) -> dict[str, float]:
        """Milliseconds of `write` (copying, checking and digesting), `sync` (added up over threads), `commit` and
        `notice`, of `stage` where the rest went on without the trainer, of `upload` to an object store, of `compare`
        where a delta was asked for, and of `encode`, which puts one together.
        """
        return self._facts.timings

    @property
    def base(self) -> str | None:
        """The version that a delta leads from."""
        return self._facts.base

    @property
    def notice_error(self) -> ServiceError | None:
        """Why the notice did not reach the service; None if it did."""
        return self._facts.notice_error

    @property
    def begun(self) -> str | None:
        """A sentence if a generation of the run begins with it; None if the run goes on."""
        return self._facts.begun

    @property
    def url(self) -> str | None:
        """Where its objects lie, if it went to an object store; nothing is left at `path` then."""
        return self._facts.url

    @property
    def in_memory(self) -> bool:
        """Whether engines have taken it from the trainer's memory, and it has no files, as `durable` says."""
        return self._facts.in_memory

    @property
    def _facts(self) -> CommittedFacts:
        facts = self.committed().facts
        if facts is None:
            raise PublishError(f"{self.version_id} was never published")
        return facts

    def wait(self, timeout: float = 60.0, wait_for: WaitFor = "served") -> Served:
        """Wait until engines serve the version, or until what `wait_for` says. Raises what `committed` raises, too.

        A service that is down is waited for, and sent the notice again if the first one was lost.

        Args:
            timeout: seconds.
            wait_for: `served`; or `sealed`: the service has found it good; or `taken`: no engine copies it from this
                trainer's memory any more, or will (after a hand-over), so that the tensors may be changed.

        Returns:
            What was reached. Outcome `served` means that engines were proved to serve it; where they have gone on to a
            newer one and its files are gone, the outcome is `superseded`, as it is where they never were on it.

        Raises:
            VersionRejectedError: the checkpoint is bad; the message has the reason.
            VersionLostError: its files have changed or gone.
            VersionFailedError: it is barred, as versions are that were rolled back from; or the service means other
                content by it, as one of another root does.
            EngineFailedError: engines did not take it.
            WaitTimeoutError: the time is up; the update goes on. It names the engines that are late.
            ServiceUnreachableError: the service was not there all the time, or none was given to the publisher.
            ServiceProblemError: the service refuses the notice or the question.
            ServiceError: the token file cannot be read.
            ValueError: `sealed` is waited for, and the version has no files.
        """
        ends = time.monotonic() + timeout
        self.committed(timeout)
        facts = self._facts
        if facts.in_memory and wait_for == "sealed":
            raise ValueError(f"{self.version_id} is in the engines' memory alone, as durable says: it is never sealed")
        announce_first = facts.notice_error is not None
        while True:
            left = max(0.0, ends - time.monotonic())
            try:
                return judge(self._ask(wait_for, left, announce_first=announce_first), timeout, facts.digest or None)
            except ServiceProblemError as error:
                is_unknown = isinstance(error, NotFoundError)  # its journal was lost, or it has not scanned yet
                if left <= 0 or not ((is_unknown and not facts.in_memory) or error.fault is Fault.SERVICE):
                    raise
                announce_first = announce_first or is_unknown
            time.sleep(min(_NOT_NOW_SECONDS, left))

    async def wait_async(self, timeout: float = 60.0, wait_for: WaitFor = "served") -> Served:  # noqa: ASYNC109
        """As `wait`, in a thread, for a trainer with an event loop. Cancelling leaves the thread to its timeout."""
        return await asyncio.to_thread(self.wait, timeout, wait_for)

    def _ask(self, wait_for: WaitFor, left: float, *, announce_first: bool) -> WaitResult:
        if self.connection is None:
            raise ServiceUnreachableError("the publisher was opened without service_url, so there is no service to ask")
        ends = time.monotonic() + left
        try:
            with open_client(self.connection, try_for=left) as client:
                if announce_first:
                    client.announce(self.notice)
                return client.wait(self.version_id, wait_for, max(0.0, ends - time.monotonic()))
        except (OSError, ValueError) as error:
            raise no_token(error) from error


def announce(publication: Publication) -> Publication:
    """Send the notice. Returns the publication with the time that this took, and why it failed, if it did.

    Once the service was found down, it is sent once and briefly, until it answers again; and that is logged once.

    Raises:
        ServiceProblemError: the service refuses the notice; the version stands, and is the error's `publication`.
    """
    laps = Laps()
    error: ServiceError | None = None
    reach = ServiceReach() if publication.connection is None else publication.connection.reach
    was_down = reach.is_down
    with laps.lap("notice"):
        try:
            if publication.connection is not None:
                with open_client(publication.connection, try_for=0.0 if was_down else NOTICE_DEADLINE) as client:
                    client.announce(publication.notice)
        except ServiceError as refused:
            error = refused
        except (OSError, ValueError) as refused:
            error = no_token(refused)
    reach.is_down = error is not None and error.fault is not Fault.TRAINER
    facts = replace(publication.committed().facts or CommittedFacts(notice=publication.notice), notice_error=error)
    announced = replace(publication, facts=replace(facts, timings=facts.timings | laps.times))
    if error is not None:
        error.publication = announced
        if error.fault is Fault.TRAINER:
            raise error
        text = "%s is published, and the notice did not reach the service (%s); the service will find the version"
        _log.log(logging.DEBUG if was_down else logging.WARNING, text, publication.version_id, error)
    elif was_down:
        _log.info("%s is published, and the service answers again", publication.version_id)
    return announced
