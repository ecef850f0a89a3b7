"""A trainer and a service that do not mean the same files: no version is taken for another that had its name before."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from refitd.root.ownership import mark_root
from refitd_client import ConflictError, Publication, Served, VersionFailedError, WeightPublisher
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import VersionState, WaitOutcome
from support.checkpoints import tensors
from support.services import Stage, at_a_port, serving

RUN = "run"


@dataclass
class Job:
    """A service on a port of its own, and trainers that come one after the other."""

    stage: Stage
    url: str

    async def trains(self, *steps: int, seed: int = 0, root: Path | None = None) -> list[Publication]:
        """A trainer publishes these steps, with other weights for another seed, and waits for none."""
        return await asyncio.to_thread(self._train, root or self.stage.root, steps, seed)

    def _train(self, root: Path, steps: tuple[int, ...], seed: int) -> list[Publication]:
        with WeightPublisher(root, RUN, self.url) as publisher:
            return [publisher.publish(tensors(1000 * seed + step), step=step) for step in steps]

    async def waits(self, publication: Publication) -> Served:
        return await publication.wait_async(10)

    async def serves(self, *steps: int) -> None:
        """A trainer publishes steps, each is served, and all but the last are collected."""
        for step in steps:
            (publication,) = await self.trains(step)
            assert (await self.waits(publication)).outcome is WaitOutcome.SERVED
        await self.stage.sweep()

    async def is_emptied(self) -> None:
        """The root is, as one in memory is by a reboot, and so are the engines. The journal is kept."""
        shutil.rmtree(self.stage.root / RUN)
        self.stage.engines["a"].restart()
        await self.stage.until("run~v000003", lambda record: record.state is VersionState.LOST)


@asynccontextmanager
async def job(tmp_path: Path) -> AsyncIterator[Job]:
    async with serving(tmp_path, keep_last=1, slots=0) as stage:
        stage.store.is_about(mark_root(stage.root, None, has_versions=False, mounts=""))
        async with at_a_port(stage) as url:
            yield Job(stage, url)


async def test_a_trainer_whose_root_was_emptied_begins_a_generation_and_its_steps_are_served(tmp_path: Path) -> None:
    """The service remembers what the folder does not. What was collected before, and what was lost, is not mixed up."""
    async with job(tmp_path) as at:
        await at.serves(1, 2, 3)
        await at.is_emptied()
        for step in (1, 2):
            (again,) = await at.trains(step, seed=1)
            served = await at.waits(again)
            assert (again.version_id, served.outcome) == (f"run~v{step:06d}.g2", WaitOutcome.SERVED)
            assert [engine.serves for engine in served.engines] == [True]
            assert served.version.digest == again.digest
        assert at.stage.engines["a"].path.endswith("v000002.g2")


@pytest.mark.parametrize(("step", "state"), [(1, VersionState.DELETED), (3, VersionState.LOST)])
async def test_a_step_that_is_published_again_after_the_root_was_emptied_is_refused_and_never_called_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, state: VersionState
) -> None:
    """By a publisher that could not ask, because the service was not there yet."""
    monkeypatch.setattr("refitd_client.publisher.newest_known", lambda *_: None)
    async with job(tmp_path) as at:
        await at.serves(1, 2, 3)
        await at.is_emptied()
        with pytest.raises(ConflictError, match="opens a new generation") as refused:
            await at.trains(step, seed=1)
        assert refused.value.publication is not None
        known = await at.stage.store.find(refused.value.publication.version_id)
        assert known is not None
        assert known.state is state
        publication = refused.value.publication
        assert isinstance(publication, Publication)
        assert publication.facts is not None
        with pytest.raises(VersionFailedError, match=r"other content|changed or gone"):
            await at.waits(replace(publication, facts=replace(publication.facts, notice_error=None)))


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("step", [1, 3, 9])
async def test_a_publisher_of_another_root_is_told_so_and_named_the_service_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, marked: bool
) -> None:
    """Whether the service knows the step as collected, as served, or not at all."""
    monkeypatch.setattr("refitd_client.publisher.newest_known", lambda *_: None)
    other = tmp_path / "other"
    (other / SERVICE_FOLDER).mkdir(parents=True)
    if marked:
        mark_root(other, None, has_versions=False, mounts="")
    async with job(tmp_path) as at:
        await at.serves(1, 2, 3)
        with pytest.raises(ConflictError, match=r"your root is not this service's|not those that were published") as it:
            await at.trains(step, seed=1, root=other)
        assert str(at.stage.root) in str(it.value) or (step == 3 and not marked)


async def test_a_publisher_whose_root_is_not_there_hears_which_one_the_service_watches_and_makes_none(
    tmp_path: Path,
) -> None:
    async with job(tmp_path) as at:
        with pytest.raises(ConflictError, match="your root is not this service's, which watches") as told:
            await at.trains(1, root=tmp_path / "nosuchroot")
        assert str(at.stage.root) in str(told.value)
        assert not (tmp_path / "nosuchroot").exists()


@pytest.mark.parametrize("marked", [True, False])
async def test_a_publisher_of_another_root_hears_it_before_anything_is_written(tmp_path: Path, marked: bool) -> None:
    other = tmp_path / "other"
    (other / SERVICE_FOLDER).mkdir(parents=True)
    if marked:
        mark_root(other, None, has_versions=False, mounts="")
    async with job(tmp_path) as at:
        await at.serves(1, 2)
        for _ in range(2):
            with pytest.raises(ConflictError, match="your root is not this service's, which watches") as told:
                await at.trains(2, root=other)
            assert told.value.publication is None
        assert [path.name for path in (other / RUN).iterdir()] == [".publisher.lock"]
        assert {record.id for record in at.stage.store.versions.values()} == {"run~v000002"}
        (again,) = await at.trains(3)
        assert (await at.waits(again)).outcome is WaitOutcome.SERVED


async def test_a_service_whose_root_is_away_or_that_is_down_changes_nothing_for_a_publisher(tmp_path: Path) -> None:
    """The version is written, and found later."""
    async with job(tmp_path) as at:
        shutil.rmtree(at.stage.root / SERVICE_FOLDER)
        assert (await at.stage.http.get("/v1/versions")).json()["root"] is not None  # it has not looked yet
        (unseen,) = await at.trains(1)
        at.stage.store.faults.set(root="it is away")
        assert (await at.stage.http.get("/v1/versions")).json()["root"] is None
        (away,) = await at.trains(2)
    with WeightPublisher(tmp_path / "new", RUN, "http://127.0.0.1:9") as publisher:
        down = publisher.publish(tensors(1), step=1)
    for publication in (unseen, away, down):
        assert publication.notice_error is not None
        assert publication.path.is_dir()
