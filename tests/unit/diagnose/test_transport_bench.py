"""What the bench of transports publishes, and what it says of what it found."""

import pytest
import torch

from refitd.cli.bench import shown
from refitd.diagnose.transports import TransportComparison, TransportFigures, flip


def said(*figures: tuple[str, list[float]], fastest: str, auto: str) -> str:
    found = TransportComparison(
        run="bench/transports",
        device="cpu",
        model_bytes=10**9,
        engines=["e"],
        figures=[TransportFigures(transport=name, answered=answered) for name, answered in figures],
        fastest=fastest,
        auto=auto,
        auto_why="trainer and engines share a host",
    )
    return str(shown(found)[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_element_in_a_hundred_is_changed_a_little_and_the_second_time_changed_back(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    weights = {"a": torch.randn(50, 40).to(dtype), "b": torch.randn(7).to(dtype)}
    before = {name: each.clone() for name, each in weights.items()}
    flip(weights)
    assert [int((weights[name] != before[name]).sum()) for name in weights] == [20, 1]
    for name, each in weights.items():
        torch.testing.assert_close(each, before[name], rtol=2**-7, atol=0)
    flip(weights)
    assert all(torch.equal(weights[name], before[name]) for name in weights)


def test_numbers_of_one_byte_and_integers_stay_as_they_are() -> None:
    weights = {"q": torch.ones(200).to(torch.float8_e4m3fn), "n": torch.arange(200)}
    before = {name: each.clone() for name, each in weights.items()}
    flip(weights)
    assert all(torch.equal(weights[n].view(torch.uint8), before[n].view(torch.uint8)) for n in weights)


def test_what_auto_takes_is_confirmed_where_it_is_the_fastest() -> None:
    assert "takes the fastest, nccl" in said(("nccl", [9.0]), ("disk", [20.0]), fastest="nccl", auto="nccl")


def test_another_one_is_recommended_only_where_each_of_its_times_is_shorter() -> None:
    close = said(("gloo", [9.0, 12.0]), ("handover", [11.0, 13.0]), fastest="gloo", auto="handover")
    assert "gloo is no faster" in close
    clear = said(("gloo", [9.0, 10.0]), ("handover", [11.0, 13.0]), fastest="gloo", auto="handover")
    assert 'The fastest is gloo: publish(…, transport="gloo")' in clear
