"""Attacks on tokens: guessing, timing, empty files, the wrong scope, and places where one could be read."""

import hmac
import logging
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from refitd import tokens
from refitd.api.auth import HEALTH, OPEN
from refitd.settings import Settings
from refitd_client import RefitClient
from support.attackers import attacking, listening
from support.command_line import refitd
from support.servers import RefitdProgram, refitd_ended
from support.services import Stage, serving

WRITE, READ = "opens-everything", "opens-what-looks"
LOOKS = ["/v1/versions", "/v1/engines", "/v1/reclaim/plan", "/v1/explain/x", "/v1/events", "/metrics"]


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def challenge(answer: httpx.Response) -> str:
    return answer.headers["www-authenticate"]


async def routes(stage: Stage, token: str = "") -> list[tuple[str, str]]:
    """Every route that the service has, and a few that it has not."""
    paths = (await stage.http.get("/openapi.json", headers=bearer(token))).json()["paths"]
    known = [(method.upper(), path.replace("{", "").replace("}", "")) for path in paths for method in paths[path]]
    return [*known, ("GET", "/docs"), ("GET", "/nowhere"), ("POST", "/nowhere"), ("BREW", "/v1/versions")]


async def test_without_a_token_nothing_is_reached_but_health_when_looking_needs_one(tmp_path: Path) -> None:
    async with serving(tmp_path, token=WRITE, read_token=READ) as stage:
        for method, path in await routes(stage, READ):
            answer = await stage.http.request(method, path, content=b"{")
            assert (answer.status_code == 401) is (path not in OPEN), (method, path)
            if path not in OPEN:
                assert challenge(answer) == 'Bearer realm="refitd"'  # no error where no token was sent: RFC 6750, 3.1


async def test_a_guessed_token_opens_nothing(tmp_path: Path) -> None:
    guesses = ["", "x", WRITE[:-1], WRITE + "x", WRITE.upper(), f"{WRITE}\0", "é" * 8, "x" * 4000, f'"{WRITE}"']
    async with serving(tmp_path, token=WRITE, read_token=READ) as stage:
        for guess in guesses:
            for method, path in (("GET", "/metrics"), ("POST", "/v1/reclaim")):
                headers = [("Authorization", f"Bearer {guess}".encode())]
                answer = await stage.http.request(method, path, headers=headers)
                assert answer.status_code == 401, (guess, path)
                assert challenge(answer) == 'Bearer realm="refitd", error="invalid_token"'


async def test_of_two_tokens_in_one_request_none_counts(tmp_path: Path) -> None:
    """A proxy in front may have looked at the other one."""
    async with serving(tmp_path, token=WRITE) as stage:
        both = [("Authorization", f"Bearer {WRITE}"), ("Authorization", "Bearer x")]
        assert (await stage.http.post("/v1/reclaim", headers=both)).status_code == 401
        assert (await stage.http.post(f"/v1/reclaim?access_token={WRITE}")).status_code == 401


async def test_a_read_token_looks_and_changes_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, token=WRITE, read_token=READ) as stage:
        await stage.listed()
        for path in LOOKS[:4]:
            assert (await stage.http.get(path, headers=bearer(READ))).status_code in {200, 404}
            assert (await stage.http.get(path, headers=bearer(WRITE))).status_code in {200, 404}
        for method, path in await routes(stage, READ):
            if method != "GET":
                answer = await stage.http.request(method, path, headers=bearer(READ), content=b"{")
                assert (answer.status_code, answer.json()["type"]) == (403, "urn:refitd:problem:insufficient-scope")
                assert challenge(answer) == 'Bearer realm="refitd", error="insufficient_scope"'
        assert (await stage.http.post("/v1/reclaim", headers=bearer(WRITE))).status_code == 200


async def test_nobody_without_the_token_has_a_body_read(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, token=WRITE) as stage,
        listening(stage.api) as server,
        attacking(server) as attacker,
    ):
        await attacker.send(b"POST /v1/versions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n")
        assert b"HTTP/1.1 401" in await attacker.reader.readuntil(b"\r\n")


async def test_tokens_are_exchanged_without_a_restart_and_both_are_good_meanwhile(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")
    async with serving(tmp_path, token_file=file) as stage:

        async def good() -> list[str]:
            answers = {each: await stage.http.post("/v1/reclaim", headers=bearer(each)) for each in ("old", "new")}
            return [each for each, answer in answers.items() if answer.status_code == 200]

        assert await good() == ["old"]
        file.write_text("new\nold\n")
        assert await good() == ["old", "new"]
        assert RefitClient("http://x", token_file=file)._connection.headers() == bearer("new")
        file.write_text("new\n")
        assert await good() == ["new"]


@pytest.mark.parametrize("content", [b"", b"\n \n", b"two words\n", b"caf\xc3\xa9\n", b"\xff\n", b"x\n" * 17])
async def test_a_token_file_that_holds_no_token_opens_nothing(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_text("good\n")
    async with serving(tmp_path, token_file=file) as stage:
        file.write_bytes(content)
        with capture_logs() as told:
            for headers in ({}, bearer(""), bearer("good"), bearer("x")):
                answer = await stage.http.post("/v1/reclaim", headers=headers)
                assert answer.status_code == 503, headers
                assert "REFITD_TOKEN_FILE" in answer.json()["detail"]
        assert [event["event"] for event in told].count("every request is refused") == 1  # and not once per request
        file.unlink()
        assert (await stage.http.post("/v1/reclaim", headers=bearer("good"))).status_code == 503
    with pytest.raises(ValidationError, match="token file"):
        Settings(root=tmp_path, token_file=file)
    file.write_bytes(content)
    with pytest.raises(ValidationError, match="REFITD_TOKEN_FILE"):
        Settings(root=tmp_path, token_file=file)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"REFITD_TOKEN": ""}, "REFITD_TOKEN is empty"),
        ({"REFITD_TOKEN": "", "REFITD_HOST": "0.0.0.0"}, "REFITD_TOKEN is empty"),  # noqa: S104 - refused
        ({"REFITD_HOST": "0.0.0.0"}, "set a token"),  # noqa: S104 - refused
        ({"REFITD_READ_TOKEN_FILE": "FILE"}, "set --token-file (REFITD_TOKEN_FILE) or REFITD_TOKEN too"),
        ({"REFITD_READ_TOKEN_FILE": "FILE", "REFITD_HOST": "0.0.0.0"}, "without a write token"),  # noqa: S104 - refused
    ],
)
def test_no_service_starts_that_only_seems_to_have_a_token(
    environment: dict[str, str], says: str, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("x")
    given = {name: str(tmp_path / "token") if value == "FILE" else value for name, value in environment.items()}
    result = refitd("serve", "--root", "/x", env=given)
    assert result.exit_code == 2
    assert says in result.stderr


def test_how_long_a_comparison_takes_says_nothing_about_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is compared, by digests of one length, in constant time, whichever it is."""
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    real = hmac.compare_digest
    monkeypatch.setattr(tokens.hmac, "compare_digest", compare)
    known = ("first", "a-much-longer-second-one", "3")
    for given, expected in (("first", True), ("3", True), ("", False), ("x" * 500, False)):
        compared.clear()
        assert tokens.is_one_of(given, known) is expected
        assert compared == [(32, 32)] * 3


def test_a_token_is_no_flag_because_every_user_sees_the_flags_of_a_process() -> None:
    result = refitd("serve", "--root", "/x", "--token", "secret")
    assert result.exit_code == 2
    assert "No such option" in result.stderr


async def test_no_answer_repeats_a_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(tmp_path, token=WRITE, read_token=READ) as stage:
        for method, path in await routes(stage, READ):
            if path != "/v1/events":
                for token in (WRITE, READ, "wrong-guess"):
                    answer = await stage.http.request(method, path, headers=bearer(token), json={"run": "run"})
                    assert not any(secret in answer.text + str(answer.headers) for secret in (WRITE, READ, token))
    assert WRITE not in caplog.text
    assert READ not in caplog.text


@pytest.mark.e2e
def test_no_token_or_key_is_in_the_log_the_journal_or_the_list_of_processes(tmp_path: Path) -> None:
    """A real service, whose engine is not there, so that its key is in all that fails."""
    key = "the-engines-key"
    for name, secret in (("token", WRITE), ("read", READ), ("key", key)):
        (tmp_path / name).write_text(f"{secret}\n")
    (tmp_path / "root").mkdir()
    files = ["--token-file", "token", "--read-token-file", "read", "--engine-key-file", "key"]
    flags = [str(tmp_path / word) if not word.startswith("--") else word for word in files]
    with RefitdProgram(tmp_path, tmp_path / "root", ["http://127.0.0.1:9"], *flags) as server:
        for token in (WRITE, READ, "wrong-guess"):
            for method, path in (("GET", "/v1/engines"), ("POST", "/v1/versions"), ("GET", f"/{token}%00")):
                httpx.request(method, server.url + path, headers=bearer(token), content=b"\xff{", trust_env=False)
        listed = psutil.Process(server.pid).cmdline()
        server.stop()
    kept = [path.read_bytes() for path in (tmp_path / "state").iterdir()] + [server.log.read_bytes()]
    for secret in (WRITE, READ, key):
        assert not any(secret.encode() in content for content in kept), secret
        assert not any(secret in word for word in listed), secret


@pytest.mark.e2e
def test_a_service_that_others_can_reach_does_not_start_without_a_token(tmp_path: Path) -> None:
    code, said = refitd_ended("serve", "--root", str(tmp_path), "--host", "0.0.0.0")  # noqa: S104 - it is refused
    assert code == 2
    assert "reachable from other machines: set a token" in said


ANSWERED = {200, 404, 503}  # 503: the root was not listed yet


@pytest.mark.parametrize("path", [each for each in LOOKS if "events" not in each])
async def test_a_page_whose_name_was_pointed_at_loopback_reads_nothing(tmp_path: Path, path: str) -> None:
    """DNS rebinding: its requests have no header that tells them from a client's, but the name."""
    page, address = {"Host": "evil.test:8700"}, {"Host": "127.0.0.1:8700"}
    cases: list[dict[str, Any]] = [{}, {"token": WRITE}]
    for settings in cases:
        async with serving(tmp_path / str(len(settings)), **settings) as stage:
            refused = await stage.http.get(path, headers=page)
            assert (refused.status_code, refused.json()["type"]) == (403, "urn:refitd:problem:foreign-host")
            assert "--allowed-host" in refused.json()["detail"]
            assert (await stage.http.get(path, headers=address)).status_code in ANSWERED
            known = await stage.http.get(path, headers=page | bearer(WRITE))
            assert (known.status_code == 403) is (not settings)
    async with serving(tmp_path / "named", allowed_hosts=["*.test"]) as stage:
        assert (await stage.http.get(path, headers=page)).status_code in ANSWERED


async def test_such_a_page_changes_nothing_and_health_goes_by_any_name(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        refused = await stage.http.post("/v1/reclaim", headers={"Host": "evil.test:8700"})
        assert refused.json()["type"] == "urn:refitd:problem:foreign-host"
        for path in HEALTH:
            assert (await stage.http.get(path, headers={"Host": "refitd.pod.cluster.local"})).status_code == 200


@pytest.mark.parametrize("name", ["evil.test:8700", "*", "a*", "http://a", "", "a b"])
def test_an_allowed_host_is_a_name_and_never_all_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValidationError, match="no name of a host"):
        Settings(root=tmp_path, allowed_hosts=[name])
