"""The URL of a canary's check may hold a user, a password and a token. They are sent to the check and shown nowhere."""

import base64
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest

from refitd_client.contract.wire import Event
from support.command_line import refitd
from support.jobs import PATIENCE, TOKEN, Job, running
from support.scripted_server import Step, answer, hang_up, serve
from support.servers import EmbeddedServer, refitd_ended

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CREDENTIALS, QUERY = "a-user:a%2Fpassword", "token=a-secret"
BASIC = base64.b64encode(b"a-user:a/password").decode()
SECRETS = ["a-user", "a%2Fpassword", "a/password", "a-secret", BASIC]
PATHS = [
    *("/v1/overview", "/v1/log?limit=500", "/v1/engines", "/v1/versions"),
    *("/v1/rollback?run=exp/trial", "/v1/reclaim/plan", "/metrics", "/healthz", "/readyz"),
]
OF_A_VERSION = ["/v1/versions/{}", "/v1/versions/{}/attempts", "/v1/versions/{}/wait?timeout=0", "/v1/explain/{}"]


def repeats(status: int) -> Step:
    """Answer with what was asked, as some servers do in their errors."""

    def step(handler: BaseHTTPRequestHandler) -> None:
        said = f"nothing at {handler.path} for {handler.headers['authorization']}, who is {SECRETS}"
        answer(status, said.encode())(handler)

    return step


def says(text: str) -> Callable[[Event], bool]:
    """Whether an event tells this of a check."""
    return lambda event: "check" in event.text and text in event.text


def shown(job: Job, versions: list[str]) -> str:
    """What routes answer, what commands print, and all events."""
    headers, texts = {"Authorization": f"Bearer {TOKEN}"}, [f"{event.text} {event.data}" for event in job.events]
    subjects = [*versions, job.engine_now.id]
    with httpx.Client(base_url=job.refitd.url, headers=headers, timeout=PATIENCE, trust_env=False) as http:
        of_versions = [path.format(version) for version in versions for path in OF_A_VERSION]
        for path in [*PATHS, f"/v1/engines/{subjects[-1]}", *of_versions]:
            answered = http.get(path)
            assert answered.status_code in {200, 409}, (path, answered.text)
            texts.append(answered.text)
    for words in (["status"], ["versions"], ["engines"], ["log"], *(["explain", each] for each in subjects)):
        printed = refitd(*words, "--url", job.refitd.url, env={"REFITD_TOKEN": TOKEN})
        assert printed.exit_code in {0, 1}, printed.output
        texts.append(printed.output)
    return "\n".join(texts)


def kept(job: Job) -> bytes:
    """The whole log of a service that has ended, its journal, and what it wrote into the root beside versions."""
    folders = [job.refitd.log.parent / "state", job.root / ".refitd"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "journal.db" for path in files)
    return b"\n".join(path.read_bytes() for path in [job.refitd.log, *files])


def test_what_a_checks_url_holds_is_shown_nowhere_whatever_becomes_of_the_check(tmp_path: Path, models: Path) -> None:
    with EmbeddedServer(tmp_path, models / "model_a") as engine, ExitStack() as open_check:
        steps = [repeats(500), repeats(302), hang_up, repeats(200), repeats(422)]
        check = open_check.enter_context(serve(*steps))
        url = f"{check.url.replace('//', f'//{CREDENTIALS}@')}/judge?{QUERY}#{QUERY}"
        with running(tmp_path, engine, "--strategy", "canary", "--canary-check", url) as job:
            versions = [job.publish(models / "model_b", 1).version_id]
            for text in ("answered 500", "answered 302", "cannot be asked", "passed"):
                job.until(says(text))
            versions.append(job.publish(models / "model_a", 2).version_id)
            assert f"{check.url}/judge says no" in job.until(says("answered 422")).text
            open_check.close()
            before = job.now
            versions.append(job.publish(models / "model_b", 3).version_id)
            job.until(says("cannot be asked"), before)
            told = shown(job, versions)
            job.refitd.stop()
            left = kept(job)
    assert {each.headers["authorization"] for each in check.seen} == {f"Basic {BASIC}"}
    assert {each.path for each in check.seen} == {f"/judge?{QUERY}"}
    for secret in SECRETS:
        assert secret not in told
        assert secret.encode() not in left


@pytest.mark.parametrize(
    "url",
    [
        "http://a-user:hu/sh@127.0.0.1:9/judge?token=a-secret",
        "http://a-user:a-secret@127.0.0.1:99999/",
        "http://a-user:a-secret@[::1/",
        "http://a-user:a-secret@/judge",
        "ftp://a-user:a-secret@127.0.0.1/",
        "http://a-user:a-secret@a b/",
    ],
)
def test_a_url_that_is_none_is_refused_at_the_start_and_not_repeated(tmp_path: Path, url: str) -> None:
    (tmp_path / "root").mkdir()
    words = ["--root", str(tmp_path / "root"), "--state", str(tmp_path / "state"), "--port", "0"]
    code, said = refitd_ended("serve", *words, "--strategy", "canary", "--canary-check", url)
    assert code == 2
    assert "canary_check" in said
    assert "Traceback" not in said
    for secret in ("a-user", "hu", "a-secret"):
        assert secret not in said
