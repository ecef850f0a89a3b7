"""The plugin in a real SGLang and the service: what it is used for, what is said of it, and deaths at bad moments."""

import asyncio
from pathlib import Path

import pytest

from refitd.engine.port import Outcome, Reached, Stage
from support.jobs import running, served_by
from support.plugged import PluggedSglang
from support.saved import served_and_put_back
from support.subject import Subject, ignore_stage

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

RUN = "with/service"


def test_what_a_trainer_publishes_goes_through_the_plugin_and_everyone_can_see_that(
    sglang_plugged: PluggedSglang, models: Path, service: Path
) -> None:
    root = sglang_plugged.root
    with running(service, sglang_plugged, "--run", RUN, root=root, run=RUN) as job:
        answers = []
        for step, model in enumerate(["model_a", "model_b", "model_a"], start=1):
            job.serve(models / model, step)
            answers.append(served_by(sglang_plugged).answer)
        assert answers[0] == answers[2] != answers[1]
        engine = job.engine_now
        assert engine.plugin is not None
        assert engine.last_attempt is not None
        assert {"prepare", "pause", "load", "resume"} <= engine.last_attempt.timings.keys()
        way = f"loads through refitd's plugin {engine.plugin}, checkpoints without refit.json as well"
        job.until(lambda event: event.text == way)
        assert f"It {way}." in job.client.explain(engine.id).sentences
        before = served_by(sglang_plugged)
        job.refitd.kill()
        mark = job.now
        job.refitd.restart()
        # Nothing is loaded again: what is in memory was held against the record.
        job.until(lambda event: event.subject == engine.id and event.text.startswith("IN_SYNC: serves"), after=mark)
        assert job.engine_now.last_attempt == engine.last_attempt
        assert served_by(sglang_plugged) == before


def test_a_checkpoint_of_save_pretrained_goes_through_the_plugin_and_one_that_changed_unseen_is_put_back(
    sglang_plugged: PluggedSglang, models: Path, service: Path
) -> None:
    root, run = sglang_plugged.root, "with/checkpoints"
    with running(service, sglang_plugged, "--run", run, root=root, run=run) as job:
        served_and_put_back(job, models, lambda: served_by(sglang_plugged).answer)


async def test_an_engine_that_dies_after_it_has_prepared_is_found_again_when_it_is_back(
    sglang_plugged: PluggedSglang, models: Path
) -> None:
    subject = Subject("sglang-plugged", sglang_plugged, models, sglang_plugged.root)
    await subject.refit("model_a", "1")
    loading = asyncio.Event()

    def freeze(seen: Stage) -> None:
        if seen is Stage.LOAD:
            sglang_plugged.scheduler.suspend()
            loading.set()

    refit = asyncio.create_task(subject.engine.refit(subject.target("model_b", "2"), freeze))
    await loading.wait()
    assert not (await asyncio.wait({refit}, timeout=1.0))[0]  # the order is on its way to the frozen process
    sglang_plugged.kill()
    broken = await refit
    assert (broken.outcome, broken.resumed, "prepare" in broken.timings) == (Outcome.TAINTED, False, True)
    sglang_plugged.start()
    seen = await subject.engine.probe()  # its old socket is still there, and nobody listens
    assert isinstance(seen, Reached)
    assert (seen.plugin is not None, seen.weight_version) == (True, "default")
    again = await subject.engine.refit(subject.target("model_b", "2", repairs=True), ignore_stage)
    assert (again.outcome, again.resumed, "prepare" in again.timings) == (Outcome.ACK, True, True)
