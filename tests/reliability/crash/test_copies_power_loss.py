"""Power loss and kills while copies are made: what has a copy's name is the version of that name, to the bit."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
from disk_model import Disk, Tree
from recorded_copies import mirrored_copies
from safetensors.numpy import load

from refitd.policy.materialize import COPIES, NOTE, Copy, MakeCopy, order_in, parse_note
from refitd.root.scan import Discarded
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_inside.materialize.disk import DiskCopies
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
    """A copy is made of each delta from the one before, which is deleted; then one anew from the full version."""
    copies = DiskCopies(root)
    source: Copy | VersionRecord = versions[0]
    for target in versions[1:]:
        made = copies._write(MakeCopy(source=source, deltas=(target,)), Event())
        if isinstance(source, Copy):
            assert isinstance(copies._discard(source), Discarded)
        source = made
    copies._write(MakeCopy(source=versions[0], deltas=tuple(versions[1:])), Event())


def named_copies(state: Tree) -> Iterator[tuple[int, Tree]]:
    """The folders that a service would believe, with the steps that their names say. Signatures are not looked at."""
    node: Tree | bytes = state
    for part in ("root", SERVICE_FOLDER, COPIES, RUN):
        node = node.get(part, {}) if isinstance(node, dict) else {}
    assert isinstance(node, dict)
    for name, folder in node.items():
        order = order_in(name)
        if order is not None:
            assert isinstance(folder, dict)
            note = folder[NOTE]
            assert isinstance(note, bytes)
            assert parse_note(note) is not None
            yield order.step, folder


def weights_in(folder: Tree) -> Tensors:
    found: Tensors = {}
    for name, data in folder.items():
        if name.endswith(".safetensors"):
            assert isinstance(data, bytes)
            found |= load(data)
    return found


def test_a_power_cut_never_leaves_the_name_of_a_copy_on_other_bytes(
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
            for step, folder in named_copies(state):
                why = f"seed {SEED}, power cut before effect {number}: the name says step {step}"
                assert same(weights_in(folder), trainer.history[step]), why
                seen[step] += 1

    with mirrored_copies(disk, cut, monkeypatch) as effects:
        tell(root, versions)
    print(f"seed {SEED}: {effects.count} effects; copies seen {dict(seen)}")
    assert seen.keys() == {2, 3, 4, 5, 6}
    assert effects.count > 100


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the code that it hits goes on."""


def test_kill_9_between_any_two_steps_leaves_a_whole_copy_or_what_is_thrown_away(
    story: tuple[Path, Trainer, list[VersionRecord]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next service finds the copy that it is made from as it was; and the one that was made whole, or worthless."""
    root, trainer, versions = story
    copies = DiskCopies(root)
    before = copies._write(MakeCopy(source=versions[0], deltas=tuple(versions[1:3])), Event())
    found: Counter[str | None] = Counter()
    for number in range(1, 200):

        def kill(count: int, number: int = number) -> None:
            if count >= number:
                raise Killed

        try:
            with mirrored_copies(_deaf(root), kill, monkeypatch):
                copies._write(MakeCopy(source=before, deltas=tuple(versions[3:5])), Event())
        except Killed:
            left = copies._survey()
            left.remove(before)
            found.update([None] if not left else [copy.holds for copy in left])
            for copy in left:
                if copy.holds is not None:
                    assert same(in_folder(root / copy.path), trainer.history[5])
                assert isinstance(copies._discard(copy), Discarded)
            assert same(in_folder(root / before.path), trainer.history[3])
            continue
        assert number > 12, "it was killed at more than twelve effects"
        break
    assert found.keys() == {versions[4].id, None}


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
