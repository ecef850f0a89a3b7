"""Fingerprints of what an engine holds: by what means they are computed, and which of them can be compared. Pure.

A fingerprint is a text that begins with its means, such as `xxh3:`. That of a host also names the means of its engines
and a digest of what they are made of, such as `host:plugin,xxh3.5f:`, and that of servers that are updated together
joins theirs by `+`.
"""

from collections.abc import Sequence

import xxhash

BY_PLUGIN = "plugin:"
"""The prefix of fingerprints that refitd's plugin computes; the others are made of what the server itself tells."""
CHECKED = "vllm:"
BY_HOST = "host:"
ANSWERED = "vllm-answers:"
_NEAR = 0.5  # natural logarithms: two log-probabilities of one token that differ by more are of different weights
NOT_COMPARED = "recorded, not yet compared"
NOT_ALIKE = "not compared: what is on record is of other means"
CONTRADICTED = "contradicted by another engine"
_PROOFS = {
    BY_PLUGIN: "fingerprints of refitd's plugin",
    ANSWERED: "answers to a fixed prompt",
    CHECKED: "digests of parameters",
    "xxh3:": "checksums of tensors",
    BY_HOST: "proofs",  # of an earlier release, which does not name its engines' means
}
_OF_HOST = "of the host's engines"


def proof_by(fingerprint: str | None, *, recorded: bool = False) -> str | None:
    """What proves contents that have this fingerprint, for people; None where nothing does.

    `recorded`: it is the first of its version. The plugin holds its own against the version's files, and so proves them
    all the same; any other will prove later loads, and proves nothing of this one.
    """
    if fingerprint is None:
        return None
    proof = next((proof for prefix, proof in _PROOFS.items() if fingerprint.startswith(prefix)), None)
    if fingerprint.startswith(BY_HOST):
        named = [_PROOFS[f"{name}:"] for name in names_of_means(fingerprint) if f"{name}:" in _PROOFS]
        proof = f"{' and '.join(named) or _PROOFS[BY_HOST]}, {_OF_HOST}"
    if proof is None or not recorded or fingerprint.startswith(BY_PLUGIN):
        return proof
    return f"{proof} ({NOT_COMPARED})"


def uncompared(fingerprint: str) -> str | None:
    """As `proof_by`, of contents that could not be compared with what is on record of their version."""
    proof = proof_by(fingerprint)
    return proof if proof is None or fingerprint.startswith(BY_PLUGIN) else f"{proof} ({NOT_ALIKE})"


def what_was_compared(proof: str | None) -> str:
    """What `proof_by` has said, as a sentence: which contents were compared with which."""
    if proof is None:
        return "Its tensors were not compared: it names the version's folder and label itself."
    if NOT_COMPARED in proof:
        return "No other load of the version was on record: what this one gave is what later loads have to give."
    if NOT_ALIKE in proof:
        return "What is on record of the version was computed by other means: they were compared with nothing."
    if CONTRADICTED in proof:
        return "Another engine gave other ones of the same version, and nothing says which are right."
    if proof == _PROOFS[BY_PLUGIN]:
        return "Its tensors were compared with the version's own fingerprints, and are equal."
    return "They were compared with those of another load of the version, and are equal."


def comparable(some: str, other: str | None) -> bool:
    if other is None:
        return False
    if some.startswith(BY_HOST) and other.startswith(BY_HOST):
        return means_of(some) == means_of(other)
    return some.startswith(BY_PLUGIN) == other.startswith(BY_PLUGIN)


def by_plugin(contents: Sequence[str]) -> str | None:
    """One fingerprint of the contents of several ranks, in any order; None where one of them is missing."""
    if not contents or not all(contents):
        return None
    if len(contents) == 1:
        return f"{BY_PLUGIN}{contents[0]}"
    return f"{BY_PLUGIN}xxh3:{xxhash.xxh3_128(','.join(sorted(contents)).encode()).hexdigest()}"


def alike(some: str, other: str) -> bool | None:
    """Whether two fingerprints of one server are of the same contents, as far as they can tell; None: they cannot be
    compared. Scores of answers are never equal to the last digit.
    """
    if means_of(some) != means_of(other):
        return None
    if not some.startswith(ANSWERED):
        return some == other
    (digest, scores), (digest_2, scores_2) = _scored(some), _scored(other)
    if "-" not in (digest, digest_2) and digest != digest_2:
        return False
    return len(scores) == len(scores_2) and all(abs(x - y) <= _NEAR for x, y in zip(scores, scores_2, strict=True))


def _scored(fingerprint: str) -> tuple[str, list[float]]:
    digest, _, scores = fingerprint.removeprefix(ANSWERED).rpartition(":")
    return digest, [float(score) for score in scores.split(",")]


def agree(found: str, recorded: str) -> bool | None:
    """Whether an engine holds what another load of the version has left behind; None where that cannot be told.

    Answers to a prompt are equal on no two engines: their adapter alone can compare them. `found`: the fingerprint of
    the engine's contents. `recorded`: the one of the other load.
    """
    means = means_of(found)
    if means != means_of(recorded) or any(each.startswith(ANSWERED.rstrip(":")) for each in means):
        return None
    return found == recorded


def means_of(fingerprint: str) -> tuple[str, ...]:
    """By what means a fingerprint was computed, for each of the servers that are updated together."""
    parts = fingerprint.split("+")
    return tuple(part.rpartition(":")[0] if part.startswith(BY_HOST) else part.partition(":")[0] for part in parts)


def names_of_means(fingerprint: str) -> list[str]:
    """By what means a fingerprint was computed, without repetition; of a host, by what means those of its engines were,
    as far as it names them.
    """
    names: set[str] = set()
    for part in fingerprint.split("+"):
        name, _, rest = part.partition(":")
        names.update(rest.partition(".")[0].split(",") if part.startswith(BY_HOST) and "." in rest else {name})
    return sorted(names)
