"""Takes notices: "weights ready" becomes a version in the store, durable before the reply."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from refitd.catalog.files import Files, RootAwayError
from refitd.catalog.notices import check_caps, check_handover, check_metadata, order_of, relative_path
from refitd.policy.admit import New, NoticeConflict, Same, SeenFolder, admit
from refitd.policy.binding import followed, free_engines, move, why_unbound
from refitd.policy.readiness import unknown
from refitd.problem import ProblemError, Slug
from refitd.rollout.targets import Targets
from refitd.root.threads import RootHangsError
from refitd.state.records import EngineRecord
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd.text import one_line
from refitd_client.checkpoint.fault import AGAIN_WHEN_ANNOUNCED
from refitd_client.contract.naming import InvalidNameError, Order, check_run, check_step, version_folder, version_id
from refitd_client.contract.states import Kind, VersionState
from refitd_client.contract.wire import Notice
from refitd_client.validation.conventions import Trainer

_ASK_FOR_THEM = (
    "a publisher with engines='mine' ('refitd publish --engines mine') takes those of closed runs ('refitd runs close "
    "RUN')"
)
_NONE_FREE = "no engine is free: each follows a run that is not closed ('refitd runs close RUN', if one has ended)"


class Intake:
    """Admits notices.

    Args:
        store: the versions.
        targets: what engines are to serve; hears of offers from memory.
        files: the port to the root's files.
        root: the root.
        nudge: has the catalog scan and judge soon.
        default_run: the run that engines follow which are bound to none.
        trainers: those whose own folders count as versions.
        kind: what the versions in the root are.
        deltas: whether deltas are taken; where not, publishers hear it and make no more of them.
    """

    def __init__(
        self,
        store: Store,
        targets: Targets,
        files: Files,
        root: Path,
        nudge: Callable[[], None],
        default_run: str | None = None,
        *,
        trainers: Collection[Trainer] = (),
        kind: Kind = Kind.FULL,
        deltas: bool = True,
    ) -> None:
        self._store = store
        self._targets = targets
        self._files = files
        self._root = root
        self._nudge = nudge
        self._default_run = default_run
        self._trainers = trainers
        self._kind = kind
        self._kinds = {kind, Kind.DELTA} if deltas else {kind}
        if kind is Kind.FULL:
            self._kinds.add(Kind.HANDOVER)

    async def take(self, notice: Notice) -> tuple[VersionRecord, bool]:
        """Return the version that a notice is about, and whether it is new.

        Raises:
            ProblemError: the notice cannot be taken; the problem says why and what to do.
            JournalError: it cannot be written down now.
        """
        self._check(notice)
        generation = max((version.order.generation for version in self._store.versions_of(notice.run)), default=1)
        named = notice.path or f"{notice.run}/{version_folder(Order(generation, notice.step))}"
        path = relative_path(named, self._root)
        order = order_of(path, notice.run, notice.step, generation, self._trainers)
        id_ = version_id(notice.run, order)
        known = await self._store.find(id_)
        if notice.kind is Kind.HANDOVER:
            return await self._hand_over(notice, path, order, self._store.versions.get(id_, known))
        seen = await self._look(path, order, known)
        self._check_root(notice, is_there=seen.there)
        if not seen.there and known is None:
            raise ProblemError(
                Slug.PATH_MISSING,
                f"{self._root / path} is not there: publish into this service's root, {self._root}, and announce then; "
                "a notice's path is as the service sees it, absolute or relative to that root",
            )
        # Meanwhile the same notice may have come in, or the scan may have found the directory.
        decision = admit(notice, seen, self._store.versions.get(id_, known))
        match decision:
            case NoticeConflict(reason):
                raise ProblemError(Slug.VERSION_CONFLICT, reason)
            case Same(record):
                self._bring_engines(notice)
                return await self._again(record, notice), False
            case New():
                self._bring_engines(notice)
                return await self._take(self._new(notice, path, order), "announced"), True
            case _:
                assert_never(decision)

    def _check(self, notice: Notice) -> None:
        self._check_root(notice, is_there=True)
        try:
            check_run(notice.run)
            check_step(notice.step)
        except InvalidNameError as error:
            raise ProblemError(Slug.BAD_NAME, str(error)) from error
        check_caps(notice)
        if notice.kind not in self._kinds:
            refused = f"kind {notice.kind.value!r} is not carried out by this service"
            raise ProblemError(Slug.UNSUPPORTED_KIND, f"{refused}: {self._advice(notice.kind)}")
        if notice.kind is Kind.DELTA and notice.base is None:
            raise ProblemError(Slug.BAD_REQUEST, "a delta names its base: say the id of the version that it leads from")
        check_handover(notice)
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
        if notice.failed is not None:
            return await self._give_up_files(known, notice.failed), False
        if known is not None:  # the reply was lost, and perhaps with it a service that knew of the offer
            if known.state.is_open:
                self._targets.offer(known, f"{known.run}/{notice.offer}")
            await self._store.durable()
            return known, False
        self._bring_engines(notice)
        announced = replace(self._new(notice, path, order), kind=self._kind, handed=True)
        self._store.put_version(announced, "handed over from its trainer's memory: its files are to follow")
        self._targets.offer(announced, f"{announced.run}/{notice.offer}")  # engines go there while the disk writes
        await self._store.durable()
        return announced, True

    async def _give_up_files(self, known: VersionRecord | None, reason: str) -> VersionRecord:
        if known is None:
            detail = "the service knows of no such hand-over, so it cannot fail"
            raise unknown(self._store, Slug.UNKNOWN_VERSION, detail)
        if known.state.is_open:
            text = f"its files will not come: {one_line(reason)}"
            known = replace(known, state=VersionState.REJECTED, reason=text)
            self._store.put_version(known, f"rejected: {text}")
        await self._store.durable()
        return known

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
        why = self._why_not_followed(run, runs, follow, mine=notice.engines == "mine")
        raise ProblemError(Slug.RUN_NOT_FOLLOWED, "; ".join(why))

    def _why_not_followed(
        self, run: str, runs: Collection[str], follow: Collection[str | None], *, mine: bool
    ) -> Iterator[str]:
        closed = self._store.runs.closed
        bound = sorted(other for other in follow if other is not None)
        yield f"no engine follows run {run}"
        if bound:
            named = (f"{other} (closed)" if other in closed else other for other in bound)
            yield f"engines follow {', '.join(named)}"
        if None in follow:
            yield f"{why_unbound(runs)}; engines that are bound to no run follow none of several"
        else:
            yield (
                f"'refitd engines move ID --run {run}' brings engines here, or bind them in the engines file; "
                f"{_NONE_FREE if mine else _ASK_FOR_THEM}"
            )

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

    async def _look(self, path: str, order: Order, known: VersionRecord | None) -> SeenFolder:
        """Look at the directory, which need not be there where it was collected."""
        try:
            found = await self._files.glance(path)
        except FileNotFoundError:
            digest, signature = (None, None) if known is None else (known.digest, known.signature)
            return SeenFolder(order=order, path=path, digest=digest, signature=signature or "", there=False)
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
        return SeenFolder(order=order, path=path, digest=digest, signature=found.signature, kind=kind)

    def _new(self, notice: Notice, path: str, order: Order) -> VersionRecord:
        return VersionRecord(
            run=notice.run,
            order=order,
            path=path,
            state=VersionState.ANNOUNCED,
            created_at=self._store.clock.now(),
            kind=notice.kind,
            base=notice.base,
            noticed=True,
            allow_missing=notice.allow_missing,
            allow_extra=notice.allow_extra,
            metadata=notice.metadata,
            timings=_publish_timing(notice),
        )

    async def _take(self, record: VersionRecord, text: str) -> VersionRecord:
        self._store.put_version(record, text)
        self._nudge()  # validation may begin at once; the reply waits for the disk
        await self._store.durable()
        return record

    async def _again(self, known: VersionRecord, notice: Notice) -> VersionRecord:
        if known.handed and known.state.is_open:
            self._nudge()  # its files are there now
        noticed = _with_notice(known, notice)
        if noticed.metadata != known.metadata:
            check_metadata(noticed.metadata)
        if noticed == known:
            await self._store.durable()
            return known
        return await self._take(
            noticed, "announced" if noticed.state.is_open else "a notice adds to what is known of it"
        )


def _publish_timing(notice: Notice) -> dict[str, float]:
    return {} if notice.publish_ms is None else {"publish": notice.publish_ms}


def _with_notice(known: VersionRecord, notice: Notice) -> VersionRecord:
    """Return a known version with what a notice changes of it.

    A version that the scan found first is now announced: it need not settle, and may do what the notice allows, also
    where it was rejected without. After its verdict a notice only adds to its metadata and timings.
    """
    if known.state in {VersionState.RETIRED, VersionState.DELETED}:
        return known
    timings = _publish_timing(notice) | known.timings  # the first notice counts
    described = replace(known, metadata=known.metadata | notice.metadata, timings=timings)
    noticed = replace(
        described,
        noticed=True,
        kind=notice.kind,
        base=notice.base,
        allow_missing=notice.allow_missing,
        allow_extra=notice.allow_extra,
    )
    if known.state is VersionState.REJECTED and (noticed != described or known.code in AGAIN_WHEN_ANNOUNCED):
        return replace(noticed, state=VersionState.ANNOUNCED, reason=None, code=None)
    return noticed if known.state.is_open else described
