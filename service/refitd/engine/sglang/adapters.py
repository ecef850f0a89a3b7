"""LoRA adapters on an SGLang server, behind the `Engine` port: version N of a run is the adapter `NAME-vN`.

The model itself is never written and generation never paused: requests name the adapter that they want. A refit is

    load      /load_lora_adapter under a name that is not in use yet; refused → nothing has changed
    verify    /v1/models lists the name with the version's folder
    unload    all but the newest few, one at a time: the server waits until no request uses it

The versions right before the one that is served stay loaded, because a request that was made for one of them may come
late: a trainer that is off-policy holds requests back over several updates. What lies above the version that is served
was rolled back from, or is of the run's earlier life, and goes first.

The unloading is not waited for, because a request may take long and the new version is served already; but the server
loads nothing meanwhile. One that broke off is begun again with the next version, so adapters do not pile up.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from refitd.engine.dialing import Guard
from refitd.engine.http import CallFailure, NoReply, Reply, Transport
from refitd.engine.port import (
    ChangeCheck,
    Coming,
    Offered,
    Outcome,
    Reached,
    Refit,
    Stage,
    Stopwatch,
    Target,
    Unreached,
)
from refitd.engine.sglang import access
from refitd.engine.sglang.info import ServerInfo, read_model_info, read_server_info
from refitd.engine.sglang.verify import TRIAL, TRIAL_SECONDS, trial_fault

PROBE_SECONDS = 5.0
CALL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ListedAdapter:
    """An adapter that a server lists: its name there, the version's label, and the folder that it was read from."""

    name: str
    label: str
    path: str


def superfluous(listed: Sequence[ListedAdapter], served: str, keep: int) -> list[ListedAdapter]:
    """Return the loaded adapters to unload, in this order: those after the served one, then the oldest.

    Args:
        listed: the loaded adapters.
        served: the label that is served.
        keep: how many stay: the served one and those right before it.
    """
    ordered = sorted(listed, key=lambda each: int(each.label))
    after = [each for each in ordered if int(each.label) > int(served)]
    return after[::-1] + ordered[: len(ordered) - len(after)][:-keep]


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class SglangAdapters:
    """One SGLang server that serves adapters called `name-v<label>`, `keep` at a time. It leaves others alone."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        keep: int = 1,
        api_key: str | Path | None = None,
        admin_key: str | Path | None = None,
        load_timeout: float = 600.0,
        guard: Guard | None = None,
    ) -> None:
        self._http = Transport(url, api_key=api_key, admin_key=admin_key, guard=guard)
        self._name = name
        self._keep = keep
        self._ours = re.compile(rf"{re.escape(name)}-v(\d+)")
        self._load_timeout = load_timeout
        self._served: str | None = None
        self._server: ServerInfo | None = None
        self._unloading: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        """See `Engine`. An unload that was sent ends all the same."""
        if self._unloading is not None:
            self._unloading.cancel()
            with suppress(asyncio.CancelledError):
                await self._unloading

    async def probe(self) -> Reached | Unreached:
        """See `Engine`. It serves the adapter that was proved last, else the newest that it lists, else the model."""
        reply = await self._http.get("/model_info", PROBE_SECONDS)
        info = read_model_info(reply, self._http.url)
        if isinstance(info, str):
            return Unreached(reason=info, advice=access.way_in(reply))
        listed = await self._listed()
        if isinstance(listed, str):
            return Unreached(reason=listed, advice=access.way_in(reply))
        if self._server is None or self._server.model_path not in {None, info.model_path}:
            server = read_server_info(await self._http.get("/server_info", CALL_SECONDS), self._http.url)
            if isinstance(server, str):
                return Unreached(reason=server, advice=access.way_in(reply))
            self._server = server
        if self._server.model_path not in {None, info.model_path}:  # another writer has replaced the model beneath them
            listed = []
        found = {each.name: each for each in listed}
        newest = found.get(self._served or "") or max(listed, key=lambda each: int(each.label), default=None)
        return Reached(
            model_path=info.model_path if newest is None else newest.path,
            weight_version=None if newest is None else newest.label,
            server_version=self._server.version,
            configuration=f"{self._server.configuration} lora {self._name}",
            startup_path=self._server.model_path,
            address=reply.address if isinstance(reply, Reply) else None,
            server="SGLang",
        )

    async def refit(self, target: Target, on_stage: Callable[[Stage], None]) -> Refit:
        """See `Engine`."""
        watch, name = Stopwatch(on_stage), f"{self._name}-v{target.label}"
        listed = await self._listed()
        if isinstance(listed, str):
            return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=listed)
        # Another folder's, of a step that was done again, or one whose load was not seen to end.
        in_the_way = any(each.name == name for each in listed)
        if in_the_way and (fault := await self._unload(name)) is not None:
            return Refit(outcome=Outcome.NACK, resumed=True, reason=fault)
        with watch.during(Stage.LOAD):
            order = {"lora_name": name, "lora_path": target.path}
            reply = await self._http.post("/load_lora_adapter", order, self._load_timeout)
        if (refused := _refused(reply)) is not None:
            return refused
        with watch.during(Stage.VERIFY):
            fault = await self._doubt(name, target)
        if fault is not None:
            return Refit(outcome=Outcome.TAINTED, resumed=True, reason=fault, timings=watch.milliseconds)
        self._served = name
        if self._unloading is None or self._unloading.done():
            task = self._unload_superfluous(target.label)
            self._unloading = asyncio.create_task(task, name=f"unload before {target.label}")
        return Refit(outcome=Outcome.ACK, resumed=True, timings=watch.milliseconds)

    async def fingerprint(self, alike: str | None = None) -> str | None:
        """See `Engine`. SGLang's checksums are of the model alone."""
        return None

    async def prefetch(self, version: Coming | Offered) -> None:
        """See `Engine`. A load pauses nothing, so nothing is gained before it."""

    async def cancel_prefetch(self) -> None:
        """See `Engine`."""

    async def trial(self, label: str) -> str | None:
        """See `Engine`. The answer names the model's own version, not the adapter's."""
        reply = await self._http.ask("/generate", TRIAL | {"lora_path": f"{self._name}-v{label}"}, TRIAL_SECONDS)
        fault = trial_fault(reply, label)
        return None if fault is not None and fault.startswith("a trial was answered by version") else fault

    async def resume(self) -> bool:
        """See `Engine`. It was never paused."""
        return True

    async def generates(self) -> bool | None:
        """See `Engine`."""
        return await access.generates(self._http)

    async def check_changes(self) -> ChangeCheck:
        """See `Engine`."""
        return await access.check_changes(self._http)

    async def _listed(self) -> list[ListedAdapter] | str:
        """Our adapters that the server has, or a sentence on why that cannot be said."""
        reply = await self._http.get("/v1/models", PROBE_SECONDS)
        if isinstance(reply, NoReply):
            return reply.reason
        try:
            cards = msgspec.convert(reply.data, _Cards).data
        except msgspec.ValidationError as error:
            return f"{self._http.url}/v1/models answered {reply.status} in another form: {error}"
        matches = [(card, self._ours.fullmatch(card.id)) for card in cards]
        return [ListedAdapter(card.id, match[1], card.root or "") for card, match in matches if match is not None]

    async def _doubt(self, name: str, target: Target) -> str | None:
        """Why what was loaded is not the target, None where it is."""
        listed, unchanged = await asyncio.gather(self._listed(), target.unchanged())
        if isinstance(listed, str):
            return f"loaded, but cannot be verified: {listed}"
        if ListedAdapter(name, target.label, target.path) not in listed:
            return f"loaded, but the server does not list {name} of {target.path}: is --max-loaded-loras large enough?"
        return None if unchanged else "loaded, but its files changed meanwhile, or it is not known whether they did"

    async def _unload_superfluous(self, served: str) -> None:
        listed = await self._listed()
        for each in superfluous(listed, served, self._keep) if isinstance(listed, list) else ():
            await self._unload(each.name)

    async def _unload(self, name: str) -> str | None:
        """Have the server unload an adapter once no request uses it; return why it did not, None if it did."""
        reply = await self._http.post("/unload_lora_adapter", {"lora_name": name}, self._load_timeout)
        if isinstance(reply, NoReply):
            return f"{name} cannot be unloaded: {reply.reason}"
        return None if reply.ok else f"{name} cannot be unloaded: {_said(reply)}"


def _refused(reply: Reply | NoReply) -> Refit | None:
    """What a load left behind that did not succeed; None where it did. The adapters from before are served on."""
    if isinstance(reply, NoReply):
        outcome = Outcome.UNREACHABLE if reply.lost is CallFailure.NEVER_SENT else Outcome.TAINTED
        return Refit(outcome=outcome, resumed=True, reason=reply.reason)
    if reply.ok and reply.data is not None and reply.data.get("success") is True:
        return None
    return Refit(outcome=Outcome.NACK, resumed=True, reason=f"the engine answered {reply.status}: {_said(reply)}")


def _said(reply: Reply) -> str:
    told = (reply.data or {}).get("error_message")
    return told[:500] if isinstance(told, str) else reply.short_message
