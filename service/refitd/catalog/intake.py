"""Takes notices: "weights ready" becomes a version in the store, durable before the reply.

What a notice brings stays in memory and in the journal as long as its version, so it is limited.

A notice that is refused is in the log of decisions as well: the trainer has the answer, and an operator looks at the
log. A trainer sends a notice again and again, so that a reason is written down once in a while for each run. Nothing is
written of the notice by which `refitd doctor` asks whether notices are taken: it is to be refused, and doctor says what
the answer means.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from refitd.catalog.files import DiskFiles, RootAwayError
from refitd.policy.admit import LIMITS, SeenFolder, admit, fits
from refitd.policy.readiness import unknown
from refitd.policy.roster import followed, free_engines, move, why_not_followed
from refitd.problem import ProblemError, Slug
from refitd.root.handle import RootHangsError
from refitd.state.records import EngineRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.text import one_line
from refitd.update.targets import Targets
from refitd_client.checkpoint.fault import AGAIN_WHEN_ANNOUNCED, FOR_EVERY_NOTICE
from refitd_client.contract.naming import (
    INCOMING_PREFIX,
    SERVICE_FOLDER,
    InvalidNameError,
    Order,
    check_run,
    check_step,
    name_patterns,
    parse_version_folder,
    version_folder,
    version_id,
)
from refitd_client.contract.states import Kind, VersionState
from refitd_client.contract.wire import Notice
from refitd_client.validation.foreign import Trainer, is_foreign, recognise
from refitd_client.validation.validate import Structure

SAID_AGAIN_SECONDS = 600.0  # until the same reason is written down again for a run
DOCTORS_RUN = "refitd-doctor"  # which doctor names in its own
MOST = 64  # reasons in that time: runs' names are the senders', and the log is kept


class RefusedNotices:
    """Writes into the log why notices were refused."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._told: dict[tuple[str, Slug], float] = {}  # monotonic seconds

    def tell(self, notice: Notice, error: ProblemError) -> None:
        """Write a refusal down, unless this run had one of its kind a short while ago."""
        if error.kind is Slug.NOT_READY or notice.run == DOCTORS_RUN:
            return
        now = self._store.clock.monotonic()
        self._told = {key: since for key, since in self._told.items() if now - since < SAID_AGAIN_SECONDS}
        key = (notice.run, error.kind)
        if key in self._told or len(self._told) >= MOST:
            return
        self._told[key] = now
        try:
            kind, subject = "run", check_run(notice.run)
        except InvalidNameError:
            kind, subject = "root", "root"  # a name that no run can have is no subject, and stands in the reason
        text = f"the notice of step {notice.step} was refused: {error.detail}"
        self._store.say(kind, subject, text, is_fault=True, problem=error.kind.slug)


MAX_BASE = 512
MAX_PATH = 4096
MAX_FAILED = 500
MAX_DIGEST = 200
MAX_ROOT = 64
MAX_PUBLISH_MS = 86_400_000.0  # a day
_OFFER = re.compile(r"\.offer-[0-9a-f]{16}")


def _check_caps(notice: Notice) -> None:
    """Refuse fields that are longer than is kept."""
    _check_metadata(notice.metadata)
    try:
        name_patterns(notice.allow_missing)
    except (TypeError, ValueError) as error:
        raise ProblemError(Slug.BAD_REQUEST, str(error)) from error
    if notice.path is not None and len(notice.path) > MAX_PATH:
        raise ProblemError(Slug.BAD_REQUEST, f"path is longer than {MAX_PATH} characters")
    if notice.base is not None and len(notice.base) > MAX_BASE:
        raise ProblemError(Slug.BAD_REQUEST, f"base is a version's id, of at most {MAX_BASE} characters")
    if len(notice.digest or "") > MAX_DIGEST or len(notice.root or "") > MAX_ROOT:
        raise ProblemError(Slug.BAD_REQUEST, f"digest has at most {MAX_DIGEST} characters, and root {MAX_ROOT}")
    if notice.publish_ms is not None and not 0 <= notice.publish_ms <= MAX_PUBLISH_MS:
        raise ProblemError(Slug.BAD_REQUEST, f"publish_ms is between 0 and {MAX_PUBLISH_MS:g} milliseconds")


def _check_handover(notice: Notice) -> None:
    """Refuse an offer or a failure of anything but a hand-over, and a hand-over with neither."""
    said = [each for each in (notice.offer, notice.failed) if each is not None]
    if len(said) != (notice.kind is Kind.HANDOVER):
        raise ProblemError(Slug.BAD_REQUEST, "a hand-over names an offer, or says why it failed; nothing else does")
    if notice.offer is not None and not _OFFER.fullmatch(notice.offer):
        raise ProblemError(Slug.BAD_REQUEST, f"offer {notice.offer[:50]!a} is no name of an offer's file")
    if notice.failed is not None and len(notice.failed) > MAX_FAILED:
        raise ProblemError(Slug.BAD_REQUEST, f"failed is longer than {MAX_FAILED} characters")


def _check_metadata(metadata: Mapping[str, str]) -> None:
    """Refuse metadata of one version, from one notice or several, that is more than is kept."""
    if not fits(metadata):
        most = f"the metadata of a version has at most {LIMITS}"
        raise ProblemError(Slug.BAD_REQUEST, f"{most}: put the rest into a file beside the weights")


class Intake:
    """Admits notices.

    Args:
        targets: hears of offers from memory.
        nudge: `Waiting.nudge`: has the catalog scan and judge soon.
        default_run: the run that engines follow which are bound to none.
        trainers: those whose own folders count as versions.
        kind: what the versions in the root are.
        deltas: whether deltas are taken; where not, publishers hear it and make no more of them.
        upstreams: URLs of the upstreams that this service follows: versions come from there alone.
    """

    def __init__(
        self,
        store: Store,
        targets: Targets,
        files: DiskFiles,
        root: Path,
        nudge: Callable[..., None],
        default_run: str | None = None,
        *,
        trainers: Collection[Trainer] = (),
        kind: Kind = Kind.FULL,
        deltas: bool = True,
        upstreams: Collection[str] = (),
    ) -> None:
        self._store = store
        self._refusals = RefusedNotices(store)
        self._targets = targets
        self._files = files
        self._root = root
        self._nudge = nudge
        self._default_run = default_run
        self._trainers = trainers
        self._kind = kind
        self.upstreams = upstreams
        self._kinds = {kind, Kind.DELTA} if deltas else {kind}
        if kind is Kind.FULL:
            self._kinds.add(Kind.HANDOVER)

    def left_to_upstream(self, do: str) -> str | None:
        """Say whom this service leaves something to, and what to do instead; None where it follows no upstream."""
        return f"this service follows {', '.join(self.upstreams)}: {do}" if self.upstreams else None

    async def take(self, notice: Notice) -> tuple[VersionRecord, bool]:
        """Return the version that a notice is about, and whether it is new.

        Raises:
            ProblemError: the notice cannot be taken; the problem says why and what to do, and so does the log.
            JournalError: it cannot be written down now.
        """
        try:
            return await self._taken(notice)
        except ProblemError as error:
            self._refusals.tell(notice, error)
            raise

    async def _taken(self, notice: Notice) -> tuple[VersionRecord, bool]:
        if (why := self.left_to_upstream(f"publish run {notice.run!a} there")) is not None:
            raise ProblemError(Slug.RUN_FOLLOWED, why)
        self._check(notice)
        newest = self._store.index.newest_of(notice.run)
        begins = self._store.runs.begins(notice.run, newest)
        generation = begins or (1 if newest is None else newest.generation)
        named = notice.path or f"{notice.run}/{version_folder(Order(generation, notice.step))}"
        path = relative_path(named, self._root)
        order = order_of(path, notice.run, notice.step, generation, self._trainers)
        id_ = version_id(notice.run, order)
        known = await self._store.find(id_)
        if known is None and self._store.runs.was_deleted(notice.run, order):
            again = f"publish the step as {version_folder(Order(generation, notice.step))}"
            raise ProblemError(Slug.VERSION_CONFLICT, f"{id_} was deleted with its run: {again}")
        if notice.kind is Kind.HANDOVER:
            return await self._hand_over(notice, path, order, self._store.versions.get(id_, known))
        seen, look = await self._look(path, order, known)
        self._check_root(notice, is_there=seen.there)
        if not seen.there and known is None:
            raise ProblemError(
                Slug.PATH_MISSING,
                f"{self._root / path} is not there: publish into this service's root, {self._root}, and announce then; "
                "a notice's path is as the service sees it, absolute or relative to that root",
            )
        # Meanwhile the same notice may have come in, or the scan may have found the directory.
        known = self._store.versions.get(id_, known)
        if (conflict := admit(notice, seen, known)) is not None:
            raise ProblemError(Slug.VERSION_CONFLICT, conflict)
        self._bring_engines(notice)
        if known is not None:
            return await self._again(known, notice, seen), False
        return await self._take(self._new(notice, path, order), "announced", look), True

    def _check(self, notice: Notice) -> None:
        self._check_root(notice, is_there=True)
        try:
            check_run(notice.run)
            check_step(notice.step)
        except InvalidNameError as error:
            raise ProblemError(Slug.BAD_NAME, str(error)) from error
        _check_caps(notice)
        if notice.kind not in self._kinds:
            refused = f"kind {notice.kind.value!r} is not carried out by this service"
            raise ProblemError(Slug.UNSUPPORTED_KIND, f"{refused}: {self._advice(notice.kind)}")
        if notice.kind is Kind.DELTA and notice.base is None:
            raise ProblemError(Slug.BAD_REQUEST, "a delta names its base: say the id of the version that it leads from")
        _check_handover(notice)
        self._engines_for(notice)

    def _advice(self, kind: Kind) -> str:
        if self._kind is Kind.LORA:
            return (
                "it was started with --lora, and its versions are adapters: publish the folder that peft saves "
                "(model.save_pretrained(DIR)), or start it without --lora"
            )
        if kind is Kind.LORA:
            return "start it with --lora NAME, or publish whole weights (model.merge_and_unload())"
        return f"publish {self._kind.value!r} ones"

    async def _hand_over(
        self, notice: Notice, path: str, order: Order, known: VersionRecord | None
    ) -> tuple[VersionRecord, bool]:
        """Take a version that is in its trainer's memory, or whose files will never come.

        It is a version like any other whose files are not there yet. The offer itself is not written down.
        """
        if known is not None and not known.handed:
            raise ProblemError(Slug.VERSION_CONFLICT, f"{known.id} is {known.state}: its files are there already")
        if notice.failed is not None and known is None:
            detail = "the service knows of no such hand-over, so it cannot fail"
            raise unknown(self._store, Slug.UNKNOWN_VERSION, detail)
        if known is not None:
            if known.state.is_open and notice.failed is not None:
                text = f"its files will not come: {one_line(notice.failed)}"
                known = known.having(state=VersionState.REJECTED, reason=text)
                self._store.put_version(known, f"rejected: {text}")
            elif known.state.is_open:  # the reply was lost, and perhaps with it a service that knew of the offer
                self._targets.offer(known, f"{known.run}/{notice.offer}")
            await self._store.durable()
            return known, False
        self._bring_engines(notice)
        announced = self._new(notice, path, order).having(kind=self._kind, handed=True)
        self._store.put_version(announced, f"handed over from its trainer's memory: {announced.files_to_come}")
        self._targets.offer(announced, f"{announced.run}/{notice.offer}")  # engines go there while the disk writes
        await self._store.durable()
        return announced, True

    def _bring_engines(self, notice: Notice) -> None:
        """Move the engines that the trainer may have to its run; this is durable with the version."""
        for engine in self._engines_for(notice):
            move(self._store, engine, notice.run)

    def _engines_for(self, notice: Notice) -> list[EngineRecord]:
        """Return the engines that this notice moves to its run.

        Raises:
            ProblemError: no engine follows the run, and none is free for it. A version that no engine would ever go to
                is refused, rather than taken and waited for.
        """
        run, closed = notice.run, self._store.runs.closed.keys()
        engines = list(self._store.engines.values())
        runs = set(self._store.index.runs) - closed | {run}
        follow = followed(engines, self._default_run, runs)
        if not follow or run in follow:
            return []
        if notice.engines == "mine" and (free := free_engines(engines, closed)):
            return free
        why = why_not_followed(engines, run, closed=closed, mine=notice.engines == "mine")
        raise ProblemError(Slug.RUN_NOT_FOLLOWED, why)

    def _check_root(self, notice: Notice, *, is_there: bool) -> None:
        """Refuse a publisher that writes into another root, before its steps are taken for some of this root's.

        A publisher's root without a name is this one, named a moment ago, where the version is here.
        """
        mark = self._store.origin.root
        if mark is None or notice.root is None or notice.root == mark.name or (notice.root == "" and is_there):
            return
        raise ProblemError(
            Slug.OTHER_ROOT,
            f"your root is not this service's, which watches {self._root} (as it is called on the service's host): "
            "publish into that folder, or tell the service that watches yours",
        )

    async def _look(self, path: str, order: Order, known: VersionRecord | None) -> tuple[SeenFolder, Structure | None]:
        """Look at the directory, which need not be there where it was collected; of a delta return all of that look."""
        try:
            found = await self._files.glance(path)
        except FileNotFoundError:
            digest, signature = (None, None) if known is None else (known.digest, known.files.signature)
            return SeenFolder(order=order, path=path, digest=digest, signature=signature or "", there=False), None
        except RootAwayError as error:
            raise ProblemError(Slug.NOT_READY, str(error.strerror)) from error
        except RootHangsError as error:
            raise ProblemError(Slug.NOT_READY, str(error)) from error
        except OSError as error:
            raise ProblemError(Slug.PATH_UNREADABLE, f"{self._root / path} cannot be read: {error.strerror}") from error
        if not found.signature:
            raise ProblemError(Slug.PATH_UNREADABLE, found.reason or f"{path} cannot be opened")
        manifest = found.manifest
        digest = None if manifest is None else manifest.digest
        kind = None if manifest is None else (manifest.kind, manifest.base)
        is_all = manifest is not None and manifest.kind is Kind.DELTA and not is_foreign(path)
        seen = SeenFolder(order=order, path=path, digest=digest, signature=found.signature, kind=kind)
        return seen, found if is_all else None

    def _new(self, notice: Notice, path: str, order: Order) -> VersionRecord:
        return VersionRecord(
            run=notice.run,
            order=order,
            path=path,
            state=VersionState.ANNOUNCED,
            created_at=self._store.clock.now(),
            kind=notice.kind,
            base=notice.base,
        ).having(
            noticed=True,
            after=self._after(notice.run, order),
            may_lack=tuple(notice.allow_missing),
            allow_extra=notice.allow_extra,
            metadata=notice.metadata,
            timings=_publish_timing(notice),
        )

    def _after(self, run: str, order: Order) -> str | None:
        """The id of the run's newest version, where that is good and of a later step of the generation; else None."""
        newest = next(iter(self._store.versions_of(run)), None)
        if newest is None or newest.state is not VersionState.SEALED:
            return None
        is_later = newest.order.generation == order.generation and newest.order > order
        return newest.id if is_later else None

    async def _take(self, record: VersionRecord, text: str, look: Structure | None = None) -> VersionRecord:
        self._store.put_version(record, text)
        self._nudge(record.id, look)  # validation may begin at once; the reply waits for the disk
        await self._store.durable()
        return record

    async def _again(self, known: VersionRecord, notice: Notice, seen: SeenFolder) -> VersionRecord:
        if known.handed and known.state.is_open:
            self._nudge()  # its files are there now
        is_mended = seen.there and known.files.signature is not None and seen.signature != known.files.signature
        noticed = _with_notice(known, notice, is_mended=is_mended)
        if noticed.announced.metadata != known.announced.metadata:
            _check_metadata(noticed.announced.metadata)
        if noticed == known:
            await self._store.durable()
            return known
        return await self._take(
            noticed, "announced" if noticed.state.is_open else "a notice adds to what is known of it"
        )


def _publish_timing(notice: Notice) -> dict[str, float]:
    return {} if notice.publish_ms is None else {"publish": notice.publish_ms}


def _with_notice(known: VersionRecord, notice: Notice, *, is_mended: bool) -> VersionRecord:
    """Return a known version with what a notice changes of it.

    A version that the scan found first is now announced: it need not settle, and may do what the notice allows, also
    where it was rejected without, unless its bytes alone were the fault. One that was rejected, and whose files have
    changed since, is looked at again. After any other verdict a notice only adds to its metadata and timings.
    """
    if known.state.is_over:
        return known
    timings = _publish_timing(notice) | known.career.timings  # the first notice counts
    described = known.having(metadata=known.announced.metadata | notice.metadata, timings=timings)
    noticed = described.having(
        noticed=True,
        kind=notice.kind,
        base=notice.base,
        may_lack=tuple(notice.allow_missing),
        allow_extra=notice.allow_extra,
    )
    may_differ = noticed != described and known.verdict.code not in FOR_EVERY_NOTICE
    if known.state is VersionState.REJECTED and (may_differ or is_mended or known.verdict.code in AGAIN_WHEN_ANNOUNCED):
        return noticed.having(state=VersionState.ANNOUNCED, reason=None, code=None)
    return noticed if known.state.is_open else described


def relative_path(path: str, root: Path) -> str:
    """Return a notice's path, absolute or relative, as one relative to the root. Links are not followed or looked at.

    Raises:
        ProblemError: it leads out of the root, is the root, or is a folder that is not a version's.
    """
    absolute = os.path.normpath(root / path)
    inside = os.path.relpath(absolute, root)
    parts = inside.split(os.sep)
    if "\0" in path or parts[0] == os.pardir:
        raise ProblemError(Slug.PATH_OUTSIDE_ROOT, f"{path!a} is not beneath the root {root}: publish into the root")
    if inside == os.curdir or any(part == SERVICE_FOLDER or part.startswith(INCOMING_PREFIX) for part in parts):
        raise ProblemError(Slug.PATH_OUTSIDE_ROOT, f"{path!a} is no version's directory")
    return inside


def order_of(path: str, run: str, step: int, generation: int, trainers: Collection[Trainer] = ()) -> Order:
    """Return the order of the version at `path`: that of its directory's name, else the notice's.

    A directory that the scan finds by its trainer's name for it has to be announced as what the scan takes it for.

    Args:
        path: the directory, relative to the root.
        trainers: those whose own folders count as versions.

    Raises:
        ProblemError: the directory's name is that of another step or run.
    """
    folder, _, name = path.rpartition("/")
    order = parse_version_folder(name)
    if order is None:
        foreign = recognise(path, trainers)
        if foreign is not None and (foreign.run, foreign.step) != (run, step):
            raise ProblemError(
                Slug.BAD_NAME,
                f"{path} is found as run {foreign.run}, step {foreign.step} (--trainers), and not {run}, {step}",
            )
        return Order(generation, step)
    if folder != run or order.step != step:
        raise ProblemError(
            Slug.BAD_NAME,
            f"{path} is the directory of run {folder or '(none)'}, step {order.step}, not of {run}, {step}",
        )
    return order
