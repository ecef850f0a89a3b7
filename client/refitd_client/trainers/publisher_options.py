"""Names of options that a trainer's hook passes on to a publisher, checked when the hook is made.

The publisher itself is made later: when the training begins, or at the first update, which may be an hour on.
"""

import inspect
from collections.abc import Iterable
from difflib import get_close_matches

from refitd_client.publish.publisher import WeightPublisher
from refitd_client.sharded import ShardedPublisher

_KEYWORDS = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}


def check_options(
    names: Iterable[str], hook: type[object], *publishers: type[WeightPublisher] | type[ShardedPublisher]
) -> None:
    """Refuse options that neither the hook nor a publisher has.

    Args:
        names: what the hook would pass on.
        hook: the hook's class, whose own options may have been meant.
        publishers: the classes of which one gets the options.

    Raises:
        TypeError: a name is none of theirs; it says which, and the nearest that is one.
    """
    taken = {name for publisher in publishers for name in _keywords(publisher)}
    wrong = [name for name in names if name not in taken]
    if not wrong:
        return
    known = sorted(taken | _keywords(hook))
    hints = [_hint(name, known) for name in wrong]
    raise TypeError(f"{hook.__name__} has no option {'; and no option '.join(hints)}. Options: {', '.join(known)}")


def _hint(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, 1)
    return f"{name!r}: did you mean {near[0]!r}?" if near else repr(name)


def _keywords(class_: type[object]) -> set[str]:
    parameters = inspect.signature(class_).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind in _KEYWORDS}
