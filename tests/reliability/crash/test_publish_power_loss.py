"""Power loss while a version is published: what is left is whole or judged bad, and what was acknowledged is there."""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from disk_model import Disk, Tree
from recorded_publish import SYNCS, Mirror, mirrored, plant, tree_of

from refitd.root.scan import FoundFolder, Listing, scan
from refitd_client.checkpoint.inventory import Reference
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.validation.examine import examine
from refitd_client.validation.reference import read_reference
from refitd_client.validation.validate import Options, Valid, validate
from support import durable_effects

SEED = 20261121
RUN = "run"


@dataclass
class Judge:
    """The catalog of a fresh service on a root that a power cut left. The same root is judged once."""

    folder: Path
    reference: Reference
    good: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    def __call__(self, root: Tree) -> set[str]:
        """The versions that it finds good."""
        key = repr(root)
        if key not in self.good:
            place = self.folder / f"{len(self.good):05d}"
            plant(place, root)
            listing = scan(place)
            assert isinstance(listing, Listing)
            self.good[key] = {found.path for found in listing.found if self._is_good(place, found)}
        return self.good[key]

    def _is_good(self, root: Path, found: FoundFolder) -> bool:
        options = Options(run=found.run, order=found.order)
        evidence = examine(root, found.path, self.reference, options)
        return isinstance(validate(evidence, self.reference, options), Valid)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return durable_effects.make_base(tmp_path / "base")


@pytest.fixture
def judge(tmp_path: Path, base: Path) -> Judge:
    durable_effects.publish(tmp_path / "model", 1, base)
    (tmp_path / "after").mkdir()
    return Judge(tmp_path / "after", read_reference(tmp_path / "model" / RUN / "v000001"))


@dataclass
class Cut:
    """What may be left of the disk when the power goes before an effect, and what had been acknowledged by then."""

    number: int
    states: list[Tree]
    acknowledged: list[str]


def power_cuts(
    tmp_path: Path, base: Path, patch: pytest.MonkeyPatch, *, deaf: frozenset[str] = frozenset(), most: int = 200
) -> tuple[list[Cut], Tree]:
    """Publish two versions; the power may go before each effect, and after each publication. And what was published."""
    place = tmp_path / "disk"
    place.mkdir()
    disk, chance = Disk(str(place)), random.Random(SEED)
    cuts: list[Cut] = []
    acknowledged: list[str] = []

    def cut(number: int) -> None:
        cuts.append(Cut(number, list(disk.states(chance, most=most)), list(acknowledged)))

    for step in (1, 2):
        with mirrored(Mirror(disk, cut, deaf), patch):
            durable_effects.publish(place / "root", step, base)
        acknowledged.append(f"v{step:06d}")
        cut(1000 * step)
    assert disk.tree() == _without_locks(tree_of(place)), "the model went another way than the disk"
    run = tree_of(place / "root" / RUN)
    return cuts, {name: node for name, node in run.items() if name.startswith("v")}


def _without_locks(tree: Tree) -> Tree:
    """The model knows that lock files are there, and not what is in them."""
    return {
        name: _without_locks(node) if isinstance(node, dict) else b"" if name.endswith("lock") else node
        for name, node in tree.items()
    }


def run_of(state: Tree) -> tuple[Tree, Tree]:
    """The root and the run's folder in a state; empty where they are not there."""
    root = state.get("root", {})
    assert isinstance(root, dict)
    run = root.get(RUN, {})
    assert isinstance(run, dict)
    return root, run


def _visible(version: "Tree | bytes") -> Tree:
    """Without hidden names: loaders do not see them."""
    assert isinstance(version, dict)
    return {name: node for name, node in version.items() if not name.startswith(".")}


def test_power_loss_with_unsynced_writes_leaves_a_whole_version_or_none(
    tmp_path: Path, base: Path, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every effect of a first and a second publication; what publish() has returned for is there, whole."""
    cuts, published = power_cuts(tmp_path, base, monkeypatch)
    seen: Counter[str] = Counter()
    for cut in cuts:
        for state in cut.states:
            root, run = run_of(state)
            why = f"seed {SEED}, power cut before effect {cut.number}"
            good = judge(root)
            for name in published:
                there = name in run
                assert not there or run[name] == published[name], f"half of {name} has its name; {why}"
                assert there or name not in cut.acknowledged, f"{name} was acknowledged and is gone; {why}"
                assert there == (f"{RUN}/{name}" in good), f"the catalog is mistaken about {name}; {why}"
                seen[name] += there
    states = sum(len(cut.states) for cut in cuts)
    print(f"seed {SEED}: {states} states after a power cut, {len(judge.good)} different, {len(cuts)} moments; {seen}")
    assert len(cuts) > 60
    assert 0 < seen["v000002"] < seen["v000001"] < states


def test_a_marker_written_without_fsync_outlives_its_data_and_is_not_believed(
    tmp_path: Path, base: Path, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher that never syncs: names and the manifest are there, and the bytes are not. The digests tell."""
    cuts, published = power_cuts(tmp_path, base, monkeypatch, deaf=SYNCS, most=150)
    seen: Counter[str] = Counter()
    for cut in cuts[-4:]:
        for state in cut.states:
            root, run = run_of(state)
            marked = {name for name, node in run.items() if name in published and MANIFEST_NAME in node}
            good = judge(root)
            for name in marked:
                is_whole = _visible(run[name]) == published[name]
                assert is_whole or f"{RUN}/{name}" not in good, f"wrong content is believed; seed {SEED}: {run[name]}"
                seen["whole" if is_whole else "torn"] += 1
    print(f"seed {SEED}: {seen}")
    assert seen["torn"] > 100
