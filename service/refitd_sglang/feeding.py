"""Gives SGLang's own update function a version's tensors in place of files.

SGLang goes on doing what it does around a load (its refusals, what its quantisation prepares, its own records of what
it serves), in the way of its release. For the length of one call only two things are other than stock: its loader's
iterator yields tensors that are already checked and mapped, and, for a replay, the model's `load_weights` makes the
plan's copies, or applies a delta. Its "rolling back", which would read the version that has just failed once more, is
refused.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from refitd_sglang.plan import Loader, Tensors

_ITERATOR = "_get_weights_iterator"


class NoRollbackError(Exception):
    """SGLang wanted to load a second time. The plugin puts back what was there, by itself."""


class Feed:
    """One load, by the loader or by `copy` in its place. `asked`: SGLang came for the tensors; `begun`: some may be
    written; `done`: all were given, or are the loader's to be asked for. `how` is `load`, or what `copy` is.
    """

    def __init__(self, tensors: Tensors, copy: Callable[[Loader], None] | None = None, how: str = "replay") -> None:
        self._tensors = tensors
        self._copy = copy
        self.how = how if copy is not None else "load"
        self.before: dict[str, str] | None = None  # the model's contents, where `copy` has taken them beside its work
        self.after: dict[str, str] | None = None
        self.others: list[int] | None = None
        self.asked = False
        self.begun = False
        self.done = False

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """What the loader iterates over: asked for once."""
        if self.asked:
            raise NoRollbackError("the load failed, and is not tried again from the same files")
        self.asked = True
        return self._given()

    def _given(self) -> Iterator[tuple[str, Any]]:
        for item in self._tensors.items():
            self.begun = True
            yield item
        self.done = True

    def replayed(self, load: Loader) -> None:
        """What the model's `load_weights` does in a replay."""
        self.begun = True
        if self._copy is not None:
            self._copy(partial(self._last, load))
        self.done = True

    def _last(self, load: Loader, weights: Iterator[tuple[str, Any]]) -> None:
        """What a copy leaves to the loader, which may compute something of all weights when it has them."""
        self.done = True
        load(weights)

    @contextmanager
    def through(self, loader: type, model: Any, watching: Any = None) -> Iterator[None]:
        """Have SGLang's loader take its tensors from here while the context lasts, in this thread."""
        dtype = torch.get_default_dtype()
        replay = _replaced(model, self.replayed) if self._copy is not None else nullcontext()
        try:
            with _fed(loader, self), replay, watching or nullcontext():
                yield
        finally:
            torch.set_default_dtype(dtype)  # SGLang before 0.5.19 leaves the model's behind when a load raises


@contextmanager
def _fed(loader: type, feed: Feed) -> Iterator[None]:
    original, mine = getattr(loader, _ITERATOR), threading.get_ident()

    def iterator(self: Any, *args: Any, **kwargs: Any) -> Any:
        return feed.tensors() if threading.get_ident() == mine else original(self, *args, **kwargs)

    setattr(loader, _ITERATOR, iterator)
    try:
        yield
    finally:
        setattr(loader, _ITERATOR, original)


@contextmanager
def _replaced(model: Any, replayed: Callable[[Loader], None]) -> Iterator[None]:
    """Only for a model whose `load_weights` is its class's own: a plan is not made of others."""
    load = model.load_weights
    model.load_weights = lambda *_, **__: replayed(load)
    try:
        yield
    finally:
        del model.load_weights
