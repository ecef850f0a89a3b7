"""The hosts that the operator named as engines' in the settings or in the engines file."""

from collections.abc import Callable

from refitd.engine.allow import Address, host_of, parse_allow_list, refusal
from refitd.ledger import Ledger
from refitd.rollout.record import Source
from refitd.settings import Settings


def guard_of(settings: Settings, ledger: Ledger) -> Callable[[str, Address | None], str | None]:
    """Why an engine may not be called, by the settings and by what the engines file says at the time of the call.

    What `--engine` names is the operator's word. So is the engines file, unless there is an allow list: then it says
    which hosts the file may name.
    """
    allowed = parse_allow_list(settings.engine_allow)
    settled = frozenset(host_of(url) for url in settings.engines)

    def guard(host: str, address: Address | None) -> str | None:
        reason = refusal(host, address, allowed, settled)
        if reason is None or allowed.is_set:
            return reason
        file = {host_of(engine.url) for engine in ledger.engines.values() if engine.source is Source.FILE}
        return refusal(host, address, allowed, settled | file)

    return guard
