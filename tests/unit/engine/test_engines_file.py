"""The engines file and engine URLs."""

import re
from pathlib import Path

import pytest

from refitd.cli.serve import ENGINES_FILE_HELP
from refitd.engine.address import AddressRefusedError, check_url, engine_id
from refitd.engine.registry import EnginesFile, EnginesFileError, EngineSpec, parse_engines


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
        ("engines: [http://a:1, {}]", "engine 2 has no 'url'"),
        ("engines: [{url: http://a:1, api_key: secret}]", "engine 1 has 'api_key', which is no key"),
        ("engines: [{url: http://a:1, run: ../x}]", "engine 1, run: run '../x' is not a safe relative name"),
        ("engines: [a:1]", "engine 1, url: engine URL 'a:1': write it as http://host:port"),
        ("engines: [7]", "engine 1 is neither a URL nor a mapping"),
        ("engines: http://a:1", "the file, engines: it has to be a valid list"),
        ("replicas: []", "the file has no 'engines'; the file has 'replicas', which is no key"),
        ("just words", "the file is no mapping"),
        ("engines: [", "not YAML"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line_by_file_entry_and_field(text: str, named: str) -> None:
    with pytest.raises(EnginesFileError, match=re.escape(named)) as caught:
        parse_engines(text, Path("/etc/engines.yaml"))
    told = str(caught.value)
    assert told.startswith("the engines file /etc/engines.yaml cannot be used: ")
    assert "\n" not in told
    assert "EngineSpec" not in told


@pytest.mark.parametrize("text", ["engines: [{}]", "engines: [{url: http://a:1, key: x}]", "7"])
def test_whoever_wrote_another_form_is_told_the_keys(text: str) -> None:
    with pytest.raises(EnginesFileError, match="url, id, run, api_key_file, admin_key_file, root"):
        parse_engines(text)


@pytest.mark.parametrize("text", ["[http://a:1, http://b:2]", "engines: [http://a:1, {url: http://b:2}]"])
def test_a_plain_list_of_urls_will_do(text: str) -> None:
    assert parse_engines(text) == [EngineSpec(url="http://a:1"), EngineSpec(url="http://b:2")]


def test_the_example_in_the_help_is_a_good_file() -> None:
    _, _, text = ENGINES_FILE_HELP.partition("\n\n")
    plain, full = parse_engines(text)
    assert plain == EngineSpec(url="http://10.0.0.7:30000")
    assert full.model_fields_set == set(EngineSpec.model_fields)


def test_a_file_that_is_followed_says_what_is_new_and_complains_of_each_fault_once(tmp_path: Path) -> None:
    complaints: list[str] = []
    path = tmp_path / "engines.yaml"
    file = EnginesFile(path, complaints.append)
    assert [file.news(), file.news()] == [None, None]
    path.write_text("- http://a:1\n")
    assert (file.news(), file.news(), file.fault) == ([EngineSpec(url="http://a:1")], None, None)
    for text in ("engines: [", "engines: [{}]"):
        path.write_text(text)
        assert [file.news(), file.news()] == [None, None]
        assert file.fault == complaints[-1]
    assert len(complaints) == 3
    path.write_text("- http://a:1\n")
    assert (file.news(), file.fault) == (None, None)


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


@pytest.mark.parametrize("pair", ["http://b:2/", "[http://b:2]"])
def test_servers_that_are_updated_together_are_one_entry(pair: str) -> None:
    (spec,) = parse_engines(f"[{{url: http://a:1, pair: {pair}}}]")
    assert spec.pair == ("http://b:2",)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[{url: http://a:1, pair: http://a:1}]", "named twice: http://a:1"),
        ("[{url: http://a:1, pair: http://b:2}, http://b:2]", "named twice: http://b:2"),
        ("[{url: http://a:1, pair: file:///etc}]", "engine 1, pair"),
        ("[{url: http://a:1, engine: vllm, pair: http://b:2}]", "only engines of kind sglang"),
    ],
)
def test_a_pair_that_cannot_be_updated_together_is_refused(text: str, why: str) -> None:
    with pytest.raises(EnginesFileError, match=why):
        parse_engines(text)
