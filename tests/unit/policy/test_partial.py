"""A version that leaves tensors out is the same on all engines: what it lacks are the start-up model's tensors."""

from dataclasses import replace

import pytest

from refitd.engine.port import Process, Reached
from refitd.policy.chain import begun, why_not_over
from refitd.policy.observe import after_probe
from refitd.state.version import VersionRecord
from support.records import engine, version

WHOLE = version(1)
PART = version(2).having(lacks="mtp", left_out=("mtp.fc.weight",), left_out_count=1)
OTHER = version(3).having(lacks="vision", left_out=("visual.patch.weight",), left_out_count=1)
KNOWN: dict[str, VersionRecord] = {each.id: each for each in (WHOLE, PART, OTHER)}


@pytest.mark.parametrize(
    ("loaded", "goes"),
    [([], True), ([PART], True), ([PART, PART], True), ([WHOLE], False), ([PART, WHOLE], False), ([OTHER], False)],
)
def test_a_version_with_tensors_left_out_goes_only_over_start_up_weights_of_those(
    loaded: list[VersionRecord], goes: bool
) -> None:
    record = engine("a")
    for each in loaded:
        record = begun(record, each).having(serving=each.id)
    reason = why_not_over(record, PART, KNOWN)
    assert (reason is None) is goes
    if reason is not None:
        assert "mtp.fc.weight" in reason
        assert reason.endswith("restart it")
    assert why_not_over(record, WHOLE, KNOWN) is None


def test_what_an_earlier_release_has_loaded_counts_by_what_the_engine_serves() -> None:
    assert why_not_over(engine("a", serving=WHOLE.id), PART, KNOWN) is not None
    assert why_not_over(engine("a", serving=PART.id), PART, KNOWN) is None
    assert why_not_over(engine("a", serving="gone~v000001"), PART, KNOWN) is not None


def test_an_engine_that_another_writer_has_loaded_has_no_start_up_weights() -> None:
    record = engine("a", startup_path="/base", model_path="/elsewhere")
    assert why_not_over(record, PART, KNOWN) is not None
    assert why_not_over(record.having(model_path="/base"), PART, KNOWN) is None


def test_a_host_asks_its_own_engines() -> None:
    assert why_not_over(engine("a", serving=WHOLE.id, pulls=True), PART, KNOWN) is None


def test_a_restart_brings_the_start_up_weights_back() -> None:
    before = begun(engine("a", serving=WHOLE.id), WHOLE).having(process=Process(seed=1), model_path="/base")
    seen = Reached(model_path="/base", weight_version="", server_version="1", configuration="c", startup_path="/base")
    assert after_probe(before, replace(seen, process=Process(seed=2)), None, None, 0.0).contents.kept is None
    assert after_probe(before, replace(seen, process=Process(seed=1)), None, None, 0.0).contents.kept == ""
