"""LoRA adapters on a server, behind the `EnginePort`: version N of a run is the adapter `NAME-vN`.

The model itself is never written and generation never paused: requests name the adapter that they want. A refit is

    load      under a name that is not in use; refused → nothing has changed
    verify    /v1/models lists the name with the version's folder; and what else a kind of server can prove
    unload    all but the newest few, one at a time

The versions right before the one that is served stay loaded, because a request that was made for one of them may come
late: a trainer that is off-policy holds requests back over several updates. What lies above the version that is served
was rolled back from, or is of the run's earlier life, and goes first.

The unloading is not waited for, because a request may take long and the new version is served already. One that broke
off is begun again with the next version, so adapters do not pile up.

A server that lists an adapter may not compute with it: the model alone can answer a request that names the adapter, or
an adapter that was loaded before. Then the answer is exactly that of a request without the adapter, or with the other
one. Adapters may be that alike themselves: B is zero before the first step, and a step may change nothing. What the
files say decides then. Answers of one server may differ in the last digit with the batch they are computed in. So an
answer that differs shows something only where the server repeats itself, and is asked again where it does not. Two
adapters that are both applied never agree in every digit of eight or more log-probabilities, unless they are equal.
"""

import asyncio
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from refitd.engine.http import PROBE_SECONDS, CallFailure, NoReply, Reply, Transport
from refitd.engine.kind import EngineServer
from refitd.engine.port import (
    UNTOLD,
    EnginePort,
    Obstacle,
    Outcome,
    Process,
    Reached,
    Refit,
    Stage,
    Stopwatch,
    Target,
    Unreached,
)
from refitd.engine.transaction import refusal
from refitd_client.checkpoint.header import locate
from refitd_client.contract.naming import ADAPTER_CONFIG_NAME, ADAPTER_NAME, Order, parse_version_label
from refitd_client.errors import InvalidWeightsError
from refitd_client.files.plain_file import read_plain
from refitd_client.validation.lora import MAX_CONFIG_BYTES

_ROUNDS = 3
_MAX_ADAPTER_BYTES = 2**34
_MAGNITUDE = {"F32": ("<u4", 0x7FFFFFFF), "F16": ("<u2", 0x7FFF), "BF16": ("<u2", 0x7FFF)}

Scores = tuple[object, ...]
"""The answer to a fixed prompt, token by token, with every digit of the log-probabilities that the server gives."""

Ask = Callable[[str | None], Awaitable[Scores | str | None]]
"""Has an adapter answer, or the model where it is None. A text says why the answer is not in order; None that it did
not come in time, which says nothing of the adapter.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBeneath:
    """The server beneath adapters, as for `Reached`. `is_replaced`: another writer has replaced its model."""

    model_path: str
    version: str
    configuration: str
    startup_path: str | None
    process: Process = UNTOLD
    is_replaced: bool = False


@dataclass(frozen=True, slots=True)
class ListedAdapter:
    """An adapter that a server lists: its name there, the version's label, and the folder that it was read from."""

    name: str
    label: str
    path: str

    @property
    def order(self) -> Order:
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
    """Return the loaded adapters to unload, in this order: those after the served one, then the oldest. `served`: the
    label that is served. `keep`: how many stay: the served one and those right before it.
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


class NamedAdapters(EnginePort, ABC):
    """The adapters `name-v<label>` of one server, `keep` at a time; others are left alone. Kinds of servers differ in
    the calls that load, unload and prove.

    Attributes:
        server: what sentences call the kind of server.
        probe_route: a route that shows that a server of the kind is there.
        load_route: of the call that loads an adapter.
        unload_route: of the call that unloads one.
        unlisted_hint: what may be wrong where the server does not list what it has loaded.
    """

    server: str
    probe_route: str
    load_route: str
    unload_route: str
    unlisted_hint = ""

    def __init__(self, http: Transport, server: EngineServer) -> None:
        access = server.access
        if access.lora is None:
            raise ValueError("no adapter is named")
        self._http = http
        self._root, self._root_there = access.root, server.root
        self._name = access.lora
        self._keep = access.lora_keep
        self._ours = re.compile(rf"{re.escape(self._name)}-v(.+)")
        self._load_timeout = access.load_timeout
        self._served: str | None = None
        self._lost: str | None = None  # why nothing counts any more that this process of the server answers
        self._unloading: asyncio.Task[None] | None = None

    @abstractmethod
    async def _look(self, reply: Reply | NoReply, listed: Sequence[ListedAdapter] | str) -> ServerBeneath | Unreached:
        """Learn what is beneath the adapters. `reply`: to a call of `probe_route`. `listed`: our adapters that it
        lists, or why that cannot be said.
        """

    @property
    @abstractmethod
    def _is_known(self) -> bool:
        """Whether a probe has learned how the server was started."""

    @abstractmethod
    def _obstacles(self) -> Iterable[Obstacle]:
        """What is in the way of updates, the worst first."""

    @abstractmethod
    def _failure(self, reply: Reply) -> str | None:
        """What the answer to a load says of why it failed; None where it succeeded."""

    @abstractmethod
    async def _proof(self, name: str, target: Target, *, again: bool) -> AdapterProof:
        """Prove what was loaded, beyond that it is listed. `again`: the name was in use before."""

    @abstractmethod
    async def _scores(self, adapter: str | None) -> Scores | str | None:
        """Have an adapter answer a fixed prompt, as `Ask`."""

    async def _left_alone(self) -> str | None:
        """Why it is not updated now, though it can be; None where it is."""
        return None

    async def _load(self, name: str, path: str) -> Reply | NoReply:
        """Have the server load an adapter under a name that it does not list."""
        return await self._change(self.load_route, {"lora_name": name, "lora_path": path})

    async def _change(self, route: str, body: dict[str, Any]) -> Reply | NoReply:
        return await self._http.post(route, body, self._load_timeout)

    def _may_read(self, listed: Sequence[ListedAdapter]) -> tuple[str, ...]:
        """Folders that the server may read again when a request names an adapter. `listed`: the loaded adapters."""
        return ()

    @property
    def _may_read_more(self) -> bool:
        """Whether it may read folders of adapters that were unloaded before this object was made."""
        return False

    async def aclose(self) -> None:
        """See `EnginePort`. An unload that was sent ends all the same."""
        if self._unloading is not None:
            self._unloading.cancel()
            with suppress(asyncio.CancelledError):
                await self._unloading

    async def probe(self) -> Reached | Unreached:
        """See `EnginePort`. It serves the adapter proved last, else the newest that it lists, else the model."""
        reply = await self._http.get(self.probe_route, PROBE_SECONDS)
        listed = reply.reason if isinstance(reply, NoReply) else await self._listed()
        beneath = await self._look(reply, listed)
        if isinstance(beneath, Unreached):
            return beneath
        listed = [] if isinstance(listed, str) else listed
        newest = None if beneath.is_replaced else self._newest(listed)
        return Reached(
            model_path=beneath.model_path if newest is None else newest.path,
            weight_version=None if newest is None else newest.label,
            server_version=beneath.version,
            configuration=f"{beneath.configuration} lora {self._name}",
            startup_path=beneath.startup_path,
            process=beneath.process,
            address=reply.address if isinstance(reply, Reply) else None,
            server=self.server,
            obstacles=tuple(self._obstacles()),
            may_read=self._may_read(listed),
            may_read_more=self._may_read_more,
        )

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

    async def _refusal(self) -> Refit | None:
        """How a refit ends before any call that changes something; None where it goes on."""
        if not self._is_known and isinstance(seen := await self.probe(), Unreached):
            return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=seen.reason)
        if self._lost is not None:
            return Refit(outcome=Outcome.TAINTED, resumed=True, reason=self._lost)
        if (reason := refusal(self._obstacles())) is not None:
            return Refit(outcome=Outcome.NACK, resumed=True, reason=reason)
        if (reason := await self._left_alone()) is not None:
            return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=reason)
        return None

    async def trial(self, label: str) -> str | None:
        """See `EnginePort`. Only the adapter of this label answers to its name."""
        answer = await self._scores(f"{self._name}-v{label}")
        if answer is None:
            return "no answer to a trial in time"
        return answer if isinstance(answer, str) else None

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
        """Why the server does not compute with an adapter that it lists; None where its answers are its own. `others`:
        whose answers its own must not be equal to, unless the files are; None for the model. At least one.
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
        there = self._root_there.rstrip("/") + "/"
        return self._root / path.removeprefix(there) if self._root and path.startswith(there) else Path(path)

    def _refused(self, reply: Reply | NoReply) -> Refit | None:
        """What a load left behind that failed; None where it succeeded. The adapters from before are served on."""
        if self._lost is not None:
            return Refit(outcome=Outcome.TAINTED, resumed=True, reason=self._lost)
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


async def answered_instead(ask: Ask, adapter: str, others: Sequence[str | None]) -> tuple[list[str | None], str | None]:
    """Return which of `others` a server answers with where `adapter` is named, and why that cannot be told. `ask`: has
    each answer. `others`: names of adapters, None for the model without one. At least one.
    """
    for _ in range(_ROUNDS):
        found: dict[str | None, Scores] = {}
        for each in (*others, adapter):
            scores = await ask(each)
            if not isinstance(scores, tuple):
                return [], scores
            found[each] = scores
        if same := [each for each in others if found[each] == found[adapter]]:
            return same, None
        if await ask(others[0]) == found[others[0]]:
            break
    return [], None


def unexplained(folder: Path, whose: str, other: Path | None) -> str | None:
    """Why it is wrong that an adapter answers exactly as another, or as the model; None where it is right. Blocks.
    `whose`: what its answers are equal to, for the sentence. `other`: the folder of the other adapter; None for the
    model.
    """
    doubt = f"requests that name it are answered exactly as by {whose}"
    try:
        explained = _changes_nothing(folder) if other is None else _is_same(folder, other)
    except (OSError, InvalidWeightsError) as error:
        return f"{doubt}, and its files cannot be read to see whether they are alike: {error}"
    if explained:
        return None
    differ = "its B matrices are not zero" if other is None else "the two differ"
    return f"{doubt}, and {differ}: the server does not compute with it"


def _changes_nothing(folder: Path) -> bool:
    """Whether every B of an adapter is zero, so that the model answers as without it."""
    for name, (dtype, data) in _tensors(folder).items():
        width, magnitude = _MAGNITUDE.get(dtype, ("<u1", 0xFF))
        if name.endswith(".lora_B.weight") and np.any(np.frombuffer(data, width) & magnitude):
            return False
    return True


def _is_same(folder: Path, other: Path) -> bool:
    return _scale(folder) == _scale(other) and _tensors(folder) == _tensors(other)


def _tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    data = read_plain(folder / ADAPTER_NAME, _MAX_ADAPTER_BYTES)
    found = locate(folder / ADAPTER_NAME)
    return {name: (entry.dtype, data[start : start + entry.nbytes]) for name, (entry, start) in found.items()}


def _scale(folder: Path) -> tuple[object, object]:
    try:
        config = json.loads(read_plain(folder / ADAPTER_CONFIG_NAME, MAX_CONFIG_BYTES))
        return config.get("r"), config.get("lora_alpha")
    except (ValueError, AttributeError) as error:
        raise InvalidWeightsError(f"{folder} has no adapter's configuration: {error}") from error
