"""vLLM's client of a trainer, over the SDK: engines serve a folder when the call returns, or it says why not."""

import shutil
from pathlib import Path

import pytest

from refitd_client import PublishOptions, VersionRejectedError, WeightPublisher
from refitd_client.front import LabelRefusedError, VLLMWeightSyncClient
from support import published
from support.jobs import RUN, TOKEN, running, served_by
from support.servers import EmbeddedServer
from support.sockets import free_port
from support.weight_sources import Source, read

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def update(client: VLLMWeightSyncClient, folder: Path, label: str | None = None) -> None:
    client.start_weight_update()
    client.update_weights({"path": str(folder)})
    client.finish_weight_update(label)


def test_each_update_is_served_before_the_call_returns_and_a_bad_one_changes_nothing(
    models: Path, tmp_path: Path
) -> None:
    """The root is the one that the service names, and an engine that cannot be reached is not waited for."""
    nowhere = f"http://127.0.0.1:{free_port()}"
    with EmbeddedServer(tmp_path, models / "model_a") as engine, running(tmp_path, engine, "--engine", nowhere) as job:
        options = PublishOptions(token=TOKEN)
        client = VLLMWeightSyncClient(job.refitd.url, RUN, options=options)
        client.init_weight_transfer_engine({})
        update(client, shutil.copytree(models / "model_b", tmp_path / "saved"), "best")
        shutil.rmtree(tmp_path / "saved")  # the trainer's own again
        best = served_by(engine)
        assert job.client.version(f"{RUN.replace('/', '~')}~v000001").metadata["weight_version"] == "best"
        with pytest.raises(VersionRejectedError, match="NaN"):
            update(client, models / "bad_nan", "7")
        assert served_by(engine) == best
        with pytest.raises(LabelRefusedError, match="best already"):
            update(client, models / "model_a", "best")
        client.finish_weight_update()
        assert served_by(engine).label == "8"
        client.shutdown_weight_transfer_engine()
        with WeightPublisher(job.root, RUN, job.refitd.url, options=options) as publisher:
            publisher.publish(Source(read(models / "model_b")), step=9).wait()
        assert served_by(engine).answer == best.answer
        assert published.versions(job.root / RUN)[-1] == "v000009"
