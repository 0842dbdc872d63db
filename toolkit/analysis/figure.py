"""A study's figure: every draw as a point in a strip, the judged selections marked, one panel a budget."""

from __future__ import annotations

import math
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.analysis import grid, reports
from toolkit.analysis.reports import Results
from toolkit.analysis.summary import summary
from toolkit.errors import InputError, closest
from toolkit.records.io import atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "pdf", "svg")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, told apart by colour-blind readers; each arm also has a marker of its own."""
MARKERS = ("^", "v", "D", "s", "o", "P", "X")
LINES = {"16-bit": "-", "base": "--"}
DRAW, FAINT, INK = "#5F5F5F", "#A3A3A3", "#222222"
PANEL, ROW, OVERVIEW = 4.3, 0.62, 0.34  # inches: width of a panel, height of a strip and of the overview
LABEL, GAP = 0.22, 0.008  # parts of the overview's width: room for a reference's label, and half the space between two


def figure(study: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Draw a study: one panel a budget (and one row of panels a text), one strip an arm and control.

    A strip holds the outcome of each of the control's draws (moved up and down only so that they can be told
    apart), their median as a bar, and the arm that they are matched to as a coloured marker; draws that do not
    hold the arm's memory are fainter. The bar above each panel shows where the panel lies between the 16-bit and
    the base run.

    Args:
        study: a study's folder, its `study.yaml`, its results folder, or the `--out` folder of a run.
        out: the picture to write; its ending tells the format, png, pdf or svg.

    Raises:
        InputError: another ending, or no arm with draws; and as `toolkit.analysis.reports.read`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    out = Path(out)
    kind = out.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise InputError(f"a figure is written as png, pdf or svg; found {out.name!r}; {closest(kind, FORMATS)}")
    results = reports.read(study)
    data = summary(results)
    strips = _strips(data)
    budgets = [b for b in results.budgets if any(arm["budget"] == b and arm["controls"] for arm in data["arms"])]
    if not strips or not budgets:
        raise InputError(f"{results.folder} holds no arm with draws to show")
    texts = list(results.texts)
    caption = _caption(data, strips)
    width = 1.9 + PANEL * len(budgets) + 0.2
    lines = [line for text in caption for line in textwrap.wrap(text, int(width * 16.5))]
    above, below, between = 0.55, 0.62 + 0.165 * len(lines), 0.95
    panel = OVERVIEW + 0.16 + ROW * len(strips) + 0.1
    height = above + below + panel * len(texts) + between * (len(texts) - 1)
    picture = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(picture)
    for row, text in enumerate(texts):
        top = height - above - row * (panel + between)
        for column, budget in enumerate(budgets):
            left = 1.9 + column * PANEL
            wide = PANEL - 0.28
            strip_height = ROW * len(strips) + 0.1
            bar = picture.add_axes((left / width, (top - OVERVIEW) / height, wide / width, OVERVIEW / height))
            axes = picture.add_axes((left / width, (top - panel) / height, wide / width, strip_height / height))
            limits = _panel(axes, results, data, budget, text, strips, labels=column == 0)
            _overview(bar, data, text, limits, f"{budget}" + (f" · {text}" if len(texts) > 1 else ""))
            if row == len(texts) - 1 or len(texts) > 1:
                axes.set_xlabel(f"{data['analysis']['outcome']} (nats a token)", fontsize=8, color=INK)
    for at, line in enumerate(lines):
        picture.text(0.12 / width, (0.1 + 0.165 * (len(lines) - 1 - at)) / height, line, fontsize=7.5, color=INK)
    metadata = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[kind]
    with atomic(out) as temporary:
        picture.savefig(temporary, format=kind, dpi=160, metadata=metadata)
    return out


def _strips(data: dict[str, Any]) -> list[tuple[str, str]]:
    """(arm, control) of every strip, in the study's order, over all budgets."""
    return list(dict.fromkeys((arm["arm"], c["control"]) for arm in data["arms"] for c in arm["controls"]))


def _panel(
    axes: Axes,
    results: Results,
    data: dict[str, Any],
    budget: str,
    text: str,
    strips: list[tuple[str, str]],
    *,
    labels: bool,
) -> tuple[float, float]:
    """The strips of one budget and text; returns the range of outcomes that they show."""
    outcome = data["analysis"]["outcome"]
    arms = {arm["arm"]: arm for arm in data["arms"] if arm["budget"] == budget}
    order = list(dict.fromkeys(arm for arm, _ in strips))
    seen: list[float] = []
    for at, (name, control) in enumerate(strips):
        y = -at
        if at and strips[at - 1][0] != name:
            axes.axhline(y + 0.5, color="#DDDDDD", linewidth=0.8, zorder=0)
        run = results.controls.get((budget, name, control))
        item = next((c for c in arms.get(name, {}).get("controls", []) if c["control"] == control), None)
        if run is None or run.draws is None or item is None:
            axes.text(0.5, y, "missing", transform=axes.get_yaxis_transform(), fontsize=7, ha="center", va="center")
            continue
        values = run.draws.outcomes[text][outcome]
        many = len(values) > 60
        axes.scatter(
            values,
            y - 0.12 + 0.46 * _jitter(len(values)),
            s=7 if many else 20,
            color=DRAW if item["matched"] else FAINT,
            alpha=0.45 if many else 0.8,
            linewidths=0,
            zorder=2,
        )
        median = item["texts"][text]["median"]
        axes.plot([median, median], [y - 0.38, y + 0.14], color=INK, linewidth=1.6, zorder=3)
        value, which = item["texts"][text]["outcome"], order.index(name)
        colour = COLOURS[which % len(COLOURS)]
        axes.plot([value, value], [y - 0.38, y + 0.14], color=colour, linewidth=1.0, zorder=3)
        axes.scatter(
            [value],
            [y - 0.12],
            marker=MARKERS[which % len(MARKERS)],
            s=70,
            color=colour,
            edgecolors="white",
            linewidths=0.8,
            zorder=4,
        )
        axes.text(
            0.99,
            y + 0.33,
            _verdict(item, text),
            transform=axes.get_yaxis_transform(),
            fontsize=6.8,
            ha="right",
            va="center",
            color=INK,
        )
        seen += [float(values.min()), float(values.max()), value]
    span = (max(seen) - min(seen)) or 1e-3
    limits = (min(seen) - 0.05 * span, max(seen) + 0.05 * span)
    for kind, value in _reference_lines(data, text).items():
        if limits[0] < value < limits[1]:
            axes.axvline(value, color=INK, linewidth=0.8, linestyle=LINES[kind], alpha=0.5, zorder=1)
    _dress(axes, strips, data, limits, labels=labels)
    return limits


def _reference_lines(data: dict[str, Any], text: str) -> dict[str, float]:
    """Kind of reference run (16-bit, base) → its outcome."""
    outcome = data["analysis"]["outcome"]
    return {r["kind"]: r["scores"][text][outcome] for r in data["references"] if r["kind"] in LINES}


def _dress(
    axes: Axes, strips: list[tuple[str, str]], data: dict[str, Any], limits: tuple[float, float], *, labels: bool
) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlim(*limits)
    axes.set_ylim(-len(strips) + 0.42, 0.55)
    axes.set_yticks([-at - 0.12 for at in range(len(strips))])
    unmatched = {(a["arm"], c["control"]) for a in data["arms"] for c in a["controls"] if not c["matched"]}
    names = [
        "\n".join(textwrap.wrap(arm, 28) + textwrap.wrap(f"{control} draws", 28))
        + ("\n(memory not matched)" if (arm, control) in unmatched else "")
        for arm, control in strips
    ]
    axes.set_yticklabels(names if labels else [""] * len(strips), fontsize=7.5, color=INK)
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
    axes.set_axis_off()
    axes.set_title(title, fontsize=9, color=INK, pad=5)


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


def _caption(data: dict[str, Any], strips: list[tuple[str, str]]) -> list[str]:
    counts = sorted({c["draws"] for arm in data["arms"] for c in arm["controls"]})
    draws = " or ".join(f"{n:,}" for n in counts)
    texts = "; ".join(
        f"{name}: {text['windows']} windows of {text['window']} tokens, SHA-256 {text['sha256'][:12]}"
        for name, text in data["texts"].items()
    )
    note = data["reference"]["note"].rstrip(".")
    lines = [
        f"{data['model']}, {data['form']} form; {note}. {texts}. n = {draws} draws a strip (grey points; bar: their "
        "median); coloured: the selection that they are matched to. Above each panel, its range (box) between the "
        "16-bit (solid) and the base run (dashed). p is one-sided, one strip's law each; budgets are nested and not "
        "combined."
    ]
    lines += [note for note in data["notes"] if note.startswith("Descriptive")]
    if data["missing"]:
        lines.append(f"{len(data['missing'])} declared runs are missing.")
    return lines
