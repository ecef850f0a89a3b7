"""LoRA adapters on a server, behind the `Engine` port: version N of a run is the adapter `NAME-vN`.

The model itself is never written and generation never paused: requests name the adapter that they want. A refit is

    load      under a name that is not in use; refused → nothing has changed
    verify    /v1/models lists the name with the version's folder; and what else a kind of server can prove
    unload    all but the newest few, one at a time

The versions right before the one that is served stay loaded, because a request that was made for one of them may come
late: a trainer that is off-policy holds requests back over several updates. What lies above the version that is served
was rolled back from, or is of the run's earlier life, and goes first.

The unloading is not waited for, because a request may take long and the new version is served already. One that broke
off is begun again with the next version, so adapters do not pile up.
"""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from refitd.engine.applied import Scores, answered_instead, unexplained
from refitd.engine.http import CallFailure, NoReply, Reply, Transport
from refitd.engine.limits import PROBE_SECONDS
from refitd.engine.port import Coming, Offered, Outcome, RankProof, Refit, Stage, Stopwatch, Target
from refitd_client.contract.naming import Order, parse_version_label


@dataclass(frozen=True, slots=True)
class ListedAdapter:
    """An adapter that a server lists: its name there, the version's label, and the folder that it was read from."""

    name: str
    label: str
    path: str

    @property
    def order(self) -> Order:
        """The version's place in its run."""
        return _order(self.label)


@dataclass(frozen=True, slots=True)
class AdapterProof:
    """Why a loaded adapter is not the target, None where it is; `fingerprint` where a kind of server has one.

    `withdrawn`: the adapter was unloaded for the doubt, so that the server is as it was before the load.
    """

    doubt: str | None
    fingerprint: str | None = None
    withdrawn: bool = False


def superfluous(listed: Sequence[ListedAdapter], served: str, keep: int) -> list[ListedAdapter]:
    """Return the loaded adapters to unload, in this order: those after the served one, then the oldest.

    Args:
        listed: the loaded adapters.
        served: the label that is served.
        keep: how many stay: the served one and those right before it.
    """
    ordered = sorted(listed, key=lambda each: each.order)
    after = [each for each in ordered if each.order > _order(served)]
    return after[::-1] + ordered[: len(ordered) - len(after)][:-keep]


def _order(label: str) -> Order:
    order = parse_version_label(label)
    if order is None:
        raise ValueError(f"{label!r} is no version's label")
    return order


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class NamedAdapters(ABC):
    """The adapters `name-v<label>` of one server, `keep` at a time; others are left alone. Kinds of servers differ in
    the calls that load, unload and prove.

    Attributes:
        unload_route: of the call that unloads.
        unlisted_hint: what may be wrong where the server does not list what it has loaded.
    """

    unload_route: str
    unlisted_hint = ""

    def __init__(
        self,
        http: Transport,
        *,
        name: str,
        keep: int,
        load_timeout: float,
        root: Path | None = None,
        root_there: str | None = None,
    ) -> None:
        """Make no call yet.

        Args:
            http: to the server.
            name: of the adapter.
            keep: how many stay loaded.
            load_timeout: seconds that a load may take.
            root: the root as the service sees it, from which files are read where answers need an explanation.
            root_there: the root as the server sees it.
        """
        self._root, self._root_there = root, root_there
        self._http = http
        self._name = name
        self._keep = keep
        self._ours = re.compile(rf"{re.escape(name)}-v(.+)")
        self._load_timeout = load_timeout
        self._served: str | None = None
        self._unloading: asyncio.Task[None] | None = None

    @abstractmethod
    async def _refusal(self) -> Refit | None:
        """How a refit ends before any call that changes something; None where it goes on."""

    @abstractmethod
    async def _load(self, name: str, path: str) -> Reply | NoReply:
        """Have the server load an adapter under a name that it does not list."""

    @abstractmethod
    def _failure(self, reply: Reply) -> str | None:
        """What the answer to a load says of why it failed; None where it succeeded."""

    @abstractmethod
    async def _proof(self, name: str, target: Target, *, again: bool) -> AdapterProof:
        """Prove what was loaded, beyond that it is listed. `again`: the name was in use before."""

    @abstractmethod
    async def _scores(self, adapter: str | None) -> Scores | str | None:
        """Have an adapter answer a fixed prompt, as `applied.Ask`."""

    async def _change(self, route: str, body: dict[str, Any]) -> Reply | NoReply:
        """Send a load or an unload."""
        return await self._http.post(route, body, self._load_timeout)

    def _may_read(self, listed: Sequence[ListedAdapter]) -> tuple[str, ...]:
        """Folders that the server may read again when a request names an adapter. `listed`: the loaded adapters."""
        return ()

    @property
    def _may_read_more(self) -> bool:
        """Whether it may read folders of adapters that were unloaded before this object was made."""
        return False

    async def aclose(self) -> None:
        """See `Engine`. An unload that was sent ends all the same."""
        if self._unloading is not None:
            self._unloading.cancel()
            with suppress(asyncio.CancelledError):
                await self._unloading

    async def refit(self, target: Target, on_stage: Callable[[Stage], None]) -> Refit:
        watch, name = Stopwatch(on_stage), f"{self._name}-v{target.label}"
        if (refused := await self._refusal()) is not None:
            return refused
        listed = await self._listed()
        if isinstance(listed, str):
            return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=listed)
        # The same step's of another run, or one whose load was not seen to end.
        in_the_way = next((each for each in listed if each.name == name), None)
        if in_the_way is not None and (fault := await self._unload(in_the_way)) is not None:
            return Refit(outcome=Outcome.NACK, resumed=True, reason=fault)
        with watch.during(Stage.LOAD):
            reply = await self._load(name, target.path)
        if (refused := self._refused(reply)) is not None:
            return refused
        with watch.during(Stage.VERIFY):
            proof = await self._proved(name, target, again=in_the_way is not None)
        if proof.doubt is not None:
            outcome = Outcome.NACK if proof.withdrawn else Outcome.TAINTED
            return Refit(outcome=outcome, resumed=True, reason=proof.doubt, timings=watch.milliseconds)
        self._served = name
        if self._unloading is None or self._unloading.done():
            task = self._unload_superfluous(target.label)
            self._unloading = asyncio.create_task(task, name=f"unload before {target.label}")
        return Refit(
            outcome=Outcome.ACK,
            resumed=True,
            fingerprint=proof.fingerprint,
            may_read=self._may_read(listed),
            may_read_more=self._may_read_more,
            timings=watch.milliseconds,
        )

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        """See `Engine`. A load pauses nothing, so nothing is gained before it."""
        return ()

    async def cancel_prefetch(self) -> None:  # noqa: B027 - it is all that there is to do
        ...

    async def resume(self) -> bool:
        """See `Engine`. It was never paused."""
        return True

    async def _listed(self) -> list[ListedAdapter] | str:
        """Our adapters that the server has, or a sentence on why that cannot be said."""
        reply = await self._http.get("/v1/models", PROBE_SECONDS)
        if isinstance(reply, NoReply):
            return reply.reason
        try:
            cards = reply.read_as(_Cards).data
        except msgspec.ValidationError as error:
            return f"{self._http.url}/v1/models answered {reply.status} in another form: {error}"
        matches = [(card, self._ours.fullmatch(card.id)) for card in cards]
        return [
            ListedAdapter(card.id, match[1], card.root or "")
            for card, match in matches
            if match is not None and parse_version_label(match[1]) is not None
        ]

    def _newest(self, listed: Sequence[ListedAdapter]) -> ListedAdapter | None:
        """What it serves: the adapter that was proved last, else the newest that it lists; None for the model."""
        found = {each.name: each for each in listed}
        return found.get(self._served or "") or max(listed, key=lambda each: each.order, default=None)

    async def _proved(self, name: str, target: Target, *, again: bool) -> AdapterProof:
        listed, unchanged = await asyncio.gather(self._listed(), target.unchanged())
        if isinstance(listed, str):
            return AdapterProof(f"loaded, but cannot be verified: {listed}")
        if ListedAdapter(name, target.label, target.path) not in listed:
            return AdapterProof(f"loaded, but the server does not list {name} of {target.path}{self.unlisted_hint}")
        if not unchanged:
            return AdapterProof("loaded, but its files changed meanwhile, or it is not known whether they did")
        return await self._proof(name, target, again=again)

    async def _answers_of_another(
        self, name: str, target: Target, others: Sequence[ListedAdapter | None]
    ) -> str | None:
        """Why the server does not compute with an adapter that it lists; None where its answers are its own.

        Args:
            name: of the adapter.
            target: what it was loaded from.
            others: whose answers its own must not be equal to, unless the files are; None for the model. At least one.
        """
        names = {None if each is None else each.name: each for each in others}
        same, doubt = await answered_instead(self._scores, name, [*names])
        for each in same if doubt is None else ():
            other = names[each]
            whose = "the model without it" if other is None else other.name
            there = None if other is None else self._here(other.path)
            doubt = doubt or await asyncio.to_thread(unexplained, self._here(target.path), whose, there)
        return doubt

    def _here(self, path: str) -> Path:
        """A folder of the server's as the service sees it."""
        there = None if self._root_there is None else self._root_there.rstrip("/") + "/"
        if self._root is None or there is None or not path.startswith(there):
            return Path(path)
        return self._root / path.removeprefix(there)

    def _refused(self, reply: Reply | NoReply) -> Refit | None:
        """What a load left behind that failed; None where it succeeded. The adapters from before are served on."""
        if isinstance(reply, NoReply):
            outcome = Outcome.UNREACHABLE if reply.lost is CallFailure.NEVER_SENT else Outcome.TAINTED
            return Refit(outcome=outcome, resumed=True, reason=reply.reason)
        if (failure := self._failure(reply)) is None:
            return None
        return Refit(outcome=Outcome.NACK, resumed=True, reason=f"the engine answered {reply.status}: {failure}")

    async def _unload_superfluous(self, served: str) -> None:
        listed = await self._listed()
        for each in superfluous(listed, served, self._keep) if isinstance(listed, list) else ():
            await self._unload(each)

    async def _unload(self, adapter: ListedAdapter) -> str | None:
        """Have the server unload an adapter; return why it did not, None if it did."""
        reply = await self._change(self.unload_route, {"lora_name": adapter.name})
        if isinstance(reply, NoReply):
            return f"{adapter.name} cannot be unloaded: {reply.reason}"
        return None if reply.ok else f"{adapter.name} cannot be unloaded: {self._failure(reply)}"
