"""What `start_followers` refuses before it asks Ray for anything. Of a real Ray: e2e/test_trainers_ray_followers.py."""

import sys
from collections.abc import Mapping, Sequence

import pytest

from refitd_client.errors import FollowerStartError
from refitd_client.ray import start_followers

ENGINES = {"ab" * 28: ["http://127.0.0.1:30000"]}


@pytest.mark.parametrize("engines", [{}, {"ab" * 28: []}, {"ab" * 28: "http://127.0.0.1:30000"}])
def test_followers_without_engines_are_refused(engines: Mapping[str, Sequence[str]]) -> None:
    with pytest.raises(ValueError, match=r"name the engines of each node: \{node_id: \[URL, …\]\}"):
        start_followers("http://hub:8700", engines)


def test_followers_without_an_upstream_are_refused() -> None:
    with pytest.raises(ValueError, match="name an upstream to follow"):
        start_followers([], ENGINES)


@pytest.mark.parametrize("word", ["--root", "--port=1", "--engine"])
def test_a_flag_that_an_argument_stands_for_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="arguments of start_followers stand for it"):
        start_followers("http://hub:8700", ENGINES, flags=[word])


def test_where_ray_is_not_installed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FollowerStartError, match="extra ray is not installed"):
        start_followers("http://hub:8700", ENGINES)
