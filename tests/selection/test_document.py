"""The numbers of docs/matching.md are those that the code gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import toolkit as tk

DOCUMENT = (Path(__file__).parents[2] / "docs" / "matching.md").read_text(encoding="utf-8")
UNIT = 110_592


@pytest.fixture
def demo(profile_of):
    """The demo model's layers."""
    return profile_of(
        30,
        {
            "self_attn.q_proj": (576, 576),
            "self_attn.k_proj": (192, 576),
            "self_attn.v_proj": (192, 576),
            "self_attn.o_proj": (576, 576),
            "mlp.gate_proj": (1536, 576),
            "mlp.up_proj": (1536, 576),
            "mlp.down_proj": (576, 1536),
        },
    )


def blocks(profile, chosen):
    rows = [row for row in profile.layers if row.block in chosen]
    return tk.Selection(
        selector="blocks",
        model=profile.model,
        fingerprint=profile.fingerprint,
        layers=[row.name for row in rows],
        parameters=sum(row.parameters for row in rows),
        bytes=sum(row.bytes for row in rows),
        of={"layers": len(profile), "parameters": profile.parameters, "bytes": profile.bytes},
    )


def shares(profile, inclusion):
    """The inclusion of (k, v), (q, o), MLP, each written as in the document."""
    found = {}
    for row, share in zip(profile.layers, inclusion, strict=True):
        found.setdefault(row.parameters // UNIT, set()).add(f"{share:.3f}".removeprefix("0"))
    assert all(len(values) == 1 for values in found.values())
    return [found[size].pop() for size in (1, 3, 8)]


def written(count):
    return f"{float(count):.1e}".replace("e+", "e")


def test_the_model(demo):
    assert (len(demo), demo.parameters // UNIT, demo.parameters % UNIT) == (210, 960, 0)
    assert sorted({row.parameters // UNIT for row in demo.layers}) == [1, 3, 8]
    assert blocks(demo, {5, 15, 25}).parameters == 96 * UNIT == demo.parameters // 10
    for number in ("210 layers, 960 units", "1:3:8", "96 units, 10%", "30 blocks", f"{UNIT:,} weights"):
        assert number in DOCUMENT


def test_the_table_of_laws(demo):
    like = blocks(demo, {5, 15, 25})
    rows = re.findall(r"^\| `(random-\S+?|placement-\S+?)`.*?\|(.*)\|$", DOCUMENT, re.MULTILINE)
    assert len(rows) == 6
    for key, cells in rows:
        selection = tk.select(key, demo, like=like)
        expected = [*shares(demo, selection.inclusion), f"{sum(selection.inclusion):.1f}"]
        expected.append(written(selection.feasible_subsets))
        assert [cell.strip() for cell in cells.split("|")] == expected, key


def test_the_numbers_of_nested_families(demo):
    likes = [blocks(demo, {5, 15, 25}), blocks(demo, {2, 5, 12, 15, 22, 25})]
    small, large = tk.chains("random-matched", demo, likes=likes, count=1)[0]
    alone = tk.select("random-matched", demo, like=likes[1])
    text = " ".join(DOCUMENT.split())
    a, b, c = shares(demo, small.inclusion)
    assert f"the inclusion at 10% is {a} (k, v), {b} (q, o), {c} (MLP) among {written(small.feasible_subsets)}" in text
    at20, by_itself = ", ".join(shares(demo, large.inclusion)), ", ".join(shares(demo, alone.inclusion))
    assert f"at 20% it is {at20}, where the one-budget law has {by_itself}" in text


def test_laws_that_follow_the_matched_selection(demo):
    names = [f"model.layers.{i}.self_attn.v_proj" for i in range(12)]
    like = blocks(demo, {5}).model_copy(update={"layers": [n for n in demo.names if n in names]})
    for key in ("random-permuted", "random-matched(roles=true)"):
        inclusion = dict(zip(demo.names, tk.select(key, demo, like=like).inclusion, strict=True))
        assert inclusion[names[0]] == pytest.approx(0.4) and inclusion["model.layers.0.self_attn.k_proj"] == 0
