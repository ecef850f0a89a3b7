"""`refitd bench transports --ranks`: sender ranks are tried beside one process, and what they cannot do is named."""

from pathlib import Path

import pytest

from refitd.diagnose.transports import TransportComparison
from support.command_line import answer
from support.jobs import TOKEN, running, served_by
from support.servers import EmbeddedServer

pytestmark = pytest.mark.timeout(600)


def test_what_ranks_can_do_has_figures_beside_one_process_and_the_engine_ends_on_the_weights_of_the_folder(
    tmp_path: Path, models: Path
) -> None:
    with EmbeddedServer(tmp_path, models / "model_a") as engine, running(tmp_path, engine) as job:
        as_it_is = served_by(engine).answer
        words = ("bench", "transports", str(models / "model_a"), "--root", str(job.root), "--url", job.refitd.url)
        flags = ("--publications", "1", "--between", "0", "--device", "cpu", "--ranks", "2")
        found = answer(*words, *flags, kind=TransportComparison, env={"REFITD_TOKEN": TOKEN})
        assert served_by(engine).answer == as_it_is
    of_ranks = found.of_ranks
    assert of_ranks is not None
    assert (found.ranks, of_ranks.ranks) == (1, 2)
    assert of_ranks.model_bytes == found.model_bytes
    figures = {each.transport: each for each in of_ranks.figures}
    assert [name for name, each in figures.items() if each.answered] == ["disk", "delta"]
    assert figures["disk"].ranks == figures["delta"].ranks == 2
    assert figures["delta"].reason is None
    assert (figures["delta"].bytes or 0) < (figures["disk"].bytes or 0) / 10
    for transport in ("handover", "nccl", "gloo"):
        assert ") has refitd inside: install it there" in (figures[transport].reason or "")
    assert of_ranks.fastest in {"disk", "delta"}
    assert of_ranks.auto == "disk"
