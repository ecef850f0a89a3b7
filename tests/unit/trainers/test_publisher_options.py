"""A misspelt option of a trainer's hook is refused when the hook is made, before anything is trained.

`test_trainer_server_callback.py` has TRL's callback for vLLM: TRL takes the folder `tests/vllm` for vLLM here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from refitd_client.trainers.slime import DiskUpdates
from support.verl_backend import backend

URL = "http://127.0.0.1:9"


def transformers(*places: Any, **options: Any) -> Any:
    from refitd_client.trainers.transformers import RefitCallback  # here, because every worker imports this module

    return RefitCallback(*places, **options)


def trl(*places: Any, **options: Any) -> Any:
    from refitd_client.trainers.trl_rollouts import RefitRollouts  # likewise

    return RefitRollouts(*places, **options)


def verl(root: Path, run: str, service_url: str, **options: Any) -> Any:
    return backend().RefitCheckpointEngine(1 << 20, True, root=root, run=run, service_url=service_url, **options)


HOOKS: list[Callable[..., Any]] = [transformers, trl, DiskUpdates, verl]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    ("misspelt", "meant"), [("fingerprint", "fingerprints"), ("wiat", "wait"), ("max_shard_byte", "max_shard_bytes")]
)
def test_a_misspelt_option_is_refused_with_the_nearest_right_one(
    hook: Callable[..., Any], misspelt: str, meant: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=rf"no option '{misspelt}': did you mean '{meant}'\?"):
        hook(tmp_path, "run", URL, **{misspelt: 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("hook", HOOKS)
def test_an_option_that_resembles_none_is_refused_with_all_that_there_are(
    hook: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=r"no option 'qqq'\. Options: .*check_finite.*, wait"):
        hook(tmp_path, "run", URL, qqq=1)


@pytest.mark.parametrize("hook", HOOKS)
def test_options_of_the_publisher_are_taken(hook: Callable[..., Any], tmp_path: Path) -> None:
    hook(tmp_path, "run", URL, fingerprints=True, max_shard_bytes=1 << 20, check_finite=False)
