"""What the demo breaks by itself, and how it ended: an engine is killed, and the trainer publishes a NaN.

    engine-b is killed and started again, on the weights of the beginning → rollouts come from the other engine
    → refitd brings it to the current step → rollouts come from both again

    a step is published with a NaN → refitd rejects it → engines go on serving the step before

Each is done to the demo's own processes, once in a run that is long enough to see how it ends.
"""

import copy
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from refitd_client import Publication
from refitd_client.contract.states import EngineState, VersionState
from refitd_client.http.client import RefitClient
from refitd_embedded.demo import policy
from refitd_embedded.demo.processes import Stack
from refitd_embedded.demo.rollouts import Engines
from refitd_embedded.demo.table import Display, Incident
from refitd_embedded.demo.trainer import PolicyTrainer

BROKEN = "model.layers.0.mlp.up_proj.weight"
SHORTEST = 10
"""Steps of a run in which something is broken."""
BACK_SECONDS = 60.0
INCIDENT_LOOK_SECONDS = 0.1


@dataclass(slots=True)
class Incidents:
    """Breaks things at their steps; `seen` has how each ended.

    Attributes:
        stack: whose processes they are.
        workdir: the folder for the checkpoint with the NaN.
        engines: who answers; one that was killed is left out until it is back.
        shown: where it is told.
        steps: of the whole run.
        publishing: whether versions are published: else nothing is broken.
    """

    stack: Stack
    workdir: Path
    engines: Engines
    shown: Display
    steps: int
    publishing: bool
    seen: list[Incident] = field(default_factory=list[Incident])
    _killed: tuple[str, int, float] | None = None  # its name, the step, and the time

    def kill(self, step: int) -> None:
        """Kill the last engine if this is the step for it, and have it started again."""
        if len(self.stack.engines) > 1 and self._is_due(step, 0.3):
            victim = self.stack.children[len(self.stack.engines) - 1]
            self._killed = (victim.name, step, time.monotonic())
            self.engines.leave_out(self.stack.engines[-1])
            victim.kill_and_restart()
            told = f"{victim.name} is killed (SIGKILL), and started again on its first weights."
            self.shown.tell(step, told)

    def broken(self, trainer: PolicyTrainer) -> Path | None:
        """The checkpoint with a NaN to publish in the place of this step's policy; None if this is not the step for it.

        It is written as a trainer without the SDK would: `publish` refuses to publish such tensors.
        """
        if not self._is_due(trainer.step, 0.7):
            return None
        diverged = copy.deepcopy(trainer.policy)
        with torch.no_grad():
            diverged.state_dict()[BROKEN][7, 11] = torch.nan
        self.shown.tell(trainer.step, "the trainer publishes a checkpoint with a NaN in it.")
        return policy.write(diverged, self.workdir / "diverged")

    def _is_due(self, step: int, part: float) -> bool:
        is_own = bool(self.stack.children)
        return is_own and self.publishing and self.steps >= SHORTEST and step == int(self.steps * part)

    def judged(self, publication: Publication) -> None:
        """Note how the NaN ended."""
        with RefitClient(self.stack.service_url) as client:
            version = client.version(publication.version_id)
            loads = client.attempts(publication.version_id).items
        ended = f"{version.state}, " + (f"{len(loads)} loads of it were tried" if loads else "and no engine loaded it")
        self.shown.tell(publication.step, f"{ended}: {version.reason}.")
        is_rejected = version.state is VersionState.REJECTED and not loads
        self.seen.append(
            Incident(step=publication.step, what="a NaN was published", ended=ended, as_promised=is_rejected)
        )

    def look(self, step: int) -> None:
        """Note it if the engine that was killed is back on the trainer's step; it answers again from now on."""
        if self._killed is None:
            return
        _, killed_at, since = self._killed
        with RefitClient(self.stack.service_url) as client:
            url = self.stack.engines[-1]
            engine = next(each for each in client.engines().items if each.url.rstrip("/") == url.rstrip("/"))
        if engine.state is not EngineState.IN_SYNC or engine.step is None or engine.step <= killed_at:
            return
        self.engines.take_back(url)
        self._end_kill(step, f"back on step {engine.step} after {time.monotonic() - since:.0f} s", is_back=True)

    def settle(self, step: int) -> None:
        """Wait until the engine that was killed is back.

        Raises:
            ProcessError: it has died again.
        """
        ends = time.monotonic() + BACK_SECONDS
        while self._killed is not None and time.monotonic() < ends:
            self.stack.check()
            self.look(step)
            time.sleep(INCIDENT_LOOK_SECONDS)
        if self._killed is not None:
            self._end_kill(step, f"not back after {BACK_SECONDS:g} s", is_back=False)

    def _end_kill(self, step: int, ended: str, *, is_back: bool) -> None:
        if self._killed is not None:
            name, killed_at, _ = self._killed
            self._killed = None
            self.shown.tell(step, f"{name}, which was killed, is {ended}.")
            self.seen.append(Incident(step=killed_at, what=f"{name} was killed", ended=ended, as_promised=is_back))
