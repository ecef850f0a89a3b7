"""Every line of the log says what it is about: version, update, attempt and engine, by the same names everywhere."""

from pathlib import Path
from typing import Any

from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from refitd.engine.port import Outcome, Refit
from support.checkpoints import publish, tensors
from support.services import serving


def about(lines: list[Any], text: str) -> list[dict[str, Any]]:
    return [line for line in lines if text in line["event"]]


async def test_lines_of_a_load_name_engine_version_attempt_and_update(tmp_path: Path) -> None:
    with capture_logs(processors=[merge_contextvars]) as lines:
        async with serving(tmp_path, names=("a", "b")) as stage:
            stage.engines["a"].script.append(Refit(outcome=Outcome.NACK, resumed=True, reason="no room"))
            id_ = await stage.served(1)
    (refused,) = about(lines, "NACKED")
    assert (refused["engine"], refused["version"], refused["log_level"]) == ("a:1", id_, "warning")
    loads = [line for line in about(lines, "IN_SYNC: serves") if line.get("version") == id_]
    assert {line["engine"] for line in loads} == {"a:1", "b:1"}
    assert len({line["attempt"] for line in [*loads, refused]}) == 3
    (rolling,) = about(lines, ": COMPLETE")
    assert (rolling["version"], rolling["update"]) == (id_, 1)


async def test_lines_of_a_verdict_name_the_version_and_nothing_of_another_task(tmp_path: Path) -> None:
    with capture_logs(processors=[merge_contextvars]) as lines:
        async with serving(tmp_path) as stage:
            weights = tensors(1)
            del weights["layer.1.weight"]
            publish(stage.root, "run", 1, weights)
            await stage.rejected("run~v000001")
    (rejected,) = about(lines, "rejected:")
    assert rejected["version"] == "run~v000001"
    assert not {"engine", "attempt", "update"} & rejected.keys()
