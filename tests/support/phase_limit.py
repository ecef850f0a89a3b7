"""A limit for each phase of a test, its setup, its call and its teardown, that nothing outlives.

pytest-timeout takes its timer away at a test's first failure: without this, the teardown and the second run that CI
allows have no limit, and neither has what Python cannot interrupt. Here the process says what each of its threads does
and ends. The tests that it had not run yet go to another one.
"""

import faulthandler
import os
from collections.abc import Generator

import pytest

_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # before pytest captures it


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_STDERR])


def _seconds(item: pytest.Item) -> float:
    """Half as much again as pytest-timeout allows, which ends a test without its process where it can; 0: no limit."""
    marker = item.get_closest_marker("timeout")
    given = marker.args[0] if marker else item.config.getvalue("timeout") or item.config.getini("timeout")
    return 1.5 * float(given or 0)


def _limited(item: pytest.Item) -> Generator[None, object, object]:
    seconds = _seconds(item)
    if seconds:
        faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _limited(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _limited(item))
