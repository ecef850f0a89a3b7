"""LoRA adapters on an SGLang server (`engine/adapters.py`). It proves by its list of adapters, and by its answers.

The server waits with an unload until no request uses the adapter, and loads nothing meanwhile. Each load has an id of
its own in the server, under which prefixes are cached: what an adapter of the same name computed before is not used.
"""

from pathlib import Path
from uuid import uuid4

from refitd.engine.adapters import AdapterProof, ListedAdapter, NamedAdapters
from refitd.engine.applied import Scores
from refitd.engine.dialing import Guard
from refitd.engine.http import CallFailure, NoReply, Reply, Transport
from refitd.engine.limits import CALL_SECONDS, PROBE_SECONDS, TRIAL_SECONDS
from refitd.engine.port import ChangeCheck, Outcome, Reached, Refit, Target, Unreached
from refitd.engine.sglang import access
from refitd.engine.sglang.info import SglangServerInfo, read_model_info, read_server_info
from refitd.engine.sglang.obstacles import adapter_obstacles, refusal
from refitd.engine.sglang.verify import TRIAL, read_scores, trial_fault


class SglangAdapters(NamedAdapters):
    """One SGLang server that serves adapters called `name-v<label>`, `keep` at a time."""

    unload_route = "/unload_lora_adapter"
    unlisted_hint = ": is --max-loaded-loras large enough?"

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
        root: Path | None = None,
        root_there: str | None = None,
    ) -> None:
        """Make no call yet.

        Args:
            url: of the server.
            name: of the adapter.
            keep: how many stay loaded.
            api_key: opens requests, as for `Transport`.
            admin_key: opens changes, as for `Transport`.
            load_timeout: seconds that a load may take.
            guard: says which addresses may be called.
            root: the root as the service sees it, from which files are read where answers need an explanation.
            root_there: the root as the server sees it.
        """
        http = Transport(url, api_key=api_key, admin_key=admin_key, guard=guard)
        super().__init__(http, name=name, keep=keep, load_timeout=load_timeout, root=root, root_there=root_there)
        self._server: SglangServerInfo | None = None

    async def probe(self) -> Reached | Unreached:
        """See `Engine`. It serves the adapter that was proved last, else the newest that it lists, else the model."""
        reply = await self._http.get("/model_info", PROBE_SECONDS)
        info = read_model_info(reply, self._http.url)
        if isinstance(info, str):
            return Unreached(reason=info, advice=access.way_in(reply), nothing_listens=reply.nothing_listens)
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
        newest = self._newest(listed)
        return Reached(
            model_path=info.model_path if newest is None else newest.path,
            weight_version=None if newest is None else newest.label,
            server_version=self._server.version,
            configuration=f"{self._server.configuration} lora {self._name}",
            startup_path=self._server.model_path,
            address=reply.address if isinstance(reply, Reply) else None,
            server="SGLang",
            obstacles=tuple(adapter_obstacles(self._server)),
        )

    async def fingerprint(self, alike: str | None = None) -> str | None:
        """See `Engine`. SGLang's checksums are of the model alone."""
        return None

    async def trial(self, label: str) -> str | None:
        """See `Engine`. The answer names the model's own version, not the adapter's."""
        reply = await self._http.ask("/generate", TRIAL | {"lora_path": f"{self._name}-v{label}"}, TRIAL_SECONDS)
        fault = trial_fault(reply, label)
        return None if fault is not None and fault.startswith("a trial was answered by version") else fault

    async def check_changes(self) -> ChangeCheck:
        return await access.check_changes(self._http)

    async def _refusal(self) -> Refit | None:
        if self._server is None and isinstance(seen := await self.probe(), Unreached):
            return Refit(outcome=Outcome.UNREACHABLE, resumed=True, reason=seen.reason)
        why = None if self._server is None else refusal(adapter_obstacles(self._server))
        return None if why is None else Refit(outcome=Outcome.NACK, resumed=True, reason=why)

    async def _load(self, name: str, path: str) -> Reply | NoReply:
        return await self._change("/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def _failure(self, reply: Reply) -> str | None:
        if reply.ok and reply.data is not None and reply.data.get("success") is True:
            return None
        told = (reply.data or {}).get("error_message")
        return told[:500] if isinstance(told, str) else reply.short_message

    async def _proof(self, name: str, target: Target, *, again: bool) -> AdapterProof:
        listed = await self._listed()
        before = self._newest([each for each in listed if each.name != name]) if isinstance(listed, list) else None
        others = [None] if before is None else [None, before]
        if (doubt := await self._answers_of_another(name, target, others)) is None:
            return AdapterProof(None)
        withdrawn = await self._unload(ListedAdapter(name, target.label, target.path)) is None
        return AdapterProof(f"loaded, but {doubt}", withdrawn=withdrawn)

    async def _scores(self, adapter: str | None) -> Scores | str | None:
        # No two of these requests share cached prefixes, by which an answer can differ in its last digits.
        named = {} if adapter is None else {"lora_path": adapter}
        reply = await self._http.ask("/generate", TRIAL | {"extra_key": uuid4().hex} | named, TRIAL_SECONDS)
        if isinstance(reply, NoReply) and reply.lost is CallFailure.TIMED_OUT:
            return None  # many requests are before it
        return read_scores(reply)
