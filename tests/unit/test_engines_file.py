"""The engines file and engine URLs."""

import pytest

from refitd.engine.address import AddressRefusedError, check_url, engine_id
from refitd.engine.engines_file import EnginesFileError, EngineSpec, parse_engines


def test_an_engine_is_a_url_and_what_differs_from_the_default() -> None:
    text = "engines:\n- url: http://a:1\n- {url: 'http://b:2', id: b, run: exp/trial, root: /mnt}\n"
    assert parse_engines(text) == [
        EngineSpec(url="http://a:1"),
        EngineSpec(url="http://b:2", id="b", run="exp/trial", root="/mnt"),
    ]


def test_an_empty_file_names_no_engine() -> None:
    assert parse_engines("") == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("engines: [{url: http://a:1}, {url: http://a:1}]", "named twice"),
        ("engines: [{}]", "engines.0.url"),
        ("engines: [{url: http://a:1, api_key: secret}]", "api_key"),
        ("engines: [{url: http://a:1, run: ../x}]", "engines.0.run"),
        ("- http://a:1", "dictionary"),
        ("engines: [", "not YAML"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_entry_and_field(text: str, named: str) -> None:
    with pytest.raises(EnginesFileError, match=named):
        parse_engines(text)


@pytest.mark.parametrize(
    ("url", "clean"),
    [("http://a:1/", "http://a:1"), ("https://a", "https://a"), ("http://[::1]:30000", "http://[::1]:30000")],
)
def test_a_url_is_cleaned(url: str, clean: str) -> None:
    assert check_url(url) == clean


@pytest.mark.parametrize(
    "url", ["a:1", "file:///etc", "http://", "http://u:p@a", "http://a/b", "http://a?x", "http://a:x"]
)
def test_what_is_no_engine_url_is_refused(url: str) -> None:
    with pytest.raises(AddressRefusedError):
        check_url(url)


def test_an_engine_is_called_by_its_host_and_port() -> None:
    assert engine_id("http://a:1/") == "a:1"
