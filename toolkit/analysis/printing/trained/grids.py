"""The tables of a fine-tuning study as text cells: each task's arms, averages, contrasts, noise, the tuned lever."""

from __future__ import annotations

from typing import Any

from toolkit.analysis.printing.grid import NOTHING, Grid
from toolkit.analysis.printing.trained import timing_grids
from toolkit.analysis.printing.trained.cells import gib, interval, number, p, percent, signed, span, spread

WHY = {"baseline": "baseline", "matched": "matched random", "declared": "declared"}


def grids(data: dict[str, Any]) -> list[Grid]:
    """Those that have a row."""
    found = []
    for task in data["tasks"]:
        found += [_arms(data, task), _sets(data, task)]
    found += [_layers(data), _averages(data)]
    for outcome in dict.fromkeys(entry["outcome"] for entry in data["contrasts"]):
        for own in (False, True):
            found.append(_contrasts(data, outcome, own))
    found += [_flips(data), _pairing(data), _grid_of_draws(data), _noise(data), _tune(data)]
    if data["timing"] is not None:
        found += timing_grids.grids(data["timing"])
    return [grid for grid in found if grid.rows]


def _name(entry: dict[str, Any]) -> str:
    return entry["arm"] + (" (own)" if entry["own"] else "")


def _notes(entry: dict[str, Any]) -> str:
    said = [f"{f['flag']} ({f['runs']} of {f['of']} runs)" for f in entry["flags"]]
    return "; ".join([*said, *entry["labels"]])


def _arms(data: dict[str, Any], task: dict[str, Any]) -> Grid:
    mine = [e for e in data["arms"] if e["task"] == task["task"] and e["group"] == ""]
    heading = ["arm", "runs", "loss", task["metric"], "trainable", "base GiB", "peak GiB", "padding", "unparsed"]
    heading += ["seconds", "flags"]
    rows = []
    zero = task["untrained"]
    if zero is not None:
        cells = [f"{zero['arm']}, untrained", "1", number(zero["loss"]), percent(zero["score"], 2)]
        rows.append([*cells, *[NOTHING] * 6, ""])
    for entry in mine:
        held = entry["memory"]
        rows.append(
            [
                _name(entry),
                str(entry["runs"]),
                spread(entry["loss"]),
                _score(entry["score"]),
                span(entry["trainable"]),
                gib(held and held["base"]),
                gib(held and held["peak"]),
                percent(entry["padding"]),
                percent(entry["unparsed"]),
                f"{entry['seconds']:.0f}",
                _notes(entry),
            ]
        )
    kinds = sorted({e["memory"]["kind"] for e in mine if e["memory"]})
    chance = "" if task["chance"] is None else f", chance {percent(task['chance'], 1)}"
    title = (
        f"{task['task']}: mean ± sd over the runs; loss in nats a gold target token and {task['metric']} of "
        f"{task['test']['rows']:,} rows{chance}; trained on {task['train']['rows']:,}; memory "
        f"{' and '.join(kinds) or 'not measured'}, the largest of the runs; padding: share of computed tokens; seconds "
        "of training are no timing measurement"
    )
    return Grid(title, heading, rows)


def _score(found: dict[str, Any] | None) -> str:
    """A share in percent: mean ± sd."""
    if found is None:
        return NOTHING
    return number(100 * found["mean"], 2) + ("%" if found["sd"] is None else f" ± {number(100 * found['sd'], 2)}%")


def _sets(data: dict[str, Any], task: dict[str, Any]) -> Grid:
    """A task's own sets, one column each."""
    mine = [e for e in data["arms"] if e["task"] == task["task"] and e["group"] != ""]
    names = list(dict.fromkeys(e["group"] for e in mine))
    chances = {e["group"]: e["chance"] for e in mine}
    rows = []
    for arm in dict.fromkeys(_name(e) for e in mine):
        of = {e["group"]: e for e in mine if _name(e) == arm}
        cells = [_marked(of.get(name)) for name in names]
        rows.append([arm, *cells])
    if rows and any(chances.values()):
        rows.insert(0, ["chance", *(percent(chances[name], 2) for name in names)])
    title = f"{task['task']}, by set: {task['metric']}, mean ± sd over the runs; * not above chance, or constant"
    return Grid(title, ["arm", *names], rows)


def _marked(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return NOTHING
    text = _score(entry["score"]) if entry["score"] is not None else spread(entry["loss"])
    return text + (" *" if entry["flags"] else "")


def _layers(data: dict[str, Any]) -> Grid:
    rows = []
    first = data["tasks"][0]["task"] if data["tasks"] else None
    for entry in data["arms"]:
        if entry["task"] != first or entry["group"] or entry["own"]:
            continue
        for use, word in (("protect", "protected"), ("adapt", "adapted")):
            chosen = entry[use]
            if chosen is not None:
                off = chosen["mismatch"]
                rows.append(
                    [
                        entry["arm"],
                        word,
                        chosen["selector"],
                        f"{span(chosen['layers'])} of {chosen['of']}",
                        span(chosen["parameters"]),
                        percent(chosen["share"], 2),
                        str(chosen["sets"]),
                        NOTHING if off is None else signed(100 * off, 3) + "%",
                    ]
                )
    heading = ["arm", "layers are", "selector", "layers", "parameters", "share", "sets", "largest mismatch"]
    title = (
        "What each arm chooses; sets: distinct sets of layers among its runs; mismatch = (draw − arm)/arm of what the "
        f"selector matches (runs of {first})"
    )
    return Grid(title, heading, rows)


def _averages(data: dict[str, Any]) -> Grid:
    rows = []
    flagged = data["averages"][0]["flagged"] if data["averages"] else []
    for entry in data["averages"]:
        part = entry["unflagged"]
        cells = [_name(entry), str(len(entry["all"]["loss"]["values"])), spread(entry["all"]["loss"])]
        cells.append(_score(entry["all"]["score"]))
        if flagged:
            cells += [NOTHING, NOTHING] if part is None else [spread(part["loss"]), _score(part["score"])]
        rows.append(cells)
    metric = (data["averages"][0]["metric"] if data["averages"] else None) or "score"
    heading = ["arm", "runs", "loss", metric] + (["loss, unflagged", f"{metric}, unflagged"] if flagged else [])
    sets = data["averages"][0]["sets"] if data["averages"] else []
    title = f"Averages over {len(sets)} sets ({', '.join(sets)}), each counting alike, mean ± sd over the runs"
    if flagged:
        title += f"; and without {', '.join(flagged)}, where an arm is not above chance or predicts a constant"
    return Grid(title, heading, rows)


def _contrasts(data: dict[str, Any], outcome: str, own: bool) -> Grid:
    mine = [e for e in data["contrasts"] if e["outcome"] == outcome and e["own"] is own]
    analysis = data["analysis"]
    by = "corrected p" if analysis["correction"] == "holm" else "p again"
    heading = ["task", "contrast", "of", "runs", "difference", f"{100 * (1 - analysis['level']):g}% interval", "p", by]
    heading += ["permutation p", "attainable p", "detectable", "seeds asked", "equivalence", "verdict"]
    rows, breaks, last = [], [], None
    for entry in mine:
        if entry["task"] != last and rows:
            breaks.append(len(rows))
        digits = 4
        rows.append(
            [
                entry["task"] if entry["task"] != last else "",
                f"{entry['first']} − {entry['second']}",
                ", ".join(WHY[word] for word in entry["why"].split(", ")),
                " + ".join(map(str, entry["runs"])) if len(set(entry["runs"])) > 1 else str(entry["runs"][0]),
                signed(entry["difference"], digits),
                interval(entry["both"]["low"], entry["both"]["high"], digits),
                p(entry["p"]),
                p(entry["adjusted"]),
                p(entry["permutation_p"]),
                p(entry["attainable"]),
                number(entry["power"]["detectable_both"]),
                _asked(entry["power"]),
                equivalence(entry),
                _verdict(entry),
            ]
        )
        last = entry["task"]
    primary = outcome == analysis["outcome"]
    unit = mine[0]["unit"] if mine else ""
    how = "paired by seed, as declared" if analysis["paired"] else "not paired by seed"
    corrected = "p corrected by Holm over the tasks (averages are a family of their own)"
    title = (
        f"{'The declared' if primary else 'The other'} outcome, {outcome} ({unit}): first − second"
        f"{', each arm at its own value of the tuned lever' if own else ''}; {how}; interval and p over other seeds "
        f"and other rows; {corrected if analysis['correction'] == 'holm' else 'not corrected'}"
        f"; detectable: the smallest difference that so many seeds and rows find at {percent(_power(mine), 0)} power; "
        "seeds asked: an arm on these rows, for the margin or else the observed difference"
    )
    return Grid(title, heading, rows, breaks)


def _power(found: list[dict[str, Any]]) -> float:
    return found[0]["power"]["power"] if found else 0.8


def _asked(power: dict[str, Any]) -> str:
    if power["detectable"] is None:
        return NOTHING
    text = f"more than {power['most']:,}" if power["seeds"] is None else f"{power['seeds']:,}"
    return text + (", and more rows" if power["rows_limit"] else "")


def equivalence(entry: dict[str, Any]) -> str:
    """Against the declared margin; without one, the smallest margin at which it would pass."""
    found = entry["equivalence"]
    if found["smallest"] is None:
        return NOTHING
    if found["margin"] is None:
        return f"would pass at {number(found['smallest'])}"
    word = "passes" if found["passed"] else "does not pass"
    return f"{word} at {found['margin']:g}, p {p(found['p'])}"


def _verdict(entry: dict[str, Any]) -> str:
    words = [entry["verdict"]]
    if not entry["spread_known"]:
        words.append("the spread is not known")
    if entry["this_draw_only"]:
        words.append("this draw only")
    return "; ".join(words)


def _flips(data: dict[str, Any]) -> Grid:
    rows = []
    for entry in data["contrasts"]:
        found = entry.get("flips")
        if found is None or entry["own"]:
            continue
        ps = [each["p"] for each in found["each"]]
        pooled = found["pooled"]
        rows.append(
            [
                entry["task"],
                f"{entry['first']} − {entry['second']}",
                f"{entry['rows']:,}",
                str(len(ps)),
                number(found["gained"], 1),
                number(found["lost"], 1),
                NOTHING if not ps else p(ps[0]) if len(ps) == 1 else f"{p(min(ps))} to {p(max(ps))}",
                f"{pooled['gained']:,}",
                f"{pooled['lost']:,}",
                p(pooled["p"]),
            ]
        )
    heading = ["task", "contrast", "rows", "seeds", "gained", "lost", "p of each seed", "gained, pooled"]
    heading += ["lost, pooled", "p, pooled"]
    title = (
        "Flips: rows that the first arm gets right and the second does not (gained), and the reverse (lost), mean over "
        "common seeds; exact McNemar for each seed; pooled: each row once, by the larger share of right runs. It tells "
        "of other rows, for these runs"
    )
    return Grid(title, heading, rows)


def _pairing(data: dict[str, Any]) -> Grid:
    rows = []
    for entry in data["contrasts"]:
        found = entry["pairing"]
        if found is None or not entry["primary"]:
            continue
        rows.append(
            [
                entry["task"],
                f"{entry['first']} − {entry['second']}",
                str(found["pairs"]),
                percent(found["removed"], 0),
                number(found["correlation"], 2),
                interval(found["low"], found["high"], 2),
                p(found["p"]),
            ]
        )
    used = "declared" if data["analysis"]["paired"] else "not used: it was not declared"
    title = (
        f"Whether pairing by seed removes variance of the difference (pairing is {used}): removed = 1 − "
        "paired/unpaired variance; correlation of the two arms over seeds, with its interval"
    )
    return Grid(title, ["task", "contrast", "pairs", "removed", "correlation", "interval", "p"], rows)


def _grid_of_draws(data: dict[str, Any]) -> Grid:
    rows = []
    for entry in data["contrasts"]:
        found = entry.get("random_draws")
        if found is None:
            continue
        rows.append(
            [
                entry["task"],
                f"{entry['first']} − {entry['second']}",
                entry["outcome"],
                f"{found['draws']} × {found['seeds']}",
                signed(found["estimate"]),
                interval(found["low"], found["high"]),
                p(found["p"]),
                number(found["draw_sd"]),
                number(found["seed_sd"]),
                number(found["rest_sd"]),
            ]
        )
    heading = ["task", "contrast", "outcome", "draws × seeds", "difference", "interval", "p"]
    heading += ["sd of draws", "sd of seeds", "sd of the rest"]
    return Grid("Draw as a random effect: over other draws and other seeds, these rows", heading, rows)


def _noise(data: dict[str, Any]) -> Grid:
    rows = []
    for entry in data["noise"]:
        rows.append(
            [
                entry["task"],
                entry["arm"],
                entry["outcome"],
                str(entry["repeats"]),
                str(entry["seeds"]),
                number(entry["repeat_sd"], 5),
                number(entry["total_sd"], 5),
                number(entry["seed_sd"], 5),
                percent(entry["share"], 0),
                p(entry["p"]),
                "yes" if entry["identical"] else "no",
            ]
        )
    heading = ["task", "arm", "outcome", "repeats", "other seeds", "sd of repeats", "sd over them", "seeds' own part"]
    heading += ["run-to-run share", "p", "repeats identical"]
    title = (
        "A/A: the same arm under the very same seeds, beside its runs under other seeds; share = variance of the "
        "repeats over that over other seeds; the seeds' own part: sd of what is left; p: two-sided "
        "variance-ratio test of the two"
    )
    return Grid(title, heading, rows)


def _tune(data: dict[str, Any]) -> Grid:
    tune = data["tune"]
    if tune is None:
        return Grid("", [], [])
    values = tune["values"]
    heading = ["task", "arm", *(f"{v:g}" for v in values), "chosen", "shared value", "loss, shared", "loss, own"]
    heading += ["score, shared", "score, own"]
    rows = []
    for entry in tune["arms"]:
        losses = {trial["value"]: trial["loss"] for trial in entry["trials"]}
        shared, own = entry["shared"], entry["own"]
        chosen = NOTHING if entry["chosen"] is None else f"{entry['chosen']:g}"
        rows.append(
            [
                entry["task"],
                entry["arm"],
                *(number(losses.get(value)) for value in values),
                chosen + (" (edge of the grid)" if entry["edge"] else ""),
                f"{entry['shared_value']:g}",
                spread(shared and shared["loss"]),
                spread(own and own["loss"]),
                _score(shared and shared["score"]),
                _score(own and own["score"]),
            ]
        )
    title = (
        f"{tune['lever']}: every arm's trials over the same grid (loss on {tune['rows']:,} rows that no table "
        "scores), the value that they choose, and the scored rows at the shared and at the own value, mean ± sd "
        "over the runs"
    )
    if any(entry["own_is_shared"] for entry in tune["arms"]):
        title += "; where the chosen value is the shared one, the shared runs are the arm's own"
    return Grid(title, heading, rows)
