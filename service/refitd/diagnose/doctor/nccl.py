"""Whether processes are ready for a broadcast over NCCL, by the variables that they were started with."""

from collections.abc import Iterator, Mapping

from refitd.diagnose.doctor.finding import Check, Finding, Verdict, good

_CUMEM = "NCCL_CUMEM_ENABLE"
_DEBUG = "NCCL_DEBUG"


def judge_nccl(name: str, environment: Mapping[str, str] | None, *, is_sglang: bool) -> Iterator[Finding]:
    """Whether a process is ready for a broadcast. SGLang sets NCCL_CUMEM_ENABLE=0 for itself where nobody set it."""
    fix = f"set {_CUMEM}=0 on both sides: else the trainer joins the group and the first broadcast fails"
    if environment is None:
        text = "its variables cannot be seen from here"
        yield Finding(check=Check.NCCL, subject=name, verdict=Verdict.UNKNOWN, text=text, fix=fix)
        return
    said = environment.get(_CUMEM, "0" if is_sglang else None)
    if said == "0":
        yield good(Check.NCCL, name, f"{_CUMEM} is 0")
    else:
        text = f"{_CUMEM} is {'not set' if said is None else said}"
        yield Finding(check=Check.NCCL, subject=name, verdict=Verdict.FAILED, text=text, fix=fix)
    if environment.get(_DEBUG, "").upper() == "INFO":
        text, fix = f"{_DEBUG} is INFO", f"unset {_DEBUG}: it writes for every operation"
        yield Finding(check=Check.NCCL, subject=name, verdict=Verdict.WARNING, text=text, fix=fix)
