"""What the arguments of a publisher alone show to be wrong is said before anything is written."""

import re
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
    ],
)
@pytest.mark.parametrize("more", [{}, {"block": "staged"}, {"delta": "auto"}])
def test_metadata_that_is_no_text_is_refused_by_key_and_type_before_anything_is_written(
    tmp_path: Path, metadata: Any, said: str, more: Any
) -> None:
    with WeightPublisher(tmp_path, "run") as publisher:
        with pytest.raises(TypeError, match=re.escape(said)):
            publisher.publish(WEIGHTS, step=1, metadata=metadata, **more)
        assert not [path for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")]
        assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".incoming")]
        done = publisher.publish(WEIGHTS, step=1, metadata={"lr": "1e-05"}, delta="auto")
    assert "first version" in (done.why_full or "")
