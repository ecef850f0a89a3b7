"""An update to what is served already: SGLang is told so once more, and nothing is written.

A version that SGLang loads while requests are paused in place is loaded before SGLang says that it could not flush its
cache, and keeps its old path and label. The service then has it loaded again. A delta does not lead from itself, and an
offer may be over: where the weights are still what that update left, there is nothing left to write.
"""

from pathlib import Path

from refitd_sglang.call import Call
from refitd_sglang.feeding import Feed
from refitd_sglang.loading import Loading
from refitd_sglang.source import FullNeededError
from refitd_sglang.standing import Standing


class Again:
    """As `Way`."""

    kind = "again"
    proved = 0
    nbytes = 0
    watches = False

    def __init__(self, standing: Standing, loading: Loading) -> None:
        self._standing, self._loading = standing, loading

    @property
    def label(self) -> str:
        """As `Way`."""
        return self._standing.label

    @property
    def digest(self) -> str:
        """As `Way`."""
        return f"again:{self.label}"

    @property
    def signature(self) -> str:
        """As `Way`: nothing is read of its files."""
        return ""

    @property
    def folder(self) -> Path:
        """As `Way`."""
        return self._standing.folder

    def is_unchanged(self) -> bool:
        """As `Way`."""
        return True

    def fit(self, standing: Standing | None, contents: dict[str, str]) -> None:
        """As `Way`."""
        if standing is not self._standing or contents != self._standing.contents:
            raise FullNeededError(f"the weights in memory are not those of {self.label} any more")

    def write(self, call: Call) -> tuple[Feed, str | None]:
        """As `Way`."""
        return self._loading.apply(call, call.path, call.load_format, _nothing)

    def check(self, contents: dict[str, str]) -> str | None:
        """As `Way`."""
        return None if contents == self._standing.contents else "the weights have changed, and nobody has written them"

    def put_back(self, call: Call, previous: Standing | None, path: str) -> tuple[Feed, str | None]:
        """As `Way`."""
        return self._loading.apply(call, path, "auto", _nothing)

    def standing(self, contents: dict[str, str]) -> Standing | None:
        """As `Way`."""
        return self._standing


def _nothing() -> None:
    """All of it is there."""
