"""Policy gradient: GRPO's clipped objective, on marks for single tokens. Pure torch; nothing here knows of engines.

    advantage = mark - mean mark of the group at that place, over the batch's deviation
    loss      = -mean(min(ratio · advantage, clip(ratio) · advantage)) - a little entropy

A group is several answers to one problem, so what a problem is worth on the average says nothing and drops out. The
ratio is of the policy now to the one that sampled, whose log-probabilities came with the rollouts: on fresh rollouts
it is 1, on stale ones the clip keeps the policy from running away from them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from refitd_embedded.model import Decoder

LEARNING_RATE = 2e-3
CLIP = 0.2
ENTROPY = 0.01
LARGEST_GRADIENT = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """Rollouts as tensors. `tokens` is [rows, prompt + answer]; the others are [rows, answer]: what the engines said
    of each token's log-probability, and its advantage.
    """

    tokens: Tensor
    sampled: Tensor
    advantages: Tensor


class PolicyTrainer:
    """Owns the policy and its optimiser. `step` counts the gradient steps taken."""

    def __init__(self, policy: Decoder) -> None:
        self.policy, self.step = policy, 0
        self._optimiser = torch.optim.AdamW(
            policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, foreach=True
        )

    def learn(self, batch: TrainingBatch) -> float:
        """Take one gradient step; the loss before it."""
        loss = objective(answer_distribution(self.policy, batch.tokens, batch.sampled.shape[1]), batch)
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), LARGEST_GRADIENT)
        self._optimiser.step()
        self.step += 1
        return loss.item()


def advantages(marks: Tensor) -> Tensor:
    """[problems, group, answer] marks → their advantages. Zero throughout where all marks are equal."""
    centred = marks - marks.mean(1, keepdim=True)
    return centred / (centred.square().mean().sqrt() + 1e-6)


def answer_distribution(policy: Decoder, tokens: Tensor, answer: int) -> Tensor:
    """Log-probabilities [rows, answer, vocabulary] of what may stand at each of the last places.

    Args:
        policy: the decoder.
        tokens: prompts and answers, [rows, time].
        answer: how many of the last tokens are the answer.
    """
    return policy(tokens[:, :-1])[:, -answer:].float().log_softmax(-1)


def chosen(distribution: Tensor, tokens: Tensor) -> Tensor:
    """[rows, answer, vocabulary] and tokens [rows, prompt + answer] → [rows, answer]: of the tokens that do stand."""
    answers = tokens[:, -distribution.shape[1] :]
    return distribution.gather(-1, answers[..., None])[..., 0]


def objective(distribution: Tensor, batch: TrainingBatch) -> Tensor:
    """The loss, a scalar."""
    ratio = (chosen(distribution, batch.tokens) - batch.sampled).exp()
    gain = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * batch.advantages)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return -gain.mean() - ENTROPY * entropy.mean()
