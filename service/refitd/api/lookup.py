"""Which version or engine a word means: an id, or less than one. A run, a step or a folder's name; an engine's URL."""

from refitd.api.context import Service
from refitd.api.overview import runs_of
from refitd.policy.readiness import unknown
from refitd.problem import Slug
from refitd.rollout.targets import Targets
from refitd.state.store import Store
from refitd.state.version import VersionRecord
from refitd_client.contract.naming import parse_version_id


async def find_version(service: Service, version_id: str) -> VersionRecord:
    """Return a version by its id, also one that was deleted.

    Raises:
        ProblemError: there is none, or the service cannot know yet.
    """
    record = await service.store.find(version_id)
    if record is None:
        detail = f"no version {version_id}: 'refitd versions' lists what there is"
        raise unknown(service.store, Slug.UNKNOWN_VERSION, detail)
    return record


def engine_id_of(word: str, store: Store) -> str:
    """Return the id of the engine with this id or URL; the word itself where there is none."""
    if word in store.engines:
        return word
    url = word.rstrip("/")
    return next((engine.id for engine in store.engines.values() if engine.url.rstrip("/") == url), word)


def version_ids_of(word: str, store: Store, targets: Targets) -> list[str]:
    """Return the ids of the versions that a run's name, a step or a folder's name may mean.

    A run is taken before a step: a run may be called `7`. Versions that are deleted count where no other fits.

    Args:
        word: what was asked for.
        store: the versions.
        targets: a run means its target.
    """
    if word in runs_of(store):
        target = targets.of_run(word).target
        return [] if target is None else [target.id]
    for ids in (store.versions, store.gone):
        named = [(id_, parsed[1].step) for id_ in ids if (parsed := parse_version_id(id_)) is not None]
        if found := sorted(id_ for id_, step in named if word in {str(step), id_.rpartition("~")[2]}):
            return found
    return []
