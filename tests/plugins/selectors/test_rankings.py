"""The rankings: top-error, bottom-error, density, weight-norm and depth."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import toolkit as tk
from toolkit.interfaces import CalibratedSelector, RankingSelector
from toolkit.records.profile import Statistic


def best(profile, scores, count):
    order = sorted(range(len(profile)), key=lambda i: (-scores[i], i))[:count]
    return [profile.names[i] for i in sorted(order)]


@pytest.mark.parametrize("measure", ["mse", "mae", "relative", "max"])
@pytest.mark.parametrize("sign", [1, -1])
def test_errors_rank_by_the_measure(phi_1_5, measure, sign):
    selector = "top-error" if sign > 0 else "bottom-error"
    scores = [sign * getattr(layer.error["nf4"], measure) for layer in phi_1_5.layers]
    selection = tk.select(selector, phi_1_5, "layers=0.2", measure=measure)
    assert selection.layers == best(phi_1_5, scores, 29)  # ⌈.2 · 144⌉, the paper's 29


def test_top_and_bottom_share_nothing_at_half(phi_1_5):
    top, bottom = (tk.select(s, phi_1_5, "layers=0.5").layers for s in ("top-error", "bottom-error"))
    assert sorted(top + bottom) == sorted(phi_1_5.names)


def test_another_quantizer_is_never_taken_instead(tiny):
    with pytest.raises(tk.InputError, match=r"no errors under 'mxfp4'.*--quantizer 'mxfp4'"):
        tk.select("top-error", tiny, "layers=0.2", quantizer="mxfp4")
    with pytest.raises(tk.InputError, match="option 'measure'"):
        tk.select("top-error", tiny, "layers=0.2", measure="mean")


def test_another_quantizers_errors(tiny):
    rows = [
        layer.model_copy(
            update={"error": layer.error | {"fp4-bnb": layer.error["nf4"].model_copy(update={"mse": float(at)})}}
        )
        for at, layer in enumerate(tiny.layers)
    ]
    profile = tiny.model_copy(update={"layers": rows})
    assert tk.select("top-error(quantizer=fp4-bnb)", profile, "layers=0.25").layers == profile.names[-4:]


def test_density_and_weight_norm(phi_1_5):
    density = [layer.density for layer in phi_1_5.layers]
    assert tk.select("density", phi_1_5, "layers=0.1").layers == best(phi_1_5, density, 15)
    rms = [Fraction(layer.norm) ** 2 / layer.parameters for layer in phi_1_5.layers]
    assert tk.select("weight-norm", phi_1_5, "layers=0.1").layers == best(phi_1_5, rms, 15)
    frobenius = [layer.norm for layer in phi_1_5.layers]
    assert best(phi_1_5, rms, 15) != best(phi_1_5, frobenius, 15)


@pytest.mark.parametrize(("alpha", "count", "mean"), [(0.5, 72, 17.5), (0.7, 100, 15.16)])
def test_the_papers_placement_with_the_floor(phi_1_5, alpha, count, mean):
    selection = tk.select("depth", phi_1_5, tk.Budget(layers=alpha), rounding="floor")
    blocks = [phi_1_5.row(name).block for name in selection.layers]
    assert len(blocks) == count and np.mean(blocks) == pytest.approx(mean, abs=1e-12)
    assert selection.layers == phi_1_5.names[-count:]
    assert len(tk.select("depth", phi_1_5, tk.Budget(layers=0.7)).layers) == 101  # the ceiling


@pytest.mark.parametrize(
    ("budget", "blocks"),
    [("layers=0.7", 16), ("layers=0.5", 12), ("parameters=0.5", 12), ("parameters=0.49", 11), ("layers=1", 24)],
)
def test_whole_blocks_never_exceed(phi_1_5, budget, blocks):
    selection = tk.select("depth", phi_1_5, budget, whole_blocks=True)
    assert selection.layers == phi_1_5.names[-6 * blocks :]


def test_no_whole_block(phi_1_5):
    with pytest.raises(tk.InputError, match="block 23 holds 6 layers"):
        tk.select("depth", phi_1_5, "layers=0.03", whole_blocks=True)


def test_layers_outside_the_blocks_are_in_no_whole_block(phi_1_5):
    head = phi_1_5.layers[0].model_copy(update={"name": "lm_head", "block": None, "role": "lm_head"})
    profile = phi_1_5.model_copy(update={"layers": [*phi_1_5.layers, head]})
    assert tk.select("depth", profile, "layers=0.05").layers[-1] == "lm_head"
    assert tk.select("depth", profile, "layers=0.05", whole_blocks=True).layers == phi_1_5.names[-6:]


def test_every_ranking_takes_the_rounding_option(phi_1_5):
    from toolkit.registry import registry

    values = [layer.norm for layer in phi_1_5.layers]
    held = Statistic(values=values, rows=1, batches=1, tokens=1, loss=1.0, sha256="", dtype="float32")
    for name, (cls, _) in registry.of_kind("selector").items():
        if issubclass(cls, RankingSelector) and cls.__module__.startswith("toolkit_plugins"):
            asks = issubclass(cls, CalibratedSelector)
            assert cls.needs_calibration == asks
            profile = phi_1_5.model_copy(update={"statistics": {name: held}}) if asks else phi_1_5
            counts = [len(tk.select(name, profile, "layers=0.7", rounding=r).layers) for r in ("floor", "ceil")]
            assert counts == [100, 101], name


def test_all_and_none(tiny):
    assert tk.select("all", tiny).layers == tiny.names
    assert tk.select("none", tiny).layers == []
