"""What becomes of a draft model in updates is said wherever an engine is shown."""

from pathlib import Path

from rich.console import Console

from refitd.cli import render
from refitd.engine.port import DRAFT_LEFT, Obstacle, Reached
from refitd_doctor.engines import EngineAnswers, judge_engine
from refitd_doctor.finding import CheckName, CheckVerdict
from support.services import serving
from support.stand_in_service import make_engine


async def test_explain_the_api_and_status_say_that_a_draft_model_is_left_as_started(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        stage.engines["a"].draft = DRAFT_LEFT
        await stage.served(1)
        await stage.until("run~v000001", lambda _: stage.store.engines["a:1"].seen.draft is not None)
        (shown,) = (await stage.http.get("/v1/engines")).json()["items"]
        sentences = (await stage.http.get("/v1/explain/a:1")).json()["sentences"]
    assert shown["draft"] == "left as started"
    assert "Its draft model is left as started." in sentences


def test_the_table_of_engines_shows_it_where_it_has_nothing_else_to_say() -> None:
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(render.engines_table([make_engine(draft=DRAFT_LEFT, version="run~v000001", step=1)], {}))
    assert "draft: left as started" in capture.get()


def test_doctor_warns_of_it() -> None:
    obstacle = Obstacle(text=f"draft: {DRAFT_LEFT}", fix="restart it", blocks=False)
    seen = Reached(
        model_path="/m",
        weight_version=None,
        server_version="0.5.23",
        configuration="sglang 0.5.23",
        startup_path=None,
        server="SGLang",
        obstacles=(obstacle,),
    )
    asked = EngineAnswers(name="e", url="http://10.0.0.7:30000", seen=seen)
    found = {each.check: each for each in judge_engine(asked)}[CheckName.UPDATES]
    assert (found.verdict, found.text) == (CheckVerdict.WARNING, "draft: left as started")
