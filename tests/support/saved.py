"""A trainer without refitd's SDK saves a folder as transformers does, and says so. With refitd inside its engine."""

import os
from collections.abc import Callable
from pathlib import Path

from transformers import AutoModelForCausalLM

from refitd_client.contract.wire import Version

from .jobs import PATIENCE, Job


def save(job: Job, model: Path, step: int) -> Version:
    """Save a model with `save_pretrained` in the root, and announce it."""
    folder = job.root / job.run / f"v{step:06d}"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder)
    assert not (folder / "refit.json").exists()
    return job.announce(folder, step)


def damage_unseen(file: Path) -> None:
    """Change two bytes as a disk does that loses bits: size, times and inode stay as they were."""
    times = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-2, os.SEEK_END)
        opened.write(b"\x01\x3f")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def served_and_put_back(job: Job, models: Path, answer: Callable[[], list[int]], *, proved: bool = True) -> None:
    """Two checkpoints are prepared, loaded and answered for by the plugin. A third one is damaged after its seal: the
    engine finds that when it has loaded it, and what it served before is put back.

    Args:
        job: the service and its engine.
        models: the folder with model_a and model_b.
        answer: asks the engine for an answer.
        proved: whether all tensors are copied as they are, so that their fingerprints are compared.
    """
    answers: list[list[int]] = []
    for step, model in enumerate(["model_a", "model_b"], start=1):
        job.client.wait(save(job, models / model, step).id, timeout=PATIENCE)
        answers.append(answer())
        attempt = job.engine_now.last_attempt
        assert attempt is not None
        assert "prepare" in attempt.timings, "the server loaded it itself"
    assert answers[0] != answers[1]
    if not proved:
        return
    job.client.pause(job.run)
    version = save(job, models / "model_a", 3)
    job.client.wait(version.id, "sealed", timeout=PATIENCE)
    damage_unseen(job.root / job.run / "v000003" / "model.safetensors")
    mark = job.now
    job.client.resume(job.run)
    refused = job.until(lambda event: event.kind == "engine" and event.data.get("state") == "NACKED", after=mark)
    assert "fingerprint" in refused.text
    assert "what was there is back" in refused.text
    assert answer() == answers[1]
    assert (job.engine_now.version or "").endswith("v000002")
