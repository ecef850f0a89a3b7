"""A file system as a power cut sees it: what was synced is there, the rest may be, in part and in any mixture.

    bytes   what was written to a file since its last sync may be there or not, page by page; a file may have its right
            length and zeros in it, or end in the middle
    names   a name that was given or taken since the last sync of its folder may be so or not, each for itself, but two
            changes of one name in their order. A rename in one folder is one change; from one folder to another the
            new name may be there beside the old one

(T. S. Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014, on what file systems really do of this.)
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

PAGE = 64  # bytes; the files of these tests are small, so their pages are
MOST_SUBSETS = 64  # above so many subsets of the pending changes, a sample of them
SAMPLES = 24

Tree = dict[str, "bytes | Tree"]


@dataclass(eq=False)
class File:
    """`synced` is on the disk; `now` is what a reader sees while the machine is up."""

    synced: bytes | None = None
    now: bytes = b""

    def variants(self, chance: random.Random) -> list[bytes]:
        """What may be found of its bytes."""
        before = self.synced or b""
        if self.synced == self.now:
            return [self.now]
        found = [self.now, before, self._zeroed(before), self.now[: len(self.now) // 2], self._torn(before, chance)]
        return list(dict.fromkeys(found))

    def _zeroed(self, before: bytes) -> bytes:
        return before + bytes(len(self.now) - len(before))

    def _torn(self, before: bytes, chance: random.Random) -> bytes:
        content = bytearray(self._zeroed(before))
        for start in range(0, len(self.now), PAGE):
            if chance.random() < 0.5:
                content[start : start + PAGE] = self.now[start : start + PAGE]
        return bytes(content)


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """One name in a folder gets another meaning; None takes it away. `also` is the other half of a rename."""

    name: str
    node: "File | Folder | None"
    also: "tuple[str, Folder | File | None] | None" = None


@dataclass(eq=False)
class Folder:
    """`synced` names are on the disk, `pending` changes of them may be."""

    synced: dict[str, "File | Folder"] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    @property
    def now(self) -> "dict[str, File | Folder]":
        """The names while the machine is up."""
        return self.after(self.pending)

    def after(self, changes: "list[Change]") -> "dict[str, File | Folder]":
        """The names if of all pending changes just these are on the disk."""
        names = dict(self.synced)
        for change in changes:
            for name, node in filter(None, [(change.name, change.node), change.also]):
                if node is None:
                    names.pop(name, None)
                else:
                    names[name] = node
        return names

    def sync(self) -> None:
        """Put all changes on the disk."""
        self.synced, self.pending = self.now, []

    def variants(self, chance: random.Random) -> "list[dict[str, File | Folder]]":
        """The names that may be found: those after every subset of the pending changes, or after a sample."""
        count = len(self.pending)
        if 2**count <= MOST_SUBSETS:
            masks = list(itertools.product((True, False), repeat=count))
        else:
            masks = [(True,) * count, (False,) * count]
            masks += [tuple(chance.random() < 0.5 for _ in range(count)) for _ in range(SAMPLES)]
        return [self.after(list(itertools.compress(self.pending, mask))) for mask in masks]


class Disk:
    """Takes effects by path, and says what a power cut now would leave."""

    def __init__(self, root: str) -> None:
        """An empty, durable folder at `root`."""
        self._root = PurePosixPath(root)
        self.top = Folder()

    def make_folder(self, path: str) -> None:
        """mkdir."""
        self._change(path, Folder())

    def create(self, path: str) -> None:
        """A new, empty file."""
        self._change(path, File())

    def write(self, path: str, offset: int, data: bytes) -> None:
        """Bytes into a file."""
        file = self._file(path)
        whole = file.now.ljust(offset, b"\0")
        file.now = whole[:offset] + data + whole[offset + len(data) :]

    def sync(self, path: str) -> None:
        """fsync of a file."""
        file = self._file(path)
        file.synced = file.now

    def sync_folder(self, path: str) -> None:
        """fsync of a folder. Of one above the root of the model there is nothing to sync."""
        if self._root in (PurePosixPath(path), *PurePosixPath(path).parents):
            self._folder(path).sync()

    def rename(self, old: str, new: str) -> None:
        """Another name."""
        source, target = self._folder(_above(old)), self._folder(_above(new))
        node = source.now[_name(old)]
        if source is target:
            source.pending.append(Change(_name(new), node, (_name(old), None)))
        else:
            target.pending.append(Change(_name(new), node))
            source.pending.append(Change(_name(old), None))

    def remove(self, path: str) -> None:
        """unlink, or rmdir."""
        self._change(path, None)

    def tree(self) -> Tree:
        """What is there while the machine is up."""
        return _tree(self.top)

    def states(self, chance: random.Random, *, most: int = 200) -> Iterator[Tree]:
        """What may be there after a power cut, at most so many states."""
        return itertools.islice(_states(self.top, chance), most)

    def _change(self, path: str, node: File | Folder | None) -> None:
        self._folder(_above(path)).pending.append(Change(_name(path), node))

    def _file(self, path: str) -> File:
        node = self._folder(_above(path)).now[_name(path)]
        assert isinstance(node, File), path
        return node

    def _folder(self, path: str) -> Folder:
        node: File | Folder = self.top
        for part in PurePosixPath(path).relative_to(self._root).parts:
            assert isinstance(node, Folder), path
            node = node.now[part]
        assert isinstance(node, Folder), path
        return node


def _above(path: str) -> str:
    return str(PurePosixPath(path).parent)


def _name(path: str) -> str:
    return PurePosixPath(path).name


def _tree(folder: Folder) -> Tree:
    return {name: _tree(node) if isinstance(node, Folder) else node.now for name, node in folder.now.items()}


def _states(folder: Folder, chance: random.Random) -> Iterator[Tree]:
    """Every variant of the names; with each, what lies in it varied one by one, and then all of it at random."""
    for names in folder.variants(chance):
        parts = {name: _variants(node, chance) for name, node in names.items()}
        first = {name: each[0] for name, each in parts.items()}
        yield first
        for name, each in parts.items():
            yield from (first | {name: other} for other in each[1:])
        for _ in range(4 if sum(len(each) > 1 for each in parts.values()) > 1 else 0):
            yield {name: chance.choice(each) for name, each in parts.items()}


def _variants(node: File | Folder, chance: random.Random) -> "list[bytes | Tree]":
    return list(_states(node, chance)) if isinstance(node, Folder) else list(node.variants(chance))
