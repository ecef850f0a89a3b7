"""The core stands alone: built without its rings and installed by itself, it keeps what it promises.

It has the lowest versions of what it needs and no torch. Engines are in the tests' environment, and it reaches them
over HTTP alone.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from build import core_files, ring_paths
from safetensors.torch import save_file

from support.installed import InstalledServer, ran
from support.mini_sglang import tiny_weights
from support.mini_vllm import mini_vllm
from support.servers import EmbeddedServer

pytestmark = pytest.mark.e2e

PYTHON = str(Path(os.environ.get("REFITD_CORE_VENV", "")).absolute() / "bin/python")
RUN = "run"
MOST_LINES = 40_700  # it is to come down to 25,000


class CoreJob:
    """A core service, one engine, and how a trainer and an operator speak to it."""

    def __init__(self, service: InstalledServer, root: Path) -> None:
        self.service, self.root = service, ("--root", str(root))

    def publish(self, model: Path, step: int, *words: str, fails: bool = False) -> str:
        return self.service.refitd(
            "publish", str(model), *self.root, "--run", RUN, "--step", str(step), "--wait", *words, fails=fails
        )

    def waits_for(self, step: int, outcome: str = "served") -> None:
        found = json.loads(self.service.refitd("wait", "--run", RUN, "--step", str(step), "--json"))
        assert found["outcome"] == outcome

    def versions(self) -> dict[int, dict[str, Any]]:
        listed = json.loads(self.service.refitd("versions", RUN, "--json"))
        return {each["step"]: each for each in listed["items"]}


@pytest.fixture
def job(tmp_path: Path, models: Path) -> Generator[CoreJob]:
    (tmp_path / "engine").mkdir()
    with (
        EmbeddedServer(tmp_path / "engine", models / "model_a") as engine,
        InstalledServer(
            PYTHON, {}, tmp_path / "service", tmp_path / "root", [engine.url], "--base-model", str(models / "model_a")
        ) as service,
    ):
        yield CoreJob(service, tmp_path / "root")


def test_every_module_of_the_core_can_be_imported_without_the_rings() -> None:
    program = """
import pkgutil, sys, refitd, refitd_client
for package in (refitd, refitd_client):
    assert "site-packages" in package.__file__, package.__file__
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.endswith("__main__"):
            continue
        try:
            __import__(module.name)
        except ModuleNotFoundError as error:  # of an extra that is not installed here
            assert not error.name.startswith("refitd"), error
        print(module.name)
"""
    found = set(ran(PYTHON, "-c", program).split())
    assert {"refitd.app", "refitd_client.publisher"} <= found
    rings = {path.partition("/")[2].removesuffix(".py").replace("/", ".") for path in ring_paths()}
    assert not rings & found


def test_the_core_has_no_more_lines_than_anyone_can_read() -> None:
    tree = Path(__file__).parents[2]
    lines = sum((tree / file).read_text().count("\n") for file in core_files() if file.endswith(".py"))
    assert lines <= MOST_LINES


def test_help_of_the_core_names_the_commands_that_it_has() -> None:
    said = ran(PYTHON, "-m", "refitd", "help", "all")
    for command in ("serve", "publish", "status", "explain", "rollback", "reclaim"):
        assert command in said
    for command in ("doctor", "demo", "plan", "push", "areal"):
        assert f" {command} " not in said
    assert "--root" in ran(PYTHON, "-m", "refitd", "serve", "--help")


def test_the_core_updates_an_sglang_refuses_what_is_bad_rolls_back_survives_a_kill_and_collects(
    job: CoreJob, models: Path
) -> None:
    for step, model in enumerate(("model_b", "model_a", "model_b"), 1):
        job.publish(models / model, step)
        job.waits_for(step)
    assert "NaN" in job.publish(models / "bad_nan", 4, fails=True)
    job.service.refitd("rollback", RUN, "--yes")
    job.service.restart()  # killed, and begun again on the journal that it left
    job.waits_for(2)
    assert {step: each["barred"] for step, each in job.versions().items()}[3]
    job.publish(models / "model_a", 5)
    job.waits_for(5)
    job.service.refitd("reclaim", "--yes")
    assert RUN in job.service.refitd("status")


def test_the_core_finds_a_version_that_no_notice_told_it_of(job: CoreJob, models: Path) -> None:
    quiet = {"REFITD_URL": ""}
    words = ("publish", str(models / "model_b"), *job.root, "--run", RUN, "--step", "1")
    ran(PYTHON, "-m", "refitd", *words, variables=quiet)
    job.waits_for(1)


def test_the_core_updates_a_vllm_over_http(tmp_path: Path) -> None:
    with mini_vllm(tmp_path) as engine:
        base = tmp_path / "startup"
        (base / "config.json").write_text("{}")
        with InstalledServer(
            PYTHON, {}, tmp_path / "service", tmp_path / "root", [engine.server.url], "--base-model", str(base)
        ) as service:
            job = CoreJob(service, tmp_path / "root")
            for seed in (1, 2):
                model = tmp_path / f"model-{seed}"
                model.mkdir()
                save_file(tiny_weights(seed), model / "model.safetensors")
                job.publish(model, seed)
                assert engine.holds(seed)


def test_what_a_ring_would_do_is_refused_by_a_sentence(job: CoreJob, tmp_path: Path) -> None:
    program = f"""
import numpy, sys
from refitd_client import PublishOptions, RefitError, WeightPublisher
weights = {{"w": numpy.zeros(4, "float32")}}
class Source(list):
    def metadata(self): ...
with WeightPublisher({str(tmp_path / "root")!r}, "other", {job.service.url!r}) as publisher:
    print(publisher.publish(weights, step=1, transport="delta").why_full)
    for transport in ("handover", "nccl", "gloo"):
        try:
            publisher.publish(weights, step=2, transport=transport)
        except RefitError as error:
            print(error)
    print(publisher.publish(weights, step=3, transport="auto").handed.why)
    try:
        publisher.publish(Source(weights.items()), step=4)
    except RefitError as error:
        print(error)
for more in ({{"root": "s3://bucket/prefix"}}, {{"root": "/tmp", "ranks": "all"}}):
    try:
        WeightPublisher(run="other", **more)
    except RefitError as error:
        print(error)
"""
    said = ran(PYTHON, "-c", program)
    assert "this installation of refitd makes no deltas" in said
    assert said.count("this installation of refitd brings no version from a trainer's memory") == 4
    assert "reads no sources of weights: pass a state dict" in said
    assert "publishes into folders alone" in said
    assert "publishes from one process alone" in said
