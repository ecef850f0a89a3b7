"""A vLLM whose KV connector keeps prefixes beyond a reset of the prefix cache is not updated."""

from typing import Any

import pytest

from refitd.engine.port import Outcome, Reached, Target
from support.engines import vllm_engine
from support.scripted_vllm import config, scripted_vllm

RESET = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def of_several(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(connectors)}}


def told(transfer: Any) -> dict[str, Any]:
    answer = config()
    answer["vllm_config"]["kv_transfer_config"] = transfer
    return answer


@pytest.mark.parametrize("transfer", [LMCACHE, of_several(OFFLOADING, LMCACHE)])
async def test_a_connector_that_no_reset_reaches_is_refused_by_name(transfer: dict[str, Any]) -> None:
    with scripted_vllm(told=told(transfer)) as vllm:
        engine = vllm_engine(vllm.url)
        seen = await engine.probe()
        done = await engine.refit(Target(path="/root/v7", label="7"), lambda _: None)
        await engine.aclose()
    assert isinstance(seen, Reached)
    assert [each.blocks for each in seen.obstacles if "LMCacheConnectorV1" in each.text] == [True]
    assert (done.outcome, done.resumed) == (Outcome.NACK, True)
    assert "LMCacheConnectorV1" in (done.reason or "")
    assert RESET not in vllm.changes


@pytest.mark.parametrize(
    "transfer",
    [None, {}, OFFLOADING, of_several(OFFLOADING), {"kv_connector": "NixlConnector"}, {"kv_connector": None}],
)
async def test_what_a_reset_reaches_is_reset_in_each_update(transfer: Any) -> None:
    with scripted_vllm(told=told(transfer)) as vllm:
        engine = vllm_engine(vllm.url)
        done = await engine.refit(Target(path="/root/v7", label="7"), lambda _: None)
        await engine.aclose()
    assert done.outcome is Outcome.ACK, done.reason
    assert RESET in vllm.changes
