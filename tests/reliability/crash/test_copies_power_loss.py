"""Power loss and kills while copies are written: what has a note is the version that the note says, to the bit."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
from disk_model import Disk, Tree
from recorded_copies import mirrored_copies
from safetensors.numpy import load

from refitd.materialize.disk import DiskCopies
from refitd.policy.materialize import WriteCopy
from refitd.state.copy import COPIES, Copy, parse_note
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import SERVICE_FOLDER
from support.checkpoints import Tensors
from support.deltas import RUN, Trainer, chain, in_folder, same, training

SEED = 20261121
MOST = 40  # states of the disk that are looked at for each effect
LENGTH = 6


@pytest.fixture
def story(tmp_path: Path) -> Iterator[tuple[Path, Trainer, list[VersionRecord]]]:
    """A root with a full version and deltas."""
    root = tmp_path / "root"
    with training(root) as trainer:
        (root / SERVICE_FOLDER).mkdir()
        yield root, trainer, chain(trainer, root, LENGTH)


def tell(root: Path, versions: list[VersionRecord]) -> None:
    """Two copies are made, and each is patched in its turn; then one is made anew from the full version."""
    copies = DiskCopies(root)
    known: list[Copy] = []
    for number, target in enumerate(versions[1:]):
        into = known[-2] if len(known) > 1 else None
        source: Copy | VersionRecord = into or (known[-1] if known else versions[0])
        first = (
            versions.index(next(v for v in versions if isinstance(source, Copy) and v.id == source.holds))
            if (isinstance(source, Copy))
            else 0
        )
        deltas = tuple(versions[first + 1 : number + 2])
        known.append(copies._write(WriteCopy(target=target, source=source, deltas=deltas, into=into), Event()))
    anew = WriteCopy(target=versions[2], source=versions[0], deltas=tuple(versions[1:3]), into=known[-2])
    copies._write(anew, Event())


def copies_with_notes(state: Tree) -> Iterator[tuple[int, Tree]]:
    """The folders that a service would believe in, with the step that their notes say. Signatures are not looked at."""
    node: Tree | bytes = state
    for part in ("root", SERVICE_FOLDER, COPIES, RUN):
        node = node.get(part, {}) if isinstance(node, dict) else {}
    assert isinstance(node, dict)
    for name, data in node.items():
        note = parse_note(data, RUN) if isinstance(data, bytes) and not name.startswith(".") else None
        if note is not None:
            folder = node.get(name.removesuffix(".json"), {})
            assert isinstance(folder, dict)
            yield note.step, folder


def weights_in(folder: Tree) -> Tensors:
    found: Tensors = {}
    for name, data in folder.items():
        if name.endswith(".safetensors"):
            assert isinstance(data, bytes)
            found |= load(data)
    return found


def test_a_power_cut_never_leaves_a_note_on_other_bytes(
    story: tuple[Path, Trainer, list[VersionRecord]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each effect, whatever was not synced being there or not, in any mixture."""
    root, trainer, versions = story
    disk, chance = Disk(str(root.parent)), random.Random(SEED)
    for folder in (root, root / SERVICE_FOLDER):
        disk.make_folder(str(folder))
    disk.sync_folder(str(root))
    disk.sync_folder(str(root.parent))
    seen: Counter[int] = Counter()

    def cut(number: int) -> None:
        for state in disk.states(chance, most=MOST):
            for step, folder in copies_with_notes(state):
                why = f"seed {SEED}, power cut before effect {number}: the note says step {step}"
                assert same(weights_in(folder), trainer.history[step]), why
                seen[step] += 1

    with mirrored_copies(disk, cut, monkeypatch) as effects:
        tell(root, versions)
    print(f"seed {SEED}: {effects.count} effects; notes seen {dict(seen)}")
    assert seen.keys() == {2, 3, 4, 5, 6}
    assert effects.count > 100


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the code that it hits goes on."""


def test_kill_9_between_any_two_steps_of_a_patch_leaves_a_whole_copy_or_none(
    story: tuple[Path, Trainer, list[VersionRecord]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next service finds the copy that it was, the one that it was to become, or one that is worth nothing; and
    writes it anew.
    """
    root, trainer, versions = story
    copies = DiskCopies(root)
    found: Counter[str | None] = Counter()
    for number in range(1, 200):
        before = copies._write(
            WriteCopy(target=versions[2], source=versions[0], deltas=tuple(versions[1:3]), into=None), Event()
        )
        order = WriteCopy(target=versions[4], source=before, deltas=tuple(versions[3:5]), into=before)

        def kill(count: int, number: int = number) -> None:
            if count >= number:
                raise Killed

        try:
            with mirrored_copies(_deaf(root), kill, monkeypatch):
                copies._write(order, Event())
        except Killed:
            (left,) = copies._survey()
            found[left.holds] += 1
            if left.order is not None:
                assert same(in_folder(root / left.path), trainer.history[left.order.step])
            again = WriteCopy(target=versions[4], source=versions[0], deltas=tuple(versions[1:5]), into=left)
            assert same(in_folder(root / copies._write(again, Event()).path), trainer.history[5])
            copies._discard(left)
            continue
        assert number > 12, "it was killed at more than twelve effects"
        break
    assert found.keys() == {versions[2].id, versions[4].id, None}


class _Deaf(Disk):
    """A model that does not listen: the effects are counted only."""

    def make_folder(self, path: str) -> None: ...

    def create(self, path: str) -> None: ...

    def write(self, path: str, offset: int, data: bytes) -> None: ...

    def sync(self, path: str) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def sync_folder(self, path: str) -> None: ...


def _deaf(place: Path) -> Disk:
    return _Deaf(str(place))
