"""What a look into a folder finds: which files are a version's, what they take, and what changes until they go."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from refitd.policy.holdings import Holdings
from refitd.reclaim import folders, trash
from refitd.reclaim.folders import look_at
from refitd.reclaim.trash import discard, discard_files, empty
from refitd.reclaim.trash import room as trash_room
from refitd.root.handle import root_at
from refitd.root.scan import Discarded, Emptied, Refused
from support.checkpoints import publish, tensors, write_model
from support.rawfiles import raw

PATH = "run/v000001"


@pytest.fixture
def handle(root: Path) -> Iterator[int]:
    with root_at(root) as opened:
        yield opened


def found(handle: int, path: str = PATH, known: Holdings | None = None) -> Holdings:
    holdings = look_at(handle, path, known)
    assert isinstance(holdings, Holdings), holdings
    return holdings


def sizes(folder: Path, *names: str) -> int:
    return sum((folder / name).stat().st_size for name in names)


def test_what_the_publisher_wrote_is_a_versions_from_the_first_file_to_the_last(root: Path, handle: int) -> None:
    folder = publish(root, "run", 1, tensors(1))
    holdings = found(handle)
    assert set(holdings.files) == set(os.listdir(folder))
    assert list(holdings.files)[-1] == "refit.json", "what proves that it is a version goes last"
    assert (holdings.bytes, holdings.foreign_bytes) == (sizes(folder, *os.listdir(folder)), 0)


def test_what_a_trainer_saved_goes_by_name_and_what_it_saved_besides_stays(root: Path, handle: int) -> None:
    folder = write_model(root / PATH)
    for name in ("tokenizer.json", "modeling_own.py", "optimizer.pt", "train.log", ".cache"):
        (folder / name).write_text(name)
    (folder / "global_step1" / "deep").mkdir(parents=True)
    (folder / "global_step1" / "deep" / "state").write_bytes(b"x" * 100)
    holdings = found(handle)
    assert list(holdings.files) == ["config.json", "modeling_own.py", "tokenizer.json", "model.safetensors"]
    assert holdings.others == (".cache", "global_step1", "optimizer.pt", "train.log")
    assert holdings.foreign_bytes == sizes(folder, ".cache", "optimizer.pt", "train.log") + 100
    assert holdings.refusal is None
    assert ".cache, global_step1, optimizer.pt and 1 more in its folder belong to no version" in (holdings.rest or "")


HEADER = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
TORN = {
    "data": (raw(HEADER, b"12"), True),
    "all of its data": (raw(HEADER), True),
    "half of its header": (raw(HEADER)[:20], False),
    "all but its length": (raw(HEADER)[:8], False),
    "everything": (b"", False),
}


@pytest.mark.parametrize(("data", "is_proven"), TORN.values(), ids=TORN.keys())
def test_a_file_that_was_cut_off_is_a_versions_if_its_header_is_whole(
    root: Path, handle: int, data: bytes, *, is_proven: bool
) -> None:
    (root / PATH).mkdir(parents=True)
    (root / PATH / "model.safetensors").write_bytes(data)
    holdings = found(handle)
    assert (holdings.refusal is None) is is_proven
    assert holdings.bytes + holdings.foreign_bytes == len(data)


def test_what_has_the_name_of_weights_and_is_no_plain_file_proves_nothing(root: Path, handle: int) -> None:
    (root / PATH).mkdir(parents=True)
    write_model(root / "elsewhere")
    (root / PATH / "model.safetensors").symlink_to(root / "elsewhere" / "model.safetensors")
    (root / PATH / "refit.json").symlink_to(root / "elsewhere" / "config.json")
    os.mkfifo(root / PATH / "other.safetensors")
    assert found(handle).refusal is not None


def test_files_are_opened_once_as_long_as_nothing_changes(
    root: Path, handle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(root / PATH)
    first = found(handle)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "read_header", None)  # to call it would fail
        assert found(handle, known=first) is first
    (folder / "model.safetensors").write_bytes(b"something else")
    assert found(handle, known=first).refusal is not None


def test_a_look_is_bounded(root: Path, handle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(root / PATH)
    (folder / "many").mkdir()
    for number in range(20):
        (folder / "many" / str(number)).write_bytes(b"x" * 10)
    monkeypatch.setattr(folders, "MAX_COUNTED", 5)
    assert found(handle).foreign_bytes == 50, "what lies beyond is not counted"
    monkeypatch.setattr(trash, "MAX_NAMES", 2)
    outcome = look_at(handle, PATH)
    assert isinstance(outcome, Refused)
    assert "more than 2 names" in outcome.reason


def test_a_hole_takes_no_room(root: Path, handle: int) -> None:
    folder = write_model(root / PATH)
    os.truncate(folder / "config.json", 2**40)
    assert found(handle).bytes < 2**20


def right_before_the_rename_of(name: str, act: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    real, done = os.rename, list[str]()

    def rename(source: str, target: str, **more: int) -> None:
        if source == name and not done:
            done.append(name)
            act()
        real(source, target, **more)

    patch.setattr(os, "rename", rename)


@pytest.mark.parametrize("name", ["thesis.tex", "inner/thesis.tex"])
def test_a_folder_that_somebody_writes_into_while_it_is_moved_is_put_back(
    root: Path, handle: int, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = write_model(root / PATH)

    def write() -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("years of work")

    holdings = found(handle)
    right_before_the_rename_of("v000001", write, monkeypatch)
    outcome = discard(handle, PATH, holdings.identity, holdings.seal)
    assert isinstance(outcome, Refused)
    assert "was changed while it was moved" in outcome.reason
    assert empty(handle).left == ()
    assert (folder / name).read_text() == "years of work"
    assert (folder / "model.safetensors").exists()


def test_a_file_that_is_replaced_while_the_version_goes_is_put_back(
    root: Path, handle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(root / PATH)
    (folder / "notes").write_text("months of work")
    (folder / "thesis").write_text("years of work")
    holdings = found(handle)
    right_before_the_rename_of("config.json", lambda: (folder / "thesis").replace(folder / "config.json"), monkeypatch)
    outcome = discard_files(handle, PATH, holdings.identity, holdings.files)
    assert isinstance(outcome, Refused)
    assert "was swapped while it was moved" in outcome.reason
    assert empty(handle).left == ()
    assert (folder / "config.json").read_text() == "years of work"
    assert (folder / "model.safetensors").exists(), "nothing goes after a surprise"


def test_a_file_that_was_written_to_since_the_look_is_left_alone(root: Path, handle: int) -> None:
    folder = write_model(root / PATH)
    (folder / "notes").touch()
    holdings = found(handle)
    (folder / "model.safetensors").write_text("years of work")
    outcome = discard_files(handle, PATH, holdings.identity, holdings.files)
    assert isinstance(outcome, Refused)
    assert "was changed since it was looked at" in outcome.reason
    assert (folder / "model.safetensors").read_text() == "years of work"


def test_of_a_folder_that_holds_more_only_the_versions_files_go(root: Path, handle: int) -> None:
    folder = write_model(root / PATH)
    (folder / "notes").touch()
    holdings = found(handle)
    assert discard_files(handle, PATH, holdings.identity, holdings.files) == Discarded(PATH)
    assert os.listdir(folder) == ["notes"]
    assert trash_room(handle) == (holdings.bytes, 0)
    assert empty(handle) == Emptied(1)
    assert trash_room(handle) == (0, 0)


def test_what_a_kill_left_in_the_trash_is_deleted_only_if_it_is_what_was_looked_at(root: Path, handle: int) -> None:
    """The process died between the rename and the check, of a folder and of a file."""
    box = root / ".refitd" / "trash" / ("0" * 32)
    box.mkdir(parents=True)
    folder, other = write_model(root / PATH), write_model(root / "run" / "v000002")
    holdings = found(handle)
    name, stamp = next(iter(found(handle, "run/v000002").files.items()))
    folder.rename(box / f"caught-{holdings.identity.inode}-{holdings.seal}")
    (other / name).rename(box / f"caught-{(other / name).stat().st_ino}-{stamp}")
    for path in list(box.iterdir()):
        precious = path / "thesis" if path.is_dir() else path
        precious.write_text("years of work")
        assert trash_room(handle)[1] > 0
        assert any("moved by mistake" in sentence for sentence in empty(handle).left)
        assert precious.read_text() == "years of work"
        precious.unlink()
    assert empty(handle) == Emptied(1), "what is as it was is deleted to the end"
