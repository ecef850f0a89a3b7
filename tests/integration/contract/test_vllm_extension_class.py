"""A real vLLM with refitd's extension class and no plugin. On one rank the engine core holds the worker itself."""

import asyncio
from pathlib import Path

import pytest

from refitd.engine.plugin import Leads
from refitd.engine.port import Outcome, Reached, Target
from refitd_client.contract.plugin import Owner
from support.forged import files_of, version_of
from support.servers import VLLM_VENV
from support.subject import ignore_stage
from support.vllm import OneVllm

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM_VENV is None, reason="REFITD_VLLM_VENV names no vLLM: make vllm"),
]


@pytest.mark.parametrize("kind", ["vllm-plugged-by-class", "vllm-plugged-by-class-two-ranks"])
async def test_the_service_has_its_channel_opened_and_updates_it_as_a_transaction(
    one_vllm: OneVllm, vllm_models: Path, kind: str
) -> None:
    subject = await asyncio.to_thread(one_vllm.subject, kind)
    assert subject.root is not None
    stock = await subject.adapter().probe()
    assert isinstance(stock, Reached)
    assert "the service has its channel opened" in (stock.stock_reason or "")
    leads = Leads(owner=Owner(service="one", root=str(subject.root), host="here", pid=1))
    engine = subject.adapter(leads=leads)
    seen = await engine.probe()
    assert isinstance(seen, Reached)
    assert (seen.plugin is not None, seen.stock_reason) == (True, None)
    path = version_of(subject.root, vllm_models / "model_b")
    done = await engine.refit(Target(path=str(path), label="1", files=files_of(subject.root, path)), ignore_stage)
    assert done.outcome is Outcome.ACK, done
    assert (done.fingerprint or "").startswith("plugin:")
    assert (await engine.check_changes()).fault is None
    await engine.aclose()
    assert "Traceback" not in subject.server.log.read_text(), "of a probe"
