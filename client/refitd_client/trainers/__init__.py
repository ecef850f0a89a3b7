"""Integrations with trainers' own libraries.

The options that a trainer's hook passes on to a publisher are checked when the hook is made (`options_of`). The
publisher itself is made later: when the training begins, or at the first update, which may be an hour on.
"""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from refitd_client.publish.options import PublishOptions

_KEYWORDS = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}


def options_of(given: Mapping[str, Any], hook: type[object]) -> PublishOptions:
    """The options of these names.

    Args:
        given: what the hook passes on.
        hook: the hook's class, whose own options may have been meant.

    Raises:
        TypeError: neither the hook nor a publisher has an option of that name; it says which, and the nearest.
    """
    taken = {each.name for each in fields(PublishOptions)}
    wrong = [name for name in given if name not in taken]
    if not wrong:
        return PublishOptions(**given)
    known = sorted(taken | _keywords(hook))
    hints = [_hint(name, known) for name in wrong]
    raise TypeError(f"{hook.__name__} has no option {'; and no option '.join(hints)}. Options: {', '.join(known)}")


def _hint(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, 1)
    return f"{name!r}: did you mean {near[0]!r}?" if near else repr(name)


def _keywords(class_: type[object]) -> set[str]:
    parameters = inspect.signature(class_).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind in _KEYWORDS}
