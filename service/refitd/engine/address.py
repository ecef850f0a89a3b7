"""Engines' URLs, ids and adapter names, and which hosts may be engines. Pure.

A client that may add an engine makes the service call an address and send it a key. So the operator has to name every
host that is not loopback: in the settings, in the engines file, or on the allow list. Some addresses are never an
engine's, even if they are named: those of a cloud's metadata, of broadcast and multicast, and of no host.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from refitd_client.contract.naming import InvalidNameError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
SETTING = "--engine-allow (REFITD_ENGINE_ALLOW)"
_NEVER: dict[Network, str] = {
    ip_network(network): what
    for network, what in {
        "0.0.0.0/8": "no host",
        "169.254.0.0/16": "link-local, where clouds keep their metadata",
        "100.100.100.200/32": "a cloud's metadata",  # Alibaba
        "168.63.129.16/32": "a cloud's metadata",  # Azure's wire server
        "192.0.0.192/32": "a cloud's metadata",  # Oracle
        "224.0.0.0/4": "multicast",
        "255.255.255.255/32": "broadcast",
        "::/128": "no host",
        "fe80::/10": "link-local",
        "fd00:ec2::254/128": "a cloud's metadata",  # AWS
        "fd20:ce::254/128": "a cloud's metadata",  # Google
        "ff00::/8": "multicast",
    }.items()
}
# An IPv4 address in the last 32 bits: RFC 6052, RFC 8215, and RFC 4291's deprecated "IPv4-compatible" addresses.
_LAST_32_BITS = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"), IPv6Network("::/96"))
# Names and addresses as they are called, and nothing that one library takes for another host than the next does:
# no '%', no Unicode, no spaces, no zones.
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?\.?|[0-9A-Fa-f:.]{2,45}")
_ID = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9._:\[\]-]{0,254}")  # `host:port`, `[::1]:30000`, or a plain name
_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class AddressRefusedError(ValueError):
    """An engine's URL cannot be used; the message shows the form."""


def check_url(url: str) -> str:
    """Return `url` without a trailing slash.

    Raises:
        AddressRefusedError: it is not `http(s)://host[:port]`, or carries credentials, a query or a path.
    """
    advice = f"engine URL {url!r}: write it as http://host:port"
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise AddressRefusedError(f"{advice} ({error})") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise AddressRefusedError(advice)
    if parts.username is not None or parts.password is not None:
        raise AddressRefusedError(f"{advice}, without credentials: keys come from files")
    if parts.path.rstrip("/") or parts.query or parts.fragment:
        raise AddressRefusedError(f"{advice}, without a path")
    if not _HOST.fullmatch(parts.hostname):
        raise AddressRefusedError(f"{advice}, with a plain host name or address")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + ("" if port is None else f":{port}")


def engine_id(url: str) -> str:
    """The id of an engine that was given none: `host:port`."""
    return check_url(url).partition("://")[2]


def check_engine_id(name: str) -> str:
    """Return `name` if it can be an engine's id, as it is used in routes, logs and metrics.

    Raises:
        NameRefusedError: it is empty, too long, or has other characters.
    """
    if not _ID.fullmatch(name):
        raise InvalidNameError(f"engine id {name[:200]!a} is none: use letters, digits, '.', '_', ':' and '-'")
    return name


def check_adapter_name(name: str) -> str:
    """Return `name` if adapters can be called `name-v<step>`, as requests name them.

    Raises:
        ValueError: it has other characters than letters, digits, '.', '_' and '-', or is too long.
    """
    if not _ADAPTER.fullmatch(name):
        raise ValueError(f"{name!r} is no name for adapters: use letters, digits, '.', '_' and '-'")
    return name


def host_of(url: str) -> str:
    """The host of a URL, without brackets, in lower case."""
    return urlsplit(url).hostname or ""


def literal(host: str) -> Address | None:
    """The address that a host is written as, None where it is a name."""
    try:
        return ip_address(host.partition("%")[0])
    except ValueError:
        return None


class AllowRefusedError(ValueError):
    """An entry of the allow list is neither a host name nor a network."""


@dataclass(frozen=True, slots=True)
class AllowList:
    """The entries of the setting: patterns of host names, and networks. An empty list is not set: see `refusal`."""

    patterns: tuple[str, ...] = ()
    networks: tuple[Network, ...] = ()

    @property
    def is_set(self) -> bool:
        return bool(self.patterns or self.networks)

    def names(self, host: str) -> bool:
        return any(fnmatchcase(host.lower().rstrip("."), pattern) for pattern in self.patterns)

    def holds(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


def parse_allow_list(entries: Iterable[str]) -> AllowList:
    """Read the setting: addresses and CIDRs are networks, the rest are host names, with `*` for any characters.

    Raises:
        AllowRefusedError: an entry is a URL or another thing that no host is called.
    """
    patterns: list[str] = []
    networks: list[Network] = []
    for entry in entries:
        try:
            networks.append(ip_network(entry.strip("[]"), strict=False))
        except ValueError:
            if not entry or not all(character.isalnum() or character in "*?.-_" for character in entry):
                raise AllowRefusedError(
                    f"engine_allow: {entry!r} is no host: write names (engine-0, *.pod.local) or networks "
                    "(10.0.0.0/8), without a port"
                ) from None
            patterns.append(entry.lower())
    return AllowList(tuple(patterns), tuple(networks))


def refusal(host: str, address: Address | None, allowed: AllowList, named: Collection[str]) -> str | None:
    """Return why `host` may not be called at `address`; None where it may.

    Args:
        host: a name or an address, as in the URL.
        address: one that the host has; None where it has none now, and then only its name can allow it.
        allowed: the operator's allow list.
        named: hosts that the operator named elsewhere.
    """
    told = host if address is None or str(address) == host else f"{host} ({address})"
    if address is not None:
        if isinstance(address, IPv6Address):
            address = address.ipv4_mapped or address  # the kernel connects to that IPv4 address
        if what := _what_no_engine_is(address):
            return f"{told} is {what}: no engine is there"
    if host in named or allowed.names(host) or (address is not None and allowed.holds(address)):
        return None
    if not allowed.is_set and address is not None and address.is_loopback:
        return None
    if address is None:
        return f"{told} has no address now, and its name is not on the allow list: set {SETTING}"
    return f"{told} is not on the allow list: set {SETTING}, or name the engine with --engine or in the engines file"


def _what_no_engine_is(address: Address) -> str | None:
    """Why no engine has the address, nor the IPv4 host that a gateway would pass its packets on to; None if one may."""
    for candidate in (address, *_behind_gateway(address)):
        if what := next((what for network, what in _NEVER.items() if candidate in network), None):
            return what
        if candidate is not address and candidate.is_loopback:
            return "another host's loopback"
    return None


def _behind_gateway(address: Address) -> list[Address]:
    """The IPv4 addresses that an IPv6 address carries for a gateway (6to4, Teredo, NAT64)."""
    if isinstance(address, IPv4Address) or address.is_loopback:
        return []
    carried: list[IPv4Address | None] = [address.sixtofour, *(address.teredo or ())]
    if any(address in network for network in _LAST_32_BITS):
        carried.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return [each for each in carried if each is not None]
