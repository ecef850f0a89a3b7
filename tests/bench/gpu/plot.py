"""Draws `gpu.json`: the trainer's side of each model beside the bus, and the whole loop by its stages. Needs no GPU.

python tests/bench/gpu/plot.py docs/benchmarks/gpu.json docs/benchmarks/gpu.svg
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

Row = dict[str, Any]

SIDE = ("bus", "full", "delta")
STAGES = (
    "save_file", "stage", "compare", "write", "sync", "commit", "notice", "seen", "validate", "prepare", "pause",
    "reload", "load", "verify", "resume", "rmtree",
)  # fmt: skip
"""In the order in which they come; each has its colour in every bar."""


def main() -> None:
    """Read, draw, write."""
    source, target = (Path(argument) for argument in sys.argv[1:])
    result = json.loads(source.read_text())
    rows = [row for row in result["rows"] if row["unit"] == "ms"]
    models = list(dict.fromkeys(row["model"] for row in rows if row["scenario"] in SIDE))
    whole = [row for row in rows if row["stages"] and row["scenario"] not in SIDE]
    panels = [[row for row in rows if row["model"] == model and row["scenario"] in SIDE] for model in models]
    heights = [0.3 * len(panel) + 0.8 for panel in panels] + ([0.45 * len(whole) + 1.2] if whole else [])
    figure, axes = plt.subplots(
        len(heights), figsize=(10, sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    for axis, model, panel in zip(axes[:, 0], models, panels, strict=False):
        _side(axis, model, panel)
    if whole:
        _whole(axes[-1, 0], whole)
    figure.suptitle(f"{result['machine']['gpu']}, {result['machine']['cores']} cores, {result['at'][:10]}", fontsize=10)
    mpl.rcParams["svg.hashsalt"] = "refitd"  # the same picture of the same figures
    figure.savefig(target, metadata={"Date": None})


def _side(axis: Any, model: str, rows: list[Row]) -> None:
    """One bar a row, from least to most as a whisker; the pinned copy as a line through all."""
    for place, row in enumerate(rows):
        whisker = [[row["p50"] - row["min"]], [row["max"] - row["p50"]]]
        axis.barh(place, row["p50"], xerr=whisker, color=_colour(row), height=0.7, error_kw={"lw": 0.8})
        axis.text(max(row["max"], row["limit"] or 0) * 1.08, place, _short(row["p50"]), va="center", fontsize=7)
        if row["limit"] is not None:
            axis.plot([row["limit"]] * 2, [place - 0.42, place + 0.42], color="black", lw=1.2)
    copy = next((row["p50"] for row in rows if row["name"] == "pinned copy"), None)
    if copy is not None:
        axis.axvline(copy, color="grey", lw=0.8, ls=":")
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=7)
    axis.set_xscale("log")
    axis.margins(x=0.12)
    axis.invert_yaxis()
    axis.set_xlabel(
        "ms (bars: p50; lines: least and most; black: what was wanted; dotted: the pinned copy)", fontsize=7
    )
    axis.set_title(f"publishing, {model} shapes, bf16", fontsize=9)


def _whole(axis: Any, rows: list[Row]) -> None:
    """Bars made of stages."""
    colours = dict(zip(STAGES, plt.get_cmap("tab20").colors, strict=False))
    for place, row in enumerate(rows):
        begin = 0.0
        for stage in sorted(row["stages"].keys() & set(STAGES), key=STAGES.index):  # "publish" is the sum of some
            took = row["stages"][stage]
            axis.barh(place, took, left=begin, height=0.6, color=colours.get(stage, "lightgrey"), label=stage)
            begin += took
        axis.text(max(begin, row["p50"]) * 1.02, place, f"{_short(row['p50'])} in all", va="center", fontsize=7)
    axis.margins(x=0.15)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("ms (medians of stages; some overlap, so that the whole may be less)", fontsize=7)
    axis.set_title("from the trainer's weights to an engine that serves them", fontsize=9)
    handles = {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    axis.legend(handles.values(), handles.keys(), fontsize=6, ncols=5, loc="lower right")


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def _colour(row: Row) -> str:
    return {"bus": "tab:grey", "full": "tab:blue", "delta": "tab:green"}[row["scenario"]]


if __name__ == "__main__":
    main()
