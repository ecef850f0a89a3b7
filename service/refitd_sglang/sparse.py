"""A delta on its way into a model, in place.

Before the first write it is known that it fits: the model holds what it held when its version was found to be there,
that version is the delta's base or one since, and each changed tensor's fingerprint, less the old elements and plus the
new ones, is the one that the delta promises. After the last write the model's tensors have the fingerprints that
follow.

Where a delta cannot be translated (a loader computes the tensor, or nobody has seen how it is loaded) nothing is
guessed: a full version is asked for.
"""

from pathlib import Path

from refitd.catalog.examine import signature
from refitd_sglang.call import Call
from refitd_sglang.changes import Changes
from refitd_sglang.feeding import Feed
from refitd_sglang.fitted import Fitted, fitted
from refitd_sglang.loading import Loading
from refitd_sglang.source import FullNeededError
from refitd_sglang.standing import Standing


class Sparse:
    """As `Way`."""

    kind = "delta"

    def __init__(self, changes: Changes, loading: Loading) -> None:
        self.changes = changes
        self.proved = 0
        self._loading = loading
        self._fitted: Fitted | None = None

    @property
    def label(self) -> str:
        """As `Way`."""
        return self.changes.label

    @property
    def digest(self) -> str:
        """As `Way`."""
        return self.changes.digest

    @property
    def signature(self) -> str:
        """As `Way`: as of now; `is_unchanged` says whether that is what was read."""
        return signature(self.changes.place.root, self.changes.place.path)

    @property
    def nbytes(self) -> int:
        """As `Way`."""
        return self.changes.nbytes

    @property
    def folder(self) -> Path:
        """As `Way`."""
        return self.changes.place.folder

    @property
    def watches(self) -> bool:
        """As `Way`: a delta is held against what is there before anyone writes."""
        return False

    def is_unchanged(self) -> bool:
        """As `Way`."""
        return self.changes.is_unchanged()

    def look(self, standing: Standing | None) -> None:
        """Make it fit: translate it, read what is there, and see what comes of it. The engine may serve meanwhile.

        Raises:
            SourceRefusedError: it does not fit.
        """
        self._fitted = fitted(self.changes, standing, self._loading)

    def fit(self, standing: Standing | None, contents: dict[str, str]) -> None:
        """As `Way`."""
        if standing is not None and contents != standing.contents:
            raise FullNeededError(f"the weights in memory are not those of {standing.label} any more")
        ready = self._fitted
        if ready is None or ready.standing is not standing or not self._loading.has(ready.plan):
            self.look(standing)

    def write(self, call: Call) -> tuple[Feed, str | None]:
        """As `Way`."""
        patch = self._ready.patch
        return self._loading.apply(call, call.path, call.load_format, patch.write if patch is not None else _nothing)

    def check(self, contents: dict[str, str]) -> str | None:
        """As `Way`."""
        if contents != self._ready.contents:
            wrong = next(name for name, found in contents.items() if self._ready.contents.get(name) != found)
            return f"the model's {wrong} is not what the delta should have made of it"
        self.proved = len({name for name, _ in self._ready.prints if name in self.changes.manifest.fingerprints})
        return None

    def put_back(self, call: Call, previous: Standing | None, path: str) -> tuple[Feed, str | None]:
        """As `Way`: exactly what was overwritten."""
        patch = self._ready.patch
        return self._loading.apply(call, path, "auto", patch.undo if patch is not None else _nothing)

    def standing(self, contents: dict[str, str]) -> Standing | None:
        """As `Way`."""
        before = self._ready.standing
        deltas = before.followed_by(self.changes.kept)
        return Standing(source=before.source, deltas=deltas, contents=contents, prints=self._ready.prints)

    @property
    def _ready(self) -> Fitted:
        if self._fitted is None:
            raise RuntimeError("a delta is written that was not looked at")
        return self._fitted


def _nothing() -> None:
    """A delta that changes nothing on this rank."""
