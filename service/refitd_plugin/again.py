"""An update to what is served already: SGLang is told so once more, and nothing is written.

A version that SGLang loads while requests are paused in place is loaded before SGLang says that it could not flush its
cache, and keeps its old path and label. The service then has it loaded again. A delta does not lead from itself, and an
offer may be over: where the weights are still what that update left, there is nothing left to write.
"""

from pathlib import Path

from refitd_plugin.loading import Loading
from refitd_plugin.port import UpdateCall
from refitd_plugin.served import ServedState
from refitd_plugin.source import FullNeededError
from refitd_plugin.tensor_feed import TensorFeed


class ServedAgain:
    """See `UpdateSource`."""

    kind = "again"
    proved = 0
    nbytes = 0
    watches = False

    def __init__(self, served_state: ServedState, loading: Loading) -> None:
        self._served_state, self._loading = served_state, loading

    @property
    def label(self) -> str:
        """See `UpdateSource`."""
        return self._served_state.label

    @property
    def digest(self) -> str:
        """See `UpdateSource`."""
        return f"again:{self.label}"

    @property
    def signature(self) -> str:
        """See `UpdateSource`: nothing is read of its files."""
        return ""

    @property
    def folder(self) -> Path:
        """See `UpdateSource`."""
        return self._served_state.folder

    def is_unchanged(self) -> bool:
        """See `UpdateSource`."""
        return True

    def fit(self, served_state: ServedState | None, contents: dict[str, str]) -> None:
        """See `UpdateSource`."""
        if served_state is not self._served_state or contents != self._served_state.contents:
            raise FullNeededError(f"the weights in memory are not those of {self.label} any more")

    def write(self, call: UpdateCall) -> tuple[TensorFeed, str | None]:
        """See `UpdateSource`."""
        return self._loading.apply(call, call.path, call.load_format, _nothing)

    def check(self, contents: dict[str, str]) -> str | None:
        """See `UpdateSource`."""
        return (
            None if contents == self._served_state.contents else "the weights have changed, and nobody has written them"
        )

    def put_back(self, call: UpdateCall, previous: ServedState | None, path: str) -> tuple[TensorFeed, str | None]:
        """See `UpdateSource`."""
        return self._loading.apply(call, path, "auto", _nothing)

    def served_state(self, contents: dict[str, str]) -> ServedState | None:
        """See `UpdateSource`."""
        return self._served_state


def _nothing() -> None:
    """All of it is there."""
