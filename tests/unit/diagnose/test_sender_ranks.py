"""What each sender rank of the bench has, and how its figures are shown beside those of one process."""

from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from refitd.cli.bench import shown
from refitd.diagnose.sender_ranks import RankSetup, RankTrainer, device_of, rows_of
from refitd.diagnose.transports import TransportComparison, TransportFigures
from refitd_client.errors import PublishError
from refitd_client.http.connection import Connection


@pytest.mark.parametrize(
    ("first", "gpus", "devices"),
    [
        ("cpu", 4, ["cpu", "cpu", "cpu"]),
        ("cuda:0", 4, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:1", 2, ["cuda:1", "cuda:0", "cuda:1"]),
    ],
)
def test_each_rank_has_a_gpu_of_its_own_as_far_as_there_are_some(first: str, gpus: int, devices: list[str]) -> None:
    assert [device_of(rank, first, gpus) for rank in range(3)] == devices


def test_ranks_together_have_each_row_once_and_what_has_none_whole(tmp_path: Path) -> None:
    weights = {"matrix": torch.arange(35.0).reshape(7, 5), "short": torch.arange(2.0), "scale": torch.tensor(3.0)}
    save_file(weights, tmp_path / "model.safetensors")
    ranks = [rows_of(tmp_path, "cpu", rank, 3) for rank in range(3)]
    for name in ("matrix", "short"):
        assert torch.equal(torch.cat([tensors[name] for tensors, _ in ranks]), weights[name])
        assert [(part[name].dim, part[name].index, part[name].count) for _, part in ranks] == [
            (0, rank, 3) for rank in range(3)
        ]
    for tensors, parts in ranks:
        assert torch.equal(tensors["scale"], weights["scale"])
        assert "scale" not in parts


def comparison(ranks: int, answered: dict[str, list[float]], *, auto: str, fastest: str) -> TransportComparison:
    return TransportComparison(
        run="bench/transports",
        device="cpu",
        model_bytes=10**9,
        engines=["e"],
        figures=[TransportFigures(transport=name, ranks=ranks, answered=each) for name, each in answered.items()],
        fastest=fastest,
        auto=auto,
        auto_why="files go everywhere",
        ranks=ranks,
    )


def test_ranks_have_rows_and_a_recommendation_of_their_own() -> None:
    found = comparison(1, {"disk": [30.0], "gloo": [20.0]}, auto="disk", fastest="gloo")
    of_ranks = comparison(4, {"disk": [10.0], "gloo": [40.0]}, auto="disk", fastest="disk")
    told = [str(each) for each in shown(replace(found, of_ranks=of_ranks))[1:]]
    assert told[1].startswith("The fastest is gloo")
    assert told[2] == "4 ranks, each with its rows (1 engine):"
    assert told[3] == 'transport="auto" takes the fastest, disk: files go everywhere.'


def test_a_rank_that_is_silent_or_gone_is_named_and_what_it_says_later_counts_for_nothing(tmp_path: Path) -> None:
    setup = RankSetup(
        folder=tmp_path,
        device="cpu",
        root=tmp_path,
        run="run",
        connection=Connection(url="http://s:1"),
        takes_engines=False,
        ranks=2,
        store="",
        timeout=0.05,
    )
    for is_gone, said in ((False, "rank 1 says nothing in 0.05 s"), (True, "rank 1 has ended")):
        (mine, first), (other, second) = Pipe(), Pipe()
        for rank in (first, second):
            rank.send(("place", 5))
        trainer = RankTrainer(setup, [mine, other])
        assert trainer.nbytes == 10
        first.send(PublishError("rank 1: gone"))
        if is_gone:
            second.close()
        with pytest.raises(PublishError, match="rank 1: gone"):  # rank 0 has said it first
            trainer.publish(1, "disk")
        for rank in (first,) if is_gone else (first, second):
            rank.send("too late")
        with pytest.raises(PublishError, match=said):
            trainer.publish(2, "disk")
