"""LoRA adapters on a vLLM server (`engine/adapters.py`): VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora.

What vLLM 0.32.0 was seen to do, and what follows from it:

- It reads an adapter that it does not hold in memory (`--max-cpu-loras`, 1 unless it is given) from its folder when a
  request names it, and dies where the folder is gone. So the folders that it lists, and those of the adapters that were
  unloaded last, of which requests may still be under way, count as folders that it may read (`Reached.may_read`). It
  does not list the latter: after a restart of the service the record knows them (`Reached.may_read_more`).
- A name that is loaded with `load_inplace` keeps that flag: vLLM reads the folder again at each step of each request,
  and continues running requests with other weights. So a name that is in use is unloaded and loaded anew; requests that
  are under way end with the adapter that they began with, and the prefix cache is emptied.
- It answers 200 to an adapter with NaN, with a tensor missing or of another shape. A fixed prompt is scored with each
  adapter that was loaded; one with a wrong answer, or with that of the model alone, is unloaded again. NaN stays behind
  in what the engine keeps, and later requests for other adapters answer NaN as well (seen on a CPU): contents are
  unknown then.
- A load that fails in one of several processes shifts the answers of all, as for models.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refitd.engine.adapters import AdapterProof, ListedAdapter, NamedAdapters
from refitd.engine.applied import Scores
from refitd.engine.dialing import Guard
from refitd.engine.http import CallFailure, NoReply, Reply
from refitd.engine.limits import PROBE_SECONDS
from refitd.engine.port import ChangeCheck, Obstacle, Outcome, Reached, Refit, Target, Unreached
from refitd.engine.vllm import access, proof
from refitd.engine.vllm.calls import ask_how_started, empty_caches
from refitd.engine.vllm.contents import read_trial
from refitd.engine.vllm.info import LORA, Capabilities, Label, VllmServerInfo, read_label, said
from refitd.engine.vllm.obstacles import adapter_obstacles, lacking_for_adapters
from refitd.engine.vllm.watched import WatchedTransport


@dataclass(frozen=True, slots=True)
class _Known:
    """A process of the server: how it was started, and the label of the model beneath its adapters."""

    server: VllmServerInfo
    label: str


class VllmAdapters(NamedAdapters):
    """One vLLM server that serves adapters called `name-v<label>`, `keep` at a time."""

    unload_route = "/v1/unload_lora_adapter"

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
        several_ranks: bool = False,
        root: Path | None = None,
        root_there: str | None = None,
    ) -> None:
        """Make no call yet. See `NamedAdapters`, and `WatchedTransport` for keys.

        Args:
            url: of the server.
            name: of the adapter.
            keep: how many stay loaded.
            api_key: opens requests and adapters.
            admin_key: opens changes.
            load_timeout: seconds that a load may take.
            guard: says which addresses may be called.
            several_ranks: the operator accepts a server of several ranks without refitd inside.
            root: the root as the service sees it.
            root_there: the root as the server sees it.
        """
        http = WatchedTransport(url, api_key=api_key, admin_key=admin_key, guard=guard)
        super().__init__(http, name=name, keep=keep, load_timeout=load_timeout, root=root, root_there=root_there)
        self._several_ranks = several_ranks
        self._known: _Known | None = None
        self._was_away = True  # whether another process may answer than at the last probe
        self._lost: str | None = None  # why nothing counts any more that this process of the server answers
        self._unloaded: deque[str] = deque(maxlen=keep)  # folders, the last ones

    async def probe(self) -> Reached | Unreached:
        """See `Engine`. It serves the adapter that was proved last, else the newest that it lists, else the model."""
        reply = await self._http.get("/weight_info", PROBE_SECONDS)
        label = read_label(reply, self._http.url)
        listed = await self._listed()
        is_new = self._was_away or (self._served is not None and self._served not in _names(listed))
        was_replaced = (
            self._known is not None and isinstance(label, Label) and label.weight_version != self._known.label
        )
        if (is_new or was_replaced) and (fault := await self._look(label)) is not None:
            return self._away(fault, reply)
        if isinstance(label, str) or isinstance(listed, str) or self._known is None:
            return self._away(label if isinstance(label, str) else str(listed), reply)
        newest = None if was_replaced else self._newest(listed)  # another writer has replaced the model beneath them
        server = self._known.server
        return Reached(
            model_path=server.model_path if newest is None else newest.path,
            weight_version=None if newest is None else newest.label,
            server_version=server.version,
            configuration=f"{server.configuration} lora {self._name}",
            startup_path=server.model_path,
            process=server.process,
            address=reply.address if isinstance(reply, Reply) else None,
            server="vLLM",
            obstacles=tuple(self._obstacles),
            may_read=self._may_read(listed),
            may_read_more=self._may_read_more,
        )

    async def fingerprint(self, alike: str | None = None) -> str | None:
        """See `Engine`: the answers of the adapter that it serves."""
        listed = await self._listed()
        newest = None if isinstance(listed, str) else self._newest(listed)
        if newest is None:
            return None
        return await proof.fingerprint_of(self._http, alike, checker=False, adapter=newest.name)

    async def trial(self, label: str) -> str | None:
        """See `Engine`. Only the adapter of this label answers to its name."""
        answer = read_trial(await proof.ask(self._http, f"{self._name}-v{label}"))
        return answer if isinstance(answer, str) else None

    async def check_changes(self) -> ChangeCheck:
        return await access.check_changes(self._http)

    @property
    def _can(self) -> Capabilities:
        return Capabilities() if self._known is None else self._known.server.capabilities

    @property
    def _obstacles(self) -> list[Obstacle]:
        return list(adapter_obstacles(self._can, self._keep, several_ranks=self._several_ranks))

    def _away(self, fault: Obstacle | str, reply: Reply | NoReply) -> Unreached:
        self._was_away = True
        return access.unreached(fault, reply)

    async def _look(self, label: Label | str) -> Obstacle | str | None:
        """Learn how the server was started; what it lacks or why that cannot be said, None where it was."""
        server = await ask_how_started(self._http)
        if not isinstance(server, VllmServerInfo):
            return server
        if isinstance(label, str):
            return label
        if self._known is not None and server.process != self._known.server.process:
            self._lost = None
        self._known, self._was_away = _Known(server, label.weight_version), False
        return lacking_for_adapters(server.capabilities, self._http.url)

    def _may_read(self, listed: Sequence[ListedAdapter]) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*(each.path for each in listed), *self._unloaded]))

    @property
    def _may_read_more(self) -> bool:
        return len(self._unloaded) < self._keep

    async def _refusal(self) -> Refit | None:
        if self._was_away and isinstance(seen := await self.probe(), Unreached):
            return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=seen.reason)
        if self._lost is not None:
            return Refit(outcome=Outcome.TAINTED, resumed=True, reason=self._lost)
        for obstacle in self._obstacles:
            if obstacle.blocks:
                return Refit(outcome=Outcome.NACK, resumed=True, reason=f"{obstacle.text}: {obstacle.fix}")
        if self._can.sleeps and (asleep := await access.asleep(self._http)) is not None:
            return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=asleep)
        return None

    async def _load(self, name: str, path: str) -> Reply | NoReply:
        reply = await self._change(LORA, {"lora_name": name, "lora_path": path})
        if self._can.ranks > 1 and (isinstance(reply, NoReply) or self._failure(reply) is not None):
            why = reply.reason if isinstance(reply, NoReply) else f"the engine answered {reply.status}: {said(reply)}"
            self._lost = f"{why}; its processes answer other calls than they are asked since: restart it"
        return reply

    async def _change(self, route: str, body: dict[str, Any]) -> Reply | NoReply:
        # With the key for requests: it is the one that vLLM wants for all routes beneath /v1.
        return await self._http.ask(route, body, self._load_timeout)

    def _failure(self, reply: Reply) -> str | None:
        return None if reply.ok and reply.text.strip('"').startswith("Success") else said(reply)

    def _refused(self, reply: Reply | NoReply) -> Refit | None:
        if self._lost is not None:
            return Refit(outcome=Outcome.TAINTED, resumed=True, reason=self._lost)
        return super()._refused(reply)

    async def _unload(self, adapter: ListedAdapter) -> str | None:
        fault = await super()._unload(adapter)
        if fault is None and adapter.path not in self._unloaded:
            self._unloaded.append(adapter.path)
        return fault

    async def _proof(self, name: str, target: Target, *, again: bool) -> AdapterProof:
        if again and (fault := await empty_caches(self._http, multimodal=self._can.multimodal)) is not None:
            return AdapterProof(f"loaded, but {fault}")
        found, doubt = await proof.answered(self._http, None, target, name)
        if doubt is None and found is not None:
            # Not those of the adapter before: one that is not in memory is read from its folder, and vLLM dies where a
            # trainer has deleted that.
            doubt = await self._answers_of_another(name, target, [None])
        if doubt is None:
            return AdapterProof(None, found)
        unloaded = await self._unload(ListedAdapter(name, target.label, target.path)) is None
        if found is None:
            doubt = f"{doubt}; where other adapters answer so as well, restart it"
        return AdapterProof(f"loaded, but {doubt}", withdrawn=unloaded and found is not None)

    async def _scores(self, adapter: str | None) -> Scores | str | None:
        # vLLM looks up no cached prefix for a prompt that is to be scored.
        reply = await proof.ask(self._http, adapter)
        if isinstance(reply, NoReply) and reply.lost is CallFailure.TIMED_OUT:
            return None  # many requests are before it
        answer = read_trial(reply)
        return answer if isinstance(answer, str) else answer.values


def _names(listed: list[ListedAdapter] | str) -> set[str]:
    return set() if isinstance(listed, str) else {each.name for each in listed}
