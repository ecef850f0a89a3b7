"""The engines file: which engines there are, which run each follows, how to reach it. YAML, read again when it changes.

engines:
  - url: http://10.0.0.5:30000
    id: rollout-0                      # default: host:port
    run: exp/trial                     # default: the service's --run, or the only run
    api_key_file: /run/secrets/engine  # reads
    admin_key_file: /run/secrets/admin # changes
    root: /mnt/weights                 # where this engine sees the root
"""

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from refitd.engine.address import check_engine_id, check_url, engine_id
from refitd_client.contract.naming import check_run


class EngineSpec(BaseModel):
    """One engine as the operator names it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Annotated[str, AfterValidator(check_url)]
    id: Annotated[str, AfterValidator(check_engine_id)] | None = None
    run: Annotated[str, AfterValidator(check_run)] | None = None
    api_key_file: Path | None = None
    admin_key_file: Path | None = None
    root: str | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    engines: list[EngineSpec]


class EnginesFileError(ValueError):
    """The engines file cannot be used; the message names the entry and the field."""


def parse_engines(text: str) -> list[EngineSpec]:
    """Read the file's text.

    Raises:
        EnginesFileError: it is no YAML, a field is missing or unknown, or two entries name one engine.
    """
    try:
        data: Any = yaml.safe_load(text)
        specs = _File.model_validate(data if data is not None else {"engines": []}).engines
    except yaml.YAMLError as error:
        raise EnginesFileError(f"not YAML: {error}") from error
    except ValidationError as error:
        raise EnginesFileError("; ".join(_sentence(entry) for entry in error.errors())) from error
    names = [*(spec.id or engine_id(spec.url) for spec in specs), *(spec.url for spec in specs)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise EnginesFileError(f"named twice: {', '.join(sorted(twice))}")
    return specs


def _sentence(error: Any) -> str:
    return f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}"
