"""Certificates of a private authority, made by OpenSSL's own program (Debian's `openssl`)."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in files."""

    cert: Path
    key: Path

    @property
    def as_server(self) -> tuple[str, ...]:
        """The flags of a service that shows it to its clients."""
        return ("--tls-cert", str(self.cert), "--tls-key", str(self.key))

    @property
    def as_client(self) -> tuple[str, ...]:
        """The flags of a service that shows it to what it calls."""
        return ("--client-cert", str(self.cert), "--client-key", str(self.key))

    def put(self, other: "Pair") -> None:
        """Replace the files' contents by another pair's."""
        for own, new in ((self.key, other.key), (self.cert, other.cert)):
            own.with_suffix(".new").write_bytes(new.read_bytes())
            own.with_suffix(".new").replace(own)


class Authority:
    """An authority that signs certificates; `file` has its own."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name = folder, name
        self.file, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        _openssl(*_NEW_KEY, "-keyout", self._key, "-out", self.file, "-subj", f"/CN={name}", "-days", "30")

    @property
    def trusted(self) -> tuple[str, ...]:
        """The flags of a service that trusts it in what it calls."""
        return ("--ca-file", str(self.file))

    def issue(self, name: str, *, names: str = "IP:127.0.0.1,DNS:localhost", days: int = 30) -> Pair:
        """A certificate for these names, which a server and a client can show."""
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        extensions = (
            f"subjectAltName={names}",
            "basicConstraints=critical,CA:FALSE",
            "extendedKeyUsage=serverAuth,clientAuth",
        )
        signed = ("-CA", self.file, "-CAkey", self._key, *(word for each in extensions for word in ("-addext", each)))
        _openssl(*_NEW_KEY, "-keyout", pair.key, "-out", pair.cert, "-subj", f"/CN={name}", "-days", str(days), *signed)
        return pair


def _openssl(*words: Any) -> None:
    done = subprocess.run(["openssl", "req", "-x509", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
