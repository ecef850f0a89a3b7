"""A canary refuses the first version of a run, before which none was good: what it serves is said, and what helps."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from refitd_client.contract.states import UpdateState
from support.checkpoints import publish, tensors
from support.scripted_server import answer, serve
from support.services import Stage, serving

FIRST = "run~v000001"
FAILED = "the canary b:1 failed its check"
LEFT = (
    f"serves {FIRST}, which is barred, and there is no good version to go back to: publish the next step, or restart "
    "the engine to have what it was started with"
)


@asynccontextmanager
async def refused(folder: Path) -> AsyncIterator[Stage]:
    """Two engines, of which the canary `b` has taken a first version that the operator's check refuses."""
    with serve(answer(422, b"BLEU fell by half"), answer(204)) as operator:
        canary = {"strategy": "canary:b:1", "canary_check": operator.url}
        async with serving(folder, names=("a", "b"), **canary) as stage:
            await stage.until_engines()
            publish(stage.root, "run", 1, tensors(1))
            await stage.until(FIRST, lambda record: record.barred)
            await until_ended(stage)
            yield stage


async def until_ended(stage: Stage) -> None:
    async with asyncio.timeout(10):
        while stage.store.updates["run"].state is not UpdateState.ROLLED_BACK:
            await stage.store.changed.wait_after(stage.store.changed.count, within=0.02)


async def explained(stage: Stage, subject: str) -> list[str]:
    return (await stage.http.get(f"/v1/explain/{subject}")).json()["sentences"]


async def test_a_canary_that_refuses_the_first_version_says_what_it_serves_and_what_helps(tmp_path: Path) -> None:
    async with refused(tmp_path) as stage:
        other, canary = (await stage.http.get("/v1/overview")).json()["engines"]
        assert canary["reason"] == LEFT
        assert other["version"] is None
        assert (await explained(stage, "b:1"))[0] == f"b:1 is IN_SYNC: it {LEFT}."
        shut = (await stage.http.get("/v1/gate?engine=b:1")).json()
        assert (shut["open"], shut["reason"]) == (False, f"b:1 serves {FIRST}, which is barred: {FAILED}")
        said = await explained(stage, FIRST)
        ended = f"Its update has ended, and there is no good version to go back to: {FAILED}: "
        assert [each.partition(ended)[1] for each in said if each.startswith("Its update has")] == [ended]
        assert f"It is kept: newest version on disk of run run, though {FAILED}." in said
        assert not any("rolled back" in each or "ROLLING" in each for each in said)
        assert stage.engines["a"].loads == []


async def test_the_step_after_a_first_one_that_was_refused_goes_to_all(tmp_path: Path) -> None:
    async with refused(tmp_path) as stage:
        await stage.served(2)
        engines = (await stage.http.get("/v1/engines")).json()["items"]
        assert [(engine["version"], engine["reason"]) for engine in engines] == [("run~v000002", None)] * 2
        states = [(await stage.http.get(f"/v1/gate?engine={name}")).status_code for name in ("a:1", "b:1")]
        assert states == [200, 200]
