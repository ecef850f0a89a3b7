"""What each checkpoint that is not as it should be does to an engine: the table in tests/sglang/README.md.

SGLang answers 200 to half a checkpoint. No adapter can tell that from a good load, as these tests show: it is the
service's validation that keeps such checkpoints away from engines.
"""

import pytest

from refitd.engine.port import Outcome, Reached, Refit
from support.subject import Subject

pytestmark = pytest.mark.timeout(400)

REFUSED = ["bad_empty", "bad_shard2_gone"]
DEADLY = ["bad_trunc", "bad_garbage", "bad_shard2_trunc", "bad_shape_norm"]
MIXED = ["bad_missing", "bad_shape", "b_only_lm_head"]
CAST_OR_EXTRA = ["b_fp32", "bad_extra"]
LIKE_B = ["b_sharded", "b_only_weights", *CAST_OR_EXTRA]


async def refit_from_a(subject: Subject, model: str) -> tuple[Refit, Refit, list[int]]:
    """Load model_a, then `model`: how both ended, and what model_a answers."""
    a = await subject.refit("model_a", "1")
    answer = await subject.answer()
    return a, await subject.refit(model, "2", not_fingerprint=a.fingerprint), answer


async def assert_untouched(subject: Subject, a: Refit, refit: Refit, answer: list[int]) -> None:
    assert (refit.outcome, refit.resumed) == (Outcome.NACK, True)
    if subject.root is None:
        assert "Failed to get weights iterator" in (refit.reason or "")
    assert await subject.engine.fingerprint(a.fingerprint) == a.fingerprint
    info = await subject.info()
    assert (info["model_path"], info["weight_version"]) == (str(subject.path("model_a")), "1")
    assert await subject.answer() == answer


@pytest.mark.parametrize("model", REFUSED)
async def test_a_checkpoint_that_cannot_be_opened_is_refused_and_nothing_is_touched(
    subject: Subject, model: str
) -> None:
    a, refit, answer = await refit_from_a(subject, model)
    await assert_untouched(subject, a, refit, answer)


@pytest.mark.parametrize("model", DEADLY)
async def test_what_kills_an_engine_taints_it_and_it_comes_back_on_its_startup_weights(
    subject: Subject, model: str
) -> None:
    before = await subject.engine.probe()
    a, refit, answer = await refit_from_a(subject, model)
    if not subject.careless:
        await assert_untouched(subject, a, refit, answer)
        return
    assert (refit.outcome, refit.resumed) == (Outcome.TAINTED, False)
    assert "may have loaded, in part or in full" in (refit.reason or "")
    subject.server.died()
    subject.server.restart()
    seen = await subject.engine.probe()
    assert isinstance(before, Reached)
    assert isinstance(seen, Reached)
    assert (seen.model_path, seen.weight_version) == (str(subject.models / "model_a"), "default")
    # Another process of the same configuration: fingerprints can be compared.
    assert seen.configuration == before.configuration
    assert await subject.engine.fingerprint() == a.fingerprint
    repaired = await subject.refit("model_b", "3", not_fingerprint=a.fingerprint)
    assert (repaired.outcome, repaired.resumed) == (Outcome.ACK, True)
    assert await subject.answer() != answer


@pytest.mark.parametrize("model", MIXED)
async def test_a_mixture_of_two_models_looks_like_a_success_unless_a_clean_load_is_on_record(
    subject: Subject, model: str
) -> None:
    clean = await subject.refit("model_b", "0")
    a, refit, answer = await refit_from_a(subject, model)
    if not subject.careless:
        await assert_untouched(subject, a, refit, answer)
        return
    assert refit.outcome is Outcome.ACK
    assert refit.fingerprint not in {a.fingerprint, clean.fingerprint}
    await subject.refit("model_a", "1")
    known = await subject.refit(model, "3", fingerprint=clean.fingerprint)
    assert (known.outcome, known.resumed) == (Outcome.TAINTED, False)


async def test_weights_that_are_not_numbers_are_loaded_or_refused(subject: Subject) -> None:
    a, refit, answer = await refit_from_a(subject, "bad_nan")
    if not subject.takes_nan:
        await assert_untouched(subject, a, refit, answer)
        return
    assert refit.outcome is Outcome.ACK
    assert set(await subject.answer()) == {0}
    assert answer != [0] * len(answer)


@pytest.mark.parametrize("model", LIKE_B)
async def test_unusual_checkpoints_with_the_same_values_give_the_same_contents(subject: Subject, model: str) -> None:
    clean = await subject.refit("model_b", "0")
    answer = await subject.answer()
    a, refit, other = await refit_from_a(subject, model)
    if subject.root is not None and model in CAST_OR_EXTRA:
        await assert_untouched(subject, a, refit, other)  # unless the notice allows it
        return
    assert (refit.outcome, refit.resumed, refit.fingerprint) == (Outcome.ACK, True, clean.fingerprint)
    assert await subject.answer() == answer


async def test_a_path_that_is_not_there_is_refused_and_nothing_is_touched(subject: Subject) -> None:
    a, refit, answer = await refit_from_a(subject, "nowhere")
    await assert_untouched(subject, a, refit, answer)
