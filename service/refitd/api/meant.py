"""What somebody means who asks for a version by less than its id: by its run, its step or its folder; or for an engine
by its URL.

A run is taken before a step: one may be called `7`.
"""

from collections.abc import Iterable

from refitd.api.overview import runs_of
from refitd.rollout.targets import Targets
from refitd.state.store import Store
from refitd_client.contract.naming import parse_version_id


def meant(word: str, store: Store, targets: Targets) -> list[str]:
    """The ids that a word may stand for; of several, those of versions that are deleted are left out."""
    if word in runs_of(store):
        target = targets.of_run(word).target
        return [] if target is None else [target.id]
    return sorted(_called(word, store.versions)) or sorted(_called(word, store.gone))


def engine_meant(word: str, store: Store) -> str:
    """The id of the engine that a word stands for: an id, or a URL that is an engine's; else the word as it is."""
    if word in store.engines:
        return word
    url = word.rstrip("/")
    return next((engine.id for engine in store.engines.values() if engine.url.rstrip("/") == url), word)


def _called(word: str, ids: Iterable[str]) -> Iterable[str]:
    for id_ in ids:
        parsed = parse_version_id(id_)
        if parsed is not None and word in {str(parsed[1].step), id_.rpartition("~")[2]}:
            yield id_
