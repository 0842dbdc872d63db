"""The tuned lever: every arm's trials, one panel a task."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.analysis.printing import drawing
from toolkit.analysis.printing.drawing import COLOURS, INK, LINE, MARKERS
from toolkit.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, HIGH, LEFT, BETWEEN, ACROSS, LEGEND = 3.3, 2.5, 0.85, 0.75, 3, 1.7  # inches; panels in a row


def tuning_figure(data: dict[str, Any], out: str | os.PathLike[str]) -> Path:
    """Draw the loss of every trial against the tuned lever (the learning rate): one panel a task, one line an arm.

    A ring marks the value that an arm's trials chose; the dotted line is the value that all arms share.

    Raises:
        InputError: another ending than png, pdf or svg, or the study has no trials.
    """
    drawing.kind_of(out)
    tune = data["tune"]
    entries = [e for e in (tune or {"arms": []})["arms"] if any(t["loss"] is not None for t in e["trials"])]
    if not entries:
        raise InputError(f"study {data['study']} holds no trials to show; a study with a `tune` block makes them")
    tasks, arms = (list(dict.fromkeys(e[name] for e in entries)) for name in ("task", "arm"))
    across = 2 if len(tasks) == 4 else min(ACROSS, len(tasks))
    down = -(-len(tasks) // across)
    width = LEFT + across * WIDE + (across - 1) * BETWEEN + LEGEND
    lines = drawing.wrapped(_caption(data), width)
    above, below, between = 0.4, 0.68 + LINE * len(lines), 0.85
    height = above + below + down * HIGH + (down - 1) * between
    picture = drawing.empty(width, height)
    for at, task in enumerate(tasks):
        row, column = divmod(at, across)
        left, top = LEFT + column * (WIDE + BETWEEN), height - above - row * (HIGH + between)
        axes = picture.add_axes((left / width, (top - HIGH) / height, WIDE / width, HIGH / height))
        _panel(axes, [e for e in entries if e["task"] == task], arms)
        axes.set_title(task, fontsize=9, color=INK, pad=4)
        axes.set_xlabel(tune["lever"].replace("_", " "), fontsize=8, color=INK)
        axes.set_ylabel("loss (nats a gold target token)", fontsize=8, color=INK)
    handles, labels = {}, []
    for axes in picture.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    labels = [arm for arm in arms if arm in handles]
    picture.legend(
        [handles[arm] for arm in labels],
        labels,
        loc="upper left",
        bbox_to_anchor=((width - LEGEND + 0.1) / width, (height - above + 0.08) / height),
        fontsize=7.5,
        frameon=False,
    )
    drawing.write_caption(picture, lines)
    return drawing.save(picture, out)


def _panel(axes: Axes, entries: list[dict[str, Any]], arms: list[str]) -> None:
    values: set[float] = set()
    for entry in entries:
        at = arms.index(entry["arm"])
        colour = COLOURS[at % len(COLOURS)]
        trials = sorted((t["value"], t["loss"]) for t in entry["trials"] if t["loss"] is not None)
        xs, ys = [x for x, _ in trials], [y for _, y in trials]
        values.update(xs)
        line = "-" if at < len(COLOURS) else "--"  # colours and markers come round again
        style = {"linestyle": line, "color": colour, "linewidth": 1.2, "markersize": 5}
        style |= {"markeredgecolor": "white", "markeredgewidth": 0.5}
        axes.plot(xs, ys, marker=MARKERS[at % len(MARKERS)], label=entry["arm"], zorder=3, **style)
        best = [(x, y) for x, y in trials if x == entry["chosen"]]
        if best:
            axes.scatter(*zip(*best, strict=True), s=95, facecolors="none", edgecolors=colour, linewidths=1.1, zorder=4)
    axes.axvline(entries[0]["shared_value"], color=INK, linewidth=0.8, linestyle=":", zorder=1)
    if min(values) > 0 and max(values) / min(values) > 3:
        axes.set_xscale("log")
    ticks = sorted(values)
    axes.set_xticks(ticks, [f"{v:g}" for v in ticks])
    axes.minorticks_off()
    axes.margins(x=0.08, y=0.1)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.tick_params(labelsize=7.5, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _caption(data: dict[str, Any]) -> list[str]:
    return [
        f"{data['model']}, {data['form']} form. One trial an arm and value, all under the same seeds, on "
        f"{data['tune']['rows']:,} rows that no table scores. Ring: the value that an arm's trials chose, by their "
        f"{data['analysis']['outcome']}; dotted: the value that all arms share."
    ]
