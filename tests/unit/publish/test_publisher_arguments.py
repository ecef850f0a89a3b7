"""What the arguments of a publisher alone show to be wrong is said before anything is written."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from refitd_client import WeightPublisher

WEIGHTS = {"w": torch.ones(3)}


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"lr": 1e-5}, "metadata['lr'] is 1e-05, of the type float: values are texts, as '1e-05' is"),
        ({"note": "good", "eval": None}, "metadata['eval'] is None, of the type NoneType: values are texts"),
        ({3: "three"}, "metadata has the key 3, of the type int: keys and values are texts"),
        (["good"], "metadata is ['good'], of the type list: it is a mapping of texts to texts"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"block": "staged"}, {"transport": "delta"}])
def test_metadata_that_is_no_text_is_refused_by_key_and_type_before_anything_is_written(
    tmp_path: Path, metadata: Any, said: str, more: Any
) -> None:
    with WeightPublisher(tmp_path, "run") as publisher:
        with pytest.raises(TypeError, match=re.escape(said)):
            publisher.publish(WEIGHTS, step=1, metadata=metadata, **more)
        assert not [path for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")]
        assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".incoming")]
        done = publisher.publish(WEIGHTS, step=1, metadata={"lr": "1e-05"}, transport="delta")
    assert "first version" in (done.why_full or "")


@pytest.mark.parametrize(
    ("root", "meant"),
    [
        (
            "s3:/bucket/x",
            "with s3:/, and is none that is known: an object store is named as a text with two slashes, s3://…",
        ),
        (
            "GS:/bucket",
            "with GS:/, and is none that is known: an object store is named as a text with two slashes, gs://…",
        ),
        ("http://user:hidden@host:8700", "the service's URL is service_url, and root the folder that it watches"),
        ("file:///mnt/weights", "name the folder by its path"),
        ("hdfs://namenode/weights", "object stores are named s3://bucket/prefix, gs://bucket/prefix or az://"),
    ],
)
@pytest.mark.parametrize("given", [str, Path])
def test_a_root_that_looks_like_a_url_and_is_none_that_is_known_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, meant: str, given: Callable[[str], str | Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(meant)) as refused:
        WeightPublisher(given(root), "run")
    assert "hidden" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_colon_in_its_name_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for root in ("a:b/c", "12:/c", tmp_path / "s3:/bucket"):
        with WeightPublisher(root, "run") as publisher:
            assert publisher.publish(WEIGHTS, step=1).path.is_dir()


def test_an_empty_root_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape("root is empty: name the folder that the service watches, or '.'")):
        WeightPublisher("", "run")
    assert list(tmp_path.iterdir()) == []
