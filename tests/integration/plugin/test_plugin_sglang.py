"""The plugin in a real SGLang: what a stock server serves, dies of or mixes up, and what it does instead."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file

from refitd_client import WeightPublisher
from refitd_client.contract.plugin import UpdateOutcome
from support.architectures import change
from support.forged import forge, write_delta
from support.plugged import RELEASE, PluggedSglang
from support.sockets import ask

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

RUN = "by/hand"
A, B, C = 1, 2, 3
STEPS = {A: "model_a", B: "model_b", C: "model_a"}
BAD = [
    "bad_empty",
    "bad_shard2_gone",
    "bad_trunc",
    "bad_garbage",
    "bad_shard2_trunc",
    "bad_shape_norm",
    "bad_shape",
    "bad_missing",
    "bad_extra",
    "bad_nan",
    "b_fp32",
    "b_only_lm_head",
]


@pytest.fixture(scope="module")
def server(sglang_plugged: PluggedSglang) -> PluggedSglang:
    """The one of all tests: none of these ends it."""
    return sglang_plugged


@pytest.fixture(scope="module")
def root(server: PluggedSglang, models: Path) -> Generator[Path]:
    """Its root, with good versions of both models, and bad ones from step 100 on. At the end it has a plan again."""
    root = server.root
    with WeightPublisher(root, RUN) as publisher:
        for step, model in STEPS.items():
            publisher.publish(models / model, step=step)
    for step, model in enumerate(BAD, start=100):
        forge(root, RUN, step, models / model)
    yield root
    serving_b(server, root)


def changed(root: Path, models: Path, step: int, base: int, seed: int) -> tuple[Path, Path]:
    """A delta from one of the good versions, and the folder of what results."""
    after = change(models / STEPS[base], root.parent / f"changed-{seed}", seed)
    weights = [load_file(folder / "model.safetensors") for folder in (models / STEPS[base], after)]
    write_delta(version(root, step), RUN, step, base, *weights)
    return version(root, step), after


def version(root: Path, step: int) -> Path:
    return root / RUN / f"v{step:06d}"


def serving_b(server: PluggedSglang, root: Path) -> None:
    """Bring the server to B, with a plan learned."""
    for step in (A, B, A, B):
        assert server.update(version(root, step), str(step)).outcome is UpdateOutcome.SERVED


def without_a_plan(server: PluggedSglang, root: Path) -> None:
    """Have it forget its plan by a failure: the next update is a load, by which it learns one again."""
    serving_b(server, root)
    server.fail("copy 0")
    assert server.update(version(root, C)).outcome is UpdateOutcome.RESTORED


def test_a_version_is_served_as_a_stock_load_serves_it_by_the_loader_and_by_replay(
    server: PluggedSglang, root: Path, models: Path
) -> None:
    without_a_plan(server, root)
    stock = {}
    for model in ("model_a", "model_b"):
        assert server.load(models / model) == (
            True,
            "Succeeded to update model weights. Weight version updated to 1.",
        )
        stock[model] = server.checksum, server.generate()
    assert stock["model_a"] != stock["model_b"]
    hows = set()
    for step in (A, B, A, B):
        answer = server.update(version(root, step), str(step))
        assert (answer.outcome, answer.version) == (UpdateOutcome.SERVED, f"by~hand~v{step:06d}")
        assert (server.checksum, server.generate()) == stock[STEPS[step]]
        assert server.labels == (str(version(root, step)), str(step))
        hows.add(answer.how)
    assert hows == {"load", "replay"}


@pytest.mark.parametrize(("number", "model"), list(enumerate(BAD)), ids=BAD)
def test_a_bad_version_is_refused_and_generation_goes_on_as_it_was(
    server: PluggedSglang, root: Path, number: int, model: str
) -> None:
    serving_b(server, root)
    before, long = server.state, server.generate(200)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, 200)
        server.pause()
        answer = server.update(version(root, 100 + number))
        server.resume()
        assert running.result() == long
    assert (answer.outcome, bool(answer.reason)) == (UpdateOutcome.REFUSED, True)
    assert server.state == before


@pytest.mark.parametrize("fault", ["copy 1", "copy 20", "loader 0", "loader 5"])
def test_a_load_that_fails_after_the_first_write_is_undone(server: PluggedSglang, root: Path, fault: str) -> None:
    if fault.startswith("loader"):
        without_a_plan(server, root)
    else:
        serving_b(server, root)
    before = server.state
    server.fail(fault)
    answer = server.update(version(root, C), "77")
    assert (answer.outcome, answer.reason) == (UpdateOutcome.RESTORED, f"InjectedError: {fault}")
    assert server.state == before
    assert server.update(version(root, C)).outcome is UpdateOutcome.SERVED


def test_the_channel_says_who_is_there_and_prepares_while_the_engine_serves(server: PluggedSglang, root: Path) -> None:
    serving_b(server, root)
    (channel,) = server.sockets
    hello = ask(channel, do="hello")
    assert (hello["protocol"], hello["state"], hello["sglang"]) == (1, "on", RELEASE)
    assert (hello["port"], hello["rank"], hello["ranks"]) == (server.port, 0, 1)
    assert (hello["served"], hello["plan"]["proven"]) == ("by~hand~v000002", True)
    assert hello["pid"] == server.scheduler.pid
    ready = ask(channel, do="prepare", path=f"{RUN}/v000003")
    assert (ready["ok"], ready["version"]) == (True, "by~hand~v000003")
    refused = ask(channel, do="prepare", path=f"{RUN}/v{100 + BAD.index('bad_trunc'):06d}")
    assert (refused["ok"], "torn-file" in refused["reason"]) == (False, True)
    assert not ask(channel, do="prepare", path="../../etc")["ok"]
    assert server.update(version(root, C)).outcome is UpdateOutcome.SERVED


def test_a_delta_is_served_as_a_stock_load_of_its_result_serves_it(
    server: PluggedSglang, root: Path, models: Path
) -> None:
    folder, after = changed(root, models, 50, B, 1)
    assert server.load(after)[0]
    stock = server.checksum, server.generate()
    assert server.update(folder).needs == "full"  # it was loaded past the plugin
    serving_b(server, root)
    (channel,) = server.sockets
    assert ask(channel, do="hello")["no_deltas"] == ""
    assert ask(channel, do="prepare", path=f"{RUN}/v000050")["kind"] == "delta"
    answer = server.update(folder, "50")
    assert (answer.outcome, answer.how, answer.version) == (UpdateOutcome.SERVED, "delta", "by~hand~v000050")
    assert (server.checksum, server.generate()) == stock
    assert server.labels == (str(folder), "50")
    before = server.state
    assert server.update(changed(root, models, 51, A, 2)[0]).needs == "full"  # from what is not served
    assert server.state == before


def test_a_delta_that_fails_after_the_first_write_is_undone(server: PluggedSglang, root: Path, models: Path) -> None:
    serving_b(server, root)
    folder, _ = changed(root, models, 52, B, 3)
    before = server.state
    server.fail("delta 3")
    answer = server.update(folder, "77")
    assert (answer.outcome, answer.reason) == (UpdateOutcome.RESTORED, "InjectedError: delta 3")
    assert server.state == before


def test_a_full_version_that_fails_after_a_delta_is_undone_to_the_delta(
    server: PluggedSglang, root: Path, models: Path
) -> None:
    serving_b(server, root)
    assert server.update(changed(root, models, 53, B, 4)[0]).how == "delta"
    before = server.state
    server.fail("copy 9")
    assert server.update(version(root, C)).outcome is UpdateOutcome.RESTORED
    assert server.state == before
