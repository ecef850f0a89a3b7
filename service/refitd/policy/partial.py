"""Which tensors of its start-up weights an engine still has, so that a version that leaves tensors out is one thing
on all engines: those tensors are the start-up model's. Pure.

A load leaves alone what a version leaves out. So such a version may go to an engine that was never loaded since it
started, or only with versions that leave out the same. One that has loaded a version with those tensors would keep
them, beside others that were restarted: it stays on what it serves until it is restarted.
"""

from collections.abc import Mapping
from dataclasses import replace

from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord

NOTHING = ""
"""Of the start-up weights nothing is left, as far as is known."""


def why_not_over(engine: EngineRecord, version: VersionRecord, versions: Mapping[str, VersionRecord]) -> str | None:
    """Why an engine may not load a version over what it has; None where it may. A host asks this of its own engines."""
    if not version.lacks or engine.pulls or _kept(engine, versions) in {None, version.lacks}:
        return None
    return f"{version.id} {version.partly}, and this engine has others since a load before: restart it"


def begun(engine: EngineRecord, version: VersionRecord) -> EngineRecord:
    """The record of an engine that a version is about to be loaded into."""
    return replace(engine, kept=version.lacks)


def _kept(engine: EngineRecord, versions: Mapping[str, VersionRecord]) -> str | None:
    if engine.kept is not None:
        return engine.kept
    loaded = engine.serving or engine.held  # by an earlier release, which did not write down what is kept
    if loaded is not None:
        return versions[loaded].lacks if loaded in versions else NOTHING
    is_elsewhere = engine.startup_path is not None and engine.model_path not in {None, engine.startup_path}
    return NOTHING if is_elsewhere else None
