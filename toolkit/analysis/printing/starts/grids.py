"""The tables of a study of starts as text cells: each text's arms, declared pairs, roles and iterates."""

from __future__ import annotations

from typing import Any

from toolkit.analysis.printing.grid import NOTHING, Grid
from toolkit.analysis.printing.trained.cells import interval, number, signed
from toolkit.records.initialization import AS_THEY_ARE
from toolkit.records.report import SIXTEEN_BIT


def grids(data: dict[str, Any]) -> list[Grid]:
    """Those that have a row."""
    found = [_arms(data, text, key) for text in data["texts"] for key in data["activations"]]
    found += [_pairs(data), *(_roles(data, name) for name in ("relative", "relative_output")), _iterates(data)]
    return [grid for grid in found if grid.rows]


def _inputs(data: dict[str, Any], key: str) -> str:
    if len(data["activations"]) == 1 and key == AS_THEY_ARE:
        return ""
    return ", inputs as they are" if key == AS_THEY_ARE else f", inputs rounded by {key}"


def _rows(entries: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """One entry for all scalings where they are one run; and where a line is drawn between arms."""
    rows, breaks = [], []
    for entry in entries:
        if rows and rows[-1]["run"] == entry["run"]:
            continue
        if not rows or rows[-1]["arm"] != entry["arm"]:
            breaks.append(len(rows))
        rows.append(entry)
    return rows, breaks


def _named(rows: list[dict[str, Any]], at: int) -> list[str]:
    """The arm, where another stood above, and the scaling."""
    entry = rows[at]
    first = at == 0 or rows[at - 1]["arm"] != entry["arm"]
    return [entry["arm"] if first else "", "any" if entry["any_scaling"] else f"{entry['scaling']:g}"]


def _arms(data: dict[str, Any], text: str, key: str) -> Grid:
    baseline, outputs = data["analysis"]["baseline"], data["calibration"] is not None
    heading = ["arm", "s", "initializer", "residual", "relative", "worse layers"]
    heading += ["output error", "relative", "worse outputs"] if outputs else []
    heading += ["loss", "perplexity", "KL", f"{data['analysis']['outcome']} − {baseline}", "interval", "verdict"]
    heading += ["fall-backs", "seconds"]
    pairs = {
        (entry["first"], entry["scaling"]): entry
        for entry in data["contrasts"]
        if entry["baseline"] and (entry["text"], entry["activations"]) == (text, key)
    }
    body: list[list[str]] = []
    sixteen = (data["sixteen"] or {}).get(text, {}).get(key)
    if sixteen is not None:
        blank = [NOTHING] * (3 + 3 * outputs)
        scored = [number(sixteen["loss"]), number(sixteen["perplexity"], 3), number(sixteen["kl"])]
        body.append([SIXTEEN_BIT, NOTHING, NOTHING, *blank, *scored, *[NOTHING] * 5])
    rows, breaks = _rows(data["entries"])
    for at, entry in enumerate(rows):
        pair, score = pairs.get((entry["arm"], entry["scaling"])), entry["scores"][text][key]
        cells = [*_named(rows, at), entry["initializer"] if _named(rows, at)[0] else ""]
        cells += [number(entry["residual"], 5), number(entry["relative"]), f"{entry['worse']} of {entry['layers']}"]
        if outputs:
            cells += [number(entry["output"], 5), number(entry["relative_output"])]
            cells.append(f"{entry['worse_outputs']} of {entry['layers']}")
        cells += [number(score["loss"]), number(score["perplexity"], 3), number(score["kl"])]
        if pair is None:
            cells += [NOTHING, NOTHING, "baseline" if entry["arm"] == baseline else NOTHING]
        else:
            cells += [signed(pair["difference"]), interval(pair["low"], pair["high"]), pair["verdict"]]
        cells += [str(sum(entry["fallbacks"].values())), f"{entry['seconds']:.1f}"]
        body.append(cells)
    shift = int(sixteen is not None)
    title = (
        f"{text}{_inputs(data, key)}: loss in nats a token, KL(16-bit ‖ arm), with the adapter merged; residuals are "
        "means over layers; seconds of the starts alone"
    )
    return Grid(title, heading, body, [at + shift for at in breaks])


def _pairs(data: dict[str, Any]) -> Grid:
    mine = [entry for entry in data["contrasts"] if not entry["baseline"]]
    rows, breaks, last = [], [], None
    for entry in mine:
        key = (entry["first"], entry["second"], entry["text"], entry["activations"])
        if key != last:
            breaks.append(len(rows))
        rows.append(
            [
                f"{entry['first']} − {entry['second']}" if key != last else "",
                entry["text"] + _inputs(data, entry["activations"]) if key != last else "",
                f"{entry['scaling']:g}",
                signed(entry["difference"]),
                interval(entry["low"], entry["high"]),
                entry["verdict"],
            ]
        )
        last = key
    title = f"Declared pairs: {data['analysis']['outcome']}, nats a token, first − second"
    return Grid(title, ["pair", "text", "s", "difference", "interval", "verdict"], rows, breaks)


def _roles(data: dict[str, Any], name: str) -> Grid:
    roles = list(dict.fromkeys(role for entry in data["entries"] for role in entry["roles"]))
    rows, breaks = _rows(data["entries"])
    body = [
        [*_named(rows, at), *(number(entry["roles"].get(role, {}).get(name)) for role in roles)]
        for at, entry in enumerate(rows)
        if any(entry["roles"][role][name] is not None for role in entry["roles"])
    ]
    what = "Residual" if name == "relative" else "Output error"
    title = f"{what} by role, relative to the plainly quantized base's; means over layers"
    return Grid(title, ["arm", "s", *roles], body, breaks if len(body) == len(rows) else [])


def _iterates(data: dict[str, Any]) -> Grid:
    rows, _ = _rows([entry for entry in data["entries"] if len(entry["iterates"]) > 2])
    most = max((len(entry["iterates"]) for entry in rows), default=0)
    body = [
        [
            *_named(rows, at),
            *(number(value) for value in entry["iterates"]),
            *[NOTHING] * (most - len(entry["iterates"])),
        ]
        for at, entry in enumerate(rows)
    ]
    title = (
        "Residual after each iteration, relative to iterate 0, the zero start; means over layers, one that ended "
        "earlier counts with its last; the least of a layer's is kept"
    )
    return Grid(title, ["arm", "s", *map(str, range(most))], body)
