"""A delta on its way into a model, in place.

Before the first write it is known that it fits: the model holds what it held when its version was found to be there,
that version is the delta's base or one since, and each changed tensor's fingerprint, less the old elements and plus the
new ones, is the one that the delta promises. After the last write the model's tensors have the fingerprints that
follow.

Where a delta cannot be translated (a loader computes the tensor, or nobody has seen how it is loaded) nothing is
guessed: a full version is asked for.
"""

from pathlib import Path

from refitd_client.validation.examine import signature
from refitd_plugin.changes import DeltaChanges
from refitd_plugin.fitted import Fitted, fitted
from refitd_plugin.loading import Loading
from refitd_plugin.port import UpdateCall
from refitd_plugin.served import ServedState
from refitd_plugin.source import FullNeededError
from refitd_plugin.tensor_feed import TensorFeed


class DeltaInPlace:
    """See `UpdateSource`."""

    kind = "delta"

    def __init__(self, changes: DeltaChanges, loading: Loading) -> None:
        self.changes = changes
        self.proved = 0
        self._loading = loading
        self._fitted: Fitted | None = None

    @property
    def label(self) -> str:
        """See `UpdateSource`."""
        return self.changes.label

    @property
    def digest(self) -> str:
        """See `UpdateSource`."""
        return self.changes.digest

    @property
    def signature(self) -> str:
        """See `UpdateSource`: as of now; `is_unchanged` says whether that is what was read."""
        return signature(self.changes.place.root, self.changes.place.path)

    @property
    def nbytes(self) -> int:
        """See `UpdateSource`."""
        return self.changes.nbytes

    @property
    def folder(self) -> Path:
        """See `UpdateSource`."""
        return self.changes.place.folder

    @property
    def watches(self) -> bool:
        """See `UpdateSource`: a delta is held against what is there before anyone writes."""
        return False

    def is_unchanged(self) -> bool:
        """See `UpdateSource`."""
        return self.changes.is_unchanged()

    def look(self, served_state: ServedState | None) -> None:
        """Make it fit: translate it, read what is there, and see what comes of it. The engine may serve meanwhile.

        Raises:
            SourceRefusedError: it does not fit.
        """
        self._fitted = fitted(self.changes, served_state, self._loading)

    def fit(self, served_state: ServedState | None, contents: dict[str, str]) -> None:
        """See `UpdateSource`."""
        if served_state is not None and contents != served_state.contents:
            raise FullNeededError(f"the weights in memory are not those of {served_state.label} any more")
        ready = self._fitted
        if ready is None or ready.served_state is not served_state or not self._loading.has(ready.plan):
            self.look(served_state)

    def write(self, call: UpdateCall) -> tuple[TensorFeed, str | None]:
        """See `UpdateSource`."""
        patch = self._ready.patch
        return self._loading.apply(call, call.path, call.load_format, patch.write if patch is not None else _nothing)

    def check(self, contents: dict[str, str]) -> str | None:
        """See `UpdateSource`."""
        if contents != self._ready.contents:
            wrong = next(name for name, found in contents.items() if self._ready.contents.get(name) != found)
            return f"the model's {wrong} is not what the delta should have made of it"
        self.proved = len({name for name, _ in self._ready.prints if name in self.changes.manifest.fingerprints})
        return None

    def put_back(self, call: UpdateCall, previous: ServedState | None, path: str) -> tuple[TensorFeed, str | None]:
        """See `UpdateSource`: exactly what was overwritten."""
        patch = self._ready.patch
        return self._loading.apply(call, path, "auto", patch.undo if patch is not None else _nothing)

    def served_state(self, contents: dict[str, str]) -> ServedState | None:
        """See `UpdateSource`."""
        before = self._ready.served_state
        deltas = before.followed_by(self.changes.kept)
        return ServedState(source=before.source, deltas=deltas, contents=contents, prints=self._ready.prints)

    @property
    def _ready(self) -> Fitted:
        if self._fitted is None:
            raise RuntimeError("a delta is written that was not looked at")
        return self._fitted


def _nothing() -> None:
    """A delta that changes nothing on this rank."""
