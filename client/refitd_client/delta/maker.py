"""Makes deltas out of a publisher's successive state dicts, or says why a version goes out in full.

    first version                 copy it (the shadow), compute its fingerprints → full
    later ones, same tensors      compare with the shadow → the changes of this step
                                  union of all steps since the version that engines serve → plan: delta or full
    committed                     remember the step; the shadow holds it already
    not committed, for any reason forget everything: the next version is full

The comparison is made for full versions too, as long as few elements change: then an anchor ends no chain of deltas.

The trainer waits for the comparison and the plan. The delta is put together afterwards, from what was found and from
the shadow, which stays as it is until the next version is planned. As a version's content it is one file with a suffix
of its own, and nothing that a loader would take for a checkpoint.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import Any

from refitd_client.checkpoint.header import Entry
from refitd_client.contract.manifest import Claims, DeltaFacts, fitting_fingerprints
from refitd_client.contract.naming import DELTA_NAME, ShardLayout
from refitd_client.contract.states import Kind
from refitd_client.delta.change import (
    Change,
    ChangeHistory,
    Delta,
    StepChanges,
    elements_of,
    last_served,
    plan_delta,
)
from refitd_client.delta.head import COMPRESSION, ENCODING
from refitd_client.delta.shadow import OTHERS, ShadowDiff, Shadows, VersionShadows
from refitd_client.delta.writer import EncodedDelta, encode, fits_header, write_parts
from refitd_client.errors import ServiceError
from refitd_client.http.connection import Connection
from refitd_client.http.publisher_client import open_client
from refitd_client.publish.options import DeltaRules, PublishOptions
from refitd_client.publish.ports import AskBase, Full
from refitd_client.write.content import Content, PlannedContent, TensorShards, WeightsOfRanks
from refitd_client.write.plan import changes_not_finite
from refitd_client.write.version_folder import Staging

_NOTHING_BEFORE = "nothing to compare with: "
_FIRST = f"{_NOTHING_BEFORE}the publisher's first version, or its first after one without transport='delta'"
_AFTER_FOLDER = f"{_NOTHING_BEFORE}the version before it was made of a folder"
_AFTER_FAILURE = f"{_NOTHING_BEFORE}the publication before it failed"

# Seconds for the service to say what engines serve, from the begin of the comparison on. After them a version goes out
# in full. Each of the two requests is tried for as long, in a thread that may outlive the question.
BASE_DEADLINE = 1.0


def ask_base(connection: Connection | None, run: str) -> str | Full:
    """Ask the service for the id of the version that a delta has to lead from, or why a version has to be full.

    One that had no answer for the last notice is asked once: it would hold each step until the deadline.
    """
    if connection is None:
        return Full("the publisher was opened without service_url, so no service says what engines serve")
    try:
        with open_client(connection, try_for=0.0 if connection.reach.is_down else BASE_DEADLINE) as client:
            newest = client.versions(run, limit=1).items
            if newest and newest[0].needs_full:
                return Full(f"{newest[0].id} cannot be carried out: {newest[0].reason}")
            return last_served(client.engines().items, run)
    except (ServiceError, OSError, ValueError) as error:
        return Full(f"the service did not say what engines serve: {error}")


class BaseQuery:
    """The question for the base, in a thread of its own, while the weights are compared."""

    def __init__(self, ask: AskBase) -> None:
        self._ask = ask
        self._answer: str | Full | BaseException = Full("the service gave no answer")
        self._ends = time.monotonic() + BASE_DEADLINE
        self._thread = Thread(target=self._run, name="refitd-base", daemon=True)
        self._thread.start()

    def answer(self) -> str | Full:
        """Wait for the answer until the deadline. Raises what asking raised."""
        self._thread.join(max(0.0, self._ends - time.monotonic()))
        if self._thread.is_alive():
            return Full(f"the service did not say what engines serve within {BASE_DEADLINE:g} s")
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    def _run(self) -> None:
        try:
            self._answer = self._ask()
        except BaseException as error:  # raised by `answer`
            self._answer = error


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWeights:
    """A delta as a version's weights. `entries` are the tensors of the resulting model, changed or not."""

    encoded: EncodedDelta
    entries: Sequence[Entry]

    @property
    def tensors(self) -> dict[str, list[Entry]]:
        """The tensors of the resulting model, which the manifest sums up."""
        return {DELTA_NAME: list(self.entries)}

    @property
    def size(self) -> int:
        return self.encoded.size

    @property
    def layout(self) -> list[ShardLayout]:
        """None: it takes no slot, those are for full versions."""
        return []

    def stage(self, staging: Staging) -> Callable[[], None]:
        """Leave everything to `write`: the changes are copies, and the caller may change its tensors."""
        return partial(self.write, staging)

    def write(self, staging: Staging) -> None:
        """Write the file. Raises NoSpaceError if there is no room for it."""
        staging.require_space(self.size)
        with staging.file(DELTA_NAME) as file:
            write_parts(file, self.encoded.parts())
            file.write(file.digest)


@dataclass(slots=True, kw_only=True)
class _Memory:
    """What the maker knows of the versions so far. `next` is the step that was planned and is not committed yet.

    `most` is how many elements a delta may list. `fits`: the header of any delta of these tensors is one that
    readers take.
    """

    entries: dict[str, Entry]
    elements: int
    most: int
    shadows: VersionShadows
    fits: bool
    history: ChangeHistory | None = None
    since_anchor: int = 0
    next: StepChanges | None = None
    next_is_full: bool = True


class DeltaMaker:
    """A publisher's maker of deltas. `ask_base` returns what engines serve, or why that is not known."""

    def __init__(self, rules: DeltaRules, ask_base: AskBase, *, stream: bool) -> None:
        self._rules = rules
        self._ask_base = ask_base
        self._stream = stream
        self._memory: _Memory | None = None
        self._forgotten = _FIRST
        self._refused: str | None = None

    def refuse(self, why: str) -> None:
        """Make no more deltas: the service does not carry them out."""
        self._refused = why
        self._forget(why)

    def forget(self, *, failed: bool) -> None:
        """As `Deltas.forget`."""
        self._forget(_AFTER_FAILURE if failed else _FIRST)

    def _forget(self, why: str) -> None:
        """Drop the shadow: it may not be what was published last any more. `why` the next version is full then."""
        self._forgotten = why
        if self._memory is not None:
            self._memory.shadows.close()
        self._memory = None

    def offer(self, content: Content, version: str) -> PlannedContent:
        """Decide how `version` goes out. `content` is the full one. Call `committed` or `forget` afterwards. Raises
        InvalidWeightsError if a changed element is NaN or infinite, and such weights are to be refused.
        """
        full, memory = content.weights, self._memory
        if self._refused is not None or not isinstance(full, TensorShards | WeightsOfRanks):
            self._forget(_AFTER_FOLDER)
            why = self._refused or "deltas are made of state dicts and modules, and this is a folder"
            return PlannedContent(content=lambda: content, kind=content.claims.kind, why_full=why)
        if memory is None:
            return self._begin(content, full, self._forgotten)
        why = memory.shadows.unfit(_sources(full)) if memory.entries == _entries(full) else OTHERS
        if why is not None:
            return self._begin(content, full, why)
        return self._go_on(memory, content, full, version)

    def committed(self, version: str) -> None:
        memory = self._memory
        if memory is None:
            return
        if memory.next is None or memory.history is None:
            memory.history = ChangeHistory(version, 2 * memory.most)  # steps overlap: their union may still be small
        else:
            memory.history.add(memory.next)
        memory.since_anchor = 0 if memory.next_is_full else memory.since_anchor + 1
        memory.next = None

    def _begin(self, content: Content, full: TensorShards | WeightsOfRanks, why: str) -> PlannedContent:
        self._forget(why)  # before the new copy is made: there need not be room for both
        own = full.shadows() if isinstance(full, WeightsOfRanks) else None
        shadows = own or Shadows(_sources(full), stream=self._stream)
        entries = _entries(full)
        elements = sum(elements_of(entry.dtype, entry.shape) for entry in entries.values())
        self._memory = _Memory(
            entries=entries,
            elements=elements,
            most=self._rules.most(elements),
            shadows=shadows,
            fits=fits_header(entries.values()),
        )
        return PlannedContent(content=partial(_in_full, content, full, shadows), why_full=why)

    def _go_on(
        self, memory: _Memory, content: Content, full: TensorShards | WeightsOfRanks, version: str
    ) -> PlannedContent:
        query = BaseQuery(self._ask_base)
        before = dict(memory.shadows.fingerprints)
        diff = memory.shadows.find(_sources(full), most=memory.most)
        for name, count in diff.nonfinite.items() if full.check_finite else ():  # the others were checked before
            raise changes_not_finite(name, count)
        step = StepChanges(
            version=version,
            indices={name: found.indices for name, found in diff.found.items()},
            before={name: before[name] for name in diff.found},
        )
        planned = self._plan(memory, step, diff.count, query.answer())
        memory.next = None if diff.count > memory.most else step  # indices of everything are not worth keeping
        density = diff.count / max(1, memory.elements)
        memory.next_is_full = isinstance(planned, Full)
        if isinstance(planned, Full):
            whole = partial(_in_full, content, full, memory.shadows)
            return PlannedContent(content=whole, why_full=planned.why, density=density)
        delta = partial(self._content, memory, step, planned, diff)
        return PlannedContent(content=delta, kind=Kind.DELTA, density=density)

    def _plan(self, memory: _Memory, step: StepChanges, changed: int, base: str | Full) -> str | Full:
        history = memory.history
        if not memory.fits:
            return Full(f"the header of a delta of {len(memory.entries)} tensors may be larger than readers take")
        if isinstance(base, str) and (history is None or not history.knows(base)):
            base = Full(f"{base}, which engines serve, is not among the last versions of this publisher")
        if isinstance(base, str) and history is not None and changed <= memory.most:
            history.forget_before(base)
            changed = history.most_since(base, step)
            if changed > memory.most:  # steps overlap: only now it is worth counting
                changed = history.since(base, step).changed
        return plan_delta(base, changed, memory.since_anchor, self._rules, elements=memory.elements)

    def _content(self, memory: _Memory, step: StepChanges, base: str, diff: ShadowDiff) -> Content:
        """The delta as a version's content. It has neither index nor companions: those are its base's."""
        shadows, history = memory.shadows, memory.history
        if history is None:
            raise RuntimeError("a delta was planned without a version to lead from")
        since = history.since(base, step)
        # What changed in this step alone was found with its values; the other values are in the shadow.
        values = {name: found.values for name, found in diff.found.items() if since.indices[name] is found.indices}
        values |= shadows.gather({name: at for name, at in since.indices.items() if name not in values})
        changes = {
            name: Change(
                dtype=memory.entries[name].dtype,
                shape=memory.entries[name].shape,
                indices=indices,
                values=values[name],
                base=since.before[name],
                result=shadows.fingerprints[name],
            )
            for name, indices in since.indices.items()
        }
        facts = DeltaFacts(
            file=DELTA_NAME,
            encoding=ENCODING,
            compression=COMPRESSION,
            tensors=len(changes),
            changed=since.changed,
            elements=memory.elements,
        )
        encoded = encode(Delta(base=base, version=step.version, changes=changes))
        weights = DeltaWeights(encoded=encoded, entries=list(memory.entries.values()))
        claims = Claims(kind=Kind.DELTA, base=base, fingerprints=_texts(shadows), delta=facts)
        return Content(weights=weights, index=b"", companions=(), claims=claims)


def _sources(full: TensorShards | WeightsOfRanks) -> Any:
    return full.sources if isinstance(full, TensorShards) else full


def _entries(full: TensorShards | WeightsOfRanks) -> dict[str, Entry]:
    return {entry.name: entry for entries in full.tensors.values() for entry in entries}


def _in_full(content: Content, full: TensorShards | WeightsOfRanks, shadows: VersionShadows) -> Content:
    """The full version with its fingerprints, which are known without reading the tensors again."""
    weights = replace(full, fingerprinted=False) if isinstance(full, TensorShards) else full.scanned()
    return replace(content, weights=weights, claims=Claims(fingerprints=_texts(shadows)))


def _texts(shadows: VersionShadows) -> dict[str, str]:
    return fitting_fingerprints(shadows.fingerprints)


def deltas_of(options: PublishOptions, connection: Connection | None, run: str, base: AskBase | None) -> DeltaMaker:
    """Make a publisher's maker of deltas (part `deltas` of `refitd_client.parts`)."""
    ask = base or partial(ask_base, connection, run)
    return DeltaMaker(options.delta_rules, ask, stream=options.shadow == "stream")
