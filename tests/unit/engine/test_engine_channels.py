"""The folder of sockets, with all that can lie in it: what is found, what is passed over, and that nothing hangs."""

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from refitd.engine.plugin import Launch
from refitd_client.contract.plugin import MAX_LINE, PluginRequest
from refitd_inside.client import EngineRankGroup, Stock
from refitd_inside.client import channels as channels_module
from refitd_inside.client.channels import Channels, SocketList
from refitd_plugin.channel import Channel, Reply
from support.plugged_mini import wait_for
from support.sockets import short

LAUNCH = Launch(port=1, seed=2)
HELLO: Reply = {
    "ok": True, "protocol": 1, "plugin": "0.1.0", "sglang": "0.5.23", "state": "on", "host": "a",
    "port": 1, "seed": 2, "rank": 0, "ranks": 1, "dp_rank": None,
}  # fmt: skip


def folder(root: Path) -> Path:
    made = root / ".refitd" / "engines"
    made.mkdir(mode=0o770, exist_ok=True)
    return made


def opened(root: Path, handle: Callable[[PluginRequest], Reply]) -> Path:
    """A channel of the plugin's own."""
    each = Channel(root, 0, handle)
    each.open()
    path = folder(root) / each.name
    wait_for(path)
    return path


@contextmanager
def impostor(root: Path, name: str, talk: Callable[[socket.socket], None]) -> Iterator[None]:
    """A process that listens there, and says what it likes to the first who comes."""
    with socket.socket(socket.AF_UNIX) as listener:
        with short(folder(root) / name) as path:
            listener.bind(path)
        listener.listen()

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                talk(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield


def dead(root: Path, name: str) -> None:
    with socket.socket(socket.AF_UNIX) as left_over, short(folder(root) / name) as path:
        left_over.bind(path)


async def test_a_request_to_known_ranks_does_not_list_all_sockets(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(root, lambda _: HELLO)
    channels = Channels(root)
    rank_group = await channels.rank_group(LAUNCH)
    assert isinstance(rank_group, EngineRankGroup)
    listed: list[int] = []
    monkeypatch.setattr(channels_module, "_sockets", lambda descriptor: listed.append(descriptor) or ())
    assert await channels.ask_all(rank_group.members, {"do": "forget"}, 5.0) == [HELLO]
    assert listed == []


async def test_what_processes_left_behind_and_what_others_put_there_is_passed_over(root: Path, tmp_path: Path) -> None:
    place = folder(root)
    for number in range(20):
        dead(root, f"0-{number}-ab.sock")
    os.mkfifo(place / "0-30-ab.sock")
    (place / "0-31-ab.sock").symlink_to("/dev/zero")
    (place / "0-32-ab.sock").mkdir()
    (place / "0-33-ab.sock").write_text("a file")
    (place / "..sock").write_text("")
    live = opened(root, lambda _: HELLO)
    (place / "0-34-ab.sock").symlink_to(live)  # the same engine twice would be two that cannot be told apart
    rank_group = await Channels(root).rank_group(LAUNCH)
    assert isinstance(rank_group, EngineRankGroup), rank_group
    assert [member.socket for member in rank_group.members] == [live.name]


async def test_a_socket_that_is_left_over_is_named_where_nobody_else_answers(root: Path) -> None:
    dead(root, "0-1-ab.sock")
    assert await Channels(root).rank_group(LAUNCH) == Stock(
        "no plugin answers for it; socket 0-1-ab.sock is left over: no process listens there"
    )


def _nothing(connection: socket.socket) -> None:
    connection.recv(1000)


def _half(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b'{"ok":true,"protocol":1,"plug')


def _endless(connection: socket.socket) -> None:
    connection.sendall(b"x" * (2 * MAX_LINE))
    connection.recv(1000)


def _nonsense(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b"[" * 5000 + b"\n")


def _many(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b'{"ok":true,"protocol":1,"more":[' + b"[]," * 10_000 + b"[]]}\n")


def _silent(connection: socket.socket) -> None:
    while connection.recv(1000):
        pass


@pytest.mark.parametrize(
    ("talk", "reason"),
    [
        (_nothing, "broke off without an answer"),
        (_half, "broke off without an answer"),
        (_endless, "cannot be spoken to"),
        (_nonsense, "answered something that is no JSON object"),
        (_many, "answered something that is no JSON object, or a large one"),
        (_silent, "did not answer within 0.2 s"),
    ],
)
async def test_a_hello_that_does_not_come_whole_leaves_the_engine_to_itself_and_hides_no_other(
    root: Path, monkeypatch: pytest.MonkeyPatch, talk: Callable[[socket.socket], None], reason: str
) -> None:
    with impostor(root, "0-1-ab.sock", talk), monkeypatch.context() as hurried:
        hurried.setattr(channels_module, "HANDSHAKE_SECONDS", 0.2)
        stock = await Channels(root).rank_group(LAUNCH)
        assert isinstance(stock, Stock)
        assert stock.reason.startswith(f"no plugin answers for it; socket 0-1-ab.sock {reason}")
    opened(root, lambda _: HELLO)
    assert isinstance(await Channels(root).rank_group(LAUNCH), EngineRankGroup)


async def test_without_a_folder_there_is_no_plugin(root: Path) -> None:
    assert await Channels(root).rank_group(LAUNCH) == Stock("no plugin answers for it")
    assert await Channels(root / "nowhere").rank_group(LAUNCH) == Stock("no plugin answers for it")


async def test_a_link_in_place_of_the_folder_is_not_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / ".refitd").mkdir(parents=True)
    opened(tmp_path / "elsewhere", lambda _: HELLO)
    (root / ".refitd" / "engines").symlink_to(tmp_path / "elsewhere" / ".refitd" / "engines")
    stock = await Channels(root).rank_group(LAUNCH)
    assert isinstance(stock, Stock)
    assert "cannot be listed" in stock.reason


async def test_a_folder_that_everyone_may_write_to_is_not_believed(root: Path) -> None:
    opened(root, lambda _: HELLO)
    folder(root).chmod(0o777)
    stock = await Channels(root).rank_group(LAUNCH)
    assert isinstance(stock, Stock)
    assert "everyone may write" in stock.reason


STRANGER = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
folder, name = os.path.split(sys.argv[1])
os.chdir(folder)
listener.bind(name)
os.chmod(name, 0o777)
os.setgroups([]), os.setgid(4242), os.setuid(4242)
listener.listen()
print("listening", flush=True)
connection, _ = listener.accept()
print(len(connection.recv(1000)), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_a_socket_of_a_strangers_process_is_not_spoken_to(root: Path) -> None:
    path = folder(root) / "0-1-ab.sock"
    said = asyncio.subprocess.PIPE
    stranger = await asyncio.create_subprocess_exec(sys.executable, "-c", STRANGER, str(path), stdout=said)
    assert stranger.stdout is not None
    assert await stranger.stdout.readline() == b"listening\n"
    stock = await Channels(root).rank_group(LAUNCH)
    assert isinstance(stock, Stock)
    assert "belongs to user 4242" in stock.reason
    assert await stranger.stdout.readline() == b"0\n"  # nothing was sent
    await stranger.wait()


async def test_hellos_are_said_again_when_a_socket_comes_or_goes_and_not_before(root: Path) -> None:
    greeted: list[str] = []

    def handle(request: PluginRequest) -> Reply:
        greeted.append(request.do)
        return HELLO

    path = opened(root, handle)
    channels = Channels(root)
    for _ in range(3):
        assert isinstance(await channels.rank_group(LAUNCH), EngineRankGroup)
    assert greeted == ["hello"]
    channels.doubt()
    await channels.rank_group(LAUNCH)
    assert greeted == ["hello"] * 2
    dead(root, "0-1-ab.sock")
    await channels.rank_group(LAUNCH)
    assert greeted == ["hello"] * 3
    path.unlink()
    assert isinstance(await channels.rank_group(LAUNCH), Stock)


async def test_engines_that_are_looked_at_within_a_second_share_what_a_list_of_the_sockets_shows(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(root, lambda _: HELLO)
    listed: list[int] = []
    real = channels_module._sockets

    def noted(descriptor: int) -> tuple[str, ...]:
        listed.append(descriptor)
        return real(descriptor)

    monkeypatch.setattr(channels_module, "_sockets", noted)
    sockets = SocketList(root, seconds=3600.0)
    engines = [Channels(root, sockets) for _ in range(3)]
    first = [await engine.rank_group(LAUNCH) for engine in engines]
    assert len(listed) == 3, "an engine that was not looked at before is looked for in what is there now"
    for _ in range(5):
        assert [await engine.rank_group(LAUNCH) for engine in engines] == first
    assert len(listed) == 4
    engines[0].doubt()
    assert await engines[0].rank_group(LAUNCH) == first[0]
    assert len(listed) == 5, "what is in doubt is not believed"


async def test_descriptors_are_given_back_also_by_a_call_that_is_cancelled(root: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(_: PluginRequest) -> Reply:
        begun.set()
        go_on.wait(30)
        return HELLO

    opened(root, slow)
    before = _open_folders(root)
    looking = asyncio.create_task(Channels(root).rank_group(LAUNCH))
    await asyncio.to_thread(begun.wait, 30)
    assert _open_folders(root) == before + 1
    looking.cancel()
    await asyncio.wait({looking})
    go_on.set()
    assert _open_folders(root) == before


def _open_folders(root: Path) -> int:
    """How many descriptors of the folder this process has; the channel has one of its own."""
    links = Path("/proc/self/fd").iterdir()
    return sum(os.path.realpath(link) == os.path.realpath(folder(root)) for link in links)
