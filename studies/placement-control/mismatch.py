"""How well the draws of this study's laws match their rule, in adapter parameters: a Markdown table, without training.

toolkit profile demo -o profile.json
python studies/placement-control/mismatch.py profile.json
"""

import sys
from pathlib import Path
from statistics import mean

import toolkit as tk
from toolkit.selection.quantities import quantities

RULES = ("density", "weight-norm", "depth")
LAWS = ("placement-matched", "random-count")
BUDGETS = ("layers=0.5", "layers=0.7")
DRAWS = 200


def table(profile: tk.Profile, draws: int = DRAWS) -> str:
    """For each rule and budget: its layers, its share of all adapter parameters, and its draws' mismatch
    (of matched draws the widest).

    Mismatch is (adapter parameters of a draw − those of the rule)/those of the rule, which is free of the rank.
    """
    size = dict(zip(profile.names, quantities(profile, "adapter-parameters"), strict=True))
    wide = [max(layer.shape) for layer in profile.layers]
    mlp = {name for name, width in zip(profile.names, wide, strict=True) if width == max(wide)}
    lines = [
        "| budget | rule | layers | query | MLP | adapter parameters | matched draws | count draws, mean (range) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for budget in BUDGETS:
        for rule in RULES:
            chosen = tk.select(rule, profile, budget)
            held = sum(map(size.__getitem__, chosen.layers))
            off = {
                law: [
                    sum(map(size.__getitem__, d.layers)) / held - 1
                    for d in tk.draws(law, profile, like=chosen, count=draws)
                ]
                for law in LAWS
            }
            matched, counted = (off[law] for law in LAWS)
            queries = sum(profile.row(name).role == "q_proj" for name in chosen.layers)
            lines.append(
                f"| {budget} | {rule} | {len(chosen.layers)} | {queries} | {sum(n in mlp for n in chosen.layers)} "
                f"| {held / sum(size.values()):.1%} | {max(map(abs, matched)):.2%} "
                f"| {mean(counted):+.1%} ({min(counted):+.1%} to {max(counted):+.1%}) |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(tk.Profile.load(Path(sys.argv[1]))))
