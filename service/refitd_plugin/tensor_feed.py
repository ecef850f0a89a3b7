"""A version's tensors, given to one load of the engine in place of files.

The engine goes on doing what it does around a load (its refusals, what its quantisation prepares, its own records of
what it serves). For the length of one call only two things differ: the engine's loader iterates over tensors that are
already checked and mapped, and, for a replay, the model's `load_weights` makes the plan's copies, or applies a delta.
A second load within the call, such as SGLang's "rolling back", which would read the version that has just failed once
more, is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from refitd_plugin.plan import Loader, Tensors


class NoRollbackError(Exception):
    """The engine loads a second time within one update. The plugin itself puts back what was there."""


class TensorFeed:
    """One load, by the loader or by `copy` in its place.

    `is_copied`: the load is copies into the model's tensors, and nothing is left to the loader. `asked`: the engine has
    begun to iterate over the tensors; `begun`: some may be written; `done`: all were given, or the loader takes them.
    `how` is `load`, or what `copy` is.
    """

    def __init__(
        self,
        tensors: Tensors,
        copy: Callable[[Loader], None] | None = None,
        how: str = "replay",
        *,
        is_copied: bool = False,
    ) -> None:
        self._tensors = tensors
        self.is_copied = is_copied
        self._copy = copy
        self.how = how if copy is not None else "load"
        self.before: dict[str, str] | None = None  # the model's contents, where `copy` has taken them beside its work
        self.after: dict[str, str] | None = None
        self.others: list[int] | None = None
        self.asked = False
        self.begun = False
        self.done = False

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """What the loader iterates over, once.

        Raises:
            NoRollbackError: it was iterated over before.
        """
        if self.asked:
            raise NoRollbackError("the load failed, and is not tried again from the same files")
        self.asked = True
        return self._given()

    def _given(self) -> Iterator[tuple[str, Any]]:
        for item in self._tensors.items():
            self.begun = True
            yield item
        self.done = True

    @contextmanager
    def replacing(self, model: Any) -> Iterator[None]:
        """While the context lasts, the model's `load_weights` is the copy, where there is one.

        Only for a model whose `load_weights` is its class's own: a plan is not made of others.
        """
        if self._copy is None:
            yield
            return
        load = model.load_weights
        model.load_weights = lambda *_, **__: self._replayed(load)
        try:
            yield
        finally:
            del model.load_weights

    def _replayed(self, load: Loader) -> None:
        """What the model's `load_weights` does in a replay."""
        self.begun = True
        if self._copy is not None:
            self._copy(partial(self._last, load))
        self.done = True

    def _last(self, load: Loader, weights: Iterator[tuple[str, Any]]) -> None:
        """What a copy leaves to the loader, which may compute something of all weights when it has them."""
        self.done = True
        load(weights)
