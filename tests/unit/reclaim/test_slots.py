"""Handing a version's files back: only what is refitd's alone, stripped and synced before anybody can take it."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from refitd.reclaim.slots import MAKING, hand_back, layout_at, survey, withdraw
from refitd.reclaim.trash import discard, empty, examine
from refitd.root.handle import Identity, root_at
from refitd.root.scan import Discarded, Emptied, Gone, Refused, Slot
from refitd_client.checkpoint import header
from refitd_client.contract.naming import layout_of, slots_path
from support.checkpoints import publish, tensors

RUN = "exp/trial"
TRAINER, STRANGER, GROUP = 65001, 65002, 65003

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / ".refitd").mkdir(parents=True)
    publish(tmp_path / "root", RUN, 1, tensors(1))
    return tmp_path / "root"


@pytest.fixture
def handle(root: Path) -> Iterator[int]:
    with root_at(root) as opened:
        yield opened


def discarded(handle: int, step: int = 1) -> Discarded:
    path = f"{RUN}/v{step:06d}"
    found = examine(handle, path)
    assert isinstance(found, Identity)
    done = discard(handle, path, found)
    assert isinstance(done, Discarded)
    return done


def slots_of(root: Path) -> Path:
    return root / slots_path(RUN)


def test_a_slot_holds_the_shards_and_nothing_else(root: Path, handle: int) -> None:
    version = root / RUN / "v000001"
    (version / "config.json").write_text("{}")
    inodes = {path.name: path.stat().st_ino for path in version.glob("*.safetensors")}
    layout = layout_of(header.layout(path) for path in version.glob("*.safetensors"))
    assert layout_at(handle, f"{RUN}/v000001") == layout
    slot = hand_back(handle, discarded(handle), RUN)
    assert isinstance(slot, Slot)
    assert (slot.layout, slot.fault, survey(handle)) == (layout, None, [slot])
    folder = root / slot.path
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == inodes
    assert slot.bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert not version.exists()
    assert empty(handle) == Emptied(1)
    assert survey(handle) == [slot]


def test_a_full_disk_without_room_for_a_box_in_the_trash_is_no_hindrance(
    root: Path, handle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / ".refitd" / "trash").mkdir(mode=0o700)
    mkdir = os.mkdir

    def full(name: str, *args: object, **more: object) -> None:
        if len(name) == 32:
            raise OSError(28, "No space left on device")
        mkdir(name, *args, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", full)
        done = discarded(handle)
    assert "/" not in done.where
    assert isinstance(hand_back(handle, done, RUN), Slot)
    assert empty(handle) == Emptied(0)


def _link_elsewhere(version: Path) -> None:
    os.link(next(version.glob("*.safetensors")), version.parents[2] / "mine")


def _link_within(version: Path) -> None:
    os.link(next(version.glob("*.safetensors")), version / "other.safetensors")


def _symlink(version: Path) -> None:
    (version / "more.safetensors").symlink_to("/etc/passwd")


def _fifo(version: Path) -> None:
    os.mkfifo(version / "config.json")


def _folder(version: Path) -> None:
    (version / "code").mkdir()


def _no_header(version: Path) -> None:
    (version / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 8)


def _empty_file(version: Path) -> None:
    (version / "model-00001-of-00002.safetensors").write_bytes(b"")


def _no_shards(version: Path) -> None:
    for path in version.glob("*.safetensors"):
        path.rename(version / f"{path.stem}.refit-delta")


SPOILT = [
    (_link_elsewhere, "2 hard links"),
    (_link_within, "2 hard links"),
    (_symlink, "no plain file"),
    (_fifo, "no plain file"),
    (_folder, "no plain file"),
    (_no_header, "no safetensors file"),
    (_empty_file, "no safetensors file"),
    (_no_shards, "has no \\*.safetensors"),
]


@pytest.mark.parametrize(("spoil", "reason"), SPOILT)
def test_what_is_not_refitd_s_alone_is_deleted_and_not_recycled(
    root: Path, handle: int, spoil: Callable[[Path], None], reason: str
) -> None:
    spoil(root / RUN / "v000001")
    before = (root / "mine").read_bytes() if (root / "mine").exists() else None
    refused = hand_back(handle, discarded(handle), RUN)
    assert isinstance(refused, Refused)
    assert reason.replace("\\", "") in refused.reason
    assert survey(handle) == []
    assert empty(handle) == Emptied(1)
    assert before is None or (root / "mine").read_bytes() == before


def test_the_publisher_takes_the_slot_while_it_is_withdrawn(root: Path, handle: int) -> None:
    """The rename decides, and who is second finds nothing."""
    slot = hand_back(handle, discarded(handle), RUN)
    assert isinstance(slot, Slot)
    (root / slot.path).rename(root / RUN / ".incoming-taken")
    assert withdraw(handle, slot) == Gone(slot.path)
    assert len(list((root / RUN / ".incoming-taken").iterdir())) == 2


def test_a_slot_that_is_withdrawn_goes_through_the_trash(root: Path, handle: int) -> None:
    slot = hand_back(handle, discarded(handle), RUN)
    assert isinstance(slot, Slot)
    assert isinstance(withdraw(handle, slot), Discarded)
    assert not slots_of(root).exists(), "it was the last of its run"
    empty(handle)
    assert survey(handle) == []
    assert list((root / ".refitd" / "trash").iterdir()) == []


def test_what_others_put_among_the_slots_is_never_touched(root: Path, handle: int) -> None:
    (slots_of(root) / "mine").mkdir(parents=True)
    (found,) = survey(handle)
    assert not found.ours
    assert "not put there by this service" in (found.fault or "")


def test_a_slot_that_was_being_made_or_was_spoilt_is_known_as_such(root: Path, handle: int) -> None:
    slot = hand_back(handle, discarded(handle), RUN)
    assert isinstance(slot, Slot)
    (root / slot.path / "refit.json").write_text("{}")
    (slots_of(root) / f"{MAKING}x").mkdir()
    making, spoilt = survey(handle)
    assert "was being made" in (making.fault or "")
    assert "refit.json" in (spoilt.fault or "")


def test_a_link_in_place_of_a_run_s_slots_is_not_followed(root: Path, handle: int, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    slots_of(root).parent.mkdir()
    slots_of(root).symlink_to(tmp_path / "precious")
    refused = hand_back(handle, discarded(handle), RUN)
    assert isinstance(refused, Refused)
    assert "links are never followed" in refused.reason
    assert list((tmp_path / "precious").iterdir()) == []


def _as_user(user: int, groups: list[int], act: Callable[[], object]) -> str:
    """What an act of another user's gives, in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(groups)
            os.setgid(groups[0] if groups else user)
            os.setuid(user)
            told = repr(act())
        except BaseException as error:  # it is told, and the child must not go on
            told = repr(error)
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    told = b"".join(iter(lambda: os.read(reader, 65536), b"")).decode()
    os.close(reader)
    os.waitpid(child, 0)
    return told


def _give(folder: Path, user: int, group: int, mode: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, group)
        path.chmod(mode if path.is_dir() else 0o644)


def _open_up(path: Path) -> None:
    """The folders of the test itself are its user's alone."""
    for folder in path.parents:
        if folder.stat().st_mode & 0o001 == 0:
            folder.chmod(folder.stat().st_mode | 0o011)


@as_root
def test_a_service_that_is_root_gives_the_trainer_its_slots(root: Path, handle: int) -> None:
    _open_up(root / "x")
    _give(root / "exp", TRAINER, TRAINER, 0o755)
    slot = hand_back(handle, discarded(handle), RUN)
    assert isinstance(slot, Slot)
    target = root / RUN / ".incoming-taken"
    assert _as_user(STRANGER, [], lambda: (root / slot.path).rename(target)).startswith("PermissionError")
    assert "PosixPath" in _as_user(TRAINER, [], lambda: (root / slot.path).rename(target))


@as_root
def test_a_trainer_of_the_same_group_takes_slots_and_another_does_not(root: Path) -> None:
    _open_up(root / "x")
    service = 65010
    _give(root, service, GROUP, 0o2770)
    _give(root / "exp", TRAINER, GROUP, 0o2770)

    def recycle() -> object:
        with root_at(root) as handle:
            return hand_back(handle, discarded(handle), RUN)

    assert _as_user(service, [GROUP], recycle).startswith("Slot(")
    (slot,) = slots_of(root).iterdir()
    target = root / RUN / ".incoming-taken"
    assert stat.S_IMODE(slots_of(root).stat().st_mode) == 0o2770
    assert _as_user(STRANGER, [], lambda: slot.rename(target)).startswith("PermissionError")
    assert "PosixPath" in _as_user(TRAINER, [GROUP], lambda: slot.rename(target))


@as_root
def test_without_a_shared_group_what_is_missing_is_said(root: Path) -> None:
    """The run's folder is everybody's, so the version can be collected; its files cannot be handed back."""
    _open_up(root / "x")
    service = 65010
    _give(root, service, service, 0o755)
    _give(root / "exp", TRAINER, TRAINER, 0o777)

    def recycle() -> object:
        with root_at(root) as handle:
            return hand_back(handle, discarded(handle), RUN)

    told = _as_user(service, [service], recycle)
    assert f"the trainer is user {TRAINER}" in told
    assert f"group {TRAINER}, which the service (user {service}) is not in" in told
