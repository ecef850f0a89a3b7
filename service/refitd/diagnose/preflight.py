"""What can be known before the start of settings that name files and engines: whether they can work at all.

`Settings` refuses what contradicts itself. What needs a look at the disk is here, so that only a start looks.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress

from refitd.engine.address import engine_id
from refitd.engine.engines_file import EnginesFileError, read_engines
from refitd.settings import Settings
from refitd_client.checkpoint.opening import CONFIG_NAME
from refitd_client.validation.reference import ReferenceRefusedError, read_reference


def check_start(settings: Settings) -> None:
    """Look at what the settings name, as the service will.

    Raises:
        ValueError: the engines file or the base model cannot be used; one line for each.
    """
    if faults := faults_of(settings):
        raise ValueError("\n".join(faults))


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
    """Why files for TLS cannot be used."""
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
