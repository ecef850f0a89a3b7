"""Deltas on real processes: an engine that knows none answers with the weights that the trainer has, every step."""

from pathlib import Path

import pytest

from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import EngineState, Kind
from support.delta_jobs import fine_tuning
from support.jobs import RUN, running, served_by
from support.servers import EmbeddedServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

COPIES = Path(SERVICE_FOLDER) / "copies" / RUN.replace("/", "~")


def test_an_engine_answers_with_deltas_as_with_the_gathered_model_token_for_token(models: Path, tmp_path: Path) -> None:
    """A full version, deltas, an anchor, deltas again; in between the service is killed, and the engine."""
    model = models / "model_a"
    with (
        EmbeddedServer(tmp_path, model) as engine,
        running(tmp_path, engine) as job,
        fine_tuning(job, model) as trainer,
    ):
        kinds: list[Kind] = []
        answers: list[list[int]] = []
        for step in range(1, 9):
            if step == 4:
                job.refitd.kill()
                job.refitd.restart()
            if step == 7:
                gone = job.client.engines().items[0]
                assert gone.state is EngineState.IN_SYNC
                engine.kill()
                engine.restart()
            kinds.append(trainer.publish().kind)
            served = trainer.answered()
            assert served.label == str(step)
            assert (Path(served.path).parent == job.root / COPIES) == (kinds[-1] is Kind.DELTA), served.path
            answers.append(served.answer)
        assert kinds.count(Kind.FULL) >= 2
        assert kinds.count(Kind.DELTA) >= 4
        assert len({tuple(answer) for answer in answers}) > 1
        whole = trainer.gathered(tmp_path / "whole")
        job.client.reclaim()
        last = [Path(served.path)] if kinds[-1] is Kind.DELTA else []
        assert list((job.root / COPIES).glob("*")) == last, "copies that no engine needs are deleted"
    with EmbeddedServer(tmp_path, whole) as other:
        assert served_by(other).answer == answers[-1]
