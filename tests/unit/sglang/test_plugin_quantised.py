"""Models whose weights were made into something else when they were loaded: refused, untouched, before any write."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from refitd_client.contract.plugin import UpdateOutcome
from refitd_plugin.memory.source import SourceRefusedError
from refitd_sglang.process import loaded_once
from support.mini_sglang import values
from support.tiny_rank import Rank, version


def layer(*, knows_its_loader: bool) -> torch.nn.Module:
    """As SGLang's methods leave one: scales that were computed, and a weight that may be another than was loaded."""
    found = torch.nn.Module()
    for name in ("weight", "weight_scale"):
        found.register_parameter(name, torch.nn.Parameter(torch.zeros(2), requires_grad=False))
    if knows_its_loader:
        found.weight.weight_loader = print  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    found.quant_method = object()  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return found


def test_a_model_that_can_be_loaded_once_is_refused_before_the_pause_and_in_it(tmp_path: Path) -> None:
    rank, path = Rank(version(tmp_path, 1)), version(tmp_path, 2)
    rank.model.add_module("mlp", layer(knows_its_loader=False))
    rank.updater.model_config.quantization = "fp8"
    before = values(rank.model)
    with pytest.raises(SourceRefusedError, match="quantisation fp8 has put another in its place"):
        rank.engine.prepare(str(path))
    answer = rank.answer(path)
    assert (answer.outcome, values(rank.model)) == (UpdateOutcome.REFUSED, before)
    assert "mlp.weight is not what SGLang's loader left there" in answer.reason


def test_scales_that_were_packed_for_deepgemm_are_named_with_the_setting_that_avoids_it() -> None:
    """On Blackwell. Elsewhere scales in blocks stay what they were, and are loaded again."""
    model = torch.nn.Sequential(layer(knows_its_loader=True))
    for dtype, refused in ((torch.float32, False), (torch.int32, True)):
        scales = torch.nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
        model[0].register_parameter("weight_scale_inv", scales)
        reason = loaded_once(model, SimpleNamespace(quantization="fp8")) or ""
        assert ("0.weight_scale_inv" in reason, "SGLANG_ENABLE_JIT_DEEPGEMM=0" in reason) == (refused, refused)


@pytest.mark.parametrize(("method", "knows"), [(None, False), ("w8a8_int8", True)], ids=["plain", "loadable"])
def test_a_model_that_can_be_loaded_again_is_not_refused(method: str | None, knows: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), layer(knows_its_loader=knows))
    assert loaded_once(model, SimpleNamespace(quantization=method)) is None
