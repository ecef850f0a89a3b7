"""What either adapter sends when a server misbehaves, and what it then believes.

The rule behind all: nothing with unknown contents is resumed, and nothing with known contents stays paused.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest

from refitd.engine.port import Outcome, Target
from refitd.engine.transaction import ServerEngine
from support.engines import sglang_engine, vllm_engine
from support.scripted_server import Step, answer, cut, hang_up, page
from support.scripted_sglang import NO_FILES, said, scripted_sglang
from support.scripted_vllm import DEAD, SHAPE, config, error, scripted_vllm

ACK, UNREACHABLE = Outcome.ACK, Outcome.UNREACHABLE
DONE, KEPT, GONE, UNKNOWN = (ACK, True), (Outcome.NACK, True), (UNREACHABLE, True), (Outcome.TAINTED, False)
TARGET, REPAIR = (Target(path="/root/v7", label="7", repairs=repairs) for repairs in (False, True))
PROVED = Target(path="/root/v7", label="7", fingerprint="xxh3:7", not_fingerprint="xxh3:6")
DELTA = Target(path="/root/v7", label="7", in_place=True)


async def _changed() -> bool:
    return False


REWRITTEN = Target(path="/root/v7", label="7", unchanged=_changed)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of server, and the calls that change it."""

    serve: Callable[..., AbstractContextManager[Any]]
    adapter: Callable[..., ServerEngine]
    pause: str
    load: str
    resume: str


SGLANG = Kind(scripted_sglang, sglang_engine, "/pause_generation", "/update_weights_from_disk", "/continue_generation")
VLLM = Kind(scripted_vllm, vllm_engine, "/sleep?level=0&mode=keep", "reload_weights", "/wake_up?tags=scheduling")
RESET, LABEL = "/reset_prefix_cache", "/update_weight_version"
RESETS = f"{RESET}?reset_running_requests=true&reset_external=true"
CHECK, INFO = "/weights_checker", "/model_info"
ROLLING_BACK = "Failed to update weights: shape.\nRolling back to original weights."


@dataclass(frozen=True, slots=True)
class Case:
    """What is then sent, pause, load, resume or a route, and how it ends. `on`: what calls are answered, by route."""

    claim: str
    sent: str
    ends: tuple[Outcome, bool]
    why: str = ""
    target: Target = TARGET
    on: dict[str, list[Step]] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def each(claim: str, sent: str, ends: tuple[Outcome, bool], at: str, *replies: Step, **more: Any) -> list[Case]:
    return [Case(claim, sent, ends, on={at: [reply]}, **more) for reply in replies]


def stock(claim: str, why: str = "", told: dict[str, Any] | None = None, **state: Any) -> Case:
    return Case(claim, "resume", KEPT, why, state={"told": config(**(told or {}))} | state)


def named(path: str, label: str) -> Step:
    return answer(200, {"model_path": path, "weight_version": label})


def results(*told: Any) -> Step:
    return answer(200, {"results": list(told)})


def holding(weights: str) -> Step:
    return answer(200, {"ranks": [{"checksums": {"w": weights}}]})


EXPERTS = config(is_moe_model=True)
EXPERTS["vllm_config"]["device_config"]["device"] = "cpu"
BEFORE = named("/base", "default")
RUNS = answer(200, {"is_paused": False})
UNJUDGED = "a load that nobody can judge is followed by nothing"
BROKEN_OFF = "a pause that breaks off is followed by no load, and taken back where contents are known"
CONTRADICTED = "a success that the server itself contradicts is not believed"
LATE = "an engine that loads only at the last try is not believed"
RULED_OUT = "what a stock load cannot do right is refused"

OF_SGLANG = [
    *each(UNJUDGED, "pause load", UNKNOWN, "load", hang_up, cut, said(400, ROLLING_BACK), page(200), page(502)),
    *each(UNJUDGED, "pause load", UNKNOWN, "load", said(400, f"{NO_FILES} | {ROLLING_BACK}"), answer(500, {})),
    *each(UNJUDGED, "pause load", UNKNOWN, "load", answer(200, None), answer(302, b"", Location="/elsewhere")),
    *each("a repair that is refused", "pause load", UNKNOWN, "load", said(400, NO_FILES), answer(401), target=REPAIR),
    *each(BROKEN_OFF, "pause resume", GONE, "pause", hang_up, cut),
    *each(BROKEN_OFF, "pause resume", KEPT, "pause", answer(401, {}), answer(500, {}), page(502), page(200)),
    *each(BROKEN_OFF, "pause", (UNREACHABLE, False), "pause", hang_up, cut, target=REPAIR),
    *each(BROKEN_OFF, "pause", UNKNOWN, "pause", answer(401, {}), answer(500, {}), page(502), target=REPAIR),
    *each("a lost resume is told", "pause load resume", (ACK, False), "resume", hang_up, answer(500, {}), page(200)),
    Case(CONTRADICTED, "pause load", UNKNOWN, "serves /root/v6", on={INFO: [BEFORE, named("/root/v6", "7")]}),
    Case(CONTRADICTED, "pause load", UNKNOWN, "weight_version '6'", on={INFO: [BEFORE, named("/root/v7", "6")]}),
    Case("lost after the load", "pause load", UNKNOWN, "cannot be verified", on={INFO: [BEFORE, hang_up]}),
    *each("no tensors", "pause load", UNKNOWN, CHECK, hang_up, cut, why="tensors cannot be verified", target=PROVED),
    Case(
        "a refusal after which tensors cannot be asked for is not believed",
        "pause load",
        UNKNOWN,
        on={"load": [said(400, NO_FILES)], CHECK: [holding("/base"), hang_up]},
    ),
    Case(
        "a refusal after which tensors are others is not believed",
        "pause load",
        UNKNOWN,
        on={"load": [said(400, NO_FILES)], CHECK: [holding("/base"), holding("another")]},
    ),
    Case("an engine that is lost before the load is told nothing", "pause resume", GONE, on={CHECK: [hang_up]}),
    Case("its files changed", "pause load", UNKNOWN, "its files changed meanwhile", REWRITTEN),
    Case("too old", "", GONE, "0.5.11; refitd needs 0.5.12 or newer", state={"version": "0.5.11"}),
]
OF_VLLM = [
    *each(UNJUDGED, "pause load", UNKNOWN, "load", hang_up, cut, error(500, DEAD), answer(200, None), page(200)),
    *each(UNJUDGED, "pause load", UNKNOWN, "load", *(results(*it) for it in ((), (None, None), (["generate"],)))),
    *each("unheard of", "pause load resume", KEPT, "load", *(answer(status, {}) for status in (401, 403, 404, 405))),
    Case(
        "a repair that fails restores nothing and resumes nothing",
        "pause load load load load",
        UNKNOWN,
        "restart it",
        REPAIR,
        on={"load": [error(500, SHAPE)] * 4},
    ),
    Case(
        "a load counts only after one that did not fail: what that has read goes into the next one",
        f"pause load load load {RESETS} {LABEL} resume",
        DONE,
        target=REPAIR,
        on={"load": [error(500, SHAPE)]},
    ),
    Case(LATE, "pause load load load load", UNKNOWN, target=REPAIR, on={"load": [error(500, SHAPE)] * 3}),
    *each(BROKEN_OFF, "pause", (UNREACHABLE, False), "/sleep", hang_up, target=REPAIR),
    *each("a held cache", f"pause load {RESETS} {RESETS} {LABEL} resume", DONE, RESET, answer(200, {"success": False})),
    *each("restarted", f"pause load {RESETS} {LABEL}", UNKNOWN, "/is_paused", RUNS, why="not paused any more"),
    stock("several ranks of a stock server", "--worker-extension-cls", {"tensor_parallel_size": 2}, ranks=2),
    Case("experts that a reload would leave unpacked", "resume", KEPT, "experts", state={"told": EXPERTS}),
    stock(RULED_OUT, told={"data_parallel_size": 2}),
    stock(RULED_OUT, told={"enable_eplb": True}),
    stock(RULED_OUT, told={"pipeline_parallel_size": 2}),
    Case("a delta asks for a full version", "resume", KEPT, target=DELTA),
]
CASES = [(kind, case) for kind, cases in ((SGLANG, OF_SGLANG), (VLLM, OF_VLLM)) for case in cases]


@pytest.mark.parametrize(("kind", "case"), [pytest.param(*each, id=each[1].claim) for each in CASES])
async def test_nothing_unknown_is_resumed_and_nothing_known_stays_paused(kind: Kind, case: Case) -> None:
    words = {"pause": kind.pause, "load": kind.load, "resume": kind.resume}
    with kind.serve(**case.state) as server:
        for route, replies in case.on.items():
            server.on(words.get(route, route).partition("?")[0], *replies)
        engine = kind.adapter(server.url)
        done = await engine.refit(case.target, lambda _: None)
        await engine.aclose()
    assert (done.outcome, done.resumed) == case.ends
    assert (done.reason is None) is (done.outcome is ACK)
    assert case.why in (done.reason or "")
    assert done.needs_full is (case.target is DELTA)
    assert server.changes == [words.get(word, word) for word in case.sent.split()]
