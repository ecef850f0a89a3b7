"""What somebody means who asks for a version by less than its id: by its run, its step or its folder.

A run is taken before a step: one may be called `7`.
"""

from collections.abc import Iterable

from refitd.ledger import Ledger
from refitd.surface.overview import runs_of
from refitd_client.contract.naming import parse_version_id


def meant(word: str, ledger: Ledger) -> list[str]:
    """The ids that a word may stand for; of several, those of versions that are deleted are left out."""
    if word in runs_of(ledger):
        target = ledger.goals(word).target
        return [] if target is None else [target.id]
    return sorted(_called(word, ledger.versions)) or sorted(_called(word, ledger.gone))


def _called(word: str, ids: Iterable[str]) -> Iterable[str]:
    for id_ in ids:
        parsed = parse_version_id(id_)
        if parsed is not None and word in {str(parsed[1].step), id_.rpartition("~")[2]}:
            yield id_
