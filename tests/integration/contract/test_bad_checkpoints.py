"""What each checkpoint that is not as it should be does to an engine (tests/sglang/README.md, docs/vllm.md).

SGLang and vLLM answer 200 to half a checkpoint. No adapter can tell that from a good load, as these tests show: it is
the service's validation that keeps such checkpoints away from engines.
"""

import httpx
import pytest

from refitd.engine.port import Outcome, Reached, Refit
from support.habits import CHECKPOINTS, Fate
from support.subject import Subject

pytestmark = pytest.mark.timeout(400)

each_checkpoint = pytest.mark.parametrize("model", CHECKPOINTS)


async def refit_from_a(subject: Subject, model: str) -> tuple[Refit, Refit, list[int]]:
    """Load model_a, then `model`: how both ended, and what model_a answers."""
    a = await subject.refit("model_a", "1", repairs=True)
    assert (a.outcome, a.resumed) == (Outcome.ACK, True), a.reason
    answer = await subject.answer()
    return a, await subject.refit(model, "2", not_fingerprint=a.fingerprint), answer


@each_checkpoint
@pytest.mark.fate(Fate.UNTOUCHED)
async def test_a_checkpoint_that_is_refused_leaves_what_is_served_as_it_was(subject: Subject, model: str) -> None:
    a, refit, answer = await refit_from_a(subject, model)
    assert (refit.outcome, refit.resumed) == (Outcome.NACK, True), refit.reason
    assert subject.habits.refusal in (refit.reason or "")
    assert subject.agree(await subject.engine.fingerprint(a.fingerprint), a.fingerprint)
    assert await subject.named() == (str(subject.path("model_a")), "1")
    assert await subject.answer() == answer
    assert (await subject.refit("model_b", "3")).outcome is Outcome.ACK
    assert await subject.answer() != answer


@each_checkpoint
@pytest.mark.fate(Fate.DEAD)
async def test_what_kills_an_engine_taints_it_and_it_comes_back_on_its_startup_weights(
    subject: Subject, model: str
) -> None:
    before = await subject.engine.probe()
    a, refit, answer = await refit_from_a(subject, model)
    assert (refit.outcome, refit.resumed) == (Outcome.TAINTED, False)
    assert "may have loaded, in part or in full" in (refit.reason or "")
    subject.server.died()
    await assert_back_after_a_restart(subject, before, a, answer)


@each_checkpoint
@pytest.mark.fate(Fate.LOST)
async def test_an_engine_that_no_load_brings_back_says_restart_it_and_comes_back_on_its_startup_weights(
    subject: Subject, model: str
) -> None:
    before = await subject.engine.probe()
    a, refit, answer = await refit_from_a(subject, model)
    assert (refit.outcome, refit.resumed) == (Outcome.TAINTED, False)
    assert "restart it" in (refit.reason or "")
    repair = await subject.refit("model_a", "3", repairs=True)
    assert (repair.outcome, repair.resumed) == (Outcome.TAINTED, False)
    assert "restart it" in (repair.reason or "")
    other = subject.adapter()  # one that has seen none of this
    unaware = await other.refit(subject.target("model_a", "4", repairs=True), lambda _: None)
    await other.aclose()
    assert (unaware.outcome, unaware.resumed) == (Outcome.TAINTED, False)
    await assert_back_after_a_restart(subject, before, a, answer)


async def assert_back_after_a_restart(subject: Subject, before: object, a: Refit, answer: list[int]) -> None:
    """It serves what it was started with, and takes updates again."""
    subject.server.restart()
    seen = await subject.engine.probe()
    assert isinstance(before, Reached)
    assert isinstance(seen, Reached)
    assert (seen.model_path, seen.weight_version) == (str(subject.models / "model_a"), "default")
    assert seen.process.is_as(before.process) is not True
    # Another process of the same configuration: fingerprints can be compared.
    assert seen.configuration == before.configuration
    assert subject.agree(await subject.engine.fingerprint(a.fingerprint), a.fingerprint)
    assert await subject.answer() == answer
    repaired = await subject.refit("model_b", "3", not_fingerprint=a.fingerprint)
    assert (repaired.outcome, repaired.resumed) == (Outcome.ACK, True), repaired.reason
    assert await subject.answer() != answer


@each_checkpoint
@pytest.mark.fate(Fate.MIXED)
async def test_a_mixture_of_two_models_looks_like_a_success_unless_a_clean_load_is_on_record(
    subject: Subject, model: str
) -> None:
    clean = await subject.refit("model_b", "0", repairs=True)
    a, refit, answer = await refit_from_a(subject, model)
    assert refit.outcome is Outcome.ACK
    assert not subject.agree(refit.fingerprint, a.fingerprint)
    assert not subject.agree(refit.fingerprint, clean.fingerprint)
    await subject.refit("model_a", "1")
    known = await subject.refit(model, "3", fingerprint=clean.fingerprint)
    assert (known.outcome, known.resumed) == (Outcome.TAINTED, False)
    assert "clean load" in (known.reason or "")
    await assert_repaired(subject, a, answer)


@each_checkpoint
@pytest.mark.fate(Fate.NOT_NUMBERS)
async def test_weights_that_are_not_numbers_are_loaded_or_refused(subject: Subject, model: str) -> None:
    _, refit, answer = await refit_from_a(subject, model)
    assert refit.outcome is Outcome.ACK
    assert set(await subject.answer()) == {0}
    assert answer != [0] * len(answer)


@each_checkpoint
@pytest.mark.fate(Fate.FOUND_OUT)
async def test_weights_that_an_answer_shows_to_be_no_numbers_are_not_served(subject: Subject, model: str) -> None:
    a, refit, answer = await refit_from_a(subject, model)
    assert (refit.outcome, refit.resumed) == (Outcome.TAINTED, False)
    assert "trial" in (refit.reason or "")
    await assert_repaired(subject, a, answer)


async def assert_repaired(subject: Subject, a: Refit, answer: list[int]) -> None:
    """It answers nothing until a repair by model_a, and then as before."""
    with pytest.raises(httpx.TimeoutException):
        await subject.answer(within=1.0)
    repaired = await subject.refit("model_a", "4", fingerprint=a.fingerprint, repairs=True)
    assert (repaired.outcome, repaired.resumed) == (Outcome.ACK, True), repaired.reason
    assert await subject.answer() == answer


@each_checkpoint
@pytest.mark.fate(Fate.SERVED)
async def test_unusual_checkpoints_with_the_same_values_give_the_same_contents(subject: Subject, model: str) -> None:
    clean = await subject.refit("model_b", "0", repairs=True)
    answer = await subject.answer()
    _, refit, _ = await refit_from_a(subject, model)
    assert (refit.outcome, refit.resumed) == (Outcome.ACK, True), refit.reason
    assert subject.agree(refit.fingerprint, clean.fingerprint)
    assert await subject.answer() == answer
