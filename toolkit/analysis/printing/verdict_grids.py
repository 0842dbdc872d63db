"""The tables of what is claimed, and of what bears on it: laws, headroom, chance, the numerical floor, the replica."""

from __future__ import annotations

from typing import Any

from toolkit.analysis.printing.grid import NOTHING, Grid, count, probability, share, signed
from toolkit.analysis.statistics.headroom import CANNOT_RANK


def grids(data: dict[str, Any]) -> list[Grid]:
    """Those that have a row."""
    found = []
    if data["verdicts"] is not None:
        found += [_claims(data), _laws(data), _headroom(data), _replica(data)]
    found += [_chance(data), _floor(data), _effects(data)]
    return [grid for grid in found if grid.rows]


def _place(item: dict[str, Any]) -> str:
    """The budget, or the budgets that are tested together."""
    if item.get("budget") is not None:
        return str(item["budget"])
    budgets = [b for b in item.get("budgets", []) if b is not None]
    return f"over {len(budgets)} budgets" if len(budgets) > 1 else (budgets[0] if budgets else "")


def _claims(data: dict[str, Any]) -> Grid:
    verdicts, unit = data["verdicts"], data["unit"]
    heading = ["arm", "text" if data["kind"] == "table" else "metric", "budget", "control", "test", "gap", "in sd"]
    heading += ["draws", "p", "corrected p", "smallest p", "verdict"]
    rows = []
    for claim in verdicts["claims"]:
        effect = claim["effect"]
        rows.append(
            [
                *(claim["arm"], claim["text"], _place(claim), claim["control"], claim["test"]),
                signed(effect["gap"]),
                NOTHING if effect["standardized"] is None else f"{effect['standardized']:+.2f}".replace("-", "−"),
                f"{claim['draws']:,}",
                *(probability(claim[name]) for name in ("p", "adjusted", "smallest_p")),
                _verdict(claim),
            ]
        )
    for item in verdicts["excluded"]:
        head = [item["arm"], item["text"], _place(item), item["control"]]
        rows.append([*head, NOTHING, *[NOTHING] * 6, f"excluded: {item['reason']}"])
    family = verdicts["family"]
    by = "not corrected" if family["correction"] == "none" else f"p corrected by {family['correction']}"
    title = (
        f"The declared claims: gap = arm − median draw ({family['outcome']}, {unit}; the mean over budgets where they "
        f"are tested together), also in standard deviations of the draws; family of {family['tests']}, {by}, level "
        f"{family['level']:g}"
    )
    if family["margin"]:
        title += f", margin {family['margin']:g}"
    return Grid(title, heading, rows)


def _verdict(claim: dict[str, Any]) -> str:
    """The verdict; where the other side's p gives it, that p too."""
    if claim["verdict"] != "worse":
        return claim["verdict"]
    other = claim["opposite"]
    return f"worse: other side's p {probability(other['p'])}, corrected {probability(other['adjusted'])}"


def _laws(data: dict[str, Any]) -> Grid:
    """One row a claim, one column a control."""
    laws, level = data["verdicts"]["laws"], data["analysis"]["level"]
    controls = list(dict.fromkeys(t["control"] for law in laws for t in law["tests"]))
    heading = ["arm", "text" if data["kind"] == "table" else "metric", "budget", *controls, "laws agree"]
    rows = []
    for law in laws:
        tests = {t["control"]: t for t in law["tests"]}
        heard = any(t["counts"] and t["smallest_p"] <= level for t in law["tests"])
        agree = NOTHING if not heard else "yes" if law["agree"] else "no: composition" if law["composition"] else "no"
        rows.append([law["arm"], law["text"], _place(law), *(_law_cell(tests.get(c), level) for c in controls), agree])
    title = (
        f"The same claims under every law, each at the uncorrected level {level:g}: verdict and p (of the other side "
        "where it is worse), and the smallest p where it lies above the level; in brackets where the draws do not hold "
        "the arm's memory: no say"
    )
    return Grid(title, heading, rows if len(controls) > 1 else [])


def _law_cell(test: dict[str, Any] | None, level: float) -> str:
    if test is None:
        return NOTHING
    p = test["opposite"]["p"] if test["verdict"] == "worse" else test["p"]
    text = f"{test['verdict']}, {probability(p)}"
    if test["smallest_p"] > level:
        text += f" (smallest {probability(test['smallest_p'])})"
    return text if test["counts"] else f"({text})"


def _headroom(data: dict[str, Any]) -> Grid:
    heading = ["budget", "arm", "text", "headroom", "95% interval", "chance", "arm", "oracle", "anti-oracle"]
    heading += ["oracle's p", "the oracle is", "sd over layer sets", "s.e. over text"]
    rows = []
    found = sorted(data["verdicts"]["headroom"], key=lambda item: data_order(data, item["budget"]))
    for item in found:
        losses = item["losses"]
        separated = item["separated"]
        bounds = None if item["low"] is None or item["high"] is None else (item["low"], item["high"])
        anti = item["anti_test"]["separated"]
        rows.append(
            [
                item["budget"] or "",
                item["arm"],
                item["text"],
                share(item["headroom"]) if separated else NOTHING,
                f"{share(bounds[0])} to {share(bounds[1])}" if separated and bounds else NOTHING,
                *(f"{losses[name]:.4f}" for name in ("chance", "arm", "oracle")),
                f"{losses['anti']:.4f}" + ("" if anti else " (not separated)"),
                probability(item["oracle_test"]["p"]),
                "separated" if separated else CANNOT_RANK,
                NOTHING if item["sd_over_sets"] is None else f"{item['sd_over_sets']:.4f}",
                NOTHING if item["se_over_text"] is None else f"{item['se_over_text']:.4f}",
            ]
        )
    title = (
        "Headroom at the same memory: (chance − arm)/(chance − oracle), 0 at the mean draw and 1 at the oracle, with "
        "its interval over windows; losses in nats a token on the half of the text that the oracle was not fitted on; "
        "standard deviation of the draws over layer sets, and standard error of arm − chance over windows of text"
    )
    return Grid(title, heading, rows)


def data_order(data: dict[str, Any], budget: str | None) -> int:
    """Where a budget stands among those of the arms."""
    return list(dict.fromkeys(arm["budget"] for arm in data["arms"])).index(budget)


def _replica(data: dict[str, Any]) -> Grid:
    heading = [
        "arm",
        "text" if data["kind"] == "table" else "metric",
        "control",
        "settings",
        "settings with a better arm",
    ]
    heading += ["sign test p", "draws better than the arm", "binomial p"]
    rows = []
    for item in data["verdicts"]["replica"]:
        if item["control"] != data["analysis"]["control"]:
            continue
        signs, draws = item["sign_test"], item["draw_count"]
        rows.append(
            [
                *(item["arm"], item["text"], item["control"], str(item["settings"])),
                f"{signs['better']} of {signs['total']}",
                probability(signs["p"]),
                f"{draws['better']:,} of {draws['total']:,}",
                probability(draws["p"]),
            ]
        )
    title = (
        "Replica of AQLoRA's own tests (§7.2), two-sided; assumes independence, which nested budgets of one model and "
        "draws that share an arm do not have: not used for any verdict"
    )
    return Grid(title, heading, rows)


def _chance(data: dict[str, Any]) -> Grid:
    """What each law makes of chance: expected layers of each role, next to the arm's own."""
    tallies = [c["expected"] for arm in data["arms"] for c in arm["controls"] if c["expected"]]
    tallies += [arm["roles"] for arm in data["arms"]]
    roles = list(dict.fromkeys(role for tally in tallies for role in tally))
    heading = ["budget", "arm", "of", "holds", *roles, "layers", "feasible subsets"]
    rows, breaks = [], []
    budget: Any = ...
    for arm in data["arms"]:
        if not any(c["expected"] for c in arm["controls"]):
            continue
        if arm["budget"] != budget:
            breaks.append(len(rows))
        own = [f"{arm['roles'].get(role, 0):,}" for role in roles]
        first = (arm["budget"] or "") if arm["budget"] != budget else ""
        rows.append([first, arm["arm"], "the arm itself", "", *own, f"{arm['layers']:,}", ""])
        budget = arm["budget"]
        for control in arm["controls"]:
            of = control["expected"]
            cells = [NOTHING if of is None else f"{of.get(role, 0.0):.2f}" for role in roles]
            total = NOTHING if of is None else f"{sum(of.values()):.2f}"
            holds = ", ".join(control["holds"]) + (" (estimated)" if control["inclusion_draws"] else "")
            rows.append(["", "", control["control"], holds.strip(), *cells, total, count(control["feasible_subsets"])])
    title = (
        "What chance means: layers of each role that the arm holds, and that a draw of each law is expected to hold "
        "(the sum of the layers' inclusion probabilities); what a law holds besides the total; feasible subsets"
    )
    return Grid(title, heading, rows, breaks)


def _floor(data: dict[str, Any]) -> Grid:
    floor = data.get("floor")
    if floor is None:
        return Grid("", [], [])
    rows = [[text, f"{value:.1e}"] for text, value in floor["difference"].items()]
    how = f" ({'; '.join(floor['how'])})" if floor["how"] else ""
    outcome = data["analysis"]["outcome"]
    title = (
        f"The numerical floor: |difference| of the base's {outcome} when it is computed otherwise{how}, {data['unit']}"
    )
    return Grid(title, ["text", "difference"], rows)


def _effects(data: dict[str, Any]) -> Grid:
    found = data.get("effects")
    if not found or "reason" in found:
        return Grid("", [], [])
    rows = [
        [item["text"], item["kind"], NOTHING if item["rho"] is None else f"{item['rho']:+.2f}".replace("-", "−")]
        for item in found["spearman"]
    ]
    title = (
        f"Single layers: Spearman's ρ of the measured effect and the profile's {found['measure']} over "
        f"{found['layers']} layers (restore: one layer in 16 bit, the others quantized; quantize: the reverse)"
    )
    return Grid(title, ["text", "sweep", "ρ"], rows)
