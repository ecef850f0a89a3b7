"""Whether an engine would go to the Hugging Face hub for a path that is not there, by what it was started with."""

from refitd.diagnose.doctor.finding import Check, Finding, Verdict, good
from refitd.diagnose.doctor.processes import LocalProcess

_HUB = "HF_HUB_OFFLINE"
_TRUE = frozenset({"1", "true", "yes", "on"})


def judge_hub(name: str, process: LocalProcess | None) -> Finding:
    """Whether the engine would go to the hub for a path that is not there."""
    fix = f"start it with {_HUB}=1: a path that is gone has to fail, and never be looked for on the hub"
    if process is None or process.environment is None:
        text = "whether it may use the hub cannot be seen from here"
        return Finding(check=Check.HUB, subject=name, verdict=Verdict.UNKNOWN, text=text, fix=fix)
    if process.environment.get(_HUB, "").lower() in _TRUE:
        return good(Check.HUB, name, f"{_HUB} is set")
    return Finding(check=Check.HUB, subject=name, verdict=Verdict.WARNING, text=f"{_HUB} is not set", fix=fix)
