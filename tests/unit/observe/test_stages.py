"""The stages of an update: dashboard, `refitd top` and the metrics have the same ones, in the order of time."""

import re

from refitd.api.web_pages import FOLDER
from refitd.observe.telemetry import STAGES
from refitd_console import top as glance

TIMELINE = (FOLDER / "timeline.js").read_text()
STYLE = (FOLDER / "style.css").read_text()


def test_dashboard_and_top_show_every_stage_that_is_measured_in_the_order_of_time() -> None:
    shown = TIMELINE.partition("export const STAGES = {")[2].partition("};")[0]
    assert tuple(re.findall(r"^  (\w+): ", shown, re.MULTILINE)) == STAGES
    assert tuple(glance.STAGES) == STAGES
    assert STAGES.index("validate") < STAGES.index("copy") < STAGES.index("prepare") < STAGES.index("pause")


def test_each_stage_has_a_letter_and_colours_of_its_own() -> None:
    letters = [letter for letter, _ in glance.STAGES.values()]
    assert len(set(letters)) == len(letters)
    for stage in STAGES:
        light, dark = re.findall(rf"^ +--{stage}: (#\w+);", STYLE, re.MULTILINE)
        assert re.search(rf"\.stage\.{stage} {{\s*fill: var\(--{stage}\);", STYLE), stage
        assert light != dark
    for theme in range(2):
        colours = [re.findall(rf"^ +--{stage}: (#\w+);", STYLE, re.MULTILINE)[theme] for stage in STAGES]
        assert len(set(colours)) == len(colours)


def test_the_copy_for_engines_is_drawn_before_the_pause() -> None:
    timings = {"load": 100.0, "pause": 100.0, "copy": 100.0, "validate": 100.0}
    assert glance.bar(timings, 400.0, 16).plain == "vvvvccccPPPPLLLL"
