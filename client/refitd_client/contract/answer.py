"""What the plugin's reply to an update says: a sentence for people, and the same for programs behind it.

    Refused, the weights are what they were: … refitd-plugin={"protocol":1,"outcome":"refused",…}

SGLang adds to a message (" Weight version updated to 7.") and joins those of data-parallel ranks (" | "), so the JSON
is found by its mark and ends where it ends. The plugin writes answers, the service reads them.
"""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from refitd_client.contract.plugin import PROTOCOL

MARK = "refitd-plugin="
MAX_REASON = 600  # characters

NEEDS_FULL = "full"  # a delta was refused that a full version can stand for
NEEDS_LEADER = "leader"  # another service leads the engine


class UpdateOutcome(StrEnum):
    """What an update left behind, the best first."""

    SERVED = "served"  # the new version, on every rank
    REFUSED = "refused"  # the old one: nothing was written
    RESTORED = "restored"  # the old one: it was put back, and its fingerprints say so
    UNKNOWN = "unknown"


_SENTENCES = {
    UpdateOutcome.SERVED: "Succeeded to update model weights.",  # SGLang's own: who waits for it finds it
    UpdateOutcome.REFUSED: "Refused, the weights are what they were",
    UpdateOutcome.RESTORED: "Failed, and the weights of before were put back",
    UpdateOutcome.UNKNOWN: "Failed, and nobody knows what the weights are",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one update came to. `how`: `replay`, `load` or `delta`; `contents`: digest of this rank's fingerprints;
    `proved`: how many tensors lie in its memory with the fingerprints of the manifest; times in ms. `needs`: what would
    be taken instead, `NEEDS_FULL` or `NEEDS_LEADER`, or nothing.
    """

    outcome: UpdateOutcome
    reason: str = ""
    plugin: str = ""
    version: str = ""
    how: str = ""
    contents: str = ""
    needs: str = ""
    proved: int = 0
    ms: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def message(self) -> str:
        """The text of the reply."""
        sentence = _SENTENCES[self.outcome]
        reason = _short(self.reason)
        said = f"{sentence}: {reason}" if reason and self.outcome is not UpdateOutcome.SERVED else sentence
        return f"{said} {MARK}{json.dumps(self._facts(reason), separators=(',', ':'))}"

    @property
    def told(self) -> str:
        """One line for the log of the server."""
        stages = ", ".join(f"{stage} {took:.1f}" for stage, took in self.ms.items())
        return f"{self.outcome.value} {self.version} {self.how} [ms: {stages}] {_short(self.reason)}".strip()

    def _facts(self, reason: str) -> dict[str, Any]:
        facts = {"protocol": PROTOCOL, "outcome": self.outcome.value, "plugin": self.plugin}
        rest: dict[str, Any] = {"reason": reason, "version": self.version, "how": self.how, "contents": self.contents}
        rest |= {"needs": self.needs, "proved": self.proved}
        return facts | {key: value for key, value in rest.items() if value} | ({"ms": self.ms} if self.ms else {})


def answers_in(message: str) -> list[Answer]:
    """The answers in a reply's message: one for each data-parallel rank, none where no plugin spoke.

    What is not understood, because it is damaged or of a newer protocol, counts as an unknown outcome: somebody wrote
    the mark, and not to say that all is well.
    """
    return [_read(part) for part in message.split(MARK)[1:]]


def _read(text: str) -> Answer:
    try:
        facts, _ = json.JSONDecoder().raw_decode(text)
        if facts["protocol"] != PROTOCOL:
            return Answer(outcome=UpdateOutcome.UNKNOWN, reason=f"the plugin speaks protocol {facts['protocol']!r:.20}")
        words = {key: str(facts.get(key, "")) for key in ("reason", "plugin", "version", "how", "contents", "needs")}
        ms = {str(stage): float(value) for stage, value in facts.get("ms", {}).items()}
        return Answer(outcome=UpdateOutcome(facts["outcome"]), ms=ms, proved=int(facts.get("proved", 0)), **words)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Answer(outcome=UpdateOutcome.UNKNOWN, reason="the plugin's answer cannot be read")


def _short(reason: str) -> str:
    """On one line, and without a mark of its own: a reason may quote names that somebody chose."""
    line = " ".join(reason.replace(MARK, "").split())
    return line if len(line) <= MAX_REASON else f"{line[: MAX_REASON - 1]}…"
