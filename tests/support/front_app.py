"""The front in this process."""

from pathlib import Path
from typing import Any

from refitd.engine.http import Key
from refitd.tokens import FrontTokens
from refitd_client import PublishOptions
from refitd_client.front import NamedVersions
from refitd_client.http.connection import connect_to
from refitd_front.engines import OneEngine
from refitd_front.front import Front
from refitd_front.passing import EngineKeys, EngineProxy
from refitd_front.sessions import Sessions
from refitd_front.versions import Versions


def named_versions(root: Path, service: str) -> NamedVersions:
    return NamedVersions(connect_to(service), "exp/trial", root, PublishOptions())


def front_of(
    engine: str,
    folder: Path,
    *,
    key: Path | None = None,
    admin_key: Path | None = None,
    service: str = "http://127.0.0.1:9",
    **tokens: Any,
) -> tuple[Front, Versions, Sessions]:
    """Make the front of one engine, which takes checkpoints from beneath the folder."""
    given = FrontTokens(**tokens)
    versions = Versions(named_versions(folder, service), checkpoints=[folder], timeout=1.0)
    sessions = Sessions(versions, folder / "spool")
    keys = EngineKeys(
        reads=None if key is None else Key(key), changes=Key(admin_key or key), takes_callers=not given.are_set
    )
    front = Front(
        engine, OneEngine(EngineProxy(engine, keys)), versions, sessions, tokens=given, has_key=key is not None
    )
    return front, versions, sessions
