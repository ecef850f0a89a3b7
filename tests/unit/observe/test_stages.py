"""The stages of an update: dashboard and metrics have the same ones, in the order of time."""

import re

from refitd.api.web_pages import FOLDER
from refitd.observe.telemetry import STAGES

TIMELINE = (FOLDER / "timeline.js").read_text()
STYLE = (FOLDER / "style.css").read_text()


def test_the_dashboard_shows_every_stage_that_is_measured_in_the_order_of_time() -> None:
    shown = TIMELINE.partition("export const STAGES = {")[2].partition("};")[0]
    assert tuple(re.findall(r"^  (\w+): ", shown, re.MULTILINE)) == STAGES
    assert STAGES.index("validate") < STAGES.index("copy") < STAGES.index("prepare") < STAGES.index("pause")


def test_each_stage_has_colours_of_its_own() -> None:
    for stage in STAGES:
        light, dark = re.findall(rf"^ +--{stage}: (#\w+);", STYLE, re.MULTILINE)
        assert re.search(rf"\.stage\.{stage} {{\s*fill: var\(--{stage}\);", STYLE), stage
        assert light != dark
    for theme in range(2):
        colours = [re.findall(rf"^ +--{stage}: (#\w+);", STYLE, re.MULTILINE)[theme] for stage in STAGES]
        assert len(set(colours)) == len(colours)
