"""The HTTP surface, held against what a real SGLang 0.5.23 was seen to answer."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from refitd_embedded.engine import EmbeddedEngine
from refitd_embedded.server import ApiKeys, ReplicaServer, create_app
from refitd_embedded.weights import CarefulLoader, Write
from support.embedded_kit import PROMPT, checkpoint, open_engine, write

GREEDY = {"max_new_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two good checkpoints, `a` and `b`, and an `empty` one."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("a", "b")):
        checkpoint(root / name, seed)
    write(root / "empty", {})
    (root / "empty" / "model.safetensors").unlink()
    return root


class Gated(CarefulLoader):
    """A loader that opens when it is let."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        super().__init__(engine.decoder)
        self.reached, self.let = asyncio.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()

    def open(self, directory: Path) -> Write:
        self._loop.call_soon_threadsafe(self.reached.set)
        self.let.wait(10)
        return super().open(directory)


@asynccontextmanager
async def serving(engine: EmbeddedEngine, keys: ApiKeys | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, without a network."""
    app = create_app(engine, keys=keys, launch={"launch_command": "--model-path a"})
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client,
    ):
        yield client


@asynccontextmanager
async def listening(engine: EmbeddedEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a real server on a real port: what a disconnect is, only a connection can say."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = ReplicaServer(uvicorn.Config(create_app(engine), log_config=None, timeout_graceful_shutdown=1))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            yield client
    finally:
        server.should_exit = True
        await running


@pytest.fixture
async def client(models: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Of an engine on `a`."""
    async with serving(open_engine(models / "a")) as client:
        yield client


async def generate(client: httpx.AsyncClient, **body: Any) -> Any:
    """The answer, which must be one."""
    response = await client.post("/generate", json={"input_ids": PROMPT, "sampling_params": GREEDY} | body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_an_answer_has_the_fields_of_sglang(client: httpx.AsyncClient) -> None:
    found = await generate(client, rid="mine")
    assert found.keys() == {"text", "output_ids", "meta_info"}
    assert len(found["output_ids"]) == 6
    meta = found["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 6},
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": 6}],
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "cached_tokens": 0,
        "cached_tokens_details": None,
        "dp_rank": None,
    }


def events(text: str) -> list[Any]:
    """The contents of a stream, which must end as SGLang's do."""
    *data, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(one.removeprefix("data: ")) for one in data]


async def test_a_stream_repeats_the_answer_so_far(client: httpx.AsyncClient) -> None:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, "stream": True, "return_logprob": True}
    response = await client.post("/generate", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    seen = events(response.text)
    final = seen[-1]
    assert final["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    assert all(one["meta_info"]["finish_reason"] is None for one in seen[:-1])
    for one in seen:
        assert one["output_ids"] == final["output_ids"][: len(one["output_ids"])]
        assert len(one["meta_info"]["output_token_logprobs"]) == len(one["output_ids"])
    batch = await client.post("/generate", json=body | {"input_ids": [PROMPT, [8]]})
    assert {one["index"] for one in events(batch.text)} == {0, 1}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input_ids": None}, "no tokenizer"),
        ({"text": "hello"}, "send input_ids"),
        ({"input_ids": []}, "input_ids cannot be empty"),
        ({"input_ids": [[1], []]}, "input_ids cannot be empty"),
        ({"input_ids": [97]}, "token id 97 is outside the vocabulary"),
        ({"input_ids": [-1]}, "token id -1 is outside the vocabulary"),
        ({"input_ids": [1] * 512}, r"The input \(512 tokens\) is longer than the model's context length"),
        ({"sampling_params": {"max_new_tokens": 510}}, "Requested token count exceeds"),
        ({"sampling_params": {"top_p": 0.9}}, "top_p is not supported"),
        ({"sampling_params": {"bogus": 1}}, "unknown field `bogus`"),
        ({"sampling_params": {"n": 2}}, "n is not supported"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "length of sampling_params"),
        ({"input_ids": [[1], [2]], "rid": ["one"]}, "rids length mismatch"),
        ({"input_ids": [[1], [2]], "rid": ["one", "one"]}, "Duplicate request IDs"),
        ({"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len has to be -1"),
        ({"top_logprobs_num": 2}, "top_logprobs_num is not supported"),
    ],
)
async def test_what_cannot_be_generated_is_a_400_that_says_why(
    client: httpx.AsyncClient, body: dict[str, Any], named: str
) -> None:
    """Several of these kill a real server."""
    whole = {"input_ids": PROMPT, "sampling_params": GREEDY} | body
    response = await client.post("/generate", json=whole)
    assert response.status_code == 400
    with pytest.raises(AssertionError, match=named):
        raise AssertionError(response.json()["error"]["message"])
    stream = await client.post("/generate", json=whole | {"stream": True})
    assert (stream.status_code, events(stream.text)[0]["error"]["code"]) == (200, 400)
    await generate(client)


async def test_the_checker_answers_in_sglangs_shape(client: httpx.AsyncClient, models: Path) -> None:
    first = (await client.get("/weights_checker")).json()
    assert first.keys() == {"success", "message", "ranks", "per_engine_checksum"}
    (rank,) = first["ranks"]
    assert rank.keys() == {"checksums", "per_gpu_checksum", "parallelism_info"}
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in rank["checksums"].values())
    await client.post("/update_weights_from_disk", json={"model_path": str(models / "b")})
    second = (await client.post("/weights_checker", json={"action": "checksum"})).json()
    assert second["per_engine_checksum"] != first["per_engine_checksum"]
    unknown = await client.post("/weights_checker", json={"action": "bogus"})
    assert (unknown.status_code, unknown.json()["message"]) == (400, "Unsupported action='bogus'")


@pytest.mark.parametrize(
    ("keys", "reads", "writes"),
    [
        (ApiKeys(), {"", "api", "admin"}, {"", "api", "admin"}),
        (ApiKeys(api="api"), {"api"}, {"api"}),
        (ApiKeys(admin="admin"), {"", "api", "admin"}, {"admin"}),
        (ApiKeys(api="api", admin="admin"), {"api"}, {"admin"}),
    ],
)
async def test_keys_open_what_they_open_at_sglang(
    models: Path, keys: ApiKeys, reads: set[str], writes: set[str]
) -> None:
    async with serving(open_engine(models / "a"), keys) as client:
        for key in ("", "api", "admin"):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            read = await client.get("/model_info", headers=headers)
            write = await client.post("/flush_cache", headers=headers)
            assert (read.status_code == 200) == (key in reads)
            assert (write.status_code == 200) == (key in writes)
            for refused in (one for one in (read, write) if one.status_code != 200):
                assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
            assert (await client.get("/health", headers=headers)).status_code == 200


async def test_model_info_answers_during_a_load_and_server_info_waits(models: Path) -> None:
    engine = open_engine(models / "a", load_delay=3600.0)
    async with serving(engine) as client, asyncio.TaskGroup() as group:
        body = {"model_path": str(models / "b"), "weight_version": "7"}
        loading = group.create_task(client.post("/update_weights_from_disk", json=body))
        asking = group.create_task(client.get("/server_info"))
        for _ in range(3):
            assert (await client.get("/model_info")).json()["weight_version"] == "default"
            assert (await client.get("/ping")).status_code == 200
        assert not asking.done()
        loading.cancel()
        await asking


@pytest.mark.parametrize("defects", [False, True])
async def test_a_client_that_leaves_ends_its_load_unless_the_engine_has_sglangs_defects(
    models: Path, defects: bool
) -> None:
    engine = open_engine(models / "a", defects=defects)
    engine.reloader.loader = gate = Gated(engine)
    async with listening(engine) as client:
        loading = asyncio.create_task(client.post("/update_weights_from_disk", json={"model_path": str(models / "b")}))
        await gate.reached.wait()
        loading.cancel()
        await asyncio.wait((loading,))
        if defects:
            assert (await client.get("/ping")).status_code == 200
            gate.let.set()
        await engine.settled()
        gate.let.set()
        assert (engine.labels.model_path == str(models / "b")) == defects


async def test_one_replica_dies_and_the_others_live(models: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from refitd_embedded.server import serve

    engines = [open_engine(models / "a", defects=True) for _ in range(2)]
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in engines]
    urls = [f"http://127.0.0.1:{one.getsockname()[1]}" for one in listeners]
    serving_both = asyncio.create_task(serve([(engine, create_app(engine)) for engine in engines], listeners))
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{urls[1]}/model_info")).status_code == 200
        deadly = {"model_path": str(models / "a"), "load_format": "bogus"}
        with pytest.raises(httpx.TransportError):
            await client.post(f"{urls[0]}/update_weights_from_disk", json=deadly)
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{urls[0]}/model_info")
        assert (await client.get(f"{urls[1]}/health")).status_code == 200
    serving_both.cancel()
    await asyncio.wait((serving_both,))
    printed = capfd.readouterr()
    assert printed.out == "".join(f"refitd_embedded ready on {url}\n" for url in urls)
    assert "the scheduler died" in printed.err
