"""Fp8 in blocks in a real SGLang with the plugin: what `dtype="fp8_block"` publishes is served, update after update.

SGLang's build for the CPU has kernels for it on processors with AMX alone, and packs the weights for them. So the
matrix product is torch's here, and the loads are those of a GPU before Blackwell (see `support.plugin_faults`).
"""

from pathlib import Path

import pytest

from support.fp8_engines import check_an_updated_server_is_one_that_was_started_on_those_files
from support.plugged import RELEASES

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.skipif(RELEASES is not None, reason="what stands for the kernels was written for one release"),
]


@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("qwen2-tied", marks=pytest.mark.thorough)])
def test_an_sglang_that_is_updated_in_fp8_is_one_that_was_started_on_those_files(
    tmp_path: Path, architecture: str
) -> None:
    check_an_updated_server_is_one_that_was_started_on_those_files(tmp_path, architecture)
