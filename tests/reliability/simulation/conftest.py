"""What the simulation's tests share."""

import logging
from collections.abc import Generator

import pytest
import structlog


@pytest.fixture(autouse=True)
def quiet() -> Generator[None]:
    """A service that is killed ten thousand times has much to say."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()
