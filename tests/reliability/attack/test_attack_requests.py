"""Attacks with what a request says: bombs of JSON, numbers and texts that nothing can hold, and too much to keep."""

import base64
from pathlib import Path
from typing import Any

import pytest

from refitd.policy.admit import MAX_CHARACTERS, MAX_ENTRIES
from support.attackers import attacking, listening
from support.services import serving

NOTICE = b'{"run":"run","step":1,%b}'


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"[" * 1_000_000, id="deep list"),
        pytest.param(b'{"a":' * 150_000, id="deep object"),
        pytest.param(b"[" + b"{}," * 300_000 + b"{}]", id="many objects"),
        pytest.param(NOTICE % (b'"metadata":' + b'{"a":' * 100_000), id="deep metadata"),
        pytest.param(b'{"run":"run","step":' + b"9" * 100_000 + b"}", id="a number of 100000 digits"),
        pytest.param(b'{"run":"run","step":1e400}', id="a number beyond all"),
        pytest.param(b'{"run":"run","step":NaN}', id="NaN"),
        pytest.param(NOTICE % rb'"path":"\ud800"', id="half a surrogate pair as a path"),
        pytest.param(NOTICE % rb'"metadata":{"\udfff":""}', id="half a surrogate pair to keep"),
        pytest.param(NOTICE % b'"metadata":{"a":"\xed\xa0\x80"}', id="half a surrogate pair in UTF-8"),
        pytest.param('{"run":"run","step":1}'.encode("utf-16"), id="UTF-16"),
        pytest.param(b"\x00" * 1000, id="nothing at all"),
        pytest.param(NOTICE % (b'"path":"' + b"a/" * 400_000 + b'"'), id="a path of 800 kB"),
        pytest.param(NOTICE % (b'"base":"' + b"b" * 100_000 + b'"'), id="a base of 100 kB"),
        pytest.param(NOTICE % (b'"metadata":{"k":"' + b"v" * MAX_CHARACTERS + b'"}'), id="large metadata"),
        pytest.param(
            NOTICE % (b'"metadata":{' + b",".join(b'"%d":""' % n for n in range(MAX_ENTRIES + 1)) + b"}"),
            id="many metadata",
        ),
    ],
)
async def test_a_hostile_notice_is_refused_and_nothing_of_it_is_kept(tmp_path: Path, body: bytes) -> None:
    async with serving(tmp_path, names=(), scan_interval=60) as stage:
        headers = {"content-type": "application/json"}
        answer = await stage.http.post("/v1/versions", content=body, headers=headers)
        told = answer.status_code, answer.json()["type"].removeprefix("urn:refitd:problem:")
        assert told in {(422, "bad-request"), (413, "too-large")}  # the latter for more values than a body may have
        assert len(answer.content) < 10_000
        assert stage.store.versions == {}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/versions?cursor=" + base64.urlsafe_b64encode(b"[9999999999999999999999,1,1]").decode(), None),
        ("GET", "/v1/versions?cursor=" + base64.urlsafe_b64encode(b"[1,-1,1]").decode(), None),
        ("GET", "/v1/versions?cursor=%ff%fe", None),
        ("GET", "/v1/versions?limit=" + "9" * 5000, None),
        ("GET", "/v1/versions/x/wait?timeout=nan", None),
        ("GET", "/v1/versions/x/wait?timeout=1e400", None),
        ("POST", "/v1/rollback", {"run": "run", "to": {"a": 1}}),
        ("POST", "/v1/engines", {"url": "http://127.0.0.1:1", "id": "../../etc"}),
        ("POST", "/v1/engines", {"url": "http://127.0.0.1:1", "id": "x" * 300}),
        ("POST", "/v1/engines", {"url": "http://127.0.0.1:1", "id": "a\nb"}),
        ("POST", "/v1/engines", {"url": "http://127.0.0.1:1", "id": ""}),
    ],
)
async def test_what_no_field_can_hold_is_refused_and_no_bug(tmp_path: Path, method: str, path: str, body: Any) -> None:
    async with serving(tmp_path, names=(), engine_allow=[]) as stage:
        answer = await stage.http.request(method, path, json=body)
        assert answer.status_code == 422, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        assert stage.store.engines == {}


@pytest.mark.parametrize("path", ["/v1/versions/%2e%2e%2f", "/v1/versions/%00", "/v1/engines/%ff", "/v1/explain/..%5c"])
async def test_an_id_that_is_none_is_not_found(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, names=()) as stage:
        await stage.listed()
        assert (await stage.http.get(path)).status_code == 404


@pytest.mark.parametrize(
    "header", [b"Host: [", b"Host: 127.0.0.1\r\nOrigin: http://[", b"Host: [\r\nSec-Fetch-Site: none"]
)
async def test_a_header_that_is_no_url_is_no_bug(tmp_path: Path, header: bytes) -> None:
    async with serving(tmp_path, names=()) as stage, listening(stage.api) as server:
        for line in (b"GET /v1/versions", b"POST /v1/reclaim", b"GET /healthz", b"GET /nowhere"):
            async with attacking(server) as attacker:
                await attacker.send(b"%b HTTP/1.1\r\n%b\r\nConnection: close\r\n\r\n" % (line, header))
                said = await attacker.read()
                assert said.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4")), said
