"""These tests need a real SGLang: without REFITD_SGLANG_VENV there are none."""

from pathlib import Path

import pytest

from support.servers import SGLANG_VENV

collect_ignore_glob = [] if SGLANG_VENV else ["test_*.py"]


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the services of these tests keep their journal: they are one after the other on one root."""
    return tmp_path_factory.mktemp("service")
