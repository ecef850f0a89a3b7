"""What is opened where others write to is a plain file, nothing waits for it, and files are opened nowhere else."""

import ast
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from refitd.root.ownership import RootGuard, RootMark, StartRefusedError, owned
from refitd.state.journal.recovery import last_state_folder, write_note
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.files.plain_file import NotPlainError, open_folder, open_plain, read_plain
from refitd_client.http.publisher_client import root_name
from refitd_client.publish.run_folder import RECORD_NAME, newest_in
from refitd_client.transport import exporter, offer_file
from refitd_doctor.journal import still

REPOSITORY = Path(__file__).parents[3]
PACKAGES = [
    "client/refitd_client",
    "service/refitd",
    "service/refitd_doctor",
    "service/refitd_front",
    "service/refitd_hosts",
    "service/refitd_inside",
    "service/refitd_plan",
    "service/refitd_plugin",
    "service/refitd_sglang",
]
MAY_OPEN = {
    "client/refitd_client/files/plain_file.py": "it is the one place",
    "client/refitd_client/files/durable.py": "it makes files (O_EXCL: it opens none that is there), and syncs folders",
    "client/refitd_client/http/connection.py": "a file of tokens, certificates and keys, which the user names",
    "client/refitd_client/transport/memory.py": "/proc",
    "service/refitd_plan/model.py": "a model's config, which the user names",
    "service/refitd_doctor/root.py": "a file in a folder that it has just made",
    "client/refitd_client/parts.py": "the pyproject.toml of a checkout",
    "service/refitd/engine/registry.py": "the engines file, which the operator names",
    "service/refitd/engine/http.py": "a file of keys, which the operator names",
    "service/refitd/reclaim/trash.py": "a handle on a folder that opens nothing (O_PATH)",
    "service/refitd/root/ownership.py": "/proc",
    "service/refitd/tokens.py": "a file of tokens, which the operator names",
    "service/refitd_plugin/memory/driver.py": "/proc/self/fd: a file that is open already",
    "service/refitd_plugin/memory/source.py": "the model that the operator starts the server on",
}
METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "fromfile", "memmap"}


def opens(call: ast.Call) -> bool:
    """Whether a call opens a file by its path, as far as its words say."""
    match call.func:
        case ast.Name(id="open"):
            return True
        case ast.Attribute(value=ast.Name(id="os" | "io"), attr="open"):
            return True
        case ast.Attribute(attr="open"):  # of a Path; others that are called so are given no mode
            modes = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "mode")]
            return any(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in modes)
        case ast.Attribute(attr=name):
            return name in METHODS
        case _:
            return False


def places() -> Iterator[str]:
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Call) and opens(node):
                    yield f"{path.relative_to(REPOSITORY)}:{node.lineno}"


def test_files_are_opened_in_one_place_and_where_it_is_said_why_not() -> None:
    """Where this fails, open it by `refitd_client.files.plain_file`. A file that the operator alone names may
    be listed.
    """
    found = list(places())
    assert [place for place in found if place.partition(":")[0] not in MAY_OPEN] == []
    assert MAY_OPEN.keys() - {place.partition(":")[0] for place in found} == set(), "listed, and opens nothing"


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


PLANTS: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "socket": socket_at,
}


@pytest.fixture(params=PLANTS)
def plant(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short

    def planted(path: Path) -> Path:
        path.parent.mkdir(exist_ok=True, parents=True)
        PLANTS[request.param](path.relative_to(tmp_path))
        return path

    return planted


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY, os.O_RDWR | os.O_CREAT])
def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path, plant: Callable[[Path], Path], flags: int) -> None:
    path = plant(tmp_path / "x")
    with pytest.raises(NotPlainError, match="not a plain file"):
        open_plain(path, flags)
    with pytest.raises(NotPlainError, match="not a plain file"):
        read_plain(path, 10)


def test_a_plain_file_is_read_as_far_as_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert (read_plain(tmp_path / "x", 3), read_plain(tmp_path / "x", 9)) == (b"123", b"12345")
    with pytest.raises(NotADirectoryError):
        open_folder(tmp_path / "x")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    assert read_plain(tmp_path / "link", 3, follow=True) == b"123"


def test_nothing_of_the_service_s_folder_is_waited_for(tmp_path: Path, plant: Callable[[Path], Path]) -> None:
    """The root's name, the journal's place, the lock, the secret: each says what is wrong."""
    own = tmp_path / SERVICE_FOLDER
    plant(own / "id")
    fault = RootGuard(tmp_path, RootMark(name="a", mount="/"))()
    assert fault is not None
    assert "cannot be read" in fault
    assert root_name(tmp_path) is None
    plant(own / "journal")
    with pytest.raises(NotPlainError):
        last_state_folder(tmp_path)
    plant(own / "lock")
    with pytest.raises(StartRefusedError, match="not a plain file"), owned(tmp_path):
        pass
    with pytest.raises(NotPlainError), still(tmp_path):
        pass
    plant(own / offer_file.NAME)
    with pytest.raises(offer_file.HandoverKeyRefusedError, match="no plain file"):
        offer_file.read_secret(tmp_path)
    run = tmp_path / "run"
    plant(run / exporter.NAME)
    assert not exporter.is_there(run)
    plant(run / RECORD_NAME)
    with pytest.raises((OSError, ValueError)):
        newest_in(run)


def test_a_journal_s_place_is_written_again_over_what_lay_there(tmp_path: Path) -> None:
    (tmp_path / SERVICE_FOLDER).mkdir()
    os.mkfifo(tmp_path / SERVICE_FOLDER / "journal")
    write_note(tmp_path, str(tmp_path / "state"))
    assert last_state_folder(tmp_path) == tmp_path / "state"
