"""What an arm's accuracy costs: outcome against throughput, peak memory as label, a Pareto front a memory class."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.analysis.printing import drawing
from toolkit.analysis.printing.drawing import COLOURS, INK, LINE, MARKERS
from toolkit.analysis.printing.trained.cells import gib
from toolkit.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CLASS = 0.10
"""Arms whose peak memory exceeds the smallest of their class by at most this share are compared with each other."""
WIDE, HIGH, LEFT = 5.6, 3.8, 0.9  # inches


@dataclass(frozen=True)
class Point:
    """One arm: real tokens a second, outcome (larger is better after `sign`), their spreads, peak bytes."""

    arm: str
    speed: float
    speeds: tuple[float, float]
    outcome: float
    sd: float | None
    peak: int


def classes(points: list[Point]) -> list[list[Point]]:
    """Points by peak memory: a class holds what exceeds its smallest member by at most `CLASS`."""
    found: list[list[Point]] = []
    for point in sorted(points, key=lambda p: p.peak):
        if found and point.peak <= found[-1][0].peak * (1 + CLASS):
            found[-1].append(point)
        else:
            found.append([point])
    return found


def front(points: list[Point], sign: int) -> list[Point]:
    """The points that no other one of the class beats or equals on both axes while beating it on one; by speed."""

    def beaten(point: Point) -> bool:
        return any(
            other.speed >= point.speed
            and sign * other.outcome >= sign * point.outcome
            and (other.speed, other.outcome) != (point.speed, point.outcome)
            for other in points
        )

    return sorted((point for point in points if not beaten(point)), key=lambda p: p.speed)


def points(data: dict[str, Any], outcome: str) -> list[Point]:
    """Arms with an outcome, a kept timing and a measured peak.

    Raises:
        InputError: no session was kept, or no arm has all three.
    """
    timing = data["timing"]
    if timing is None:
        raise InputError(f"study {data['study']} holds no timing session; `toolkit time` makes one")
    kept = [session for session in timing["sessions"] if session["kept"]]
    if not kept:
        floors = ", ".join(f"{100 * s['floor']:.1f}%" for s in timing["sessions"])
        raise InputError(
            f"study {data['study']}: no timing session lies below the floor of {100 * timing['limit']:g}% (floors: "
            f"{floors}), and speeds of such sessions make no front; `toolkit time` makes another one"
        )
    found = []
    for entry in _outcomes(data):
        if entry[outcome] is None:
            continue
        mine = [arm for s in kept for arm in s["arms"] if arm["arm"] == entry["arm"] and arm["duplicate"] == 0]
        peaks = [arm["memory"]["peak_allocated"] for arm in mine if arm["memory"]]
        if mine and peaks:
            speeds = [arm["tokens_per_second"] for arm in mine]
            found.append(
                Point(
                    entry["arm"],
                    sum(speeds) / len(speeds),
                    (min(speeds), max(speeds)),
                    entry[outcome]["mean"],
                    entry[outcome]["sd"],
                    max(peaks),
                )
            )
    if not found:
        raise InputError(f"study {data['study']}: no arm has a {outcome}, a kept timing and a measured peak of memory")
    return found


def _outcomes(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Each arm's averages over the sets, or its results on the only one."""
    if data["averages"]:
        return [e["all"] | {"arm": e["arm"]} for e in data["averages"] if not e["own"]]
    return [e for e in data["arms"] if not e["own"] and e["group"] == ""]


def frontier_figure(data: dict[str, Any], out: str | os.PathLike[str]) -> Path:
    """Draw accuracy (or, where a task has no score, loss) against throughput, peak memory as each arm's label.

    A line joins the Pareto front of each memory class; a front is only meaningful within one (AQLoRA §6). Arms on a
    front are filled. Horizontal bars: range over kept sessions; vertical: sd over the runs.

    Raises:
        InputError: another ending than png, pdf or svg; and as `points`.
    """
    drawing.kind_of(out)
    scored = [e for e in _outcomes(data) if e["score"] is not None]
    outcome = "score" if scored else "loss"
    found, sign = points(data, outcome), 1 if outcome == "score" else -1
    order = [point.arm for point in found]
    groups = classes(found)
    width = LEFT + WIDE + 0.3
    lines = drawing.wrapped(_caption(data, outcome, groups), width)
    below = 0.65 + LINE * len(lines)
    height = 0.3 + HIGH + below
    picture = drawing.empty(width, height)
    axes = picture.add_axes((LEFT / width, below / height, WIDE / width, HIGH / height))
    scale = 100.0 if outcome == "score" else 1.0
    for which, group in enumerate(groups):
        best = front(group, sign)
        colour = COLOURS[which % len(COLOURS)]
        axes.plot([p.speed for p in best], [scale * p.outcome for p in best], color=colour, linewidth=1, zorder=2)
        for point in group:
            at = order.index(point.arm)
            bars = [[point.speed - point.speeds[0]], [point.speeds[1] - point.speed]]
            axes.errorbar(
                [point.speed],
                [scale * point.outcome],
                xerr=bars if point.speeds[0] < point.speeds[1] else None,
                yerr=None if point.sd is None else [scale * point.sd],
                ecolor="#BBBBBB",
                elinewidth=0.8,
                fmt="none",
                zorder=1,
            )
            axes.scatter(
                [point.speed],
                [scale * point.outcome],
                s=52,
                marker=MARKERS[at % len(MARKERS)],
                facecolors=colour if point in best else "white",
                edgecolors=colour,
                linewidths=1.2,
                zorder=3,
            )
    axes.margins(x=0.16, y=0.14)
    metric = _metric(data, outcome)
    axes.set_xlabel("real tokens a second (mean of the fastest half of the rounds)", fontsize=8, color=INK)
    axes.set_ylabel(metric, fontsize=8, color=INK)
    if sign < 0:
        axes.invert_yaxis()
    axes.ticklabel_format(useOffset=False)
    axes.tick_params(labelsize=7.5, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _labels(picture, axes, [(p.speed, scale * p.outcome, f"{p.arm}\n{gib(p.peak)} GiB") for p in found])
    drawing.write_caption(picture, lines)
    return drawing.save(picture, out)


def _metric(data: dict[str, Any], outcome: str) -> str:
    over = f", average of {len(data['averages'][0]['sets'])} sets" if data["averages"] else ""
    if outcome == "loss":
        return f"loss (nats a gold target token{over}); up is better"
    name = data["averages"][0]["metric"] if data["averages"] else data["tasks"][0]["metric"]
    return f"{name or 'score'} (%{over})"


PLACES = [
    *[(6, 5), (-6, 5), (6, -5), (-6, -5), (0, 9), (0, -9)],
    *[(22, 16), (-22, 16), (22, -16), (-22, -16), (0, 26), (0, -26), (40, 0), (-40, 0)],
    *[(48, 30), (-48, 30), (48, -30), (-48, -30), (0, 46), (0, -46), (70, 14), (-70, 14), (70, -14), (-70, -14)],
]
"""Where a label may stand, in points from its mark: the first place at which it meets nothing."""


def _labels(picture: Figure, axes: Axes, marks: list[tuple[float, float, str]]) -> None:
    """Names beside their marks, so that none covers another or a mark."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    picture.canvas.draw()
    renderer = picture.canvas.get_renderer()  # type: ignore[attr-defined]
    dots = [axes.transData.transform((x, y)) for x, y, _ in marks]
    radius = 6 * picture.dpi / 72
    taken = [Bbox.from_extents(x - radius, y - radius, x + radius, y + radius) for x, y in dots]
    inside = axes.get_window_extent(renderer).expanded(1.03, 1.08)
    for (x, y, text), own in zip(marks, list(taken), strict=True):
        for number, (right, up) in enumerate(PLACES):
            label = axes.annotate(
                text,
                (x, y),
                (right, up),
                textcoords="offset points",
                fontsize=7,
                color=INK,
                ha="left" if right > 0 else "right" if right < 0 else "center",
                va="bottom" if up > 0 else "top" if up < 0 else "center",
                linespacing=1.05,
                arrowprops={"arrowstyle": "-", "color": "#AAAAAA", "linewidth": 0.6} if number > 5 else None,
                zorder=5,
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )
            text_box = _text_box(label, renderer)
            free = not any(text_box.overlaps(other) for other in taken if other is not own)
            whole = inside.x0 <= text_box.x0 and text_box.x1 <= inside.x1 and inside.y0 <= text_box.y0 <= text_box.y1
            if (free and whole and text_box.y1 <= inside.y1) or number == len(PLACES) - 1:
                taken.append(text_box)
                break
            label.remove()


def _text_box(label: Any, renderer: Any) -> Any:
    """The extent of a label's text without its line to the mark."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    label.update_positions(renderer)
    return Bbox(Text.get_window_extent(label, renderer))


def _caption(data: dict[str, Any], outcome: str, groups: list[list[Point]]) -> list[str]:
    kept = [s for s in data["timing"]["sessions"] if s["kept"]]
    said = (
        f"{data['model']}, {data['form']} form; {len(kept)} kept timing session{'s' if len(kept) > 1 else ''} "
        f"(floor up to {100 * max(s['floor'] for s in kept):.1f}%). Labels: peak memory. Lines: the Pareto front of "
        f"each memory class (peaks within {100 * CLASS:g}% of its smallest: {_sizes(groups)}); filled: on the front "
        "of its class. Bars: range over sessions, sd over runs. Gaps within the spread or the floor order nothing."
    )
    return [said]


def _sizes(groups: list[list[Point]]) -> str:
    return "; ".join(
        f"{gib(g[0].peak)} GiB" if len(g) == 1 else f"{gib(g[0].peak)} to {gib(g[-1].peak)} GiB" for g in groups
    )
