"""Numbers of thousands of digits. Python's int() refuses them from 4,301 digits on, by a ValueError: where a name or an
answer may hold one, it is another name or an unknown release.
"""

from pathlib import Path

import pytest

from refitd.engine.sglang.info import release_of
from refitd_client.contract.naming import parse_version_folder, parse_version_id
from refitd_client.validation.foreign import recognise
from refitd_front.areal import updates
from support.services import serving

DIGITS = "9" * 5000


@pytest.mark.parametrize("name", [f"v{DIGITS}", f"v000001.g{DIGITS}"])
def test_a_folder_with_such_a_number_is_no_version(name: str) -> None:
    assert parse_version_folder(name) is None
    assert parse_version_id(f"run~{name}") is None


async def test_a_request_for_such_a_version_is_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.listed()
        assert (await stage.http.get(f"/v1/versions/run~v{DIGITS}")).status_code == 404
        assert (await stage.http.get(f"/v1/explain/{DIGITS}")).status_code == 404


@pytest.mark.parametrize("version", [f"0.5.{DIGITS}", f"{DIGITS}.5.2", f"0.{DIGITS}.2.dev1"])
def test_an_engine_of_such_a_release_is_driven_carefully(version: str) -> None:
    assert release_of(version).pause_mode("auto") == "abort"


def test_a_trainers_own_folder_with_such_a_number_is_none_of_its_steps() -> None:
    for name in ("checkpoint-", "step_", "weight_v", "weight_update_v"):
        assert recognise(f"run/{name}{DIGITS}") is None
    assert updates._AREAL_FOLDER.fullmatch(f"weight_update_v{DIGITS}") is None
