"""Variables of the environment that are called as settings are, and are none: a name with a typo would do nothing.

Values are never shown: one of them may be a secret.
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from refitd.diagnose.doctor.finding import CheckName, Finding, warning
from refitd.settings import Settings
from refitd_client.contract.plugin import HOOKS, VARIABLES, variable_meant

_OURS_BEGIN = "REFITD_"
_ELSEWHERE = re.compile(
    "REFITD_(URL|SPOOL"  # the SDK and the commands
    "|FACADE_TOKEN(_FILE)?"  # refitd areal
    "|(SGLANG|VLLM)(_[A-Z]+)?"  # refitd's plugin in an engine, and tests of it, without what is nearly one of them
    "|DATA|MODEL|DOCS_URL|JOB_(ENGINES|TOKEN)"  # docker-compose.yml and deploy/
    "|([A-Z0-9_]+_)?(SERVICE_(HOST|PORT)(_.*)?|PORT(_[0-9]+_.*)?))"  # Kubernetes, of services whose names begin so
)
_SAME_VARIABLE = 0.8


def unread(environment: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that nothing of refitd's reads, each with the setting that was probably meant, if any."""
    known = [f"{_OURS_BEGIN}{name.upper()}" for name in Settings.model_fields]
    known += [f"{hook}_{variable}" for hook in HOOKS for variable in VARIABLES]
    found = (name for name in sorted(environment) if name.upper().startswith(_OURS_BEGIN) and name.upper() not in known)
    others = (name for name in found if variable_meant(name) or not _ELSEWHERE.fullmatch(name.upper()))
    return {name: next(iter(get_close_matches(name.upper(), known, 1, _SAME_VARIABLE)), None) for name in others}


def why_unread(environment: Mapping[str, str]) -> str | None:
    """One sentence about all of them; None where there are none."""
    named = [
        name if meant is None else f"{name} (did you mean {meant}?)" for name, meant in unread(environment).items()
    ]
    return f"no setting is called {', '.join(named)}" if named else None


def judge_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The same as findings of doctor."""
    for name, meant in unread(environment).items():
        fix = "unset it, or see docs/reference/settings.md for what there is"
        if meant is not None:
            fix = f"did you mean {meant}?"
        yield warning(CheckName.SETTINGS, name, "no setting is called so, and nothing reads it", fix)
