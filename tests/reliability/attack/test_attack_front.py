"""Attacks on the front: its port is open to whoever reaches it, and it has the engine's keys and the root."""

import base64
import json
import os
import shutil
import socket
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from refitd_front.front import MAX_GENERATE_BYTES, PASSED
from refitd_front.sglang import SglangCalls
from refitd_front.vllm import VllmCalls
from support.attackers import other_spellings
from support.front import FrontServer
from support.jobs import PATIENCE, PROMPT, RUN, Job, running, served_by
from support.servers import API_KEY, EmbeddedServer, refitd_ended

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
LOAD = "update_weights_from_disk"
_NONE: Any = None
CALLS = [*SglangCalls("", _NONE, _NONE, _NONE).routes(), *VllmCalls("", _NONE, _NONE, _NONE).routes()]


@dataclass
class Attacked:
    """The front, its engine and the folder that checkpoints are taken from."""

    job: Job
    areal: FrontServer
    fileroot: Path

    def post(self, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return httpx.post(f"{self.areal.url}{path}", json=body, headers=headers, timeout=PATIENCE, trust_env=False)

    def raw(self, request: bytes) -> bytes:
        """Send bytes that no HTTP library would send, and read until the front closes the connection."""
        with socket.create_connection(("127.0.0.1", self.areal.port), PATIENCE) as line:
            line.sendall(request)
            return b"".join(iter(lambda: line.recv(65536), b""))

    def update(self, folder: Path) -> httpx.Response:
        return self.post(f"/{LOAD}", {"model_path": str(folder)})

    @property
    def served_path(self) -> str:
        """What the engine says, past the front."""
        headers = {"Authorization": f"Bearer {API_KEY}"}
        info = httpx.get(f"{self.job.engine.url}/model_info", headers=headers, timeout=PATIENCE, trust_env=False)
        return info.json()["model_path"]

    @property
    def is_serving(self) -> bool:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        return self.post("/generate", body).status_code == 200


@pytest.fixture(scope="module")
def attacked(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Attacked]:
    """One for all tests here: none of them may change what the engine serves."""
    folder = tmp_path_factory.mktemp("front")
    (folder / "fileroot").mkdir()
    with (
        EmbeddedServer(folder, models / "model_a") as engine,
        running(folder, engine) as job,
        FrontServer(folder, job, "--engine", f"{engine.url}=0") as areal,
    ):
        before = served_by(engine)
        yield Attacked(job, areal, folder / "fileroot")
        assert served_by(engine) == before
        assert not list(job.root.glob(f"{RUN}/v*"))


@pytest.mark.parametrize("target", [*other_spellings(LOAD), "/%", "/%zz", "*"])
def test_no_other_spelling_of_a_path_reaches_the_engine(attacked: Attacked, models: Path, target: str) -> None:
    """The engine would have loaded this folder: the request would go on with its admin key."""
    body = json.dumps({"model_path": str(models / "model_b")}).encode()
    head = f"POST {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    said = attacked.raw(head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    assert said.startswith((b"HTTP/1.1 400", b"HTTP/1.1 404")), said
    assert attacked.served_path == str(models / "model_a")


@pytest.mark.parametrize("path", CALLS)
def test_no_other_spelling_of_a_trainers_call_is_taken_for_it(attacked: Attacked, path: str) -> None:
    for target in other_spellings(path[1:]):
        head = f"POST {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{{}}"
        said = attacked.raw(head.encode())
        assert said.startswith((b"HTTP/1.1 400", b"HTTP/1.1 404")), (target, said)
        assert b'"success"' not in said, target
    assert attacked.is_serving


def test_only_named_routes_reach_the_engine_each_with_its_method(attacked: Attacked) -> None:
    """The engine has all of these. A front with the admin key would carry them out for anybody."""
    for path in ("/set_internal_state", "/freeze_gc", "/server_info", "/metrics"):
        for method in ("GET", "POST", "PUT"):
            answer = httpx.request(method, attacked.areal.url + path, timeout=PATIENCE, trust_env=False)
            assert answer.status_code == 404, (method, path)
            assert "/generate" in answer.json()["detail"]
    refused = attacked.post("/weights_checker", {"action": "reset_tensors"})
    assert (refused.status_code, "behind refitd" in refused.json()["message"]) == (409, True)
    for path, method in PASSED.items():
        other = {"GET": "POST", "POST": "DELETE"}[method]
        answer = httpx.request(other, attacked.areal.url + path, timeout=PATIENCE, trust_env=False)
        assert answer.status_code == 405, (other, path)
    assert attacked.is_serving


@pytest.mark.parametrize("at", ["file", "folder above", "folder"])
def test_a_link_in_a_checkpoint_publishes_no_file_of_the_fronts_user(
    attacked: Attacked, models: Path, tmp_path: Path, at: str
) -> None:
    secret = tmp_path / "outside" / "weight_update_v7"
    shutil.copytree(models / "model_b", secret)
    (secret / "notes.txt").write_text("a token")
    folder = attacked.fileroot / at.replace(" ", "-") / "weight_update_v7"
    if at == "file":
        shutil.copytree(models / "model_b", folder)
        (folder / "notes.txt").symlink_to(secret / "notes.txt")
    elif at == "folder":
        folder.parent.mkdir()
        folder.symlink_to(secret)
    else:
        folder.parent.symlink_to(secret.parent)
    answer = attacked.update(folder)
    assert (answer.status_code, "link" in answer.json()["message"]) == (400, True), answer.text
    assert not list(attacked.job.root.rglob("notes.txt"))


def test_a_checkpoint_elsewhere_is_not_read(attacked: Attacked, models: Path) -> None:
    for path in (models / "model_b", attacked.fileroot / "../models", Path("/etc"), attacked.fileroot):
        answer = attacked.update(path)
        assert answer.status_code == 400
        assert "--checkpoints" in answer.json()["message"], path
    os.mkfifo(attacked.fileroot / "pipe")
    answer = attacked.update(attacked.fileroot / "pipe")
    assert (answer.status_code, "Not a directory" in answer.json()["message"]) == (400, True)


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}])
def test_another_sites_page_holds_and_changes_nothing(attacked: Attacked, headers: dict[str, str]) -> None:
    for path in ("/pause_generation", f"/{LOAD}", "/continue_generation", "/generate"):
        refused = attacked.post(path, {}, headers)
        assert (refused.status_code, refused.json()["type"]) == (403, "urn:refitd:problem:foreign-page"), path
    assert attacked.is_serving


@pytest.mark.parametrize(
    "header", [b"Host: [", b"Host: 127.0.0.1\r\nOrigin: http://[", b"Host: 127.0.0.1\r\nX-Y: \xff\xfe"]
)
def test_no_header_is_a_bug(attacked: Attacked, header: bytes) -> None:
    for path in (b"/generate", b"/pause_generation", b"/weights_checker", b"/nowhere"):
        said = attacked.raw(b"POST %b HTTP/1.1\r\n%b\r\nConnection: close\r\n\r\n" % (path, header))
        assert not said.startswith(b"HTTP/1.1 5"), said
    attacked.post("/continue_generation", {})


def test_a_body_takes_no_more_memory_than_it_may(attacked: Attacked) -> None:
    process = psutil.Process(attacked.areal.pid)
    before, part = process.memory_info().rss, b"10000\r\n" + b"x" * 2**16 + b"\r\n"
    with socket.create_connection(("127.0.0.1", attacked.areal.port), PATIENCE) as line:
        line.sendall(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(300 * 2**20 // 2**16):
                line.sendall(part)
        except ConnectionError:
            pass  # the front has hung up
    assert process.memory_info().rss - before < 3 * MAX_GENERATE_BYTES
    said = attacked.raw(
        b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % (MAX_GENERATE_BYTES + 1)
    )
    assert b"HTTP/1.1 413" in said
    said = attacked.raw(
        b"POST /pause_generation HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % (2**20 + 1)
    )
    assert b"HTTP/1.1 413" in said
    assert attacked.is_serving


def test_half_open_connections_shut_out_nobody(attacked: Attacked) -> None:
    """More than one peer may have, and more than the descriptors that a process has by default."""
    with ExitStack() as open_ends:
        for _ in range(1100):
            line = open_ends.enter_context(socket.create_connection(("127.0.0.1", attacked.areal.port), PATIENCE))
            line.sendall(b"POST /generate HTTP/1.1\r\n")
        assert attacked.is_serving
        health = httpx.get(f"{attacked.areal.url}/health", timeout=PATIENCE, trust_env=False)
        assert health.status_code == 200


def test_the_front_with_a_token_is_closed_without_it(models: Path, tmp_path: Path) -> None:
    """AReaL has no setting for a header, but sends what stands before the host in its engines' addresses."""
    token = tmp_path / "front-token"
    token.write_text("of-the-front\n")
    good = [
        {"Authorization": "Bearer of-the-front"},
        {"Authorization": "Basic " + base64.b64encode(b"areal:of-the-front").decode()},
    ]
    bad = [
        *({}, {"Authorization": "Bearer of-the-service"}, {"Authorization": "Basic of-the-front"}),
        {"Authorization": "Basic " + base64.b64encode(b"of-the-front:").decode()},
    ]
    flags = ["--front-token-file", str(token)]
    with (
        EmbeddedServer(tmp_path, models / "model_a") as engine,
        running(tmp_path, engine) as job,
        FrontServer(tmp_path, job, "--engine", f"{engine.url}=0", *flags) as areal,
    ):
        attacked = Attacked(job, areal, tmp_path)
        for path, method in {**PASSED, **dict.fromkeys(CALLS, "POST"), "/x": "GET", "/flush_cache": "GET"}.items():
            for headers in bad:
                answer = httpx.request(method, areal.url + path, headers=headers, timeout=PATIENCE, trust_env=False)
                assert (answer.status_code == 401) is (path not in {"/health", "/ping"}), (path, headers)
        for headers in good:
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
            assert attacked.post("/generate", body, headers).status_code == 200
        port = str(areal.port)
        with_it = httpx.get(f"http://areal:of-the-front@127.0.0.1:{port}/model_info", timeout=PATIENCE)
        assert with_it.status_code == 200


def test_a_front_that_others_can_reach_does_not_start_without_a_token(tmp_path: Path) -> None:
    words = ["--root", str(tmp_path), "--run", "r", "--engine", "http://127.0.0.1:9=0", "--checkpoints", str(tmp_path)]
    code, said = refitd_ended("front", *words, "--listen", "0.0.0.0:0")
    assert code == 2
    assert "reachable from other machines: set --front-token-file" in said
