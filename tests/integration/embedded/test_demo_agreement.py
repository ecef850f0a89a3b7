"""What engines say is held against the trainer's own weights, version by version."""

import pytest
import torch

from refitd_embedded.demo.policy import ANSWER, CountingProblem, answer_distribution, chosen, fresh
from refitd_embedded.demo.rollouts import (
    KEPT,
    START_UP,
    DisagreementError,
    Rollout,
    VersionCopies,
    largest_difference,
    served_by,
)
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


def test_what_is_no_number_does_not_agree() -> None:
    history = VersionCopies(fresh(0))
    with pytest.raises(DisagreementError):
        largest_difference(history, [rollout([float("nan")] * ANSWER, (START_UP,) * ANSWER)])


def test_a_version_that_the_trainer_never_published_is_refused_by_name() -> None:
    with pytest.raises(DisagreementError, match="'77'"):
        VersionCopies(fresh(0)).step_of("77")


def test_the_last_versions_and_the_first_weights_are_kept_and_no_more() -> None:
    policy = fresh(0)
    history = VersionCopies(policy)
    for step in range(KEPT + 2):
        history.remember(str(step), step, policy)
    assert history.step_of(START_UP) == 0
    assert history.step_of(str(KEPT + 1)) == KEPT + 1
    with pytest.raises(DisagreementError):
        history.step_of("1")


def test_each_engine_serves_the_oldest_version_among_its_answers() -> None:
    policy = fresh(0)
    history, said = VersionCopies(policy), [0.0] * ANSWER
    for step in (9, 10):
        history.remember(str(step), step, policy)
    across = rollout(said, (*["9"] * 3, *["10"] * (ANSWER - 3)))
    newest = [rollout(said, ("10",) * ANSWER, engine) for engine in ("http://a", "http://b")]
    assert served_by(history, [newest[0], across, *newest]) == {"http://a": 9, "http://b": 10}
