"""Checks of what is given to a plan: a value that cannot be meant is refused, and the message names it."""

from enum import StrEnum
from typing import TypeVar

from refitd_client.errors import PlanRefusedError


def refusal_at(text: str, position: int, sentence: str) -> PlanRefusedError:
    """A refusal that points at a character of what was typed.

    Args:
        text: what was typed.
        position: the character, counted from 0.
        sentence: what is wrong.
    """
    return PlanRefusedError(f"{sentence} (character {position + 1})\n  {text}\n  {' ' * position}^")


def check_positive(name: str, value: object, *, most: float = 2**40) -> None:
    """Refuse what is no whole number above 0, or absurd. None passes.

    Args:
        name: the setting, for the message.
        value: its value.
        most: more than that is absurd.

    Raises:
        PlanRefusedError: the value is refused.
    """
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanRefusedError(f"{name} is {value!r}, which is no whole number")
    if value < 1:
        raise PlanRefusedError(f"{name} is {value:g}: it has to be above 0")
    if value > most:
        raise PlanRefusedError(f"{name} is {value:g}: more than {most:g} cannot be meant")


def check_share(name: str, value: object) -> None:
    """Refuse what is no number between 0 and 1. None passes.

    Raises:
        PlanRefusedError: it is not.
    """
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise PlanRefusedError(f"{name} is {value!r}, which is no number")
    if not 0 < value < 1:
        raise PlanRefusedError(f"{name} is {value:g}: a share between 0 and 1")


def check_switch(name: str, value: object) -> None:
    """Refuse what is neither true nor false: "no" would be taken for yes.

    Raises:
        PlanRefusedError: it is neither.
    """
    if not isinstance(value, bool):
        raise PlanRefusedError(f"{name} is {value!r}, neither true nor false")


WordT = TypeVar("WordT", bound=StrEnum)


def check_word(name: str, value: object, choices: type[WordT]) -> WordT:
    """One of some words.

    Args:
        name: the setting, for the message.
        value: its value.
        choices: the words.

    Raises:
        PlanRefusedError: it is none of them; the message has all.
    """
    try:
        return choices(value)
    except ValueError as error:
        raise PlanRefusedError(f"{name} is {value!r}: it is {', '.join(choices)}") from error
