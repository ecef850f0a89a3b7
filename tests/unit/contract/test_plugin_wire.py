"""What service, plugin and trainer of two releases say to each other keeps its words, whatever the code calls them."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from refitd_client.contract import plugin
from refitd_client.contract import plugin as answer
from refitd_client.contract.naming import installed_release
from refitd_client.contract.plugin import (
    Answer,
    Handshake,
    LoadPlan,
    Owner,
    PluginRequest,
    UpdateOutcome,
    is_socket_name,
    socket_name,
)
from refitd_client.transport import exporter, offer_file
from refitd_plugin.rank_plugin import RequestHandler
from support.tiny_rank import Rank, version


def fields(kind: type[msgspec.Struct]) -> set[str]:
    return {each.encode_name for each in msgspec.structs.fields(kind)}


def test_the_names_of_files_and_sockets() -> None:
    assert (plugin.PROTOCOL, plugin.ENGINES_FOLDER, plugin.MAX_LINE) == (1, "engines", 65536)
    assert socket_name(3, 77, "0a1b2c3d") == "3-77-0a1b2c3d.sock"
    assert is_socket_name("3-77-0a1b2c3d.sock")
    assert not is_socket_name("3-77-0a1b2c3d.sock.old")
    assert (exporter.NAME, exporter.OFFERS, offer_file.NAME) == (".lender.lock", ".offer-", "handover.key")


def test_the_words_of_a_request() -> None:
    do = next(each.type for each in msgspec.structs.fields(PluginRequest) if each.encode_name == "do")
    assert do == Literal["hello", "prepare", "contents", "forget", "lead"]
    assert fields(PluginRequest) == {
        "do", "path", "offer", "allow_missing", "allow_extra", "allow_dtype_cast", "check", "prove", "owner", "seconds",
        "peer",
    }  # fmt: skip
    assert fields(Owner) == {"service", "root", "host", "pid", "epoch"}


def test_the_words_of_a_handshake(root: Path, startup: Path) -> None:
    rank = Rank(startup, port=30000, random_seed=7)
    rank.answer(version(root, 1))
    installed = rank.plugin.rank_of(rank.updater)
    handler = RequestHandler(root, installed.process, installed.engine, None, installed_release())
    said = handler.handle(PluginRequest(do="hello"))
    assert set(said) == {
        "ok", "protocol", "plugin", "sglang", "state", "reason", "host", "pid", "port", "seed", "rank", "ranks",
        "dp_rank", "model", "served", "plan", "kinds", "boot", "device", "backends", "proves", "leads", "leader",
        "no_deltas", "needs",
    }  # fmt: skip
    assert (said["state"], said["kinds"]) == ("on", ["full", "delta", "handover"])
    assert set(said["plan"]) == {"replays", "copies", "loader", "proven", "reason"}
    read = msgspec.convert(said, Handshake)
    assert (read.port, read.seed, read.rank, read.ranks) == (30000, 7, 0, 1)
    assert fields(Handshake) - {"vllm"} < set(said), "the name of another kind of engine stands for its release"
    assert fields(LoadPlan) < set(said["plan"])


def test_the_words_of_a_prepare(root: Path, startup: Path) -> None:
    installed = (rank := Rank(startup)).plugin.rank_of(rank.updater)
    handler = RequestHandler(root, installed.process, installed.engine, None, "0.1.0")
    version(root, 1)
    said = handler.handle(PluginRequest(do="prepare", path="run/v000001"))
    assert set(said) == {"ok", "bytes", "ms", "stages", "version", "kind", "digest", "signature"}
    assert (said["kind"], set(said["stages"])) == ("full", {"check", "ready"})
    assert set(handler.handle(PluginRequest(do="prepare", path="run/v000002"))) == {"ok", "reason"}


def test_the_words_of_an_answer() -> None:
    full: Any = Answer(
        outcome=UpdateOutcome.REFUSED,
        reason="r",
        plugin="p",
        version="v",
        how="replay",
        contents="c",
        needs=answer.NEEDS_FULL,
        proved=1,
        ms={"load": 1.0},
    )
    assert full.message == (
        'Refused, the weights are what they were: r refitd-plugin={"protocol":1,"outcome":"refused","plugin":"p",'
        '"reason":"r","version":"v","how":"replay","contents":"c","needs":"full","proved":1,"ms":{"load":1.0}}'
    )
    assert [each.value for each in UpdateOutcome] == ["served", "refused", "restored", "unknown"]
    assert (answer.NEEDS_FULL, answer.NEEDS_LEADER) == ("full", "leader")


def test_the_words_of_an_answers_stages(root: Path, startup: Path) -> None:
    rank = Rank(startup)
    rank.answer(version(root, 1))
    assert set(rank.answer(version(root, 2)).ms) == {
        "prepare", "before", "agree", "load", "write", "road", "copy", "after",
    }  # fmt: skip
