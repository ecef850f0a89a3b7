"""No test here starts processes: where the plugin would begin one to read for it, there is none."""

from collections.abc import Generator

import pytest

from refitd_sglang.ahead.helper import Helper


@pytest.fixture(autouse=True, scope="session")
def no_clerks() -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Helper, "begin", lambda _: None)
        yield
