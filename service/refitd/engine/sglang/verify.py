"""Whether an engine serves what it was told to. Pure: what it says of itself and its contents in, one verdict out.

Path and label are only names (SGLang sets the path before it loads), so contents decide where they can be compared:
with what a clean load of the version gave before, and with what the engine held before this load.
"""

from dataclasses import dataclass

from refitd.engine.fingerprint import comparable
from refitd.engine.port import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Says:
    """What an engine says of itself after a load. `fingerprint` is None where the server cannot tell."""

    model_path: str | None
    weight_version: str | None
    fingerprint: str | None


def doubt(says: Says, target: Target, *, unchanged: bool) -> str | None:
    """Why the engine does not serve the target, None where it does as far as can be proved.

    `unchanged` says that the files are still those that were checked. Where they are not, a trainer may have written
    there between the last look and the end of the load, and only a clean load's record proves what was read.
    """
    if says.model_path != target.path:
        return f"it says that it serves {says.model_path}, not {target.path}"
    if says.weight_version != target.label:
        return f"it says weight_version {says.weight_version!r}, not {target.label!r}"
    is_proved = says.fingerprint is not None and says.fingerprint == target.fingerprint
    if not unchanged and not is_proved:
        return "its files changed meanwhile, or nobody can say whether they did"
    if says.fingerprint is None:
        return None
    recorded = target.fingerprint if comparable(says.fingerprint, target.fingerprint) else None
    if recorded is not None and says.fingerprint != recorded:
        return "its tensors are not those that a clean load of this version gave"
    if recorded is None and says.fingerprint == target.not_fingerprint:
        return "its tensors have not changed, and the files of the two versions differ"
    return None
