"""Places where engines can be found, as the operator writes them (`--discover`), and what a place answers. Pure.

dns:rollout.svc.local?port=30000           its A and AAAA records, each with this port (RFC 4501)
dns:_sglang._tcp.svc.local?type=SRV        its SRV records, which have the ports
dns://10.0.0.53/rollout.svc.local?port=1   likewise, asked of this name server; 10.0.0.53:5353 for another port
sglang-router+http://router:30000          the workers that an sglang-router lists; ?key_file=/PATH where it has a key
"""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from refitd.engine.address import AddressRefusedError, check_url

_ROUTER = "sglang-router+"
_FORMS = "write dns:NAME?port=N, dns:NAME?type=SRV, or sglang-router+http://HOST:PORT[?key_file=/PATH]"


class PlaceRefusedError(ValueError):
    """A text that is no place; the message names it and shows the forms."""


@dataclass(frozen=True, slots=True)
class Dns:
    """A name in the DNS. `port` None: the records are SRV and have one. `server` None: the system's resolvers."""

    name: str
    port: int | None
    server: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Router:
    """An sglang-router, by its URL. `key_file` has its API key, None where it has none."""

    url: str
    key_file: Path | None = None


Place = Dns | Router


MOST = 1000  # engines: a place that names more is not believed


@dataclass(frozen=True, slots=True)
class EnginesFound:
    """A place that answered: the URLs of its engines. `place` names it in sentences."""

    place: str
    urls: frozenset[str]


@dataclass(frozen=True, slots=True)
class Silent:
    """A place that could not be asked, or whose answer cannot be used."""

    place: str
    reason: str


Answer = EnginesFound | Silent


def parse_place(text: str) -> Place:
    """Read one place.

    Raises:
        PlaceRefusedError: the text is no place.
    """
    try:
        if text.startswith(_ROUTER):
            return _router(text.removeprefix(_ROUTER))
        parts = urlsplit(text)
        if parts.scheme == "dns":
            return _dns(parts.netloc, parts.path.lstrip("/"), dict(parse_qsl(parts.query, strict_parsing=True)))
    except (AddressRefusedError, ValueError) as error:
        raise PlaceRefusedError(f"{text!r} is no place to find engines ({error}): {_FORMS}") from error
    raise PlaceRefusedError(f"{text!r} is no place to find engines: {_FORMS}")


def check_places(texts: list[str]) -> list[str]:
    for text in texts:
        parse_place(text)
    return texts


def _router(text: str) -> Router:
    url, _, query = text.partition("?")
    options = dict(parse_qsl(query, strict_parsing=True)) if query else {}
    file = options.pop("key_file", None)
    if options or (file is not None and not file.startswith("/")):
        raise ValueError("a router's place has nothing but key_file behind its URL, an absolute path")
    return Router(check_url(url), None if file is None else Path(file))


def _dns(server: str, name: str, query: dict[str, str]) -> Dns:
    kind, port = query.pop("type", "A").upper(), query.pop("port", None)
    if not name or query or kind not in {"A", "AAAA", "SRV"}:
        raise ValueError("the name is missing, or it has another key than type and port")
    if (kind == "SRV") == (port is not None):
        raise ValueError("SRV records have their ports, and addresses need one: ?port=30000")
    if port is not None and not 0 < int(port) < 65536:
        raise ValueError(f"{port} is no port")
    at = urlsplit(f"//{server}") if server else None
    asked = None if at is None or at.hostname is None else (at.hostname, at.port or 53)
    return Dns(name, None if port is None else int(port), asked)
