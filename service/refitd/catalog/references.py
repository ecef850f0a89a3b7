"""Which model a run's checkpoints are held against: the operator's base model, else what the engines started with."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from refitd.root.threads import LISTING_SECONDS, RootHangsError, RootThreads
from refitd.state.store import Store
from refitd_client.checkpoint.inventory import Reference
from refitd_client.contract.states import EngineState
from refitd_client.validation.reference import ReferenceRefusedError, read_reference

_SETTING = "set --base-model (REFITD_BASE_MODEL) to a folder with the model that the engines serve"


@dataclass(frozen=True, slots=True)
class NoReference:
    """There is nothing to hold a checkpoint against. `final` is False while an engine may still tell."""

    reason: str
    final: bool


class References:
    """Finds and remembers references. Files are read in a thread, headers only."""

    def __init__(self, store: Store, base_model: Path | None, threads: RootThreads | None = None) -> None:
        self._store = store
        self._base_model = base_model
        self._threads = threads or RootThreads()
        self._read: dict[Path, Reference] = {}

    async def of(self, run: str) -> Reference | NoReference:
        """The reference for a run's checkpoints."""
        if self._base_model is not None:
            return await self._reference(self._base_model)
        engines = [engine for engine in self._store.engines.values() if engine.run in {run, None}]
        paths = sorted({engine.startup_path for engine in engines if engine.startup_path is not None})
        unreadable: NoReference | None = None
        for path in paths:
            found = await self._reference(Path(path))
            if isinstance(found, Reference):
                return found
            unreadable = unreadable if found.final else found
        if unreadable is not None:
            return unreadable
        if not engines and self._store.engines:
            return NoReference(
                f"no engine follows run {run}, so there is no model to hold it against: 'refitd engines move ID --run "
                f"{run}' brings an engine here, or {_SETTING}",
                final=False,
            )
        if any(engine.state in {EngineState.PROBING, EngineState.UNREACHABLE} for engine in engines) or not engines:
            return NoReference(
                f"no engine has said yet which model it serves: wait for one, or {_SETTING}", final=False
            )
        where = f"the engines' start-up model ({', '.join(paths)}) cannot be read here" if paths else "no engine tells"
        return NoReference(f"no model to hold it against: {where}; {_SETTING}", final=True)

    async def _reference(self, path: Path) -> Reference | NoReference:
        if path not in self._read:
            try:
                what = f"reading the headers of {path}"
                self._read[path] = await self._threads.run(what, partial(read_reference, path), within=LISTING_SECONDS)
            except RootHangsError as error:
                return NoReference(f"the base model {path} cannot be read now: {error}", final=False)
            except FileNotFoundError as error:
                return NoReference(f"the base model {path} is not whole: {error}; {_SETTING}", final=True)
            except OSError as error:  # permissions and I/O errors say nothing about the version
                return NoReference(f"the base model {path} cannot be read now: {_unread(error)}", final=False)
            except ReferenceRefusedError as error:
                return NoReference(f"the base model {path} cannot be read: {error}; {_SETTING}", final=True)
        return self._read[path]


def _unread(error: OSError) -> str:
    """Why the service could not read the model, and what to do."""
    if not isinstance(error, PermissionError):
        return f"{error}; it is tried again"
    user = f"the service runs as user id {os.geteuid()}"
    return f"{error}; {user}: let it read the folder and its files, or {_SETTING}. It is tried again"
