"""vLLM's client of a trainer, over the SDK: which calls make which version, and which are refused."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from refitd_client import (
    EngineFailedError,
    InvalidWeightsError,
    PublishError,
    RunBusyError,
    TransportRefusedError,
    WeightPublisher,
)
from refitd_client.contract.naming import ROOT_NAME, SERVICE_FOLDER
from refitd_client.contract.states import EngineState, WaitOutcome
from refitd_client.front import LabelRefusedError, VLLMWeightSyncClient
from support import published
from support.stand_in_service import StandIn, make_engine, make_version, stand_in

RUN = "exp"


@pytest.fixture
def service() -> Iterator[StandIn]:
    with stand_in() as service:
        yield service


@pytest.fixture
def client(service: StandIn, root: Path) -> Iterator[VLLMWeightSyncClient]:
    made = VLLMWeightSyncClient(service.url, RUN, root)
    yield made
    made.shutdown_weight_transfer_engine()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return saved(tmp_path / "checkpoint", 1.0)


def saved(folder: Path, value: float) -> Path:
    folder.mkdir()
    save_file({"w": np.full(4, value, np.float32)}, folder / "model.safetensors")
    return folder


def update(client: VLLMWeightSyncClient, folder: Path, label: str | None = None) -> None:
    client.start_weight_update()
    client.update_weights({"path": str(folder)})
    client.finish_weight_update(label)


def labels(service: StandIn) -> list[tuple[int, str | None]]:
    return [(notice.step, notice.metadata.get("weight_version")) for notice in service.bodies]


def test_an_update_is_a_version_whose_label_is_its_step_or_stands_beside_it(
    client: VLLMWeightSyncClient, service: StandIn, root: Path, checkpoint: Path
) -> None:
    for label in (None, "7", None, "best", "9" * 14):
        update(client, checkpoint, label)
    assert labels(service) == [(1, None), (7, "7"), (8, None), (9, "best"), (10, "9" * 14)]
    assert published.versions(root / RUN) == [f"v{step:06}" for step in (1, 7, 8, 9, 10)]
    assert "GET /v1/versions/exp~v000010/wait?for=served&timeout=25.000" in service.asked


def test_a_label_that_the_run_has_is_refused_and_the_update_can_be_finished_with_another(
    client: VLLMWeightSyncClient, service: StandIn, checkpoint: Path
) -> None:
    """Also one of an earlier trainer, which stands on a later page of the service's."""
    service.versions = [make_version(step, metadata={"weight_version": f"v-{step}"}) for step in range(1, 503)]
    client.start_weight_update()
    client.update_weights({"path": str(checkpoint)})
    for label, why in (("v-1", "weight_version v-1 already"), ("502", "502 is not above 502"), ("", "is empty")):
        with pytest.raises(LabelRefusedError, match=why):
            client.finish_weight_update(label)
    client.finish_weight_update("v-503")
    assert labels(service) == [(503, "v-503")]


def test_steps_go_on_after_those_that_are_in_the_root_or_that_the_service_knows(
    service: StandIn, root: Path, checkpoint: Path
) -> None:
    with WeightPublisher(root, RUN) as publisher:
        publisher.publish(checkpoint, step=5)
    for known, step in ((3, 6), (40, 41)):
        service.versions = [make_version(known)]
        client = VLLMWeightSyncClient(service.url, RUN, root)
        update(client, checkpoint)
        client.shutdown_weight_transfer_engine()
        assert service.bodies[-1].step == step


def test_a_trainer_that_begins_again_begins_a_generation_with_a_step_that_is_not_above_the_newest(
    client: VLLMWeightSyncClient, root: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client.init_weight_transfer_engine({})
    update(client, checkpoint, "7")
    client.init_weight_transfer_engine({})
    with caplog.at_level(logging.WARNING, "refitd_client"):
        update(client, checkpoint, "3")
    assert "this begins generation 2" in caplog.text
    assert published.versions(root / RUN) == ["v000003.g2", "v000007"]
    with pytest.raises(LabelRefusedError, match="3 is not above 3"):
        update(client, checkpoint, "3")


def test_an_engine_that_does_not_take_it_is_an_error_with_the_reason(
    client: VLLMWeightSyncClient, service: StandIn, checkpoint: Path
) -> None:
    service.outcomes = [WaitOutcome.FAILED]
    service.engines = [make_engine("one", run=RUN, state=EngineState.QUARANTINED, reason="it ran out of memory")]
    with pytest.raises(EngineFailedError, match="it ran out of memory"):
        update(client, checkpoint)
    service.outcomes = [WaitOutcome.SERVED]
    update(client, checkpoint)
    assert [step for step, _ in labels(service)] == [1, 2]


def test_a_folder_without_a_checkpoint_is_no_version(client: VLLMWeightSyncClient, root: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidWeightsError, match="is not a folder"):
        update(client, tmp_path / "nowhere", "1")
    assert published.versions(root / RUN) == []
    with pytest.raises(PublishError, match="no update has begun"):
        client.finish_weight_update("1")


def test_an_update_that_begins_again_drops_the_first(
    client: VLLMWeightSyncClient, root: Path, checkpoint: Path, tmp_path: Path
) -> None:
    client.start_weight_update()
    client.update_weights({"path": str(checkpoint)})
    update(client, saved(tmp_path / "other", 2.0))
    assert published.tensors(root / RUN / "v000001")["w"].tolist() == [2.0] * 4
    assert published.versions(root / RUN) == ["v000001"]


def test_calls_out_of_turn_are_refused(client: VLLMWeightSyncClient, checkpoint: Path, tmp_path: Path) -> None:
    for call in (lambda: client.update_weights({"path": str(checkpoint)}), client.finish_weight_update):
        with pytest.raises(PublishError, match="no update has begun: start_weight_update begins one"):
            call()
    client.start_weight_update()
    with pytest.raises(PublishError, match="no weights have come since the update began"):
        client.finish_weight_update()
    client.update_weights([{"path": str(checkpoint)}, {"path": str(checkpoint)}])  # one for each engine
    with pytest.raises(PublishError, match="an update is one checkpoint"):
        client.update_weights({"path": str(tmp_path)})
    client.shutdown_weight_transfer_engine()
    with pytest.raises(PublishError, match="no update has begun"):
        client.finish_weight_update()


NAMED = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[4]]}
FOREIGN: list[tuple[dict[str, Any], str]] = [
    (NAMED, "the backend nccl"),
    (NAMED | {"num_updates_list": [1]}, "the backend sparse_nccl"),
    (NAMED | {"ipc_handles_pickled": "gASV"}, "the backend ipc"),
    (NAMED | {"ipc_handles": [{}]}, "the backend ipc"),
    ({"master_address": "host", "master_port": 1, "world_size": 3, "rank_offset": 1}, "the backend nccl"),
    ({"nccl_unique_id_b64": "AAAA", "packed": True}, "the backend nccl"),
    ({"packed": False}, "the backend ipc"),
    ({"path": "/checkpoint", "load_format": "dummy"}, r"another backend \(load_format, path\)"),
]


@pytest.mark.parametrize(("info", "named"), FOREIGN)
def test_what_only_a_process_in_the_workers_place_can_receive_is_refused_by_name_with_what_to_use(
    client: VLLMWeightSyncClient, info: dict[str, Any], named: str
) -> None:
    client.start_weight_update()
    for what, call in (("init", client.init_weight_transfer_engine), ("update", client.update_weights)):
        with pytest.raises(TransportRefusedError, match=f"this {what}_info is of {named}") as raised:
            call(info)
        assert 'HTTPVLLMWeightSyncClient("http://front:8701")' in str(raised.value)
        assert "publish(source, step=...)" in str(raised.value)


def test_the_root_is_the_one_that_the_service_names_where_it_is_here(
    service: StandIn, root: Path, checkpoint: Path, tmp_path: Path
) -> None:
    (root / SERVICE_FOLDER / ROOT_NAME).write_text("0a1b")
    client = VLLMWeightSyncClient(service.url, RUN)
    away = tmp_path / "away"
    for folder, name in ((None, None), (str(away), "0a1b"), (str(root), "2c3d"), (str(root), None)):
        service.folder, service.root = folder, name
        with pytest.raises(PublishError, match="that is not here: name the root"):
            client.init_weight_transfer_engine({})
    assert not away.exists()
    service.folder, service.root = str(root), "0a1b"
    client.init_weight_transfer_engine({})
    update(client, checkpoint)
    client.shutdown_weight_transfer_engine()
    assert published.versions(root / RUN) == ["v000001"]


def test_the_run_is_held_from_init_to_shutdown(client: VLLMWeightSyncClient, root: Path) -> None:
    client.init_weight_transfer_engine({})
    with pytest.raises(RunBusyError):
        WeightPublisher(root, RUN)
    client.shutdown_weight_transfer_engine()
    WeightPublisher(root, RUN).close()
