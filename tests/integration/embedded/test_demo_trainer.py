"""The demo's trainer: advantages and the loss, on batches made by hand."""

import pytest
import torch

from refitd_embedded.demo.policy import (
    ANSWER,
    NUMBERS,
    CountingProblem,
    PolicyTrainer,
    TrainingBatch,
    advantages,
    answer_distribution,
    chosen,
    fresh,
    objective,
)
from refitd_embedded.demo.rollouts import Rollout
from refitd_embedded.demo.run import GROUP, batch


def fixed_batch(trainer: PolicyTrainer) -> TrainingBatch:
    """One problem; the first answer of the group is right, the others repeat the start. Sampled by the policy."""
    problem = CountingProblem(stride=1, start=4)
    answers = [problem.solution(), *[[4] * ANSWER] * (GROUP - 1)]
    tokens = torch.tensor([problem.prompt + answer for answer in answers])
    sampled = chosen(answer_distribution(trainer.policy, tokens, ANSWER), tokens).tolist()
    rollouts = [
        Rollout(problem=problem, engine="", answer=tuple(answer), logprobs=tuple(said), versions=("0",) * ANSWER)
        for answer, said in zip(answers, sampled, strict=True)
    ]
    return batch(rollouts, [problem.marks(answer) for answer in answers])


def test_an_advantage_is_what_a_mark_is_above_its_group_at_that_place() -> None:
    found = advantages(torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]]))
    assert found[0, 0, 0] > 0 > found[0, 1, 0]
    assert found[0, :, 0].sum().item() == pytest.approx(0)
    assert (found[1] == 0).all()  # a problem that everybody solves teaches nothing
    assert (found[0, :, 1] == 0).all()


def test_marks_that_are_all_equal_have_no_advantage() -> None:
    assert (advantages(torch.ones(2, 3, 4)) == 0).all()


def test_the_loss_falls_on_a_fixed_batch_and_what_was_right_becomes_likelier() -> None:
    trainer = PolicyTrainer(fresh(0))
    fixed = fixed_batch(trainer)
    before = trainer.learn(fixed)
    after = trainer.learn(fixed)
    assert after < before - 0.01
    assert trainer.step == 2
    now = chosen(answer_distribution(trainer.policy, fixed.tokens, ANSWER), fixed.tokens)
    assert (now[0] > fixed.sampled[0]).all()
    assert now[1:].mean() < fixed.sampled[1:].mean()


def test_a_policy_that_has_moved_far_from_its_samples_is_pulled_no_further() -> None:
    """The clip: at ratio e, a positive advantage has no gradient left but that of the entropy."""
    distribution = torch.full((1, 1, 2), 0.5).log().requires_grad_()
    tokens, advantage = torch.tensor([[0, 1]]), torch.ones(1, 1)
    gradients = []
    for sampled in (distribution.detach()[..., 1], distribution.detach()[..., 1] - 1):
        loss = objective(distribution, TrainingBatch(tokens=tokens, sampled=sampled, advantages=advantage))
        (gradient,) = torch.autograd.grad(loss, distribution)
        gradients.append(gradient[0, 0, 1] - gradient[0, 0, 0])  # the entropy's part is the same for both
    assert gradients[0].item() == pytest.approx(-1)
    assert gradients[1].item() == pytest.approx(0, abs=1e-6)


def test_the_distribution_is_of_the_answers_places_alone() -> None:
    tokens = torch.randint(0, NUMBERS, (3, 2 + ANSWER))
    policy = fresh(0)
    distribution = answer_distribution(policy, tokens, ANSWER)
    assert distribution.shape == (3, ANSWER, policy.config.vocab_size)
    expected = policy(tokens).log_softmax(-1)[0, 1, tokens[0, 2]]
    assert chosen(distribution, tokens)[0, 0].item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_policy_is_drawn_from_its_seed_alone() -> None:
    torch.manual_seed(1)
    one = fresh(5).model.embed_tokens.weight
    torch.manual_seed(2)
    assert torch.equal(one, fresh(5).model.embed_tokens.weight)
    assert not torch.equal(one, fresh(6).model.embed_tokens.weight)
