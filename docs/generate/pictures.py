"""The pictures of the README: how weights reach the engines, and how long an update takes by each transport.

Each is drawn twice, for a light and for a dark page. The figures come from docs/benchmarks; what was not measured there
has no bar and no number.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
WIDTH = 880
BAR_AT, BAR_WIDTH = 420, 380  # pixels
LINE = 27


@dataclass(frozen=True, slots=True, kw_only=True)
class Palette:
    """The colours of a picture."""

    page: str
    ink: str
    faint: str
    box: str
    edge: str
    ours: str
    others: str


PALETTES = {
    "light": Palette(
        page="#ffffff", ink="#1f2328", faint="#59636e", box="#f6f8fa", edge="#d1d9e0", ours="#0969da", others="#8c959f"
    ),
    "dark": Palette(
        page="#0d1117", ink="#e6edf3", faint="#9198a1", box="#161b22", edge="#3d444d", ours="#4493f8", others="#6e7681"
    ),
}


def pictures() -> dict[Path, str]:
    """Each picture, whole."""
    drawn = {"flow": flow, "speed": speed}
    return {
        DOCS / "images" / f"{name}-{theme}.svg": draw(palette)
        for name, draw in drawn.items()
        for theme, palette in PALETTES.items()
    }


class Drawing:
    """An SVG in the making. Coordinates are pixels from the upper left corner."""

    def __init__(self, height: int, title: str, palette: Palette) -> None:
        self._palette, self._height, self._title = palette, height, title
        self._parts: list[str] = []

    def text(self, x: float, y: float, words: str, *, size: int = 13, color: str = "", **more: Any) -> None:
        """Words whose baseline begins at (x, y)."""
        attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        color = color or self._palette.ink
        self._parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}"{attributes}>{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, *lines: str, edge: str = "") -> None:
        """A box with a title and further lines, which stand in its middle."""
        stroke = edge or self._palette.edge
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{self._palette.box}" '
            f'stroke="{stroke}" stroke-width="{2 if edge else 1}"/>'
        )
        middle, top = x + width / 2, y + height / 2 - 9 * (len(lines) - 1)
        for number, line in enumerate(lines):
            look: dict[str, Any] = {"text_anchor": "middle"}
            look |= {"font_weight": "600", "size": 15} if number == 0 else {"color": self._palette.faint}
            self.text(middle, top + 5 + 18 * number, line, **look)

    def arrow(self, *points: tuple[float, float], is_dashed: bool = False, color: str = "") -> None:
        """A line through the points with a head at its end."""
        path = " ".join(f"{'L' if number else 'M'}{x} {y}" for number, (x, y) in enumerate(points))
        dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
        color = color or self._palette.faint
        (x1, y1), (x2, y2) = points[-2:]
        dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
        head = [(x2, y2), (x2 - 8 * dx - 5 * dy, y2 - 8 * dy - 5 * dx), (x2 - 8 * dx + 5 * dy, y2 - 8 * dy + 5 * dx)]
        corners = " ".join(f"{x},{y}" for x, y in head)
        self._parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.8"{dashes}/>')
        self._parts.append(f'<polygon points="{corners}" fill="{color}"/>')

    def bar(self, x: float, y: float, width: float, color: str) -> None:
        """A bar of a chart."""
        self._parts.append(f'<rect x="{x}" y="{y}" width="{max(width, 2):.1f}" height="15" rx="2" fill="{color}"/>')

    def svg(self) -> str:
        """The whole."""
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" role="img" '
                f'font-family="{FONT}">',
                f"<title>{escape(self._title)}</title>",
                f'<rect width="{WIDTH}" height="{self._height}" rx="10" fill="{self._palette.page}"/>',
                *self._parts,
                "</svg>\n",
            )
        )


def flow(palette: Palette) -> str:
    """How weights get from the trainer into the engines, and rollouts back."""
    title = "The trainer publishes a version into a folder; refitd checks it, has the engines load it, and proves it."
    drawing = Drawing(330, title, palette)
    middle: dict[str, Any] = {"text_anchor": "middle", "color": palette.faint}
    drawing.box(30, 60, 190, 84, "Trainer", "publisher.publish(…)", "from one rank or all")
    drawing.box(345, 60, 190, 84, "Root folder", "run/v000123/", "tmpfs, NVMe, NFS, Lustre")
    drawing.box(660, 60, 190, 84, "Engines", "SGLang, vLLM", "as many as you have")
    drawing.box(215, 225, 450, 84, "refitd", "check every byte · choose the version · pause, load,",
                "prove, resume each engine · delete what is not needed", edge=palette.ours)  # fmt: skip
    drawing.arrow((220, 102), (343, 102))
    drawing.text(282, 92, "1 write", **middle)
    drawing.arrow((535, 102), (658, 102))
    drawing.text(597, 92, "5 read", **middle)
    drawing.arrow((125, 144), (125, 267), (213, 267), is_dashed=True)
    drawing.text(135, 190, "2 notice", color=palette.faint)
    drawing.arrow((440, 225), (440, 146), color=palette.ours)
    drawing.text(450, 190, "3 check", color=palette.faint)
    drawing.arrow((665, 267), (755, 267), (755, 146), color=palette.ours)
    drawing.text(745, 190, "4 load, prove", text_anchor="end", color=palette.faint)
    drawing.arrow((755, 60), (755, 28), (125, 28), (125, 58))
    drawing.text(440, 21, "6 rollouts by the new weights", **middle)
    return drawing.svg()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """One transport from a trainer to its engine; times in milliseconds, None where they were not measured.

    `held` is how long the trainer is held to publish, `pause` how long the engine stands still.
    """

    name: str
    is_ours: bool = False
    held: float | None = None
    pause: float | None = None
    answered: float | None = None
    instead: str = "not measured"


def transports() -> Mapping[str, Sequence[Transport]]:
    """What was measured, on one GPU and on two."""
    loop, one, two = _rows("gpu-loop"), _rows("gpu-peers"), _rows("gpu2")
    today, ours = loop["today: save_file, reload, rmtree"], loop["refitd: publish, reload, verify, resume"]
    held = loop["refitd: of that the trainer is held (staged)"]["p50"]
    by_hand = Transport(
        name="by hand: save, reload, delete",
        held=today["stages"]["save_file"],
        pause=today["stages"]["reload"],
        answered=today["p50"],
    )
    stock = Transport(
        name="refitd, SGLang as it is", is_ours=True, held=held, pause=_paused(ours["stages"]), answered=ours["p50"]
    )
    return {
        "One H200": (
            by_hand,
            Transport(name="checkpoint-engine 0.4.2", answered=one["checkpoint-engine"]["p50"]),
            Transport(name="NCCL", instead="does not run on one GPU"),
            stock,
            *_plugged("gpu-answered-sglang-0.5.23"),
        ),
        "Two H200s": (
            Transport(name="checkpoint-engine 0.4.2", answered=two["checkpoint-engine"]["p50"]),
            Transport(name="NCCL, a request for each tensor", answered=two["NCCL, a request per parameter"]["p50"]),
            Transport(name="NCCL, one request", answered=two["NCCL, a broadcast per parameter"]["p50"]),
            *_plugged("gpu2-answered"),
        ),
    }


def _rows(name: str) -> Mapping[str, Any]:
    return {row["name"]: row for row in json.loads((DOCS / f"benchmarks/{name}.json").read_text())["rows"]}


def _plugged(name: str) -> list[Transport]:
    """refitd with its plugin in the engine: a full version, a delta, a hand-over."""
    found = json.loads((DOCS / f"benchmarks/{name}.json").read_text())
    kinds = {"files": "full version", "delta": "delta of 1 %", "memory": "hand-over"}
    return [
        Transport(
            name=f"refitd inside: {words}",
            is_ours=True,
            held=found[f"{kind}: held ms"]["p50"],
            pause=_paused(found[f"{kind}: stages ms"]),
            answered=found[f"{kind}: answered ms"]["p50"],
        )
        for kind, words in kinds.items()
    ]


def _paused(stages: Mapping[str, float]) -> float:
    return sum(stages[stage] for stage in ("pause", "load", "verify", "resume"))


def speed(palette: Palette) -> str:
    """The time of an update by each transport, as bars, with how long trainer and engine are held up."""
    groups = transports()
    drawing = Drawing(
        126 + sum(52 + LINE * len(group) for group in groups.values()),
        "Milliseconds of an update, by transport",
        palette,
    )
    right: dict[str, Any] = {"text_anchor": "end", "color": palette.faint, "size": 12}
    drawing.text(24, 32, "An update of 3.09 GB of bf16 weights, in milliseconds", size=16, font_weight="600")
    longest = max(transport.answered or 0 for group in groups.values() for transport in group)
    y = 66.0
    for title, group in groups.items():
        drawing.text(24, y, title, font_weight="600")
        drawing.text(304, y, "publish", **right)
        drawing.text(396, y, "pause", **right)
        drawing.text(BAR_AT, y, "answered", color=palette.faint, size=12)
        for transport in group:
            y += LINE
            drawing.text(24, y, transport.name)
            drawing.text(304, y, _number(transport.held), text_anchor="end")
            drawing.text(396, y, _number(transport.pause), text_anchor="end")
            if transport.answered is None:
                drawing.text(BAR_AT, y, transport.instead, color=palette.faint)
                continue
            width = transport.answered / longest * BAR_WIDTH
            drawing.bar(BAR_AT, y - 12, width, palette.ours if transport.is_ours else palette.others)
            drawing.text(BAR_AT + width + 8, y, _number(transport.answered))
        y += 52
    notes = (
        "Publish: how long the trainer is held. Pause: how long the engine stands still (its stages, added).",
        "Empty: not measured. Medians; docs/measurements.md has each run with its machine and its command.",
        "By hand and SGLang as it is: one run. The others: runs of their own, on machines of the same kind.",
        "SGLang 0.5.12.post1; refitd inside on one H200: SGLang 0.5.23.",
    )
    for number, note in enumerate(notes):
        drawing.text(24, y - 16 + 18 * number, note, color=palette.faint, size=12)
    return drawing.svg()


def _number(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{int(milliseconds + 0.5):,}"
