"""Power loss and kills while versions are recycled: no manifest ever stands over bytes that are not its own."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from disk_model import Disk, Tree
from recorded_publish import Mirror, from_gpu, mirrored, tree_of
from recorded_slots import mirrored_reclaim

from refitd.reclaim import slots, trash
from refitd.root.handle import Identity, root_at
from refitd.root.scan import Discarded
from refitd_client.contract.manifest import ManifestRefusedError, parse_manifest
from refitd_client.contract.naming import MANIFEST_NAME, parse_version_folder
from support import durable_effects, published

SEED = 20261121
RUN = "run"
MOST = 60  # states of the disk that are looked at for each effect
STEPS = 5


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return durable_effects.make_base(tmp_path / "base")


def hand_back(root: Path, step: int) -> slots.Slot:
    """What the service does with a version that nobody needs any more."""
    with root_at(root) as handle:
        path = f"{RUN}/v{step:06d}"
        found = trash.examine(handle, path)
        assert isinstance(found, Identity), found
        discarded = trash.discard(handle, path, found)
        assert isinstance(discarded, Discarded), discarded
        slot = slots.hand_back(handle, discarded, RUN)
        assert isinstance(slot, slots.Slot), slot
        trash.empty(handle)
        return slot


@dataclass
class Story:
    """Two versions, and then each step in the files of the one before the last."""

    place: Path
    base: Path
    disk: Disk
    cut: Callable[[str], None]
    patch: pytest.MonkeyPatch
    is_on_gpu: bool = False
    there: list[int] = field(default_factory=list[int])
    whole: dict[int, Tree] = field(default_factory=dict[int, Tree])

    @property
    def root(self) -> Path:
        return self.place / "root"

    def publish(self, step: int) -> None:
        mirror = Mirror(self.disk, lambda number: self.cut(f"publish {step}, effect {number}"))
        with mirrored(mirror, self.patch):
            if self.is_on_gpu:
                from_gpu(mirror, self.patch)
            durable_effects.publish(self.root, step, self.base)
        self.there.append(step)
        tree = tree_of(self.root / RUN / f"v{step:06d}")
        self.whole[step] = tree
        self.cut(f"published {step}")

    def recycle(self, step: int) -> None:
        self.there.remove(step)
        with mirrored_reclaim(self.disk, lambda number: self.cut(f"recycle {step}, effect {number}"), self.patch):
            hand_back(self.root, step)
        self.cut(f"recycled {step}")

    def tell(self) -> None:
        for step in range(1, STEPS + 1):
            self.publish(step)
            if step > 1:
                self.recycle(step - 1)


def folders_with_a_manifest(tree: Tree, path: str = "") -> Iterator[tuple[str, Tree]]:
    """Wherever they are: in their place, in the trash, among the slots."""
    if MANIFEST_NAME in tree:
        yield path, tree
    for name, node in tree.items():
        if isinstance(node, dict):
            yield from folders_with_a_manifest(node, f"{path}/{name}")


def step_of(manifest: "Tree | bytes") -> int | None:
    """The step that a whole manifest tells; None for one that was cut off."""
    assert isinstance(manifest, bytes)
    try:
        return parse_manifest(manifest).step
    except ManifestRefusedError:
        return None


def weights_in(tree: Tree) -> dict[str, bytes]:
    """Names may be missing where nothing has been given its name yet: the bytes of those that are there count."""
    return {name: node for name, node in tree.items() if name.endswith(".safetensors") and isinstance(node, bytes)}


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A disk's file system, where slots are written by calls, and one in memory, where they are mapped."""
    if request.param == "disk":
        (tmp_path / "disk").mkdir()
        yield tmp_path / "disk"
        return
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="refitd-crash-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("is_on_gpu", [False, True], ids=["from the host", "from a GPU"])
def test_a_power_cut_never_puts_an_old_manifest_on_new_bytes(
    place: Path, base: Path, monkeypatch: pytest.MonkeyPatch, is_on_gpu: bool
) -> None:
    """Before each effect of publisher and service: whatever holds a whole manifest holds that version's bytes. A
    version that has its name holds nothing else, as how far its publisher had been, which engines read meanwhile.
    """
    disk, chance = Disk(str(place)), random.Random(SEED)
    (place / "root" / ".refitd").mkdir(parents=True)
    disk.make_folder(str(place / "root"))
    disk.make_folder(str(place / "root" / ".refitd"))
    disk.sync_folder(str(place / "root"))
    disk.sync_folder(str(place))
    seen: Counter[str] = Counter()
    states: list[tuple[str, list[int], Tree]] = []

    def cut(moment: str) -> None:
        states.extend((moment, list(story.there), state) for state in disk.states(chance, most=MOST))

    story = Story(place, base, disk, cut, monkeypatch, is_on_gpu)
    story.tell()
    inodes = [file.stat().st_ino for file in sorted((story.root / RUN / f"v{STEPS:06d}").glob("*.safetensors"))]
    assert len(inodes) == 2
    for moment, acknowledged, state in states:
        why = f"seed {SEED}, power cut before {moment}"
        for path, folder in folders_with_a_manifest(state):
            step = step_of(folder[MANIFEST_NAME])
            if step is not None and step in story.whole:
                others = weights_in(folder).items() - weights_in(story.whole[step]).items()
                assert not others, f"{path} has step {step}'s manifest, and other bytes; {why}"
                is_named = path == f"/root/{RUN}/v{step:06d}"
                assert is_named or step not in acknowledged, f"step {step} is also {path}, to be taken away; {why}"
                seen[path.split("/")[2]] += 1
        root = state["root"]
        assert isinstance(root, dict)
        run = root.get(RUN, {})
        assert isinstance(run, dict)
        for step in acknowledged:
            assert run.get(f"v{step:06d}") == story.whole[step], f"step {step} was acknowledged and is gone; {why}"
        for name, node in run.items():
            if (order := parse_version_folder(name)) is not None:
                assert node == story.whole[order.step], f"half of {name} has its name; {why}"
    print(f"seed {SEED}: {len(states)} states after a power cut; manifests seen {dict(seen)}")
    assert len(states) > 5000


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the code that it hits goes on."""


def test_a_service_killed_at_any_effect_of_a_hand_back_offers_a_whole_slot_or_none(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves besides is taken away by the next sweep, and a publisher that comes meanwhile is not misled."""
    found: Counter[str] = Counter()
    for number in range(1, 100):
        place = tmp_path / f"{number:03d}"
        (place / "root" / ".refitd").mkdir(parents=True)
        durable_effects.publish(place / "root", 1, base)

        def kill(count: int, number: int = number) -> None:
            if count == number:
                raise Killed

        try:
            with mirrored_reclaim(_deaf(place), kill, monkeypatch):
                hand_back(place / "root", 1)
        except Killed:
            found[_after_a_kill(place / "root", base)] += 1
            continue
        assert number > 12, "it was killed at more than twelve effects"
        break
    print(dict(found))
    assert found.keys() == {"in its place", "in the trash", "being made", "offered"}


def _after_a_kill(root: Path, base: Path) -> str:
    with root_at(root) as handle:
        there = slots.survey(handle)
        durable_effects.publish(root, 2, base)
        published.check(root / RUN / "v000002")
        if (root / RUN / "v000001").exists():
            published.check(root / RUN / "v000001")
            return "in its place"
        for slot in slots.survey(handle):
            assert slot.fault is not None, "a slot that was offered and not taken"
            assert isinstance(slots.withdraw(handle, slot), Discarded)
        assert trash.empty(handle).left == ()
    left = [path for path in (root / ".refitd").rglob("*") if path.is_file()]
    assert not left, left
    if not there:
        return "in the trash"
    return "being made" if there[0].fault else "offered"


class _Deaf(Disk):
    """A model that does not listen: the effects are counted only."""

    def make_folder(self, path: str) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def sync_folder(self, path: str) -> None: ...


def _deaf(place: Path) -> Disk:
    return _Deaf(str(place))
