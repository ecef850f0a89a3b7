"""`refitd doctor` beside real engines: the update that names no model changes nothing and shows what the key opens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.command_line import refitd
from support.servers import ADMIN_KEY, API_KEY, SGLANG_VENV, EmbeddedProgram, EngineServer

pytestmark = pytest.mark.timeout(400)  # a real SGLang takes its time to start

REAL = [pytest.param("sglang", marks=pytest.mark.sglang)] if SGLANG_VENV else []


@pytest.fixture(scope="module", params=["embedded", *REAL])
def engine(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    if request.param == "sglang":
        yield request.getfixturevalue("sglang")
        return
    with EmbeddedProgram(tmp_path_factory.mktemp("embedded"), models / "model_a") as server:
        yield server


def examined(root: Path, engine: EngineServer, keys: dict[str, str], *flags: str) -> dict[tuple[str, str], Any]:
    for name, key in keys.items():
        (root.parent / name).write_text(key)
    files = ["--engine-key-file", str(root.parent / "api"), "--engine-admin-key-file", str(root.parent / "admin")]
    shown = refitd(
        "doctor",
        "--root",
        str(root),
        "--state",
        str(root.parent / "s"),
        "--engine",
        engine.url,
        *files,
        *flags,
        "--json",
    )
    found = json.loads(shown.stdout)["findings"]
    return {(each["check"], each["verdict"]): each for each in found if "versions are held" not in each["text"]}


def info(engine: EngineServer) -> Any:
    return httpx.get(f"{engine.url}/model_info", headers={"Authorization": f"Bearer {API_KEY}"}).json()


def test_a_real_engine_is_examined_and_left_as_it_was(engine: EngineServer, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    before = info(engine)
    found = examined(root, engine, {"api": API_KEY, "admin": ADMIN_KEY})
    assert found["engines", "ok"]["text"].endswith("; the key opens changes")
    assert ("files", "unknown") in found
    assert info(engine) == before
    generated = httpx.post(
        f"{engine.url}/generate",
        json={"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}},
        headers={"Authorization": f"Bearer {API_KEY}"},
        timeout=30,
    )
    assert generated.status_code == 200, "it still generates"
