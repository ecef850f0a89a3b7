"""A full version on its way into a model: by the loader, or as the load plan's copies."""

from dataclasses import dataclass, field
from pathlib import Path

from refitd.catalog.validate import Options
from refitd_sglang.call import Call
from refitd_sglang.contents import differing, equal
from refitd_sglang.feeding import Feed
from refitd_sglang.loading import Loading, Readied
from refitd_sglang.source import Source
from refitd_sglang.standing import Standing


@dataclass(slots=True, eq=False)
class Whole:
    """As `Way`. `readied` are its copies, made ready while the engine served."""

    source: Source
    options: Options
    loading: Loading
    readied: Readied | None = None
    proved: int = 0
    _others: list[int] | None = None
    _prints: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    kind = "full"

    @property
    def label(self) -> str:
        """As `Way`."""
        return self.source.label

    @property
    def digest(self) -> str:
        """As `Way`."""
        return self.source.digest

    @property
    def signature(self) -> str:
        """As `Way`."""
        return self.source.structure.signature

    @property
    def nbytes(self) -> int:
        """As `Way`."""
        return self.source.nbytes

    @property
    def folder(self) -> Path:
        """As `Way`."""
        return self.source.place.folder

    @property
    def partial(self) -> bool:
        """Whether it may leave some of what was there before."""
        return self.options.allow_missing

    def is_unchanged(self) -> bool:
        """As `Way`."""
        return self.source.is_unchanged()

    @property
    def watches(self) -> bool:
        """As `Way`."""
        ready = self.readied
        return ready is not None and ready.road.watch is not None and self.loading.has(ready.plan)

    def fit(self, standing: Standing | None, contents: dict[str, str]) -> None:
        """It fits whatever is there: its tensors are those of the model."""

    def write(self, call: Call) -> tuple[Feed, str | None]:
        """As `Way`."""
        feed, fault = self.loading.load(call, self.source, partial=self.partial, readied=self.readied)
        self._others = feed.others
        return feed, fault

    def check(self, contents: dict[str, str]) -> str | None:
        """As `Way`: tensors that are only copied have the fingerprints that the manifest gives them."""
        manifest = self.source.structure.manifest
        expected = {} if manifest is None else manifest.fingerprints
        self._prints = self.loading.prints(self.source, contents, self._others)
        self.proved = equal(self._prints, expected)
        return differing(self._prints, expected)

    def put_back(self, call: Call, previous: Standing | None, path: str) -> tuple[Feed, str | None]:
        """As `Way`: through the loader, since the plan may be at fault."""
        if previous is None:
            return Feed({}), "what was served before cannot be read any more"
        return self.loading.put_back(call, previous.tensors(), path)

    def standing(self, contents: dict[str, str]) -> Standing | None:
        """As `Way`."""
        if self.partial:
            return None
        return Standing(source=self.source, contents=contents, prints=self._prints)
