"""What can be known before the start of settings that name files and engines: whether they can work at all.

`Settings` refuses what contradicts itself. What needs a look at the disk is here, so that only a start looks.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches

from refitd.engine.address import engine_id
from refitd.engine.registry import EnginesFileError, read_engines
from refitd.settings import Settings
from refitd_client.checkpoint.opening import CONFIG_NAME
from refitd_client.contract.plugin import HOOKS, VARIABLES, variable_meant
from refitd_client.validation.reference import ReferenceRefusedError, read_reference


def faults_of(settings: Settings) -> list[str]:
    """Return the faults for which a start would be refused."""
    faults: list[str] = []
    try:
        if settings.engines_file is not None:
            read_engines(settings.engines_file)
    except EnginesFileError as error:
        faults.append(f"--engines-file (REFITD_ENGINES_FILE): {error}")
    faults.extend(_tls_faults(settings))
    if not settings.insecure and (keys := keys_without_token(settings)) is not None:
        faults.append(f"{keys}: set --token-file (REFITD_TOKEN_FILE), or --insecure where every user may")
    if (fault := _base_model(settings)) is not None:
        faults.append(fault)
    return faults


def _tls_faults(settings: Settings) -> Iterator[str]:
    try:
        if settings.tls_files is not None:
            settings.tls_files.context()
    except ValueError as error:
        yield f"--tls-cert (REFITD_TLS_CERT), --tls-key, --tls-client-ca: {error}"
    try:
        settings.client_tls.context()
    except ValueError as error:
        yield f"--ca-file (REFITD_CA_FILE), --client-cert, --client-key: {error}"


def stranger(settings: Settings, known: Collection[str]) -> str | None:
    """Return a fault where the canary is no named engine, else None. `known` are the engines that the API named."""
    if settings.strategy.canary is None:
        return None
    names = {*known, *settings.engine_specs}
    if settings.engines_file is not None:
        with suppress(EnginesFileError):
            names |= {spec.id or engine_id(spec.url) for spec in read_engines(settings.engines_file)}
    if settings.strategy.canary in names:
        return None
    there = ", ".join(sorted(names)) or "there are none yet"
    return f"no engine is called {settings.strategy.canary} (--strategy), but {there}"


def keys_without_token(settings: Settings) -> str | None:
    """Without a token every user of the machine could have engines loaded with keys that only the service may read."""
    if settings.wants_token:
        return None
    keys = "--engine-key-file" if settings.engine_key_file is not None else "--engine-admin-key-file"
    if settings.engine_key_file is None and settings.engine_admin_key_file is None:
        if not _file_has_keys(settings):
            return None
        keys = "a key in --engines-file"
    return (
        f"engines have keys ({keys}) and this service has no token, so any user of this machine can have it change them"
    )


def _file_has_keys(settings: Settings) -> bool:
    if settings.engines_file is None:
        return False
    with suppress(EnginesFileError):
        specs = read_engines(settings.engines_file)
        return any(spec.api_key_file is not None or spec.admin_key_file is not None for spec in specs)
    return False


def _base_model(settings: Settings) -> str | None:
    path = settings.base_model
    if path is None:
        return None
    try:
        read_reference(path)
    except (OSError, ReferenceRefusedError) as error:
        return f"--base-model (REFITD_BASE_MODEL): {error}"
    if not (path / CONFIG_NAME).is_file():
        return f"--base-model (REFITD_BASE_MODEL): {path} has no {CONFIG_NAME}: name the folder of a whole model"
    return None


# Variables of the environment that are called as settings are, and are none: a name with a typo would do nothing.
# Values are never shown: one of them may be a secret.
_OURS_BEGIN = "REFITD_"
_ELSEWHERE = re.compile(
    "REFITD_(URL|SPOOL"  # the SDK and the commands
    "|FRONT_TOKEN(_FILE)?"  # refitd front
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
