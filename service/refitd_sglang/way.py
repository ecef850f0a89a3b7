"""How one version gets into a model: what the engine asks of a full version (`whole.py`) and of a delta (`sparse.py`).

fit        the last look before anyone writes: does it fit what is in memory now?
write      through SGLang's own function
check      is what is in memory now what it should be?
put_back   what was there before
"""

from pathlib import Path
from typing import Protocol

from refitd_sglang.call import Call
from refitd_sglang.feeding import Feed
from refitd_sglang.standing import Standing


class Way(Protocol):
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

    def fit(self, standing: Standing | None, contents: dict[str, str]) -> None:
        """Hold it against what is in memory.

        Raises:
            SourceRefusedError: it does not fit.
        """
        ...

    def write(self, call: Call) -> tuple[Feed, str | None]:
        """Load it: how far that came, and what went wrong, if anything did."""
        ...

    def check(self, contents: dict[str, str]) -> str | None:
        """What is wrong with what is in memory now, if anything is."""
        ...

    def put_back(self, call: Call, previous: Standing | None, path: str) -> tuple[Feed, str | None]:
        """Bring back what was there before, under its path: how far that came, and what went wrong, if anything did."""
        ...

    def standing(self, contents: dict[str, str]) -> Standing | None:
        """What is served from now on, as far as it is known."""
        ...
