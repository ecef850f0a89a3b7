"""Requests that a browser sends in somebody else's name. Pure.

The dashboard made browsers clients, and a browser sends a request wherever a page that it shows asks for it. Without a
token, a service on loopback would do what any page says that its user happens to look at. So what comes from a page
changes nothing unless the page is the dashboard itself (`Sec-Fetch-Site`, else `Origin`). And a name that its owner
points at 127.0.0.1 (DNS rebinding) makes a foreign page look like the dashboard, and its requests like those of any
other client. So a request that needs no token must call the service by an address or by a name that it goes by.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import ip_address
from urllib.parse import urlsplit

from refitd.problem import Kind, ProblemError

_OWN = frozenset({"same-origin", "none"})  # "none": typed into the address bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """What a request says of where it comes from: its headers, by lower-case name."""

    headers: Mapping[str, str]

    @property
    def is_browser(self) -> bool:
        """Whether a page, or its user, sent it. No other client sends these headers."""
        return "origin" in self.headers or "sec-fetch-site" in self.headers

    @property
    def is_foreign(self) -> bool:
        """Whether the page that sent it is not one of this service's."""
        site = self.headers.get("sec-fetch-site")
        if site is not None:
            return site not in _OWN
        origin = self.headers.get("origin")
        return origin is not None and _authority(origin) != self.headers.get("host")


def intrusion(sender: Sender, *, changes: bool) -> ProblemError | None:
    """Why a browser's request is not let in, None where it is."""
    if changes and sender.is_browser and sender.is_foreign:
        return ProblemError(Kind.FOREIGN_PAGE, "a page of another site asks for this: only the dashboard's own may")
    return None


def other_name(host: str | None, names: Collection[str], *, token: str | None = None) -> ProblemError | None:
    """Why a request that needs no token is not let in, None where it is.

    Args:
        host: its `Host` header, None where it has none, as no browser's.
        names: names and patterns such as `*.example` that the service goes by.
        token: what to say of tokens, None where the service has none.
    """
    if host is None or _is_local(name := _name_in(host)) or any(fnmatchcase(name, each.lower()) for each in names):
        return None
    without = "" if token is None else "without a token that it knows "
    remedy = f"start the service with --allowed-host {name}"
    detail = (
        f"{without}the service is called by its address or a name that it goes by, and not as {host!r}: "
        f"{remedy if token is None else f'{token}, or {remedy}'}"
    )
    return ProblemError(Kind.FOREIGN_HOST, detail)


def _is_local(name: str) -> bool:
    """Whether it is an address, which no name server can point elsewhere, or this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _authority(origin: str) -> str | None:
    """Host and port of an `Origin` header; None where it is no URL, such as `http://[`."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _name_in(host: str) -> str:
    """The name in a `Host` header, without the port; empty where there is none, as in `[`."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
