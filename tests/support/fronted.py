"""Two engines of a run, the service that keeps them, and the front that stands for both."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from refitd_client.contract.states import EngineState
from refitd_front.sessions import spool_of

from .front import FrontServer
from .jobs import RUN, Job, running, served_by
from .servers import EmbeddedServer


@dataclass
class Fronted:
    """`folder` is where the trainer saves checkpoints."""

    job: Job
    engines: list[EmbeddedServer]
    front: FrontServer
    folder: Path

    @property
    def answers(self) -> list[list[int]]:
        """Each engine's own, past the front: one that is paused gives none."""
        return [served_by(engine).answer for engine in self.engines]

    @property
    def labels(self) -> list[str]:
        return [served_by(engine).label for engine in self.engines]

    @property
    def received(self) -> list[Path]:
        """The files of what a trainer has sent that are still here."""
        return [path for path in spool_of(self.job.root, RUN).rglob("*") if path.is_file()]

    @property
    def is_well(self) -> bool:
        """Whether no engine is paused or in doubt, and nothing that was received lies about."""
        engines = self.job.client.engines().items
        return all(each.state is EngineState.IN_SYNC and not each.paused for each in engines) and not self.received

    def saved(self, model: Path, name: str) -> Path:
        """A checkpoint where the trainer saves them."""
        return Path(shutil.copytree(model, self.folder / name))


@contextmanager
def fronted(models: Path, folder: Path) -> Generator[Fronted]:
    """Run all of it; the engines begin with model_a."""
    (folder / "second").mkdir()
    (folder / "fileroot").mkdir()
    base = models / "model_a"
    with (
        EmbeddedServer(folder, base) as one,
        EmbeddedServer(folder / "second", base) as two,
        running(folder, one, "--engine", two.url) as job,
        FrontServer(folder, job, "--base-model", str(base)) as front,
    ):
        yield Fronted(job, [one, two], front, folder / "fileroot")
