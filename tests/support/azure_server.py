"""A real server with the API of Azure's blobs: Azurite, Microsoft's emulator. Its objects are in memory.

`tests/azure/install .azurite` installs it.
"""

import base64
import hmac
import os
import shutil
import subprocess
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlencode, urlsplit
from uuid import uuid4

import httpx

from support.sockets import free_port

ACCOUNT, KEY = "testaccount", base64.b64encode(b"hidden-test-secret-of-azure").decode()
MISSING = "Azurite is not here: tests/azure/install .azurite (it needs npm), or name its azurite-blob: REFITD_AZURITE"
PATIENCE = 60.0
_OURS = Path(__file__).parents[2] / ".azurite/node_modules/.bin/azurite-blob"
_VERSION = "2021-08-06"  # of the API, for requests of these tests
_SIGNATURE_VERSION = "2019-12-12"


def azurite() -> str | None:
    """The program's path, None where there is none."""
    return os.environ.get("REFITD_AZURITE") or shutil.which("azurite-blob") or (str(_OURS) if _OURS.exists() else None)


@dataclass(frozen=True)
class AzuriteServer:
    """The server's URL, which has the account in it, and the variables by which obstore finds it."""

    url: str

    @property
    def environment(self) -> Mapping[str, str]:
        """For `os.environ`, and for processes."""
        return {
            "AZURE_STORAGE_ENDPOINT": self.url,
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        }

    def container(self) -> str:
        """Make a container; its name."""
        name = f"weights-{uuid4().hex[:12]}"
        self._signed("PUT", name, {"restype": "container"})
        return name

    def blocks(self, container: str, key: str) -> int:
        """Of how many blocks a blob was put together: none if it was uploaded by one request."""
        return self._signed("GET", f"{container}/{key}", {"comp": "blocklist"}).text.count("<Block>")

    def _signed(self, method: str, path: str, query: Mapping[str, str]) -> httpx.Response:
        """Send a request without a body, signed with the account's key. Raises httpx.HTTPStatusError."""
        url = f"{self.url}/{path}"
        headers = {"x-ms-date": datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"), "x-ms-version": _VERSION}
        lines = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        resource = f"/{ACCOUNT}{urlsplit(url).path}" + "".join(f"\n{name}:{query[name]}" for name in sorted(query))
        to_sign = f"{method}{chr(10) * 12}{lines}{resource}"
        headers["authorization"] = f"SharedKey {ACCOUNT}:{_signature(to_sign)}"
        with httpx.Client(trust_env=False, timeout=PATIENCE) as http:
            return http.request(method, url, params=query, headers=headers).raise_for_status()


def shared_access(rights: str) -> str:
    """A shared access signature for the account's blobs, with these rights (`r`, `w`, `d`, `l`) for an hour."""
    ends = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    said = {"sp": rights, "ss": "b", "srt": "co", "st": "", "se": ends, "sip": "", "spr": "", "sv": _SIGNATURE_VERSION}
    signature = _signature("\n".join([ACCOUNT, *said.values(), ""]))
    return urlencode({name: value for name, value in said.items() if value} | {"sig": signature})


def _signature(text: str) -> str:
    return base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")).decode()


@contextmanager
def azure_server(folder: Path) -> Generator[AzuriteServer]:
    """Start it. The folder is for its log."""
    program, port = azurite(), free_port()
    assert program is not None
    log = folder / "azurite.log"
    words = ("--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry", "--silent")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [program, *words],
            cwd=folder,
            env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
            stdout=out,
            stderr=out,
        )
    try:
        _await(f"http://127.0.0.1:{port}", process, log)
        yield AzuriteServer(f"http://127.0.0.1:{port}/{ACCOUNT}")
        assert process.poll() is None, (
            f"Azurite has ended by itself, by {process.returncode}: {log.read_text()[-1000:]}"
        )
    finally:
        process.kill()
        process.wait()


def _await(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    ends = time.monotonic() + PATIENCE
    while True:
        try:
            httpx.get(url, timeout=5, trust_env=False)
        except httpx.HTTPError:
            said = log.read_text(errors="replace")[-1000:]
            assert process.poll() is None, f"Azurite has ended: {said}"
            assert time.monotonic() < ends, f"Azurite does not answer: {said}"
            time.sleep(0.05)
        else:
            return
