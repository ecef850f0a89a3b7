"""Does an engine see the same files as this host? Proved by a nonce or by a load, and otherwise not claimed.

A stock SGLang has no route that reads a file and leaves the engine as it was: an update that fails has drained the
requests in flight and changed the path that the engine names. What can prove it:

    the process    on this host, its own view of the nonce's path (/proc/PID/root)
    the plugin     its socket in the root, when it answers for this engine (`plugin_answers`, below)
    a load         of a version beneath the root, whose contents the service proved

Nothing else does. Then the answer is that it cannot be known before the first load.
"""

from dataclasses import dataclass

from refitd.diagnose.doctor.engines import Asked
from refitd.diagnose.doctor.finding import Check, Finding, Verdict, good
from refitd.diagnose.doctor.nonce import Nonce
from refitd.diagnose.doctor.processes import LocalProcess
from refitd.engine.port import Reached
from refitd.state.records import EngineRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What there is. `read` is what the engine's process reads at the nonce's path, None for nothing; `looked` whether
    anybody could look. `loaded` is a version that the engine is proven to have loaded from the root.
    """

    looked: bool
    read: str | None
    plugin: bool | None
    loaded: str | None


def sighting(nonce: Nonce, asked: Asked, process: LocalProcess | None, known: EngineRecord | None) -> Sighting:
    """Gather it. Reads one file."""
    path = f"{asked.root}/{nonce.path}"
    return Sighting(
        looked=process is not None and process.can_be_seen,
        read=None if process is None else process.reads(path),
        plugin=plugin_answers(asked),
        loaded=known.serving if known is not None and known.known else None,
    )


def plugin_answers(asked: Asked) -> bool | None:
    """Whether refitd's plugin inside this engine answers at a socket in the root; None where that is not known.

    The probe has asked (docs/plugin.md: `{"do":"hello"}` over `<root>/.refitd/engines/*.sock`): an answer that names
    the engine's own port and seed comes from a process that has made its socket beneath the very root that we look at.
    """
    return asked.seen.plugin is not None if isinstance(asked.seen, Reached) else None


def judge_sharing(asked: Asked, nonce: Nonce, found: Sighting) -> Finding:
    """What it proves."""
    if found.read == nonce.text:
        return good(Check.SHARED_FILES, asked.name, f"its process reads a nonce at {asked.root}")
    if found.plugin:
        return good(Check.SHARED_FILES, asked.name, "the plugin inside it answers from a socket in the root")
    if found.looked:
        text = f"its process does not see what was just written beneath {asked.root}"
        fix = "mount the root there, or say where it is: --path-map, or 'root' in the engines file"
        return Finding(check=Check.SHARED_FILES, subject=asked.name, verdict=Verdict.FAILED, text=text, fix=fix)
    if found.loaded is not None:
        return good(Check.SHARED_FILES, asked.name, f"it was proved to have loaded {found.loaded} from the root")
    text = "it cannot be proved before the first load: stock SGLang has no way to say what it sees"
    fix = "run doctor on the engine's host, or install refitd into its environment (the plugin answers)"
    return Finding(check=Check.SHARED_FILES, subject=asked.name, verdict=Verdict.UNKNOWN, text=text, fix=fix)
