"""Deltas on a stock SGLang, which knows nothing of them."""

from pathlib import Path

import pytest

from refitd_client.contract.states import Kind
from support.delta_jobs import fine_tuning
from support.jobs import running, served_by
from support.servers import SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.e2e, pytest.mark.timeout(400)]


def test_a_stock_sglang_follows_a_chain_of_deltas_and_answers_as_with_the_gathered_model(
    sglang: SglangServer, models: Path, tmp_path: Path
) -> None:
    """Token for token: the last full version of the chain is loaded into the same server afterwards."""
    if not sglang.is_running:
        sglang.restart()
    model = models / "model_a"
    with running(tmp_path, sglang) as job:
        with fine_tuning(job, model) as trainer:
            kinds = [trainer.publish().kind for _ in range(4)]
            assert kinds == [Kind.FULL, *[Kind.DELTA] * 3]
            by_deltas = trainer.answered()
            assert by_deltas.label == "4"
            whole = trainer.gathered(tmp_path / "whole")
        job.serve(whole, 5)
        assert served_by(sglang).answer == by_deltas.answer
