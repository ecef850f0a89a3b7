"""verl's checkpoint engine of one rank: what it publishes, what it refuses, and which servers the service hears of."""

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from refitd_client import PublishError
from support.published import shards, versions
from support.renamed_models import llava, mixtral
from support.verl_backend import REGISTERED, backend, stand_in

WEIGHTS = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3), "steps": torch.tensor([3])}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Rank 0 of an actor of one rank; whatever it publishes is served at once."""
    made = backend().RefitCheckpointEngine(1 << 20, True, root=tmp_path, run="exp", service_url="http://127.0.0.1:9")
    monkeypatch.setattr("refitd_client.publish.publication.NOTICE_DEADLINE", 0.0)
    made.waited = []

    async def wait_async(publication: Any, timeout: float) -> None:  # noqa: ASYNC109
        made.waited.append((publication.step, timeout))

    monkeypatch.setattr("refitd_client.publish.publication.Publication.wait_async", wait_async)
    yield made
    made.close()


def send(engine: Any, weights: dict[str, torch.Tensor], step: int | None) -> dict[str, float]:
    return asyncio.run(engine.send_weights(iter(weights.items()), global_steps=step))


def published(root: Path, version: str) -> dict[str, torch.Tensor]:
    return {name: tensor for file in shards(root / "exp" / version) for name, tensor in load_file(file).items()}


def test_verl_finds_the_backend_by_the_module_that_a_user_names() -> None:
    assert backend().RefitCheckpointEngine is REGISTERED["refitd"]


def test_a_release_of_verl_that_would_write_into_its_servers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = backend()
    stand_in()
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(PublishError, match=r"verl 0\.9 or later"):
        importlib.import_module(module.__name__)


def test_each_step_is_a_version_in_the_dtype_of_the_servers_and_is_waited_for(engine: Any, tmp_path: Path) -> None:
    metrics = send(engine, WEIGHTS, 0)
    send(engine, {name: tensor + 1 for name, tensor in WEIGHTS.items()}, 1)
    assert versions(tmp_path / "exp") == ["v000000", "v000001"]
    assert engine.waited == [(0, 300.0), (1, 300.0)]
    found = published(tmp_path, "v000001")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "w": torch.bfloat16,
        "b": torch.bfloat16,
        "steps": torch.int64,
    }
    assert torch.equal(found["w"], (WEIGHTS["w"] + 1).bfloat16())
    assert torch.equal(published(tmp_path, "v000000")["w"], WEIGHTS["w"].bfloat16())
    assert metrics["refitd/bytes"] > 0


def test_tensors_may_change_after_they_were_yielded(engine: Any, tmp_path: Path) -> None:
    """As where verl merges an adapter into the weights while it yields them, or gathers into one buffer."""

    def buffered() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.zeros(4)
        for value in (1.0, 2.0):
            yield f"w{value:g}", buffer.fill_(value)
        buffer.fill_(9.0)

    asyncio.run(engine.send_weights(buffered(), global_steps=0))
    assert {name: tensor.tolist() for name, tensor in published(tmp_path, "v000000").items()} == {
        "w1": [1.0] * 4,
        "w2": [2.0] * 4,
    }


def test_a_step_that_verl_sends_again_is_not_published_again(engine: Any, tmp_path: Path) -> None:
    for _ in range(2):
        send(engine, WEIGHTS, 5)
    assert versions(tmp_path / "exp") == ["v000005"]
    assert [step for step, _ in engine.waited] == [5, 5]


def test_weights_without_a_step_are_refused(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="global_steps"):
        send(engine, WEIGHTS, None)
    assert not (tmp_path / "exp").exists()


def test_a_rollout_worker_is_handed_nothing_to_write_and_takes_no_run(engine: Any, tmp_path: Path) -> None:
    assert list(engine.receive_weights(global_steps=1)) == []
    assert engine.wire_format == "delta_flush"  # of which an empty stream means that nothing has changed
    assert not (tmp_path / "exp").exists()


def test_a_wait_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    make = backend().RefitCheckpointEngine
    for wrong in ({"wait": 0}, {"delta": "always"}, {"dtype": "int8"}):
        with pytest.raises(ValueError, match=r"wait|delta|int8"):
            make(1, root=tmp_path, run="exp", service_url="http://127.0.0.1:9", **wrong)


@pytest.mark.parametrize("make", [llava, mixtral])
def test_with_a_base_model_the_names_and_the_form_are_those_of_its_checkpoint(tmp_path: Path, make: Any) -> None:
    model = make()
    model.save_pretrained(tmp_path / "saved")
    place: dict[str, Any] = {"root": tmp_path / "root", "run": "exp", "service_url": "http://127.0.0.1:9"}
    engine = backend().RefitCheckpointEngine(1, base_model=tmp_path / "saved", dtype="float32", **place)
    for step in (0, 1):
        send(engine, dict(model.state_dict()), step)
    engine.close()
    saved = {name: each for file in shards(tmp_path / "saved") for name, each in load_file(file).items()}
    for version in ("v000000", "v000001"):
        found = published(tmp_path / "root", version)
        assert found.keys() == saved.keys() != model.state_dict().keys()
        assert all(torch.equal(found[name], saved[name]) for name in saved)


class Actors:
    """Ray with verl's server actors: those of the name, what each says of itself."""

    def __init__(self, **servers: tuple[str, bool, bool, str]) -> None:
        self.util = SimpleNamespace(list_named_actors=lambda: [*servers, "rollout_standalone_0"])
        self._servers = servers

    def is_initialized(self) -> bool:
        return True

    def get(self, answer: Any) -> Any:
        return answer

    def get_actor(self, name: str) -> Any:
        mode, frees, sleeps, host = self._servers[name]
        config = SimpleNamespace(free_cache_engine=frees, enable_sleep_mode=sleeps)
        actor = SimpleNamespace(rollout_mode=SimpleNamespace(value=mode), config=config)
        return SimpleNamespace(
            __ray_call__=SimpleNamespace(remote=lambda asked: asked(actor)),
            get_server_address=SimpleNamespace(remote=lambda: (host, 30000)),
        )


def test_the_servers_are_those_that_verl_started_for_rollouts_on_their_own_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = ("standalone", False, True, "10.0.0.4")
    actors = Actors(
        sglang_server_0_0=("hybrid", True, True, "10.0.0.3"),
        sglang_server_1_0=alone,
        sglang_server_2_0=("standalone", False, True, "fd00::5"),
        sglang_server_2_1=alone,
        sglang_server_reward_0_0=alone,
    )
    monkeypatch.setitem(sys.modules, "ray", actors)  # type: ignore[arg-type]
    assert backend().rollout_servers() == {
        "sglang_server_1_0": "http://10.0.0.4:30000",
        "sglang_server_2_0": "http://[fd00::5]:30000",
    }


@pytest.mark.parametrize(
    ("name", "frees", "sleeps", "wanted"),
    [
        ("sglang_server_0_0", True, True, "rollout.free_cache_engine=False$"),
        ("vllm_server_0_0", False, True, "set .*rollout.enable_sleep_mode=False$"),
        ("vllm_server_0_0", True, True, "free_cache_engine=False .*enable_sleep_mode=False$"),
    ],
)
def test_a_server_whose_memory_verl_takes_during_an_update_is_refused(
    name: str, frees: bool, sleeps: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors = Actors(**{name: ("standalone", frees, sleeps, "10.0.0.4")})
    monkeypatch.setitem(sys.modules, "ray", actors)  # type: ignore[arg-type]
    with pytest.raises(PublishError, match=wanted):
        backend().rollout_servers()


def test_the_service_knows_the_servers_that_there_are_and_no_earlier_ones(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"exp.verl.sglang_server_0_0": "http://a:1", "mine": "http://b:1"}
    now = {"sglang_server_0_0": "http://a:2", "sglang_server_1_0": "http://b:1"}
    calls: list[str] = []

    class Client:
        def __enter__(self) -> "Client":
            return self

        def __exit__(self, *_: object) -> None: ...

        def engines(self) -> Any:
            return SimpleNamespace(items=[SimpleNamespace(id=name, url=url) for name, url in known.items()])

        def remove_engine(self, name: str) -> None:
            calls.append(f"-{name}")

        def add_engine(self, new: Any) -> None:
            calls.append(f"+{new.id} {new.url} {new.run}")

    module = sys.modules[type(engine).__module__]
    monkeypatch.setattr(module, "open_client", lambda *_, **__: Client())
    monkeypatch.setattr(module, "rollout_servers", lambda: now)
    for _ in range(2):
        assert engine.prepare() == {}
    assert calls == ["-exp.verl.sglang_server_0_0", "+exp.verl.sglang_server_0_0 http://a:2 exp"]
