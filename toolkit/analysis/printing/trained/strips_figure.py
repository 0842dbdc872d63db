"""Strips of seeds: every run of every arm, one panel a task."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.analysis.printing import drawing
from toolkit.analysis.printing.drawing import COLOURS, DRAW, INK, LINE, MARKERS
from toolkit.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, BETWEEN, STRIP, ACROSS = 3.4, 0.35, 0.42, 3  # inches; panels in a row
NAMES = {"loss": "loss (nats a gold target token)", "score": "score"}


def strips_figure(data: dict[str, Any], out: str | os.PathLike[str]) -> Path:
    """Draw the declared outcome of every run: one panel a task, one strip an arm, the runs' mean as a bar.

    The dashed line is the baseline's mean. Hollow circles below an arm's strip are its repeats under the very same
    seeds (A/A).

    Raises:
        InputError: another ending than png, pdf or svg, or no finished run with the declared outcome.
    """
    drawing.kind_of(out)
    outcome = data["analysis"]["outcome"]
    shown = [e for e in data["arms"] if e["group"] == "" and not e["own"] and e[outcome] is not None]
    tasks = [task for task in data["tasks"] if any(e["task"] == task["task"] for e in shown)]
    if not shown:
        raise InputError(f"study {data['study']} holds no finished run with a {outcome} to show")
    arms = list(dict.fromkeys(e["arm"] for e in shown))
    across = 2 if len(tasks) == 4 else min(ACROSS, len(tasks))
    down = -(-len(tasks) // across)
    left_edge = 0.35 + 0.075 * min(22, max(map(len, arms)))
    width = max(left_edge + across * WIDE + (across - 1) * BETWEEN + 0.2, 5.6)
    lines = drawing.wrapped(_caption(data, outcome), width)
    inside, above, between = STRIP * len(arms) + 0.15, 0.4, 0.85
    below = 0.68 + LINE * len(lines)
    height = above + below + down * inside + (down - 1) * between
    picture = drawing.empty(width, height)
    for at, task in enumerate(tasks):
        row, column = divmod(at, across)
        left, top = left_edge + column * (WIDE + BETWEEN), height - above - row * (inside + between)
        axes = picture.add_axes((left / width, (top - inside) / height, WIDE / width, inside / height))
        _panel(axes, data, task["task"], arms, shown, outcome)
        axes.set_yticks([-n for n in range(len(arms))])
        names = ["\n".join(textwrap.wrap(arm, 22)[:2]) for arm in arms]
        axes.set_yticklabels(names if column == 0 else [""] * len(arms), fontsize=7.5, color=INK)
        unit = f"{task['metric']} (%)" if outcome == "score" else NAMES[outcome]
        axes.set_xlabel(unit, fontsize=8, color=INK)
    drawing.write_caption(picture, lines)
    return drawing.save(picture, out)


def _panel(
    axes: Axes, data: dict[str, Any], task: str, arms: list[str], shown: list[dict[str, Any]], outcome: str
) -> None:
    from matplotlib.ticker import MaxNLocator

    scale = 100.0 if outcome == "score" else 1.0
    mine = {e["arm"]: e for e in shown if e["task"] == task}
    base = mine.get(data["analysis"]["baseline"])
    if base is not None:
        axes.axvline(scale * base[outcome]["mean"], color=INK, linewidth=0.8, linestyle="--", alpha=0.6, zorder=1)
    repeats = {n["arm"]: n["values"] for n in data["noise"] if n["task"] == task and n["outcome"] == outcome}
    for at, arm in enumerate(arms):
        if arm not in mine:
            axes.text(
                0.5, -at, "no finished run", transform=axes.get_yaxis_transform(), fontsize=7, ha="center", va="center"
            )
            continue
        values, colour = [scale * v for v in mine[arm][outcome]["values"]], COLOURS[at % len(COLOURS)]
        lift = [0.16 * (n % 3 - 1) if len(values) > 4 else 0.0 for n in range(len(values))]
        axes.scatter(
            values,
            [-at + up for up in lift],
            s=26,
            marker=MARKERS[at % len(MARKERS)],
            color=colour,
            edgecolors="white",
            linewidths=0.5,
            alpha=0.9,
            zorder=4,
        )
        mean = scale * mine[arm][outcome]["mean"]
        axes.plot([mean, mean], [-at - 0.3, -at + 0.3], color=INK, linewidth=1.6, zorder=3)
        if arm in repeats:
            again = [scale * v for v in repeats[arm]]
            axes.scatter(
                again, [-at - 0.36] * len(again), s=14, facecolors="none", edgecolors=DRAW, linewidths=0.9, zorder=2
            )
    axes.set_ylim(-len(arms) + 0.4, 0.55)
    axes.margins(x=0.08)
    axes.set_title(task, fontsize=9, color=INK, pad=4)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7.5, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _caption(data: dict[str, Any], outcome: str) -> list[str]:
    counts = sorted({e["runs"] for e in data["arms"] if e["group"] == ""})
    runs = " or ".join(map(str, counts))
    better = "lower is better" if outcome == "loss" else "higher is better"
    lines = [
        f"{data['model']}, {data['form']} form. Each point is one run ({runs} an arm and task), the bar their mean, "
        f"the dashed line the mean of {data['analysis']['baseline']}; {better}."
    ]
    if data["noise"]:
        lines.append("Hollow circles: repeats of one arm under the very same seeds (A/A).")
    if any(e["runs"] < 4 for e in data["arms"]):
        lines.append("With fewer than four runs an arm the spread is not known.")
    return lines
