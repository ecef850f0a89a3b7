"""A draft model with a checkpoint of its own, in a real SGLang: what SGLang's update makes of it, and the plugin's.

On a CPU such a server starts and is updated; to generate it needs other hardware.
"""

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from refitd_client import WeightPublisher
from refitd_client.contract.plugin import UpdateOutcome
from support.plugged import PluggedSglang
from support.servers import ADMIN_KEY, KIT

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


class DraftedSglang(PluggedSglang):
    """SGLang with a draft model that proposes two tokens at a time."""

    name = "sglang-drafted"

    def __init__(self, folder: Path, model: Path, draft: Path, **options: Any) -> None:
        few = ("--speculative-num-steps", "2", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3")
        own = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(draft))
        super().__init__(folder, model, "--skip-server-warmup", *own, *few, **options)

    def environment(self) -> dict[str, str]:
        told = super().environment()
        return told | {"PYTHONPATH": f"{KIT / 'shims/cpu_draft'}:{told['PYTHONPATH']}"}

    @property
    def parts(self) -> tuple[dict[str, str], dict[str, str]]:
        """SGLang's checksums of the model's tensors and of the draft model's."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        url, body = f"{self.url}/weights_checker", {"action": "checksum"}
        (rank,) = httpx.post(url, json=body, headers=headers, timeout=120.0, trust_env=False).json()["ranks"]
        found: dict[str, str] = rank["checksums"]
        draft = {name.removeprefix("draft."): each for name, each in found.items() if name.startswith("draft.")}
        return {name: each for name, each in found.items() if not name.startswith("draft.")}, draft


def test_the_plugin_updates_the_model_and_leaves_the_draft_model_as_it_was_started(
    models: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    own = shutil.copytree(models / "model_a", tmp_path / "draft")
    with DraftedSglang(tmp_path, models / "model_a", own, root=root) as server:
        with WeightPublisher(root, "run") as publisher:
            for step, name in ((1, "model_b"), (2, "model_a"), (3, "model_b")):
                publisher.publish(models / name, step=step)
        model, draft = server.parts
        assert draft == model, "they begin as one model, and share no tensor"
        for step, how in enumerate(("load", "replay", "replay"), start=1):
            answer = server.update(root / "run" / f"v{step:06d}")
            assert (answer.outcome, answer.how) == (UpdateOutcome.SERVED, how)
            assert server.parts[1] == draft
        assert server.parts[0] != model
        # Nor by an update that the plugin leaves to SGLang.
        assert server.load(models / "model_a")[0]
        assert server.parts == (model, draft)
