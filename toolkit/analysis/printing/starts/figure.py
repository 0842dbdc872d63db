"""The figure of a study of starts: residual and loss of every arm against the scaling."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.analysis.printing import drawing
from toolkit.analysis.printing.drawing import COLOURS, INK, LINE, MARKERS
from toolkit.analysis.printing.starts.summary import summary
from toolkit.errors import InputError, closest
from toolkit.records.initialization import AS_THEY_ARE

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

WIDE, HIGH, LEFT, BETWEEN, LEGEND, ACROSS = 3.1, 2.6, 0.8, 0.85, 1.9, 3  # inches; panels in a row
KIND = "strips"
LOG = 3.0
"""Losses are drawn as differences to the 16-bit model, on a logarithmic scale where they span more than this factor."""

Value = Any
"""An entry → the number that a panel shows, or None."""


def figure(study: str | os.PathLike[str], out: str | os.PathLike[str], *, kind: str = KIND) -> Path:
    """Draw a study of starts: the residual relative to the plainly quantized base's, the outputs' where measured, and
    each text's loss above the 16-bit model's, against s; with one scaling, one mark an arm.

    Args:
        study: a study's folder, its `study.yaml`, its results folder, or the `--out` folder of a run.
        out: the picture to write; its ending tells the format, png, pdf or svg.

    Raises:
        InputError: another ending or kind, no arm to show; and as
            `toolkit.analysis.printing.starts.summary.summary`.
    """
    if kind != KIND:
        raise InputError(f"a study of starts has no figure {kind!r}; {closest(kind, [KIND])}")
    drawing.kind_of(out)
    data = summary(study)
    if not data["entries"]:
        raise InputError(f"study {data['study']} holds no arm to show")
    panels = _panels(data)
    across = 2 if len(panels) == 4 else min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    width = LEFT + across * WIDE + (across - 1) * BETWEEN + LEGEND
    lines = drawing.wrapped(_caption(data), width)
    above, below, between = 0.4, 0.68 + LINE * len(lines), 0.95
    height = above + below + down * HIGH + (down - 1) * between
    picture = drawing.empty(width, height)
    for at, (title, label, value, log) in enumerate(panels):
        row, column = divmod(at, across)
        left, top = LEFT + column * (WIDE + BETWEEN), height - above - row * (HIGH + between)
        axes = picture.add_axes((left / width, (top - HIGH) / height, WIDE / width, HIGH / height))
        _panel(axes, data, value, log)
        axes.set_title(title, fontsize=9, color=INK, pad=4)
        axes.set_ylabel(label, fontsize=8, color=INK)
    handles, labels = picture.axes[0].get_legend_handles_labels()
    picture.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=((width - LEGEND + 0.1) / width, (height - above + 0.08) / height),
        fontsize=7.5,
        frameon=False,
    )
    drawing.write_caption(picture, lines)
    return drawing.save(picture, out)


def _panels(data: dict[str, Any]) -> list[tuple[str, str, Callable[[dict[str, Any]], float | None], bool]]:
    """(title, label, entry → value, logarithmic) of each panel that has a number."""
    found = [("residual", "relative to the plain start's", lambda entry: entry["relative"], False)]
    if data["calibration"] is not None:
        found.append(("output error", "relative to the plain start's", lambda entry: entry["relative_output"], False))
    for text in data["texts"]:
        for key in data["activations"]:
            sixteen = (
                (data["sixteen"] or {}).get(text, {}).get(AS_THEY_ARE if AS_THEY_ARE in data["activations"] else key)
            )
            zero = 0.0 if sixteen is None else sixteen["loss"]

            def value(entry: dict[str, Any], text: str = text, key: str = key, zero: float = zero) -> float:
                return entry["scores"][text][key]["loss"] - zero

            title = text if key == AS_THEY_ARE else f"{text}, inputs {key}"
            values = [value(entry) for entry in data["entries"]]
            log = sixteen is not None and min(values) > 0 and max(values) / min(values) > LOG
            label = "loss (nats a token)" if sixteen is None else "loss above the 16-bit model (nats a token)"
            found.append((title, label, value, log))
    return [panel for panel in found if any(panel[2](entry) is not None for entry in data["entries"])]


def _panel(axes: Axes, data: dict[str, Any], value: Callable[[dict[str, Any]], float | None], log: bool) -> None:
    from matplotlib.ticker import FuncFormatter

    arms = list(dict.fromkeys(entry["arm"] for entry in data["entries"]))
    single = len(data["scalings"]) == 1
    for at, arm in enumerate(arms):
        points = [(e["scaling"], value(e)) for e in data["entries"] if e["arm"] == arm]
        points = [(x, y) for x, y in points if y is not None]
        if not points:
            continue
        style = {"color": COLOURS[at % len(COLOURS)], "marker": MARKERS[at % len(MARKERS)], "markersize": 6}
        style |= {"markeredgecolor": "white", "markeredgewidth": 0.5, "linewidth": 1.2, "label": arm, "zorder": 3}
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot([at] if single else xs, ys, linestyle="none" if single else "-", **style)
    if single:
        axes.set_xticks(range(len(arms)), arms, rotation=30, ha="right")
        axes.set_xlim(-0.6, len(arms) - 0.4)
    else:
        axes.set_xscale("log")
        axes.set_xticks(data["scalings"], [f"{s:g}" for s in data["scalings"]])
        axes.minorticks_off()
        axes.set_xlabel("s, the factor on BA", fontsize=8, color=INK)
    if log:
        axes.set_yscale("log")
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis(FuncFormatter(lambda v, _: f"{v:.3g}"))
        axes.tick_params(axis="y", which="minor", labelsize=6.5, colors=INK)
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    axes.margins(x=0.08, y=0.1)
    axes.tick_params(labelsize=7.5, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _caption(data: dict[str, Any]) -> list[str]:
    texts = "; ".join(
        f"{name}: {text['windows']} windows of {text['window']} tokens, SHA-256 {text['sha256'][:12]}"
        for name, text in data["texts"].items()
    )
    status = "Confirmatory" if data["status"]["confirmatory"] else "Exploratory"
    return [
        f"{status}. {data['model']}, {data['form']} form; {data['reference'].rstrip('.')}. Rank {data['rank']}, scaler "
        f"{data['scaler']}; each arm merged, Ŵ + s·BA, untrained. {texts}. Residuals are means over layers, weighted "
        "by parameters, of what remains relative to the plainly quantized base."
    ]
