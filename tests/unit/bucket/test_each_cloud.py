"""Each cloud's URL opens a store of that cloud, with the prefix in it, by the variables that its own tools have."""

import asyncio
import base64
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from obstore.store import AzureStore, GCSStore, S3Store

from refitd_client.bucket.objects import Bucket, open_store, parse_bucket_url
from refitd_client.errors import BucketError
from support.endless_server import answering

VARIABLES = {"AZURE_STORAGE_ACCOUNT_NAME": "somebody", "AWS_REGION": "eu-west-1"}
KEY = base64.b64encode(b"hidden-key").decode()
BATCH = """--batch
Content-Type: application/http
Content-ID: 0

HTTP/1.1 {status} what a server says of it
x-ms-version: 2023-11-03
Content-Length: 0


--batch--
"""


class PlainStore:
    """A server without TLS that answers each request with a status, and notes what was asked and how it was signed."""

    def __init__(self) -> None:
        self.status, self.body = 404, b""
        self.asked: list[tuple[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append((self.path.partition("?")[0], self.headers.get("authorization") or ""))
                self.send_response(outer.status)
                self.send_header("content-length", str(len(outer.body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(outer.body)

            do_HEAD = do_GET  # noqa: N815 - its name in the class above

            def do_POST(self) -> None:
                """Answer a batch of one deletion, which is 202 whatever becomes of the deletion."""
                self.rfile.read(int(self.headers["content-length"]))
                body = BATCH.format(status=outer.status).replace("\n", "\r\n").encode()
                self.send_response(202)
                self.send_header("content-type", "multipart/mixed; boundary=batch")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the class above
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def plain() -> Generator[PlainStore]:
    made = PlainStore()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        thread.join()
        made.server.server_close()


def given(monkeypatch: pytest.MonkeyPatch, plain: PlainStore | str, cloud: str = "az") -> None:
    """Set a cloud's variables, with credentials for this server."""
    url = plain if isinstance(plain, str) else plain.url
    made = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": KEY}
    if cloud == "az":
        made = {
            f"AZURE_STORAGE_{name}": value for name, value in (("ENDPOINT", url), ("ACCOUNT", "account"), ("KEY", KEY))
        }
    for name, value in made.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of a cloud is set, and what fails is not tried again."""
    for name in os.environ:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("refitd_client.bucket.objects.RETRIES", 0)


@pytest.mark.parametrize(("url", "kind"), [("s3", S3Store), ("gs", GCSStore), ("az", AzureStore)])
def test_a_url_opens_a_store_of_its_cloud_below_its_prefix(
    url: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    store = open_store(parse_bucket_url(f"{url}://bucket/a/prefix/"))
    assert isinstance(store, AzureStore | GCSStore | S3Store)
    assert type(store) is kind
    assert store.prefix == "a/prefix"


READ = """
import asyncio, sys
from refitd_client.bucket.objects import Bucket
asyncio.run(Bucket.at("s3://bucket/weights").read("runs.json", 100))
sys.exit(7)
"""


def test_a_process_that_ends_right_after_an_answer_ends_as_it_means_to(plain: PlainStore) -> None:
    """Without the wait at its end one of some is aborted by a thread of obstore's."""
    variables = {"AWS_ENDPOINT_URL": plain.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": KEY}
    command, environment = [sys.executable, "-c", READ], {**os.environ, **variables}
    ends = [subprocess.run(command, env=environment, check=False).returncode for _ in range(8)]
    assert ends == [7] * 8


async def test_a_part_that_goes_on_behind_its_end_is_read_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    head = (
        b'HTTP/1.1 206 P\r\nLast-Modified: Wed, 21 Oct 2026 07:28:00 GMT\r\nETag: "a"\r\n'
        b"Content-Range: bytes 5-9/99\r\nContent-Length: %d\r\n\r\n" % 10**12
    )
    with answering(head, bytes(2**16)) as url:
        given(monkeypatch, url, "s3")
        async with asyncio.timeout(30):
            with pytest.raises(BucketError, match="not 5"):
                await Bucket.at("s3://bucket").fill("key", 5, memoryview(bytearray(5)))


@pytest.mark.parametrize("code", ["NoSuchBucket", "ContainerNotFound"])
def test_a_bucket_that_is_not_there_is_not_taken_for_an_empty_one(
    code: str, plain: PlainStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, plain, "s3")
    bucket = Bucket.at("s3://typo/weights")
    assert asyncio.run(bucket.read("runs.json", 100)) is None
    plain.body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>It is not there</Message></Error>".encode()
    with pytest.raises(BucketError, match="s3://typo/weights cannot be read: there is no such bucket"):
        asyncio.run(bucket.read("runs.json", 100))


@pytest.mark.parametrize(
    ("scheme", "endpoint", "more"),
    [
        ("s3", "AWS_ENDPOINT_URL", {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": KEY}),
        ("gs", "GOOGLE_BASE_URL", {"GOOGLE_SKIP_SIGNATURE": "true"}),
        ("az", "AZURE_STORAGE_ENDPOINT", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": KEY}),
    ],
)
def test_a_server_that_a_variable_names_without_tls_is_asked(
    scheme: str, endpoint: str, more: dict[str, str], plain: PlainStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {endpoint: plain.url, **more}.items():
        monkeypatch.setenv(name, value)
    assert asyncio.run(Bucket.at(f"{scheme}://bucket/prefix").facts("key")) is None
    assert [path.replace("%2F", "/") for path, _ in plain.asked] == ["/bucket/prefix/key"]


def test_the_account_and_the_key_of_azures_command_line_are_taken(
    plain: PlainStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, plain)
    assert asyncio.run(Bucket.at("az://container").facts("key")) is None
    assert plain.asked[0][1].startswith("SharedKey account:")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "another")  # obstore's own name of it comes first
    assert asyncio.run(Bucket.at("az://container").facts("key")) is None
    assert plain.asked[1][1].startswith("SharedKey another:")


def test_a_container_without_an_account_is_refused_with_the_variable_that_is_missing() -> None:
    with pytest.raises(BucketError, match="AZURE_STORAGE_ACCOUNT_NAME has to name its storage account"):
        Bucket.at("az://container/prefix")


def test_a_key_that_is_none_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "hidden-and-not-base64")
    with pytest.raises(BucketError, match="a variable of the environment for this store is not valid") as failed:
        Bucket.at("az://container/prefix")
    assert "hidden" not in str(failed.value)


def test_a_host_that_gets_no_token_is_said_to_have_no_credentials(
    plain: PlainStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", plain.url)
    monkeypatch.setenv("AZURE_MSI_ENDPOINT", f"{plain.url}/identity")
    plain.status = 400
    with pytest.raises(BucketError, match=r"no credentials for it could be had \(400\); give this process") as failed:
        asyncio.run(Bucket.at("az://container/prefix").facts("key"))
    assert failed.value.may_heal  # an identity can be given, or its server be away for a moment
    assert [path for path, _ in plain.asked] == ["/identity"]


@pytest.mark.parametrize("status", [401, 403])
def test_a_listing_that_is_refused_is_no_store_that_is_away(
    status: int, plain: PlainStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, plain)
    plain.status = status
    with pytest.raises(BucketError, match="refuses to list folder/: give this process credentials") as failed:
        asyncio.run(Bucket.at("az://container/prefix").listed("folder/"))
    assert not failed.value.may_heal


def test_a_deletion_that_azure_refuses_is_no_store_that_is_away(
    plain: PlainStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, plain)
    bucket = Bucket.at("az://container/prefix")
    plain.status = 403
    with pytest.raises(BucketError, match="refuses to delete key: give this process credentials") as failed:
        asyncio.run(bucket.delete("key"))
    assert not failed.value.may_heal
    plain.status = 500
    with pytest.raises(BucketError, match=r"could not be reached, or failed, to delete key \(500\)"):
        asyncio.run(bucket.delete("key"))
    plain.status = 404
    asyncio.run(bucket.delete("key"))  # one that is not there is no error
