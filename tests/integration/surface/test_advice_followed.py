"""What a refusal advises is done, word for word as it stands there, and then it works."""

import asyncio
import re
import shlex
from pathlib import Path
from typing import Any

from refitd_client.contract.states import VersionState
from support.checkpoints import publish, tensors
from support.servers import refitd_ended
from support.services import Stage, at_a_port, serving

_COMMAND = re.compile(r"'refitd ((?:engines move|runs close|publish) [^']+)'")


async def refused(stage: Stage, path: str, body: dict[str, Any]) -> list[str]:
    """The commands that a 409 advises."""
    answer = await stage.http.post(path, json=body)
    assert answer.status_code == 409, answer.text
    return _COMMAND.findall(answer.json()["detail"])


async def obey(stage: Stage, *commands: str) -> None:
    async with at_a_port(stage) as url:
        for command in commands:
            # In a process of its own: in this one the service would log to what the command prints to, until that ends.
            status, printed = await asyncio.to_thread(refitd_ended, *shlex.split(command), "--url", url)
            assert status == 0, printed


async def second_run(stage: Stage, **more: str) -> list[str]:
    """A run publishes while all engines follow another; the commands that its notice is answered with."""
    publish(stage.root, "new", 1, tensors(2))
    await stage.until("new~v000001", lambda record: record.state is VersionState.SEALED)
    return await refused(stage, "/v1/versions", {"run": "new", "step": 1, **more})


async def test_what_the_409_of_a_run_without_engines_advises_brings_an_engine(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        await stage.served(1)
        await obey(stage, *await second_run(stage))
        await stage.until("new~v000001", lambda record: record.served_at is not None)


async def test_what_a_refused_move_advises_moves_the_engines(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        await stage.served(1)
        await second_run(stage)
        commands = await refused(stage, "/v1/engines/move", {"engines": ["a:1", "b:1"], "run": "new"})
        await obey(stage, next(command for command in commands if command.startswith("engines move")))
        await stage.until("new~v000001", lambda record: record.served_at is not None)
        assert {engine.run for engine in stage.store.engines.values()} == {"new"}
