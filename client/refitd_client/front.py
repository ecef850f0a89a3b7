"""vLLM's structural protocols over the SDK, and what the front shares with them."""

from collections.abc import Collection

LABEL = "weight_version"
"""The key of a version's metadata under which the trainer's own name of it stands."""


class LabelRefusedError(ValueError):
    """The name that a trainer gives a version cannot be its name. The message is a sentence."""


def step_of_label(label: str | None, newest: int | None, known: Collection[str] = ()) -> int:
    """Return the step of the next version of a run. Pure.

    Args:
        label: the trainer's name of the version. A whole number is its step.
        newest: the newest step of the run, None where there is none.
        known: the names of the run's versions.

    Raises:
        LabelRefusedError: a version has this name already, or the step is not above the newest.
    """
    following = 1 if newest is None else newest + 1
    if label is None:
        return following
    if not label or len(label) > 200 or not label.isprintable():
        raise LabelRefusedError("weight_version is empty, longer than 200 characters or not printable")
    if label.isascii() and label.isdecimal() and len(label) <= 13:
        if int(label) < following and newest is not None:
            raise LabelRefusedError(
                f"weight_version {label} is not above {newest}, the newest of the run: versions of one training grow"
            )
        return int(label)
    if label in known:
        raise LabelRefusedError(f"the run has a version with weight_version {label} already")
    return following
