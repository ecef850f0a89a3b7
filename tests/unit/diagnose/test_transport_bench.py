"""What the bench of transports publishes, and what it says of what it found."""

import pytest
import torch

from refitd.cli.bench import device_here, shown
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


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    for asked in ("cuda:0", "cuda"):
        with pytest.raises(ValueError, match=f"^--device {asked}: torch sees no GPU on this host: say --device cpu$"):
            device_here(asked, gpus=0)
    for gpus, named in ((1, "cuda:0"), (4, "cuda:0 to cuda:3")):
        with pytest.raises(ValueError, match=f"^--device cuda:9: this host has no such GPU: say {named}, or cpu$"):
            device_here("cuda:9", gpus)
        with pytest.raises(ValueError, match=f"^--device nope names no device: say {named}, or cpu$"):
            device_here("nope", gpus)
    for asked in ("nope", "cuda:x", "gpu"):
        with pytest.raises(ValueError, match=f"^--device {asked} names no device: say cpu$"):
            device_here(asked, gpus=0)


@pytest.mark.parametrize(
    ("asked", "gpus", "device"),
    [(None, 0, "cpu"), (None, 2, "cuda:0"), ("cuda", 2, "cuda:0"), ("cuda:1", 2, "cuda:1"), ("cpu", 2, "cpu")],
)
def test_a_device_that_is_there_is_taken(asked: str | None, gpus: int, device: str) -> None:
    assert device_here(asked, gpus) == device


def test_figures_have_the_medians_of_what_was_measured_and_their_unit() -> None:
    found = TransportFigures(transport="disk", answered=[9.0, 7.0, 30.0], held=[2.0, 4.0]).with_medians()
    assert (found.unit, found.medians_ms) == ("ms", {"answered": 9.0, "held": 3.0})
    assert TransportFigures(transport="nccl", reason="no GPU").with_medians().medians_ms == {}
