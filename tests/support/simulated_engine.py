"""An engine behind the port, in memory: for what the reconciler decides, in orders and failures that no server can
be made to show on demand. The contract suite holds the adapter against real servers."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from refitd.engine.fingerprints import agree
from refitd.engine.port import (
    UNTOLD,
    ChangeCheck,
    Coming,
    LoaderUse,
    Offered,
    Outcome,
    RankProof,
    Reached,
    Refit,
    Stage,
    Target,
    Unreached,
)


class SimulatedEngine:
    """Serves a path and a label. `script` holds the outcomes of coming refits; ACK when it is empty."""

    base = "/base"  # the model that it is started with

    def __init__(self) -> None:
        self.path = self.base
        self.label = "default"
        self.paused = False
        self.down = False
        self.loads: list[str] = []
        self.probes = 0
        self.resumes = 0
        self.script: list[Refit] = []
        self.contents: str | None = None
        self.gate: asyncio.Event | None = None
        self.closed = False
        self.fault: str | None = None
        self.takes_offers = False
        self.draft: str | None = None
        self.stock_reason: str | None = None
        self.loader: LoaderUse | None = None
        self.prover: Callable[[Coming], Sequence[RankProof]] | None = None  # its GPUs, which read a version's files
        self.taken: list[str] = []
        self.timings = {"pause": 0.5, "load": 1.0}
        self.plugin: str | None = None
        self.server, self.release, self.proof = "SGLang", "0.5.23", ""  # `proof`: what its fingerprints begin with
        self.ahead: list[str | None] = []  # what it was to make ready before its load, None: nothing any more
        self.waiting = self.hangs = False
        self.process = UNTOLD
        self.address: str | None = None
        self.may_read: tuple[str, ...] = ()

    async def probe(self) -> Reached | Unreached:
        self.probes += 1
        if self.down:
            return Unreached(reason="connection refused")
        return Reached(
            model_path=self.path,
            weight_version=self.label,
            server=self.server,
            server_version=self.release,
            configuration="simulated" if self.plugin is None else "simulated refitd",
            startup_path=self.base,
            takes_offers=self.takes_offers,
            proves=self.prover is not None,
            draft=self.draft,
            stock_reason=self.stock_reason,
            loader=self.loader,
            plugin=self.plugin,
            process=self.process,
            address=self.address,
            may_read=self.may_read,
        )

    async def refit(self, target: Target, on_stage: Callable[[Stage], None]) -> Refit:
        if target.offered is not None:
            self.taken.append(target.offered.version)
        self.loads.append(target.path)
        self.paused, self.waiting = True, False
        on_stage(Stage.LOAD)
        if self.gate is not None:
            await self.gate.wait()
        refit = self.script.pop(0) if self.script else Refit(outcome=Outcome.ACK, resumed=True)
        if refit.outcome is Outcome.ACK:
            self.path, self.label = target.path, target.label
            self.contents = f"{self.proof}contents of {target.path}"
            refit = Refit(outcome=Outcome.ACK, resumed=refit.resumed, fingerprint=self.contents, timings=self.timings)
            if target.fingerprint is not None and agree(self.contents, target.fingerprint) is False:
                refit = replace(refit, outcome=Outcome.TAINTED, resumed=False, reason="other tensors")
        self.paused = not refit.resumed
        return refit

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        self.ahead.append(version.version)
        self.waiting = True
        if self.hangs:
            await asyncio.Event().wait()
        is_wanted = isinstance(version, Coming) and version.prove and self.prover is not None
        return await asyncio.to_thread(self.prover, version) if is_wanted else ()

    async def cancel_prefetch(self) -> None:
        if self.waiting:
            self.ahead.append(None)
        self.waiting = False

    async def fingerprint(self, alike: str | None = None) -> str | None:
        return None if self.down else self.contents

    async def trial(self, label: str) -> str | None:
        return self.fault

    async def resume(self) -> bool:
        self.resumes += 1
        self.paused = self.down
        return not self.down

    async def check_changes(self) -> ChangeCheck:
        return ChangeCheck()

    async def aclose(self) -> None:
        self.closed = True

    def restart(self) -> None:
        """A new process on its start-up weights."""
        self.path, self.label, self.paused, self.contents, self.down = self.base, "default", False, None, False
