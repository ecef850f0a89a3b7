"""How a plan is refused: what was given cannot be meant, and the message names it. No plan is ever made of guesses."""

from refitd_client.errors import PlanRefusedError


def at(text: str, position: int, sentence: str) -> PlanRefusedError:
    """A refusal that points at a character of what was typed. `position` counts from 0."""
    return PlanRefusedError(f"{sentence} (character {position + 1})\n  {text}\n  {' ' * position}^")


def positive(name: str, value: float | None, *, most: float = 2**40) -> None:
    """Refuse a number that is not above 0, or absurd. None is no number, and is let pass.

    Raises:
        PlanRefusedError: it is not.
    """
    if value is None:
        return
    if not value > 0:  # NaN is not above 0 either
        raise PlanRefusedError(f"{name} is {value:g}: it has to be above 0")
    if value > most:
        raise PlanRefusedError(f"{name} is {value:g}: more than {most:g} cannot be meant")
