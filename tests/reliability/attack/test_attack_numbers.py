"""Numbers of thousands of digits. Python's int() refuses them from 4,301 digits on, by a ValueError: where a name or an
answer may hold one, it is another name or an unknown release.
"""

from pathlib import Path

import pytest

from refitd.engine.sglang.info import release_of
from support.services import serving

DIGITS = "9" * 5000


async def test_a_request_for_such_a_version_is_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.listed()
        assert (await stage.http.get(f"/v1/versions/run~v{DIGITS}")).status_code == 404
        assert (await stage.http.get(f"/v1/explain/{DIGITS}")).status_code == 404


@pytest.mark.parametrize("version", [f"0.5.{DIGITS}", f"{DIGITS}.5.2", f"0.{DIGITS}.2.dev1"])
def test_an_engine_of_such_a_release_is_driven_carefully(version: str) -> None:
    assert release_of(version).pause_mode("auto") == "abort"
