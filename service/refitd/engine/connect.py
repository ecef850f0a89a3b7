"""From what the operator says of a server to the engine behind the `EnginePort`."""

import asyncio
from collections.abc import Callable, Sequence

from refitd.engine.engines_file import EngineSpec
from refitd.engine.kind import EngineAccess, EngineKind, EngineServer
from refitd.engine.plugin.channels import SocketList
from refitd.engine.plugin.leading import Leads
from refitd.engine.port import (
    ChangeCheck,
    Coming,
    EnginePort,
    Offered,
    RankProof,
    Reached,
    Refit,
    Stage,
    Target,
    Unreached,
)
from refitd.engine.registry import KINDS
from refitd.engine.wire import Guard

IsNamed = Callable[[str], bool]
"""Whether the operator named the engine with this URL: only such engines are sent the service's default keys."""


def connector(
    access: EngineAccess,
    guard: Guard,
    is_named: IsNamed,
    leads: Leads | None = None,
    kinds: Sequence[EngineKind] = KINDS,
) -> Callable[[EngineSpec], EnginePort]:
    """Return a function that makes the adapter for an engine. It reads no file and calls no server yet.

    Args:
        access: how engines are driven; the default keys among it.
        guard: says which addresses may be called.
        is_named: says which engines are sent the default keys.
        leads: what plugins are told of the service that loads their engines.
        kinds: the kinds of engines that there are.
    """

    sockets = None if access.root is None else SocketList(access.root)

    def connect(spec: EngineSpec) -> EnginePort:
        # The service's default keys go only to engines that the operator named.
        api_key, admin_key = (access.api_key, access.admin_key) if is_named(spec.url) else (None, None)
        server = EngineServer(
            url=spec.url,
            api_key=spec.api_key_file or api_key,
            admin_key=spec.admin_key_file or admin_key,
            guard=guard,
            leads=leads,
            root=spec.root or access.path_map or str(access.root),
            access=access,
            pair=spec.pair,
            sockets=sockets,
        )
        able = [kind for kind in kinds if spec.engine in {None, kind.name} and (kind.pairs or not spec.pair)]
        adapters = [kind.connect(server) for kind in able]
        return adapters[0] if len(adapters) == 1 else ProbedEngine(adapters)

    return connect


class ProbedEngine:
    """An engine of a kind that the operator does not say. The first adapter whose probe reaches it speaks to it.

    It goes on doing so, unless its probe fails and another's does not: then a server of another kind is there now.
    Where nothing listens the other adapters are not asked.
    """

    def __init__(self, adapters: Sequence[EnginePort]) -> None:
        self._adapters = adapters
        self._picked = adapters[0]
        self._was_reached = False  # the picked one: what others say of its server is of no use while it is away

    async def probe(self) -> Reached | Unreached:
        seen = await self._picked.probe()
        if isinstance(seen, Reached):
            self._was_reached = True
            return seen
        if seen.nothing_listens:
            return seen  # the others would be refused as well
        others = [adapter for adapter in self._adapters if adapter is not self._picked]
        answers = await asyncio.gather(*(adapter.probe() for adapter in others))
        for adapter, answer in zip(others, answers, strict=True):
            if isinstance(answer, Reached):
                self._picked, self._was_reached = adapter, True
                return answer
        for answer in answers:
            if isinstance(answer, Unreached) and answer.recognised:
                return answer
        if self._was_reached or seen.recognised:
            return seen
        reasons = [seen.reason, *(answer.reason for answer in answers if isinstance(answer, Unreached))]
        return Unreached(reason="; ".join(dict.fromkeys(reasons)), advice=seen.advice)

    async def _adapter(self) -> EnginePort:
        """The adapter of the server that is there, which a start after a kill in mid-load has not probed yet."""
        if not self._was_reached:
            await self.probe()
        return self._picked

    async def refit(self, target: Target, on_stage: Callable[[Stage], None]) -> Refit:
        return await (await self._adapter()).refit(target, on_stage)

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        return await (await self._adapter()).prefetch(version)

    async def cancel_prefetch(self) -> None:
        await self._picked.cancel_prefetch()

    async def fingerprint(self, alike: str | None = None) -> str | None:
        return await (await self._adapter()).fingerprint(alike)

    async def trial(self, label: str) -> str | None:
        return await (await self._adapter()).trial(label)

    async def resume(self) -> bool:
        return await (await self._adapter()).resume()

    async def check_changes(self) -> ChangeCheck:
        return await (await self._adapter()).check_changes()

    async def aclose(self) -> None:
        await asyncio.gather(*(adapter.aclose() for adapter in self._adapters))
