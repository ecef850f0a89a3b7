"""What a power cut may leave of the files that SQLite wrote: everything synced, and any part of the rest.

    bytes    what was written to a file after its last sync may be there, or not, or in part: each write for itself, in
             any order, torn at sectors of 512 bytes, or as zeros where it made the file longer
    names    a file that was made and a name that was removed count as unsynced until the folder is synced, and may or
             may not be so

SQLite's own assumption is kept: a write does not harm the bytes beside it (https://sqlite.org/psow.html).
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import assert_never

from recorded_sqlite import Deleted, Effect, Opened, Said, Synced, Truncated, Written

SECTOR = 512
_MAKE_FOLDER_SYNCED = ("-wal", "-journal")

Files = dict[str, bytes]
_Changes = list[Written | Truncated]


@dataclass
class _Disk:
    """Bytes by name: `synced` is on the disk, `pending` may be.

    `unsure` names are those whose folder was not synced since they were made (True) or removed (False); `former` is
    what was there before a name was removed and made anew; `fresh` files were never synced themselves.
    """

    synced: dict[str, bytearray] = field(default_factory=dict[str, bytearray])
    pending: dict[str, list[Written | Truncated]] = field(default_factory=dict[str, list[Written | Truncated]])
    unsure: dict[str, bool] = field(default_factory=dict[str, bool])
    fresh: set[str] = field(default_factory=set[str])
    former: dict[str, bytes] = field(default_factory=dict[str, bytes])
    said: int = 0

    def take(self, effect: Effect) -> None:
        """Let it happen."""
        match effect:
            case Opened(file):
                self._open(file)
            case Written(file) | Truncated(file):
                self.pending[file].append(effect)
            case Synced(file):
                self._sync(file)
            case Deleted(file, synced):
                self.unsure[file] = False
                if synced:
                    self._sync_folder()
            case Said(count):
                self.said = count
            case _:
                assert_never(effect)

    def _open(self, file: str) -> None:
        if file in self.synced and self.unsure.get(file) is not False:
            return
        if file in self.synced:
            self.former[file] = bytes(self.synced[file])
        self.synced[file], self.pending[file], self.unsure[file] = bytearray(), [], True
        self.fresh.add(file)

    def _sync(self, file: str) -> None:
        for change in self.pending[file]:
            _apply(self.synced[file], change)
        self.pending[file] = []
        if file in self.fresh and file.endswith(_MAKE_FOLDER_SYNCED):
            self._sync_folder()
        self.fresh.discard(file)

    def _sync_folder(self) -> None:
        for name, stays in self.unsure.items():
            if not stays:
                self.synced.pop(name, None)
                self.pending.pop(name, None)
        self.unsure, self.former = {}, {}

    def states(self, chance: random.Random, samples: int) -> Iterator[Files]:
        """Nothing unsynced, everything unsynced, and mixtures."""
        yield self._files(lambda _: [], lambda: False)
        yield self._files(lambda changes: changes, lambda: True)
        for _ in range(samples):
            yield self._files(lambda changes: _part(changes, chance), lambda: chance.random() < 0.5)

    def _files(self, choose: Callable[[_Changes], _Changes], coin: Callable[[], bool]) -> Files:
        """`choose` says which changes of bytes are on the disk, `coin` for each name whether its last change is."""
        files: Files = {}
        for name in self.synced:
            is_there = name not in self.unsure or self.unsure[name] == coin()
            if is_there:
                content = bytearray(self.synced[name])
                for change in choose(self.pending[name]):
                    _apply(content, change)
                files[name] = bytes(content)
            elif name in self.former and coin():
                files[name] = self.former[name]
        return files


def _apply(content: bytearray, change: Written | Truncated) -> None:
    if isinstance(change, Truncated):
        del content[change.size :]
        return
    content.extend(bytes(max(0, change.offset + len(change.data) - len(content))))
    content[change.offset : change.offset + len(change.data)] = change.data


def _part(changes: _Changes, chance: random.Random) -> _Changes:
    """Some of the changes, some of them torn."""
    if not changes:
        return []
    rate = chance.choice((0.1, 0.5, 0.9, 0.98))
    kept: _Changes = []
    for change in changes:
        if isinstance(change, Truncated):
            kept += [change] * (chance.random() < rate)
            continue
        for start in range(0, len(change.data), SECTOR):
            if chance.random() < rate:
                kept.append(Written(change.file, change.offset + start, change.data[start : start + SECTOR]))
            elif chance.random() < 0.1:  # the file got longer, and the data did not come
                kept.append(Written(change.file, change.offset + start, b""))
    return kept


@dataclass(frozen=True, slots=True)
class Moment:
    """A power cut before effect `number`; `said` facts had been called durable."""

    number: int
    said: int
    states: list[Files]


def moments(effects: list[Effect], chosen: set[int], chance: random.Random, samples: int) -> Iterator[Moment]:
    """The states that a power cut may leave at each of the chosen numbers, without repetition."""
    disk = _Disk()
    for number, effect in enumerate([*effects, Said(0)]):
        if number in chosen:
            unique = {hash(tuple(sorted(files.items()))): files for files in disk.states(chance, samples)}
            yield Moment(number, disk.said, list(unique.values()))
        if number < len(effects):
            disk.take(effect)
