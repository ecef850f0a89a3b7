"""What the channel answers: a prepare gives way to a newer one, and ends at its deadline."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from refitd_client.contract.plugin import PluginRequest
from refitd_client.validation.contents import ReadingStoppedError
from refitd_plugin import rank_plugin
from refitd_plugin.rank_plugin import RequestHandler

VERSION = SimpleNamespace(label="run~v000002", kind="full", digest="xxh3:00", signature="", nbytes=7)


class Reading:
    """An engine that reads until it is told to stop, but for what is named in `quick`."""

    def __init__(self, *quick: str) -> None:
        self.quick = quick
        self.begun = threading.Event()

    def prepare(self, path: str, *_: Any, stop: threading.Event, **__: Any) -> Any:
        if Path(path).name in self.quick:
            return VERSION
        self.begun.set()
        while not stop.is_set():
            time.sleep(0.01)
        raise ReadingStoppedError


def desk_of(engine: Any) -> RequestHandler:
    return RequestHandler(Path("/root"), SimpleNamespace(), engine, None, "0.1.0")  # type: ignore[arg-type]


def prepare(path: str) -> PluginRequest:
    return PluginRequest(do="prepare", path=path)


def test_a_newer_version_is_prepared_in_the_place_of_an_older_one() -> None:
    engine, replies = Reading("v000002"), []
    each = desk_of(engine)
    older = threading.Thread(target=lambda: replies.append(each.handle(prepare("run/v000001"))))
    older.start()
    assert engine.begun.wait(60)
    assert each.handle(prepare("run/v000002"))["version"] == "run~v000002"
    older.join(60)
    assert [(reply["ok"], "another version" in reply["reason"]) for reply in replies] == [(False, True)]


def test_what_is_not_wanted_any_more_is_not_kept_when_its_prepare_ends() -> None:
    class Forgetful(Reading):
        def forget(self) -> None: ...

    engine, replies = Forgetful(), []
    each = desk_of(engine)
    preparing = threading.Thread(target=lambda: replies.append(each.handle(prepare("run/v000001"))))
    preparing.start()
    assert engine.begun.wait(60)
    assert each.handle(PluginRequest(do="forget"))["ok"]
    preparing.join(60)
    assert [reply["ok"] for reply in replies] == [False]


def test_a_prepare_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_plugin, "PREPARE_SECONDS", 0.01)
    reply = desk_of(Reading()).handle(prepare("run/v000001"))
    assert (reply["ok"], "stopped after 0.01 s" in reply["reason"]) == (False, True)


TURNS = """
import ctypes, sys
from refitd_plugin.channel import listening_turns, short_turns

def now():
    return sys.getswitchinterval(), ctypes.CDLL(None).prctl(30)  # nanoseconds by which Linux may lengthen a wait

usual = now()
with short_turns():
    with short_turns():
        assert now()[0] < usual[0]
    short = now()
assert now() == usual
with listening_turns():
    listening = now()
    with short_turns():
        assert now() == short
    assert now() == listening
assert now() == usual
assert short[0] < listening[0] < usual[0], (short, listening, usual)
assert short[1] == listening[1] == 1 < usual[1]
"""


def test_turns_are_short_while_something_is_prepared_and_for_the_thread_that_a_request_wakes() -> None:
    """That thread would wait for its first turn for as long as an engine's loop is faster than it is. In a process of
    its own: in this one the channels of other tests listen.
    """
    subprocess.run([sys.executable, "-c", TURNS], check=True)
