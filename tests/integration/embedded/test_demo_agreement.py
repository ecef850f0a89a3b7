"""What engines say is held against the trainer's own weights, version by version."""

import pytest
import torch

from refitd_embedded.demo.policy import ANSWER, CountingProblem, answer_distribution, chosen, fresh
from refitd_embedded.demo.rollouts import START_UP, DisagreementError, Rollout, VersionCopies, largest_difference
from refitd_embedded.model import Decoder

PROBLEM = CountingProblem(stride=2, start=1)


def said_by(decoder: Decoder) -> list[float]:
    tokens = torch.tensor([[*PROBLEM.prompt, *PROBLEM.solution()]])
    return chosen(answer_distribution(decoder, tokens, ANSWER), tokens)[0].tolist()


def rollout(logprobs: list[float], versions: tuple[str, ...], engine: str = "http://a") -> Rollout:
    return Rollout(
        problem=PROBLEM,
        engine=engine,
        answer=tuple(PROBLEM.solution()),
        logprobs=tuple(logprobs),
        versions=versions,
    )


def stepped(decoder: Decoder, seed: int) -> Decoder:
    """As after a gradient step: each weight a little elsewhere."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(2e-3 * torch.randn_like(parameter).sign())
    return decoder


def test_an_engine_that_serves_what_it_claims_agrees() -> None:
    policy = fresh(0)
    history = VersionCopies(policy)
    claimed = said_by(stepped(policy, 1))
    history.remember("1", 1, policy)
    stepped(policy, 2)  # the trainer goes on; its copy of version 1 does not
    assert largest_difference(history, [rollout(claimed, ("1",) * ANSWER)]) < 1e-6


def test_weights_that_are_one_step_older_than_the_label_are_found_out() -> None:
    policy = fresh(0)
    history, older = VersionCopies(policy), said_by(policy)
    history.remember("1", 1, stepped(policy, 1))
    with pytest.raises(DisagreementError, match=r"version 1 differ by .* http://a served other weights"):
        largest_difference(history, [rollout(older, ("1",) * ANSWER)])


def test_an_answer_across_an_update_is_checked_token_by_token() -> None:
    policy = fresh(0)
    history, before = VersionCopies(policy), said_by(policy)
    history.remember("1", 1, stepped(policy, 1))
    both = [*before[:3], *said_by(policy)[3:]]
    spans = (*[START_UP] * 3, *["1"] * (ANSWER - 3))
    assert largest_difference(history, [rollout(both, spans)]) < 1e-6
    with pytest.raises(DisagreementError):
        largest_difference(history, [rollout(both, ("1",) * ANSWER)])
