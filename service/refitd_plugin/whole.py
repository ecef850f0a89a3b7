"""A full version on its way into a model: by the loader, or as the load plan's copies."""

from dataclasses import dataclass, field
from pathlib import Path

from refitd_client.validation.validate import Options
from refitd_plugin.contents import differing, equal
from refitd_plugin.loading import Loading, Readied
from refitd_plugin.port import UpdateCall
from refitd_plugin.served import ServedState
from refitd_plugin.source import VersionSource
from refitd_plugin.tensor_feed import TensorFeed


@dataclass(slots=True, eq=False)
class FullVersion:
    """See `UpdateSource`. `readied` are its copies, made ready while the engine served."""

    source: VersionSource
    options: Options
    loading: Loading
    readied: Readied | None = None
    proved: int = 0
    _others: list[int] | None = None
    _prints: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    kind = "full"

    @property
    def label(self) -> str:
        """See `UpdateSource`."""
        return self.source.label

    @property
    def digest(self) -> str:
        """See `UpdateSource`."""
        return self.source.digest

    @property
    def signature(self) -> str:
        """See `UpdateSource`."""
        return self.source.structure.signature

    @property
    def nbytes(self) -> int:
        """See `UpdateSource`."""
        return self.source.nbytes

    @property
    def folder(self) -> Path:
        """See `UpdateSource`."""
        return self.source.place.folder

    @property
    def partial(self) -> bool:
        """Whether it may leave some of what was there before."""
        return self.options.allow_missing

    def is_unchanged(self) -> bool:
        """See `UpdateSource`."""
        return self.source.is_unchanged()

    @property
    def watches(self) -> bool:
        """See `UpdateSource`."""
        ready = self.readied
        return ready is not None and ready.schedule.watch is not None and self.loading.has(ready.plan)

    def fit(self, served_state: ServedState | None, contents: dict[str, str]) -> None:
        """It fits whatever is there: its tensors are those of the model."""

    def write(self, call: UpdateCall) -> tuple[TensorFeed, str | None]:
        """See `UpdateSource`."""
        feed, fault = self.loading.load(call, self.source, partial=self.partial, readied=self.readied)
        self._others = feed.others
        return feed, fault

    def check(self, contents: dict[str, str]) -> str | None:
        """See `UpdateSource`: tensors that are only copied have the fingerprints that the manifest gives them."""
        manifest = self.source.structure.manifest
        expected = {} if manifest is None else manifest.fingerprints
        self._prints = self.loading.prints(self.source, contents, self._others)
        self.proved = equal(self._prints, expected)
        return differing(self._prints, expected)

    def put_back(self, call: UpdateCall, previous: ServedState | None, path: str) -> tuple[TensorFeed, str | None]:
        """See `UpdateSource`: through the loader, since the plan may be at fault."""
        if previous is None:
            return TensorFeed({}), "what was served before cannot be read any more"
        return self.loading.put_back(call, previous.tensors(), path)

    def served_state(self, contents: dict[str, str]) -> ServedState | None:
        """See `UpdateSource`."""
        if self.partial:
            return None
        return ServedState(source=self.source, contents=contents, prints=self._prints)
