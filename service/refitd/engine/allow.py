"""Which hosts may be engines. Pure: a host, an address that it has, and the operator's rules in; a reason or None out.

Whoever may add an engine makes the service call an address and send it a key. So what is not loopback has to be named
by the operator: in the settings, in the engines file, or on the allow list. Some addresses are never an engine's,
whatever names them: those that lead to the cloud's own metadata, to everyone, or to no one.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

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


class AllowRefusedError(ValueError):
    """An entry of the allow list that is none."""


@dataclass(frozen=True, slots=True)
class AllowList:
    """The entries of the setting: patterns of host names, and networks. An empty list is not set: see `refusal`."""

    patterns: tuple[str, ...] = ()
    networks: tuple[Network, ...] = ()

    @property
    def is_set(self) -> bool:
        """Whether the operator said anything."""
        return bool(self.patterns or self.networks)

    def names(self, host: str) -> bool:
        """Whether a pattern matches the host's name."""
        return any(fnmatchcase(host.lower().rstrip("."), pattern) for pattern in self.patterns)

    def holds(self, address: Address) -> bool:
        """Whether the address is in one of the networks."""
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
    """Why `host` may not be called at `address`, one that it has; None where it may.

    `named` are the hosts that the operator named elsewhere. A host without an address has to be allowed by its name.
    """
    told = host if address is None or str(address) == host else f"{host} ({address})"
    if address is not None:
        address = _unmapped(address)
        if what := _what_no_engine_is(address):
            return f"{told} is {what}: no engine is there"
    if host in named or allowed.names(host) or (address is not None and allowed.holds(address)):
        return None
    if not allowed.is_set and address is not None and address.is_loopback:
        return None
    if address is None:
        return f"{told} has no address now, and its name is not on the allow list: set {SETTING}"
    return f"{told} is not on the allow list: set {SETTING}, or name the engine with --engine or in the engines file"


def _unmapped(address: Address) -> Address:
    """The IPv4 address that the kernel connects to for an IPv4-mapped IPv6 address; any other address as it is."""
    return address if isinstance(address, IPv4Address) else address.ipv4_mapped or address


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


def literal(host: str) -> Address | None:
    """The address that a host is written as, None where it is a name."""
    try:
        return ip_address(host.partition("%")[0])
    except ValueError:
        return None


def host_of(url: str) -> str:
    """The host of a URL, without brackets, in lower case."""
    return urlsplit(url).hostname or ""
