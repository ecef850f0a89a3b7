"""LoRA adapters on a real SGLang: what answers them is the newest, and the model itself stays as it was."""

import json
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx
import pytest

from refitd.engine.port import Outcome, Target
from support.adapters import FLAGS, write_adapter
from support.engines import sglang_adapters
from support.jobs import PATIENCE, PROMPT, Job, running
from support.servers import ADMIN_KEY, API_KEY, KIT, SglangServer
from support.subject import ignore_stage

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


class LoraServer(SglangServer):
    """SGLang with LoRA, whose code pins host memory: a plugin of the kit's keeps it from that on a CPU."""

    def environment(self) -> dict[str, str]:
        return super().environment() | {"PYTHONPATH": str(KIT / "shims/cpu_pin_memory")}


LONG = 800  # tokens, which take longer than two updates
HEADERS = {"Authorization": f"Bearer {API_KEY}"}


def until(holds: Callable[[], bool]) -> None:
    """Wait for what nobody tells of."""
    ends = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.05)


def names_of(engine: SglangServer) -> set[str]:
    cards = httpx.get(f"{engine.url}/v1/models", headers=HEADERS, trust_env=False).json()["data"]
    return {card["id"] for card in cards if card["parent"] is not None}


def streamed(engine: SglangServer, adapter: str, begun: Event) -> list[int]:
    """A long answer that comes as a stream; `begun` is set when there is something of it."""
    params = {"temperature": 0, "max_new_tokens": LONG, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": params, "lora_path": adapter, "stream": True}
    so_far: list[int] = []
    with httpx.stream("POST", f"{engine.url}/generate", json=body, headers=HEADERS, timeout=PATIENCE) as reply:
        for line in reply.raise_for_status().iter_lines():
            if line.startswith("data: {"):
                so_far = json.loads(line.removeprefix("data: "))["output_ids"]
                begun.set()
    assert len(so_far) == LONG
    return so_far


def call(engine: SglangServer, route: str, body: dict[str, str]) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    httpx.post(f"{engine.url}{route}", json=body, headers=headers, timeout=PATIENCE, trust_env=False).raise_for_status()


def answer(engine: SglangServer, adapter: str | None, prompt: list[int] = PROMPT) -> list[int]:
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
    named = body | ({} if adapter is None else {"lora_path": adapter})
    reply = httpx.post(f"{engine.url}/generate", json=named, headers=HEADERS, timeout=PATIENCE, trust_env=False)
    return reply.raise_for_status().json()["output_ids"]


@pytest.fixture(scope="module")
def engine(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[LoraServer]:
    """One for all tests: each leaves it without adapters, as it was found."""
    with LoraServer(tmp_path_factory.mktemp("lora"), models / "model_a", *FLAGS) as server:
        yield server


@pytest.fixture
def job(engine: LoraServer, tmp_path: Path) -> Generator[Job]:
    assert names_of(engine) == set()
    with running(tmp_path, engine, "--lora", "actor") as job:
        yield job
    for name in names_of(engine):
        call(engine, "/unload_lora_adapter", {"lora_name": name})


def test_requests_that_name_the_adapter_get_it_and_others_the_model(
    models: Path, tmp_path: Path, engine: LoraServer, job: Job
) -> None:
    plain = answer(engine, None)
    answers: list[list[int]] = []
    for step in (1, 2):
        job.serve(write_adapter(tmp_path / f"adapter{step}", models / "model_a", step), step)
        answers.append(answer(engine, f"actor-v{step}"))
    assert answers[0] != answers[1]
    assert plain not in answers
    assert answer(engine, None) == plain
    assert answer(engine, "actor-v1") == answers[0], "a request that comes late still gets what it was made for"


def test_a_request_in_flight_is_answered_to_its_end_by_the_adapter_that_is_unloaded_after_it(
    models: Path, tmp_path: Path, engine: LoraServer, job: Job
) -> None:
    adapters = [write_adapter(tmp_path / f"adapter{step}", models / "model_a", step) for step in (1, 2, 3)]
    job.serve(adapters[0], 1)
    expected, begun = streamed(engine, "actor-v1", Event()), Event()
    with ThreadPoolExecutor() as threads:
        late = threads.submit(streamed, engine, "actor-v1", begun)
        assert begun.wait(PATIENCE)
        for step in (2, 3):
            job.serve(adapters[step - 1], step)
        assert not late.done(), "nothing was shown: it was answered before the update"
        assert late.result() == expected
    until(lambda: names_of(engine) == {"actor-v2", "actor-v3"})


async def test_the_same_name_with_another_adapter_answers_anew_though_its_prefix_was_cached(
    models: Path, tmp_path: Path, engine: LoraServer
) -> None:
    """As where a trainer does a step again. A prefix that the name's first adapter has computed is not used."""
    folders = [write_adapter(tmp_path / f"adapter{seed}", models / "model_a", seed) for seed in (1, 2)]
    adapter = sglang_adapters(engine.url, name="again", api_key=API_KEY, admin_key=ADMIN_KEY)
    prompt = PROMPT * 16
    answers: dict[str, list[int]] = {}
    for label, folder in (("1", folders[0]), ("2", folders[1]), ("1", folders[1])):
        done = await adapter.refit(Target(path=str(folder), label=label), ignore_stage)
        assert (done.outcome, done.reason) == (Outcome.ACK, None)
        for _ in range(2):  # the second one finds the prefix of the first
            answers[f"{folder.name} as {label}"] = answer(engine, f"again-v{label}", prompt)
    assert answers["adapter2 as 1"] == answers["adapter2 as 2"] != answers["adapter1 as 1"]
    assert adapter._unloading is not None  # pyright: ignore[reportPrivateUsage]
    await adapter._unloading  # pyright: ignore[reportPrivateUsage]
    await adapter.aclose()
    assert names_of(engine) == {"again-v1"}
    call(engine, "/unload_lora_adapter", {"lora_name": "again-v1"})
