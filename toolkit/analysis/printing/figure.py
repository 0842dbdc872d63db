"""The figure of strips: draws as points, judged selections as marks, strips grouped by arm, one panel a budget."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.analysis.printing import drawing, grid, layout
from toolkit.analysis.printing.drawing import COLOURS, DRAW, FAINT, INK, LINE, MARKERS
from toolkit.analysis.printing.effects_figure import effects_figure
from toolkit.analysis.printing.starts.figure import figure as starts_figure
from toolkit.analysis.printing.summary import summary
from toolkit.analysis.printing.trained.figure import figure as trained_figure
from toolkit.analysis.reading import reports
from toolkit.analysis.reading.kinds import STARTS, TRAINED, kind_in
from toolkit.errors import InputError, closest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = {"16-bit": "-", "base": "--"}
PANEL, OVERVIEW, LEFT = 4.3, 0.34, 1.9  # inches: width of a panel, height of its overview, room for the strips' names
ROOMY, TIGHT, MANY = 0.62, 0.42, 9  # inches: height of a strip, where there are few, and from `MANY` on
HEADER = 0.6  # of a strip's height: the arm's name above its strips
LABEL, GAP = 0.22, 0.008  # parts of the overview's width: room for a reference's label, and half the space between two

Draws = Mapping[tuple[str | None, str, str], Mapping[str, np.ndarray]]
"""(Budget, arm, control) → text → the draws' outcomes."""


def figure(study: str | os.PathLike[str], out: str | os.PathLike[str], *, kind: str = "strips") -> Path:
    """Draw a study: `strips` (draws and arms) or `effects` (what each layer alone is worth).

    A fine-tuning study: `strips` (every run of every arm), `frontier` (accuracy against throughput, peak memory as
    label) or `tuning` (loss of the trials against the tuned lever). A study of starts: `strips` alone, residual and
    loss of every arm against the scaling.

    Strips: one panel a budget (and one row of panels a text), one strip an arm and control, grouped by arm. A
    strip holds the outcome of each of the control's draws (moved up and down only so that they can be told apart),
    their median as a bar, and the arm that they are matched to as a coloured marker; draws that do not hold the
    arm's memory are fainter. The bar above each panel shows where the panel lies between the 16-bit and the base
    run.

    Args:
        study: a study's folder, its `study.yaml`, its results folder, or the `--out` folder of a run.
        out: the picture to write; its ending tells the format, png, pdf or svg.

    Raises:
        InputError: another ending or kind, or no arm with draws; and as `toolkit.analysis.reading.reports.read`,
            `toolkit.analysis.printing.effects_figure.effects_figure` and
            `toolkit.analysis.printing.trained.figure.figure`.
    """
    of = kind_in(study)
    if of in (TRAINED, STARTS):
        return (trained_figure if of == TRAINED else starts_figure)(study, out, kind=kind)
    kinds = ("strips", "effects")
    if kind not in kinds:
        raise InputError(f"no kind of figure is called {kind!r}; {closest(kind, kinds)}")
    drawing.kind_of(out)
    if kind == "effects":
        return effects_figure(study, out)
    results = reports.read(study)
    outcome = results.study.analysis.outcome
    draws = {
        key: {text: run.draws.outcomes[text][outcome] for text in results.texts}
        for key, run in results.controls.items()
        if run.draws is not None
    }
    data = summary(results)
    if not any(arm["controls"] for arm in data["arms"]):
        raise InputError(f"{results.folder} holds no arm with draws to show")
    return strips_figure(data, draws, out)


@dataclass(frozen=True)
class _Rows:
    """Where the strips stand: one arm after the other, each with its name above.

    Attributes:
        strips: (arm, control, y); y falls from 0, in heights of a strip.
        headers: (arm, y).
        depth: of all, in heights of a strip.
    """

    strips: list[tuple[str, str, float]]
    headers: list[tuple[str, float]]
    depth: float

    @property
    def tight(self) -> bool:
        return len(self.strips) >= MANY

    @property
    def inches(self) -> float:
        return self.depth * (TIGHT if self.tight else ROOMY)


def _rows(data: dict[str, Any]) -> _Rows:
    """Every arm and control, in their order, over all budgets."""
    found = list(dict.fromkeys((arm["arm"], c["control"]) for arm in data["arms"] for c in arm["controls"]))
    arms = list(dict.fromkeys(arm for arm, _ in found))
    strips, headers, y = [], [], 0.0
    for arm in arms:
        headers.append((arm, y - HEADER / 2))
        y -= HEADER
        for control in (c for a, c in found if a == arm):
            strips.append((arm, control, y - 0.5))
            y -= 1
    return _Rows(strips, headers, -y)


def strips_figure(data: dict[str, Any], draws: Draws, out: str | os.PathLike[str]) -> Path:
    """The figure of strips, from a table's plain data and the draws' outcomes."""
    drawing.kind_of(out)
    rows = _rows(data)
    budgets = list(dict.fromkeys(arm["budget"] for arm in data["arms"] if arm["controls"]))
    texts = list(data["texts"])
    width = LEFT + PANEL * len(budgets) + 0.2
    lines = drawing.wrapped(_caption(data), width)
    above, below, between = 0.55, 0.62 + LINE * len(lines), 0.95
    panel = OVERVIEW + 0.16 + rows.inches
    height = above + below + panel * len(texts) + between * (len(texts) - 1)
    picture = drawing.empty(width, height)
    for row, text in enumerate(texts):
        top = height - above - row * (panel + between)
        for column, budget in enumerate(budgets):
            left, wide = LEFT + column * PANEL, PANEL - 0.28
            bar = picture.add_axes((left / width, (top - OVERVIEW) / height, wide / width, OVERVIEW / height))
            axes = picture.add_axes((left / width, (top - panel) / height, wide / width, rows.inches / height))
            limits = _panel(axes, data, draws, budget, text, rows, labels=column == 0)
            title = [part for part in (budget, text if len(texts) > 1 or budget is None else None) if part]
            _overview(bar, data, text, limits, " · ".join(title))
            axes.set_xlabel(f"{_outcome(data, text)} ({data['unit']})", fontsize=8, color=INK)
    drawing.write_caption(picture, lines)
    return drawing.save(picture, out)


def _outcome(data: dict[str, Any], text: str) -> str:
    return str(data["analysis"]["outcome"]) if data["kind"] == "table" else text


def _panel(
    axes: Axes, data: dict[str, Any], draws: Draws, budget: str | None, text: str, rows: _Rows, *, labels: bool
) -> tuple[float, float]:
    """The strips of one budget and text; returns the range of outcomes that they show."""
    arms = {arm["arm"]: arm for arm in data["arms"] if arm["budget"] == budget}
    order = [arm for arm, _ in rows.headers]
    seen: list[float] = []
    for _, y in rows.headers[1:]:
        axes.axhline(y + HEADER / 2, color="#DDDDDD", linewidth=0.8, zorder=0)
    for name, control, y in rows.strips:
        values = draws.get((budget, name, control), {}).get(text)
        item = next((c for c in arms.get(name, {}).get("controls", []) if c["control"] == control), None)
        if values is None or item is None:
            if item is None and name in arms and not _declared(data, name, control):
                continue
            axes.text(0.5, y, "missing", transform=axes.get_yaxis_transform(), fontsize=7, ha="center", va="center")
            continue
        many = len(values) > 60
        axes.scatter(
            values,
            y - 0.14 + 0.42 * _jitter(len(values)),
            s=(5 if rows.tight else 7) if many else (12 if rows.tight else 20),
            color=DRAW if item["matched"] else FAINT,
            alpha=0.45 if many else 0.8,
            linewidths=0,
            zorder=2,
        )
        found, which = item["texts"][text], order.index(name)
        colour, median, value = COLOURS[which % len(COLOURS)], found["median"], found["outcome"]
        axes.plot([median, median], [y - 0.4, y + 0.12], color=INK, linewidth=1.6, zorder=3)
        axes.plot([value, value], [y - 0.4, y + 0.12], color=colour, linewidth=1.0, zorder=3)
        axes.scatter(
            [value],
            [y - 0.14],
            marker=MARKERS[which % len(MARKERS)],
            s=42 if rows.tight else 70,
            color=colour,
            edgecolors="white",
            linewidths=0.8,
            zorder=4,
        )
        axes.text(
            0.99,
            y + 0.32,
            _verdict(item, text),
            transform=axes.get_yaxis_transform(),
            fontsize=6 if rows.tight else 6.8,
            ha="right",
            va="center",
            color=INK,
        )
        seen += [float(values.min()), float(values.max()), value]
    if not seen:
        seen = [0.0, 1.0]
    span = (max(seen) - min(seen)) or max(abs(seen[0]), 1.0) * 1e-3
    limits = (min(seen) - 0.05 * span, max(seen) + 0.05 * span)
    for kind, value in _reference_lines(data, text).items():
        if limits[0] < value < limits[1]:
            axes.axvline(value, color=INK, linewidth=0.8, linestyle=LINES[kind], alpha=0.5, zorder=1)
    _dress(axes, rows, data, limits, labels=labels)
    return limits


def _declared(data: dict[str, Any], arm: str, control: str) -> bool:
    """Whether a run of this control is missing: named as such, or there at another budget of the arm."""
    return any(c["control"] == control for a in data["arms"] if a["arm"] == arm for c in a["controls"])


def _reference_lines(data: dict[str, Any], text: str) -> dict[str, float]:
    """Kind of reference run (16-bit, base) → its outcome."""
    outcome = data["analysis"]["outcome"]
    found = data.get("references", [])
    return {r["kind"]: r["scores"][text][outcome] for r in found if r["kind"] in LINES}


def _dress(axes: Axes, rows: _Rows, data: dict[str, Any], limits: tuple[float, float], *, labels: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlim(*limits)
    axes.set_ylim(-rows.depth - 0.1, 0.0)
    axes.set_yticks([y - 0.14 for _, _, y in rows.strips])
    unmatched = {(a["arm"], c["control"]) for a in data["arms"] for c in a["controls"] if not c["matched"]}
    names = [
        "\n".join(textwrap.wrap(control, 26)) + ("\n(memory not matched)" if (arm, control) in unmatched else "")
        for arm, control, _ in rows.strips
    ]
    size = 6.5 if rows.tight else 7.5
    axes.set_yticklabels(names if labels else [""] * len(names), fontsize=size, color=INK)
    for at, (arm, y) in enumerate(rows.headers if labels else []):
        axes.text(
            -0.02,
            y,
            "\n".join(textwrap.wrap(arm, 28)[:2]),
            transform=axes.get_yaxis_transform(),
            fontsize=size + 0.5,
            fontweight="bold",
            color=COLOURS[at % len(COLOURS)],
            ha="right",
            va="center",
        )
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7.5, colors=INK)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    ticks = axes.get_xticks()
    digits = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9)) if len(ticks) > 1 else 4
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.{digits}f}"))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _overview(axes: Axes, data: dict[str, Any], text: str, limits: tuple[float, float], title: str) -> None:
    """The way from the 16-bit to the base run, their values as lines, and the panel's range as a box."""
    lines = _reference_lines(data, text)
    axes.set_axis_off()
    axes.set_title(title, fontsize=9, color=INK, pad=5)
    if not lines:
        return
    low, high = min([*lines.values(), limits[0]]), max([*lines.values(), limits[1]])
    span = high - low
    axes.set_xlim(low - 0.02 * span, high + 0.02 * span)
    axes.set_ylim(0, 1)
    axes.axhline(0.25, color="#CCCCCC", linewidth=1)
    axes.axvspan(*limits, ymin=0.08, ymax=0.42, color="#999999", alpha=0.45, linewidth=0)
    for kind, value in lines.items():
        axes.plot([value, value], [0.0, 0.5], color=INK, linewidth=1.4, linestyle=LINES[kind])
    starts = _apart({kind: (value - low + 0.02 * span) / (1.04 * span) for kind, value in lines.items()})
    for kind, (place, side) in starts.items():
        label = f"{kind} {lines[kind]:.4f}"
        axes.text(place, 0.58, label, transform=axes.transAxes, fontsize=7, ha=side, va="bottom", color=INK)


def _apart(marks: dict[str, float]) -> dict[str, tuple[float, str]]:
    """Where two marks' labels stand: towards the middle; where they would meet, back to back at their marks.

    Args:
        marks: label → its mark's place, as a fraction of the width.

    Returns:
        label → its anchor, and the side of it that stands there.
    """
    first, *rest = sorted(marks, key=marks.__getitem__)
    places = {kind: (at, "right" if at > 0.5 else "left") for kind, at in marks.items()}
    if not rest:
        return places
    (second,) = rest
    ends = [marks[first] + LABEL * (places[first][1] == "left"), marks[second] - LABEL * (places[second][1] == "right")]
    if ends[0] <= ends[1]:
        return places
    middle = min(max((marks[first] + marks[second]) / 2, LABEL), 1 - LABEL)
    return {
        first: (max(min(marks[first], middle), LABEL) - GAP, "right"),
        second: (min(max(marks[second], middle), 1 - LABEL) + GAP, "left"),
    }


def _verdict(item: dict[str, Any], text: str) -> str:
    found = item["texts"][text]
    return (
        f"gap {grid.signed(found['gap'])}, {found['at_least_as_good']} of {item['draws']} at least as good, "
        f"p = {grid.probability(found['p'])}".replace("= <", "< ")
    )


def _jitter(count: int) -> np.ndarray:
    """Offsets in (−½, ½) that spread neighbours apart: multiples of the golden ratio, the same every time."""
    return (np.arange(1, count + 1) * 0.6180339887498949) % 1.0 - 0.5


def _caption(data: dict[str, Any]) -> list[str]:
    counts = sorted({c["draws"] for arm in data["arms"] for c in arm["controls"]})
    draws = " or ".join(f"{n:,}" for n in counts)
    status = layout.status(data).partition(":")[0]
    if data["kind"] == "table":
        texts = "; ".join(
            f"{name}: {text['windows']} windows of {text['window']} tokens, SHA-256 {text['sha256'][:12]}"
            for name, text in data["texts"].items()
        )
        about = f"{data['form']} form; {data['reference']['note'].rstrip('.')}. {texts}."
        place = (
            " Above each panel, its range (box) between the 16-bit (solid) and the base run (dashed)."
            if data["references"]
            else ""
        )
    else:
        about, place = f"scores of {data['scores']['file']}, SHA-256 {data['scores']['sha256'][:12]}.", ""
    several = len({arm["budget"] for arm in data["arms"]}) > 1
    lines = [
        f"{status}. {data['model']}, {about} n = {draws} draws a strip (grey points; bar: their median); coloured: the "
        f"selection that they are matched to.{place} p is one-sided, one strip's law each"
        + ("; budgets are nested and not combined." if several else ".")
    ]
    lines += [note for note in data["notes"] if note.startswith("Descriptive")]
    if data.get("missing"):
        lines.append(f"{len(data['missing'])} declared runs are missing.")
    return lines
