"""SGLang's calls at the front: what trainers read of each reply, and what each call is refused for.

Which trainer reads what (their sources, read in December 2026):

    slime, miles, NeMo-RL     `_make_request` of SGLangEngine, SGLangApiClient, SGLangGenerationWorker: the status, then
                              the body as JSON; of `pause_generation` and `continue_generation` the status alone
    miles                     `_check_weight_sync_results`: `success` is not False
    SGLang, verl              HttpServerEngineAdapter, HttpServerAdapter: as slime's
    all of them               flush by GET, until the status is 200: slime gives up after 60 times
    slime's older releases    GET /get_weight_version and `weight_version` of it; the others ask /model_info
    slime                     before a drain: POST /abort_request, then GET /v1/loads until it counts no request
    SGLang's own tests        `num_paused_requests` of a load, `new_version` of a renaming, `status` of a pause
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from refitd_front import sessions as module
from refitd_front.front import MEMORY, PASSED, REFUSED, Front
from refitd_front.members import MemberLostError
from refitd_front.sessions import Sessions
from refitd_front.versions import Versions
from support.attackers import attacking, listening
from support.front_app import front_of
from support.scripted_server import answer, serve

INIT = {
    "master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 3, "backend": "gloo",
    "group_name": "slime-pp_0",
}  # fmt: skip
BUCKET: dict[str, Any] = {
    "names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], "group_name": "slime-pp_0", "flush_cache": False,
    "weight_version": "1",
}  # fmt: skip


class Members:
    """In the place of the processes of a group. A bucket arrives at once, unless the test holds it."""

    held: asyncio.Event | None = None

    def __init__(self, group: object) -> None:
        self._lost = asyncio.Event()

    async def join(self, within: float) -> None:
        """The trainer has made its group."""

    async def take(self, *_: object) -> None:
        if self.held is not None:
            self.held.set()
            await self._lost.wait()
        if self._lost.is_set():
            raise MemberLostError("the member was ended")

    async def end(self) -> None:
        self._lost.set()


@dataclass
class Called:
    """A front, its trainer, and what it has published: the label of each version."""

    front: Front
    trainer: httpx.AsyncClient
    sessions: Sessions
    folder: Path
    labels: list[str | None]

    async def post(self, path: str, body: object = None) -> httpx.Response:
        return await self.trainer.post(path, json={} if body is None else body)

    async def said(self, path: str, body: object = None) -> str:
        """The sentence of a call that is refused in SGLang's form."""
        reply = await self.post(path, body)
        assert (reply.status_code, reply.json().get("success", False)) == (400, False), reply.text
        return reply.json()["message"]

    @property
    async def is_generating(self) -> bool:
        return (await self.post("/generate", {"input_ids": [1]})).status_code == 200


@asynccontextmanager
async def calling(folder: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[Called]:
    labels: list[str | None] = []

    async def served(_: object, path: Path, label: str | None = None) -> str | None:
        labels.append(label)
        return None

    Members.held = None
    patch.setattr(module, "GroupMembers", Members)
    patch.setattr(Versions, "serve", served)
    patch.setattr(Versions, "serve_received", served)
    with serve(answer(200, {"text": "ok"})) as engine:
        front, versions, sessions = front_of(engine.url, folder)
        transport = httpx.ASGITransport(cast("Any", front.app()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as trainer:
            yield Called(front, trainer, sessions, folder, labels)
            for path in (front, sessions):
                await path.aclose()
        versions.close()


@pytest.fixture
async def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Called]:
    async with calling(tmp_path, monkeypatch) as each:
        yield each
        assert await each.is_generating, "nothing that a trainer does wrong leaves requests waiting"


async def test_each_reply_has_the_status_and_the_fields_that_trainers_read(called: Called) -> None:
    pulled = {"local_checkpoint_dir": "/local", "source_dir": str(called.folder), "target_version": 12}
    (called.folder / "weight_v000012").mkdir()
    paused, went_on = (
        {"status": "ok", "message": f"Generation {what} successfully."} for what in ("paused", "continued")
    )
    done = {"success": True, "message": "Succeeded."}
    calls: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("destroy_weights_update_group", {"group_name": "slime-pp_0"}, done),  # as miles does before it makes its first
        ("init_weights_update_group", INIT, done),
        ("pause_generation", {"mode": "retract"}, paused),
        ("post_process_weights", {"restore_weights_before_load": True, "post_process_quantization": False}, done),
        ("begin_weight_update", {"selector": "all"}, done),
        ("update_weights_from_distributed", BUCKET, done),
        ("end_weight_update", {}, done),
        ("continue_generation", {}, went_on),
        ("pull_weights", pulled, done),
        (
            "update_weights_from_disk",
            {"model_path": "/local", "weight_version": "2"},
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0},
        ),
        ("load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, {"success": True, "error_message": None}),
        ("unload_lora_adapter", {"lora_name": "a"}, {"success": True, "error_message": None}),
    ]
    for path, body, fields in calls:
        reply = await called.post(f"/{path}", body)
        assert (reply.status_code, fields.items() <= reply.json().items()) == (200, True), (path, reply.text)
    for flush in (called.trainer.get, called.trainer.post):
        assert (await flush("/flush_cache")).status_code == 200
    assert called.labels == ["1", "2", None]
    assert {"/model_info", "/get_weight_version", "/v1/loads"} <= {path for path, how in PASSED.items() if how == "GET"}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("init_weights_update_group", {**INIT, "backend": "mooncake"}, "mooncake, and only gloo and nccl are"),
        ("begin_weight_update", {"selector": "draft"}, "draft"),
        ("update_weights_from_distributed", {**BUCKET, "selector": "draft"}, "draft"),
        ("update_weights_from_distributed", {**BUCKET, "load_format": "delta"}, "delta, and only flattened_bucket is"),
        ("update_weights_from_distributed", BUCKET, "no update has begun"),
        ("update_weights_from_disk", {"model_path": "/m", "load_format": "dummy"}, "dummy"),
        ("update_weights_from_disk", {"path": "/m"}, "model_path"),
        ("load_lora_adapter", {"lora_name": "a"}, "lora_path"),
        ("pull_weights", {"local_checkpoint_dir": "/local"}, "cannot be pulled"),
        ("end_weight_update", {}, "no update has begun"),
        ("pause_generation", {"mode": "now"}, "not paused"),
        ("destroy_weights_update_group", {"group_name": 1}, "cannot be left"),
        ("update_weight_version", {"new_version": "7"}, "engines serve no version of this front"),
    ],
)
async def test_what_cannot_be_carried_out_is_400_with_a_sentence_and_no_version(
    called: Called, path: str, body: dict[str, Any], named: str
) -> None:
    reply = await called.post(f"/{path}", body)
    fault = reply.json().get("message") or reply.json().get("error_message")
    assert (reply.status_code, reply.json().get("success", False)) == (400, False)
    assert named in fault
    assert called.labels == []


@pytest.mark.parametrize("path", sorted(REFUSED))
async def test_what_carries_a_pickle_or_takes_memory_away_is_refused_by_what_to_set_instead(
    called: Called, path: str
) -> None:
    reply = await called.post(
        path, {"serialized_named_tensors": ["gASVIAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAR0cnVllIWUUpQu"]}
    )
    assert (reply.status_code, reply.json()["success"]) == (409, False)
    assert "have the trainer update by" in reply.json()["message"] or "mem_fraction_static" in reply.json()["message"]


async def test_pulled_weights_are_loaded_as_often_as_the_local_folder_is_named(called: Called) -> None:
    """slime's and miles' way by disk: pull, before the pause, and then a load of the folder that was pulled to."""
    asked: list[Path] = []

    async def served(path: Path, label: str | None = None) -> str | None:
        asked.append(path)
        return None

    cast("Any", called.front)._sglang._versions.serve = served
    for number in (12, 13):
        folder = called.folder / f"weight_v{number:06d}"
        folder.mkdir()
        pull = {"local_checkpoint_dir": "/local", "source_dir": str(called.folder), "target_version": number}
        assert (await called.post("/pull_weights", pull)).status_code == 200
        for _ in range(2):
            assert (await called.post("/update_weights_from_disk", {"model_path": "/local"})).status_code == 200
    assert [path.name for path in asked] == ["weight_v000012"] * 2 + ["weight_v000013"] * 2
    assert "No such file" in await called.said("/pull_weights", {**pull, "target_version": 14})
    assert "--checkpoints" in await called.said("/pull_weights", {**pull, "source_dir": "/etc"})
    assert "without '..'" in await called.said("/pull_weights", {**pull, "source_dir": f"{called.folder}/../x"})
    assert "no absolute path" in await called.said("/pull_weights", {**pull, "source_dir": "x"})
    assert (await called.post("/update_weights_from_disk", {"model_path": "/local"})).status_code == 200
    assert asked[-1].name == "weight_v000013", "what cannot be pulled does not take the place of what was"


async def test_a_second_trainer_ends_the_bucket_of_the_first_which_hears_it_and_its_own_update_is_whole(
    called: Called,
) -> None:
    Members.held = asyncio.Event()
    assert (await called.post("/init_weights_update_group", INIT)).status_code == 200
    await called.post("/pause_generation")
    first = asyncio.create_task(called.post("/update_weights_from_distributed", BUCKET))
    await Members.held.wait()
    assert (await called.post("/begin_weight_update")).status_code == 200
    assert (await first).status_code == 400
    assert "has not arrived" in (await first).json()["message"]
    Members.held = None
    assert (await called.post("/init_weights_update_group", {**INIT, "master_port": 10})).status_code == 200
    assert (await called.post("/begin_weight_update")).status_code == 200
    assert (await called.post("/update_weights_from_distributed", {**BUCKET, "weight_version": "5"})).status_code == 200
    assert (await called.post("/end_weight_update")).status_code == 200
    assert (await called.post("/continue_generation")).status_code == 200
    assert called.labels == ["5"]


async def test_a_bucket_that_was_refused_names_no_later_version(called: Called) -> None:
    assert "no update has begun" in await called.said("/update_weights_from_distributed", BUCKET)
    await called.post("/init_weights_update_group", INIT)
    await called.post("/begin_weight_update")
    assert (
        await called.post("/update_weights_from_distributed", {**BUCKET, "weight_version": None})
    ).status_code == 200
    assert (await called.post("/end_weight_update")).status_code == 200
    assert called.labels == [None]


async def _endless() -> AsyncIterator[bytes]:
    """A body in chunks, so that no length is declared."""
    while True:
        yield b"[" * 2**20


def _calls(front: Front) -> list[str]:
    return [*front._sglang.routes(), *front._vllm.routes()]


async def test_ten_gigabytes_of_json_are_refused_by_what_they_declare_or_while_they_come(called: Called) -> None:
    for path in _calls(called.front):
        declared = await called.trainer.post(path, content=b"", headers={"Content-Length": str(10 * 10**9)})
        chunked = await called.trainer.post(path, content=_endless())
        assert [declared.status_code, chunked.status_code] == [413, 413], path
        assert "a request body has at most" in chunked.json()["detail"]
    assert (called.labels, MEMORY.used) == ([], 0)


async def test_a_client_that_leaves_in_the_middle_of_a_call_has_called_nothing(called: Called) -> None:
    async with listening(called.front.app()) as server:
        for path in _calls(called.front):
            async with attacking(server) as attacker:
                await attacker.send(_request(path, b'{"selector": "all"', 20))
        await server.until_connections(0)
    assert not called.sessions._session.begun
    assert (called.labels, called.sessions._groups) == ([], {})


def _request(path: str, body: bytes, length: int) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {length}"
    return head.encode() + b"\r\n\r\n" + body


async def test_a_trainer_that_reads_no_reply_has_made_its_calls_all_the_same(called: Called) -> None:
    """Each is carried out to its end: what it has begun is not left half done."""
    session, gate = called.sessions, called.front._gate
    calls: list[tuple[str, Any, Callable[[], bool]]] = [
        ("init_weights_update_group", INIT, lambda: any(each.is_usable for each in session._groups.values())),
        ("pause_generation", {}, lambda: not gate.is_open),
        ("begin_weight_update", {}, lambda: session._session.begun),
        ("update_weights_from_distributed", BUCKET, lambda: session._session.label == "1"),
        ("end_weight_update", {}, lambda: called.labels == ["1"]),
        ("continue_generation", {}, lambda: gate.is_open),
    ]
    async with listening(called.front.app()) as server:
        for path, body, is_done in calls:
            content = json.dumps(body).encode()
            async with attacking(server) as attacker:
                await attacker.send(_request(f"/{path}", content, len(content)))
            async with asyncio.timeout(15.0):
                while not is_done():  # noqa: ASYNC110 - a call that nobody reads the reply of has no event
                    await asyncio.sleep(0.01)
    assert called.labels == ["1"]
