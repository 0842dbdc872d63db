"""What a fine-tuning study's table says in words: what was found, and what a reader must know before quoting it."""

from __future__ import annotations

from typing import Any

from toolkit.analysis.printing.grid import probability
from toolkit.analysis.printing.trained import timing_sentences
from toolkit.analysis.printing.trained.arms import computed, doubtful
from toolkit.analysis.printing.trained.cells import interval, number, percent, signed
from toolkit.analysis.printing.trained.contrasts import AVERAGE, UNFLAGGED, UNITS
from toolkit.analysis.reading.trained import TrainedResults, once

LEFT = {
    "unusable": "could not be used",
    "cut": "had targets that did not fit",
    "shortened": "are there with prompts that lost their beginning",
}
"""What a report counts of a split's rows, in words."""

MOST = 24
"""Sentences on contrasts; the table holds them all."""


def sentences(data: dict[str, Any]) -> list[str]:
    """One sentence a contrast of the declared outcome, then the noise, then the timing."""
    primary = [entry for entry in data["contrasts"] if entry["primary"]]
    said = [_contrast(entry) for entry in primary[:MOST]]
    if len(primary) > MOST:
        said.append(f"{len(primary) - MOST} more contrasts stand in the table.")
    said += [entry["sentence"] for entry in data["noise"] if entry["outcome"] == data["analysis"]["outcome"]]
    if data["timing"] is not None:
        said += timing_sentences.sentences(data["timing"])
    return said


def _contrast(entry: dict[str, Any]) -> str:
    first, second, verdict = entry["first"], entry["second"], entry["verdict"]
    over = {AVERAGE: "Averaged over tasks", UNFLAGGED: "Averaged over the tasks that are not flagged"}
    where = over.get(entry["task"], f"On {entry['task']}")
    gap = entry["difference"]
    measured = f"{entry['outcome']}, {entry['unit']}"
    if verdict == "not tested":
        runs = " and ".join(map(str, entry["runs"]))
        return (
            f"{where}, {first} − {second} is {signed(gap)} ({measured}) over {runs} runs: too few for an interval, and "
            "nothing is claimed."
        )
    bounds = f"{100 * entry['both']['coverage']:g}% interval {interval(entry['both']['low'], entry['both']['high'])}"
    corrected = f"corrected p {probability(entry['adjusted'])}".replace("p <", "p < ")
    few = "" if entry["spread_known"] else "; with fewer than four runs an arm the spread is not known"
    draw = "; it holds for this draw only" if entry["this_draw_only"] else ""
    text = f"{where}, {first} − {second} is {signed(gap)} ({measured}; {bounds}, {corrected})"
    if verdict.startswith(("better", "worse")):
        within = ", by less than the declared margin" if "margin" in verdict else ""
        return f"{text}: {first} is {verdict.split(',')[0]} than {second}{within}{few}{draw}."
    if verdict == "equivalent":
        return f"{text}: equivalent within the declared margin of {entry['equivalence']['margin']:g}{few}{draw}."
    power = entry["power"]
    can = (
        f"; {min(entry['runs'])} runs an arm find a difference of {number(power['detectable_both'])} or more with "
        f"probability {percent(power['power'], 0)}"
        if power["detectable_both"] is not None
        else ""
    )
    return f"{text}: not separated, which is no proof of equality{can}{few}{draw}."


def notes(results: TrainedResults, data: dict[str, Any]) -> list[str]:
    """What a reader must know before a number is quoted."""
    study, said = results.study, []
    analysis = study.analysis
    if study.form == "small":
        said.append("This is the small form of the study: less training, fewer rows or runs than the full one.")
    if data["contrasts"]:
        said.append(_family(data))
    few = [entry for entry in data["contrasts"] if not entry["spread_known"]]
    if few:
        least = min(min(entry["runs"]) for entry in few)
        said.append(
            f"With fewer than four runs an arm the spread is not known ({least} here): intervals, p-values and "
            "detectable differences rest on a spread from too few runs."
        )
    if data["contrasts"] and study.seeds_shared is not None:
        said.append(study.seeds_shared[0].upper() + study.seeds_shared[1:] + ".")
    if data["contrasts"] and analysis.margin is None:
        said.append(
            "No margin was declared before the first run, so nothing is called equivalent; the smallest margin at "
            "which each contrast would pass is printed."
        )
    elif analysis.margin is not None:
        reason = (analysis.margin_reason or "").rstrip(".")
        said.append(f"Declared margin: {analysis.margin:g} {UNITS[analysis.outcome]} ({reason}).")
    single = [arm.name for arm in study.arms if once(arm)]
    if single:
        said.append(f"This draw only: {', '.join(single)} use one random draw for all seeds; other draws may differ.")
    drawn = [a.name for a in study.arms if _random(a) and not once(a) and study.draws_of(a.name) is None]
    if drawn and data["arms"]:
        said.append(
            f"A new random draw for each seed: {', '.join(drawn)}; the spread there is that of draws and seeds "
            "together."
        )
    flagged = [e for e in data["arms"] if doubtful(e)]
    if flagged:
        named = dict.fromkeys(f"{e['arm']} on {e['task']}{'/' + e['group'] if e['group'] else ''}" for e in flagged)
        said.append(
            f"Not above chance or constant in at least one run, so that its score tells nothing: {_some(list(named))}."
        )
    dropped = [t for t in data["tasks"] if any(t[s][k] for s in ("train", "test") for k in LEFT)]
    for task in dropped:
        parts = [
            f"{task[split][kind]:,} {split} rows {words}"
            for split in ("train", "test")
            for kind, words in LEFT.items()
            if task[split][kind]
        ]
        said.append(f"Dropped or cut from {task['task']}: {', '.join(parts)}.")
    if data["arms"] and study.repeats is None:
        said.append("There is no A/A arm: how much of the spread is run-to-run noise is not known.")
    said += [reason[0].upper() + reason[1:] + "." for reason in computed(list(results.runs.values()))]
    for item in data["unfinished"]:
        layer = f", layer {item['layer']}" if item["layer"] else ""
        said.append(
            f"Not finished: {item['what']} ended at step {item['step']} of {item['planned']}{layer}: {item['reason']}."
        )
    if results.others:
        names = [run.name for run in results.others]
        said.append(f"Reports of runs that the study does not declare are left out: {_some(names)}.")
    if data["tune"] is not None:
        edges = [f"{e['arm']} on {e['task']}" for e in data["tune"]["arms"] if e["edge"]]
        if edges:
            said.append(
                f"The best {data['tune']['lever']} lies at the edge of the grid, and a wider one may do better: "
                f"{_some(edges)}."
            )
        same = [f"{e['arm']} on {e['task']}" for e in data["tune"]["arms"] if e["own_is_shared"]]
        if same:
            said.append(
                f"The chosen {data['tune']['lever']} is the shared one, so that the shared runs stand as the arm's own "
                f"too: {_some(same)}."
            )
    return said


def _random(arm: Any) -> bool:
    return any(choice is not None and choice.like is not None for choice in (arm.protect, arm.adapt))


def _family(data: dict[str, Any]) -> str:
    analysis = data["analysis"]
    primary = [e for e in data["contrasts"] if e["primary"]]
    tests = max((e["family"] for e in primary), default=0)
    by = "corrected by Holm" if analysis["correction"] == "holm" else "uncorrected"
    paired = "paired by seed" if analysis["paired"] else "unpaired (Welch)"
    return (
        f"Declared: {analysis['outcome']} ({UNITS[analysis['outcome']]}), {paired}, against {analysis['baseline']} and "
        f"each arm's matched random arm; {tests} contrast{'s' if tests != 1 else ''} {by}, level "
        f"{analysis['level']:g}. The other outcome, averages over tasks and arms at their own tuned value are "
        "families of their own."
    )


MOST_NAMES = 12


def _some(names: list[str]) -> str:
    return "; ".join(names[:MOST_NAMES]) + (f"; and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
