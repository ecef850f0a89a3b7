"""Makes deltas out of a publisher's successive state dicts, or says why a version goes out in full.

    first version                     copy it (the shadow), take its fingerprints → full
    later ones, same tensors          compare with the shadow → what changed in this step
                                      since the version that engines serve → the union of the steps after it → plan
    committed                         remember the step; the shadow holds it already
    not committed, whatever stopped it   forget everything: the next version is full

The comparison is made for full versions too, as long as few elements change: then an anchor ends no chain.

The trainer waits for the comparison and the plan. A delta is put together afterwards, from what was found and from the
shadow, which stays as it is until the next version is offered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from refitd_client.checkpoint.header import Entry
from refitd_client.contract.manifest import Claims, fitting_fingerprints
from refitd_client.delta.change import Change, Delta, DeltaRefusedError, elements_of
from refitd_client.delta.content import check_finite, content_of
from refitd_client.delta.history import History, Since, Step
from refitd_client.delta.layout import Compression, Encoding
from refitd_client.delta.plan import DeltaRules, FromBase, Full, plan_delta
from refitd_client.delta.served import Asked
from refitd_client.delta.shadow import Changes, Shadows
from refitd_client.delta.writer import fits_surely
from refitd_client.fingerprint import Bits, to_texts
from refitd_client.tensors.source import TensorSource
from refitd_client.write.content import Content
from refitd_client.write.reserve import Reserve
from refitd_client.write.shards import TensorShards

_NOTHING_YET = "nothing to compare with: the publisher's first version, or its first after one without delta='auto'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What to publish. `why_full` is None for a delta. `density` is the share of elements that changed in this step.

    `content` makes it. That of a delta needs nothing of the caller's tensors, and is made in any thread, once.
    """

    content: Callable[[], Content]
    is_delta: bool = False
    why_full: str | None = None
    density: float | None = None


@dataclass(slots=True, kw_only=True)
class _Memory:
    """What is remembered of the versions so far. `next` is the step that was offered and is not committed yet.

    `most` is how many elements a delta may list; `fits` says that any delta of these tensors can be encoded.
    """

    entries: dict[str, Entry]
    elements: int
    most: int
    shadows: Shadows
    fits: bool
    history: History | None = None
    since_anchor: int = 0
    next: Step | None = None
    next_is_full: bool = True


class DeltaMaker:
    """One for a publisher. `ask_base` says what engines serve, or why nothing can be counted on."""

    def __init__(
        self, rules: DeltaRules, ask_base: Callable[[], str | Full], reserve: Reserve, *, stream: bool, compress: bool
    ) -> None:
        self._rules = rules
        self._ask_base = ask_base
        self._reserve = reserve
        self._stream = stream
        self._wire = (Encoding.GAP, Compression.ZSTD) if compress else (Encoding.FLAT, Compression.NONE)
        self._memory: _Memory | None = None
        self._refused: str | None = None

    def refuse(self, why: str) -> None:
        """Make no more deltas: the service does not carry them out."""
        self._refused = why
        self.forget()

    def forget(self) -> None:
        """The shadow may not be what was published last any more."""
        self._reserve.close()
        if self._memory is not None:
            self._memory.shadows.close()
        self._memory = None

    def offer(self, content: Content, version: str) -> Offer:
        """Decide how `version` goes out. `content` is the full one. Call `committed` or `forget` afterwards.

        Raises:
            InvalidWeightsError: a changed element is NaN or infinite, and that is to be refused.
        """
        if self._refused is not None:
            self.forget()
            return Offer(content=lambda: content, why_full=self._refused)
        if not isinstance(content.weights, TensorShards):
            self.forget()
            why = "deltas are made of state dicts and modules, and this is a folder"
            return Offer(content=lambda: content, why_full=why)
        sources = content.weights.sources
        memory = self._memory
        if memory is None or not _same(memory, sources):
            first = (
                "nothing to compare with: the publisher's first version, or its first after one without delta='auto'"
            )
            why = first if memory is None else "the tensors are not those of the last"
            return self._begin(content, content.weights, why)
        return self._go_on(memory, content, content.weights, version)

    def committed(self, version: str) -> None:
        """What was offered is published."""
        memory = self._memory
        if memory is None:
            return
        if memory.next is None or memory.history is None:
            room = 2 * memory.most  # steps overlap: their union may still be small
            memory.history = History(version, room)
        else:
            memory.history.add(memory.next)
        memory.since_anchor = 0 if memory.next_is_full else memory.since_anchor + 1
        memory.next = None
        self._reserve.begin()  # for the next one: while the trainer makes its step there is time for it

    def _begin(self, content: Content, full: TensorShards, why: str) -> Offer:
        self.forget()  # before the new copy is made: there need not be room for both
        shadows = Shadows(full.sources, stream=self._stream)
        entries = {source.entry.name: source.entry for source in full.sources}
        elements = sum(elements_of(entry.dtype, entry.shape) for entry in entries.values())
        fits = fits_surely(entries.values(), self._wire[1])
        self._memory = _Memory(
            entries=entries, elements=elements, most=self._rules.most(elements), shadows=shadows, fits=fits
        )
        return Offer(content=partial(_in_full, content, full, shadows), why_full=why)

    def _go_on(self, memory: _Memory, content: Content, full: TensorShards, version: str) -> Offer:
        asked = Asked(self._ask_base)
        before = dict(memory.shadows.fingerprints)
        changes = memory.shadows.find(full.sources, most=memory.most)
        if full.check_finite:
            check_finite(changes)
        step = Step(
            version=version,
            indices={name: found.indices for name, found in changes.found.items()},
            before={name: before[name] for name in changes.found},
        )
        density = changes.count / max(1, memory.elements)
        planned = self._plan(memory, step, changes.count, asked.answer())
        memory.next = None if changes.count > memory.most else step  # indices of everything are not worth keeping
        if isinstance(planned, FromBase):
            planned = self._delta(memory, step, planned.base, changes)
        memory.next_is_full = isinstance(planned, Full)
        if isinstance(planned, Full):
            self._reserve.close()
            whole = partial(_in_full, content, full, memory.shadows)
            return Offer(content=whole, why_full=planned.why, density=density)
        return Offer(content=planned, is_delta=True, density=density)

    def _plan(self, memory: _Memory, step: Step, changed: int, base: str | Full) -> FromBase | Full:
        history = memory.history
        if isinstance(base, str) and (history is None or not history.knows(base)):
            base = Full(f"{base}, which engines serve, is not among the last versions of this publisher")
        if isinstance(base, str) and history is not None and changed <= memory.most:
            history.forget_before(base)
            changed = history.most_since(base, step)
            if changed > memory.most:  # steps overlap: only now it is worth counting
                changed = history.since(base, step).changed
        return plan_delta(base, changed, memory.since_anchor, self._rules, elements=memory.elements)

    def _delta(self, memory: _Memory, step: Step, base: str, changes: Changes) -> Callable[[], Content] | Full:
        """What makes the delta, or why it cannot be made: that must be known as long as the tensors are there."""
        make = partial(self._content, memory, step, base, changes)
        if memory.fits:
            return make
        try:
            made = make()
        except DeltaRefusedError as error:
            return Full(str(error))
        return lambda: made

    def _content(self, memory: _Memory, step: Step, base: str, changes: Changes) -> Content:
        shadows, history = memory.shadows, memory.history
        if history is None:
            raise RuntimeError("a delta was planned without a version to lead from")
        since = history.since(base, step)
        values = _values(since, changes, shadows)
        delta = Delta(
            base=base,
            version=step.version,
            changes={
                name: Change(
                    dtype=memory.entries[name].dtype,
                    shape=memory.entries[name].shape,
                    indices=indices,
                    values=values[name],
                    base=since.before[name],
                    result=shadows.fingerprints[name],
                )
                for name, indices in since.indices.items()
            },
        )
        return content_of(delta, list(memory.entries.values()), _texts(shadows), *self._wire, self._reserve)


def _values(since: Since, changes: Changes, shadows: Shadows) -> dict[str, Bits]:
    """What is now where anything changed since the base. What changed in this step alone was found with its values."""
    new = {name: found.values for name, found in changes.found.items() if since.indices[name] is found.indices}
    return new | shadows.gather({name: at for name, at in since.indices.items() if name not in new})


def _same(memory: _Memory, sources: Sequence[TensorSource]) -> bool:
    return memory.entries == {source.entry.name: source.entry for source in sources} and memory.shadows.fits(sources)


def _in_full(content: Content, full: TensorShards, shadows: Shadows) -> Content:
    """With the fingerprints, which are known without another look at the tensors."""
    return replace(content, weights=replace(full, fingerprinted=False), claims=Claims(fingerprints=_texts(shadows)))


def _texts(shadows: Shadows) -> dict[str, str]:
    return fitting_fingerprints(to_texts(shadows.fingerprints))
