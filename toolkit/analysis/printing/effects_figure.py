"""The sweep's figure: each layer's measured effect against the profile's error, coloured by role."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toolkit.analysis.printing import drawing
from toolkit.analysis.printing.drawing import COLOURS, INK, LINE
from toolkit.analysis.printing.effects import KINDS, Effects, effects, errors
from toolkit.analysis.reading import reports
from toolkit.analysis.reading.reports import Results
from toolkit.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = ("o", "^", "s", "D", "v", "P", "X", "*")
REST = "other roles"
WIDE, HIGH, LEFT, BETWEEN = 4.2, 3.0, 0.85, 0.75  # inches


def effects_figure(study: str | os.PathLike[str], out: str | os.PathLike[str], *, measure: str = "mse") -> Path:
    """Draw what each layer alone is worth against its error under the base quantizer, one row of panels a text.

    Left, each layer alone is restored to 16 bit; right, each alone is quantized. ρ is Spearman's, over all layers.
    The grey band is the numerical floor, where the base was measured twice.

    Args:
        study: as `toolkit.analysis.printing.figure.figure`.
        out: the picture to write; its ending tells the format, png, pdf or svg.
        measure: `mse`, `mae`, `relative` or `max`, of the profile.

    Raises:
        InputError: another ending, no sweep, no profile beside the runs, or one without that error; and as
            `toolkit.analysis.reading.reports.read`.
    """
    drawing.kind_of(out)
    results = reports.read(study)
    if not results.sweeps:
        raise InputError(
            f"{results.folder} holds no single-layer sweep; a study with `headroom` and `fit: sweep` makes one"
        )
    profile = reports.profile_of(results)
    base = results.study.base
    error = errors(profile, base, measure)
    found = effects(results, error)
    if not found:
        raise InputError(f"{results.folder}: the reference runs that the sweep is compared with are missing")
    texts = list(dict.fromkeys(item.text for item in found))
    kinds = [kind for kind in KINDS if any(item.kind == kind for item in found)]
    roles = _roles([layer.role for layer in profile.layers])
    names = list(dict.fromkeys(roles))
    width = LEFT + len(kinds) * WIDE + (len(kinds) - 1) * BETWEEN + 1.55
    lines = drawing.wrapped(_caption(results, base, measure, len(roles)), width)
    above, below, between = 0.4, 0.68 + LINE * len(lines), 0.85
    height = above + below + HIGH * len(texts) + between * (len(texts) - 1)
    picture = drawing.empty(width, height)
    for item in found:
        row, column = texts.index(item.text), kinds.index(item.kind)
        left, top = LEFT + column * (WIDE + BETWEEN), height - above - row * (HIGH + between)
        axes = picture.add_axes((left / width, (top - HIGH) / height, WIDE / width, HIGH / height))
        _panel(axes, item, error, roles, names, _floor(results, item.text))
        axes.set_xlabel(f"{measure} of the layer's weights under {base}", fontsize=8, color=INK)
    handles, labels = picture.axes[0].get_legend_handles_labels()
    picture.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=((width - 1.45) / width, (height - above + 0.08) / height),
        fontsize=7.5,
        frameon=False,
        title="role",
        title_fontsize=8,
        alignment="left",
    )
    drawing.write_caption(picture, lines)
    return drawing.save(picture, out)


def _roles(roles: list[str]) -> list[str]:
    """Each layer's role; where there are more than markers, the least common ones share one."""
    counts = {role: roles.count(role) for role in dict.fromkeys(roles)}
    if len(counts) <= len(MARKERS):
        return roles
    kept = set(sorted(counts, key=lambda role: -counts[role])[: len(MARKERS) - 1])
    return [role if role in kept else REST for role in roles]


def _panel(
    axes: Axes, item: Effects, error: np.ndarray, roles: list[str], names: list[str], floor: float | None
) -> None:
    milli = 1000 * item.values
    if floor is not None:
        axes.axhspan(-1000 * floor, 1000 * floor, color="#DDDDDD", linewidth=0, zorder=0)
    axes.axhline(0, color="#999999", linewidth=0.8, zorder=1)
    where = np.asarray(roles)
    for at, name in enumerate(names):
        mine = where == name
        axes.scatter(
            error[mine],
            milli[mine],
            s=22,
            marker=MARKERS[at % len(MARKERS)],
            color=COLOURS[at % len(COLOURS)] if at < len(COLOURS) else "#888888",
            alpha=0.75,
            edgecolors="white",
            linewidths=0.4,
            label=name,
            zorder=3,
        )
    if error.min() > 0 and error.max() / error.min() > 8:
        axes.set_xscale("log")
    axes.margins(x=0.04, y=0.08)
    rho = "ρ: none (one of the two is constant)" if item.correlation is None else f"ρ = {item.correlation:.2f}"
    title = f"{item.text} · each layer alone {KINDS[item.kind]}"
    axes.set_title(f"{title}\nSpearman's {rho.replace('-', '−')}, n = {len(milli)}", fontsize=8, color=INK, pad=4)
    axes.set_ylabel("effect (10⁻³ nats a token)", fontsize=8, color=INK)
    axes.tick_params(labelsize=7.5, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _floor(results: Results, text: str) -> float | None:
    """|loss − loss measured again| of the base, nats a token."""
    if results.repeat is None or results.base is None:
        return None
    return abs(results.repeat.scores[text].loss - results.base.scores[text].loss)


def _caption(results: Results, base: str, measure: str, count: int) -> list[str]:
    texts = "; ".join(
        f"{name}: {text.windows} windows of {text.window} tokens, SHA-256 {text.sha256[:12]}"
        for name, text in results.texts.items()
    )
    sentence = (
        f"{results.model}, {results.form} form; {results.reference.note.rstrip('.')}. {texts}. One point a layer "
        f"({count}); x: the profile's {measure} under {base}; y: what the layer's 16-bit weight is worth alone, above "
        "zero where it lowers the loss. ρ is Spearman's rank correlation over all layers and says nothing of "
        "several layers together."
    )
    if results.repeat is not None and results.base is not None:
        sentence += " Grey band: the base measured twice with another batch size and thread count."
    return [sentence]
