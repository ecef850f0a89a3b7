"""How one version gets into a model: what the engine asks of a full version (`whole.py`) and of a delta (`sparse.py`).

fit        the last look before anyone writes: does it fit what is in memory now?
write      through SGLang's own function
check      is what is in memory now what it should be?
put_back   what was there before
"""

from pathlib import Path
from typing import Protocol

from refitd_plugin.port import UpdateCall
from refitd_plugin.served import ServedState
from refitd_plugin.tensor_feed import TensorFeed


class UpdateSource(Protocol):
    """A version that was opened and checked. Contents are fingerprints of the model's tensors, as `contents_of`."""

    @property
    def kind(self) -> str:
        """`full` or `delta`."""
        ...

    @property
    def label(self) -> str:
        """The version's id."""
        ...

    @property
    def digest(self) -> str:
        """Equal for equal versions."""
        ...

    @property
    def signature(self) -> str:
        """What its files look like from outside: equal to the service's for the very same files."""
        ...

    @property
    def nbytes(self) -> int:
        """What is to be read of it."""
        ...

    @property
    def folder(self) -> Path:
        """Where it lies."""
        ...

    @property
    def proved(self) -> int:
        """After `check`: how many of its tensors lie in memory with the fingerprints of its manifest."""
        ...

    def is_unchanged(self) -> bool:
        """Whether its folder still looks as it did."""
        ...

    @property
    def watches(self) -> bool:
        """Whether `write` itself takes the contents of before and after, beside its work."""
        ...

    def fit(self, served_state: ServedState | None, contents: dict[str, str]) -> None:
        """Hold it against what is in memory.

        Raises:
            SourceRefusedError: it does not fit.
        """
        ...

    def write(self, call: UpdateCall) -> tuple[TensorFeed, str | None]:
        """Load it: how far that came, and what went wrong, if anything did."""
        ...

    def check(self, contents: dict[str, str]) -> str | None:
        """What is wrong with what is in memory now, if anything is."""
        ...

    def put_back(self, call: UpdateCall, previous: ServedState | None, path: str) -> tuple[TensorFeed, str | None]:
        """Bring back what was there before, under its path: how far that came, and what went wrong, if anything did."""
        ...

    def served_state(self, contents: dict[str, str]) -> ServedState | None:
        """What is served from now on, as far as it is known."""
        ...
