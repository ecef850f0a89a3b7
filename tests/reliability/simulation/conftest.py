"""What the simulation's tests share."""

import logging
from collections.abc import Generator

import pytest
import structlog


@pytest.fixture(autouse=True)
def quiet() -> Generator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()
