"""Gives SGLang's own update function a version's tensors in place of files: its loader's iterator yields them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from refitd_plugin.tensor_feed import TensorFeed

_ITERATOR = "_get_weights_iterator"


@contextmanager
def feeding(loader: type, feed: TensorFeed) -> Iterator[None]:
    """Have SGLang's loader take its tensors from a feed while the context lasts, in this thread.

    Args:
        loader: SGLang's class that reads files.
        feed: what its iterator yields in their place.
    """
    dtype = torch.get_default_dtype()
    original, mine = getattr(loader, _ITERATOR), threading.get_ident()

    def iterator(self: Any, *args: Any, **kwargs: Any) -> Any:
        return feed.tensors() if threading.get_ident() == mine else original(self, *args, **kwargs)

    setattr(loader, _ITERATOR, iterator)
    try:
        yield
    finally:
        setattr(loader, _ITERATOR, original)
        torch.set_default_dtype(dtype)  # SGLang before 0.5.19 leaves the model's behind when a load raises
