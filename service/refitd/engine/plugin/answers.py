"""What the ranks of one engine have answered to an update, as one answer. Pure."""

from collections.abc import Sequence

import xxhash

from refitd.engine.fingerprints import BY_PLUGIN
from refitd_client.contract.plugin import Answer, UpdateOutcome


def worst(answers: Sequence[Answer], ranks: int) -> Answer:
    """Return one answer for the engine. `ranks` is the number of data-parallel ranks that should have answered."""
    outcomes = {answer.outcome for answer in answers}
    unknown = next((answer for answer in answers if answer.outcome is UpdateOutcome.UNKNOWN), None)
    if unknown is not None:
        return unknown
    if len(answers) != ranks:
        heard = f"{len(answers)} of its {ranks} data-parallel ranks have answered for the plugin"
        return Answer(outcome=UpdateOutcome.UNKNOWN, reason=heard)
    if outcomes == {UpdateOutcome.SERVED}:
        return answers[0]
    if outcomes <= {UpdateOutcome.REFUSED, UpdateOutcome.RESTORED}:
        return next((each for each in answers if each.outcome is UpdateOutcome.RESTORED), answers[0])
    mixed = next(answer for answer in answers if answer.outcome is not UpdateOutcome.SERVED)
    return Answer(
        outcome=UpdateOutcome.UNKNOWN, reason=f"some of its data-parallel ranks serve it, and not all: {mixed.reason}"
    )


def fingerprint(contents: Sequence[str]) -> str | None:
    """One fingerprint of the contents of several ranks, in any order; None where one of them is missing."""
    if not contents or not all(contents):
        return None
    if len(contents) == 1:
        return f"{BY_PLUGIN}{contents[0]}"
    return f"{BY_PLUGIN}xxh3:{xxhash.xxh3_128(','.join(sorted(contents)).encode()).hexdigest()}"
