"""Whether the engines serve what they say: their log-probabilities against the trainer's own, version by version.

The trainer keeps copies of the weights of its last versions under the labels that engines give to them. Each token of
a rollout names the version that it was sampled from; the copy of that version must find the token as likely as the
engine did. Weights that are a step older, a mixture of two steps, or another model do not.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from refitd_embedded.demo.rollouts import Rollout
from refitd_embedded.demo.trainer import answer_distribution, chosen
from refitd_embedded.model import Decoder

TOLERANCE = 1e-4
"""In nats. Rounding makes a hundredth of it, one gradient step a hundred times as much."""
KEPT = 8
START_UP = "default"
"""SGLang's label for the weights that an engine was started on."""


class DisagreementError(Exception):
    """An engine does not serve the version that it claims."""


class VersionCopies:
    """Copies of the weights of the last versions, and of the start-up weights, by the label that engines give."""

    def __init__(self, start_up: Decoder) -> None:
        self._copies = {START_UP: (0, _copy_of(start_up))}
        self._probe = copy.deepcopy(start_up)

    def remember(self, label: str, step: int, policy: Decoder) -> None:
        """Keep a copy of the policy as the version of `label`, and of the versions before it only the last few."""
        self._copies[label] = (step, _copy_of(policy))
        for label in [label for label in self._copies if label != START_UP][:-KEPT]:
            del self._copies[label]

    def step_of(self, label: str) -> int:
        """The step that a version was made by. Raises DisagreementError for a label that is none of the trainer's."""
        if label not in self._copies:
            raise DisagreementError(
                f"an engine claims to serve version {label!r}; the trainer knows {', '.join(self._copies)}: "
                "does another trainer publish to this engine?"
            )
        return self._copies[label][0]

    @torch.no_grad()
    def logprobs(self, label: str, tokens: Tensor, answer: int) -> Tensor:
        """The version's log-probabilities, [rows, answer].

        Args:
            label: the version.
            tokens: prompts and answers, [rows, time].
            answer: how many of the last tokens are the answer.
        """
        self.step_of(label)
        self._probe.load_state_dict(self._copies[label][1])
        return chosen(answer_distribution(self._probe, tokens, answer), tokens)


def largest_difference(history: VersionCopies, rollouts: Sequence[Rollout]) -> float:
    """The largest |engine's - trainer's| over all tokens. Raises DisagreementError beyond the tolerance."""
    found = 0.0
    for label in sorted({label for rollout in rollouts for label in rollout.versions}):
        mine = [rollout for rollout in rollouts if label in rollout.versions]
        said = torch.tensor([rollout.logprobs for rollout in mine])
        known = history.logprobs(label, torch.tensor([rollout.tokens for rollout in mine]), said.shape[1])
        of_version = torch.tensor([[one == label for one in rollout.versions] for rollout in mine])
        difference = (known - said).abs()[of_version].max().item()
        if not difference <= TOLERANCE:  # also when it is no number
            engines = ", ".join(sorted({rollout.engine for rollout in mine}))
            raise DisagreementError(
                f"log-probabilities said to be of version {label} differ by {difference:.3g} from the trainer's own "
                f"(at most {TOLERANCE:g} is rounding): {engines} served other weights"
            )
        found = max(found, difference)
    return found


def served_by(history: VersionCopies, rollouts: Sequence[Rollout]) -> dict[str, int]:
    """The oldest step that each engine claims to have answered with. Raises DisagreementError as `step_of` does."""
    found: dict[str, int] = {}
    for rollout in rollouts:
        oldest = min(map(history.step_of, rollout.versions))
        found[rollout.engine] = min(oldest, found.get(rollout.engine, oldest))
    return found


def _copy_of(decoder: Decoder) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
