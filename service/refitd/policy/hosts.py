"""Which engines the operator named: the hosts that may be called, and the engines that get the default keys."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from refitd.engine.allow import Address, host_of, parse_allow_list, refusal
from refitd.state.records import EngineRecord, Source


@dataclass(frozen=True, slots=True)
class OperatorHosts:
    """What the settings say of engines: their URLs, and the allow list of hosts that may be called."""

    engines: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()


def guard_of(hosts: OperatorHosts, engines: Mapping[str, EngineRecord]) -> Callable[[str, Address | None], str | None]:
    """Why an engine may not be called, by the settings and by what the engines file says at the time of the call.

    What `--engine` names is the operator's word. So is the engines file, unless there is an allow list: then it says
    which hosts the file may name.
    """
    allowed = parse_allow_list(list(hosts.allow))
    settled = frozenset(host_of(url) for url in hosts.engines)

    def guard(host: str, address: Address | None) -> str | None:
        reason = refusal(host, address, allowed, settled)
        if reason is None or allowed.is_set:
            return reason
        file = {host_of(engine.url) for engine in engines.values() if engine.source is Source.FILE}
        return refusal(host, address, allowed, settled | file)

    return guard


def named_by_operator(hosts: OperatorHosts, engines: Mapping[str, EngineRecord]) -> Callable[[str], bool]:
    """Return whether the operator named the engine with a URL, by what the engines file says at the time of the call.

    `--engine` and the engines file name engines. A place of `--discover` does where an allow list says on which hosts
    engines are; without one any process on loopback could be discovered. A POST to the API names none: whoever can send
    it could register a server of their own, to be sent the key of the others.
    """
    settled = frozenset(hosts.engines)
    sources = {Source.FILE, Source.DISCOVERED} if hosts.allow else {Source.FILE}

    def is_named(url: str) -> bool:
        return url in settled or any(e.url == url and e.source in sources for e in engines.values())

    return is_named
