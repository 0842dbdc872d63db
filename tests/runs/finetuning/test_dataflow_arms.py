"""Arms that compute otherwise: planned, trained, told of in reports and tables, and nothing else is changed."""

from __future__ import annotations

import re

import pytest
import torch
import yaml
from typer.testing import CliRunner

import toolkit as tk
from toolkit.analysis.printing.table import table
from toolkit.cli import app
from toolkit.errors import InputError
from toolkit.records.composition import Composition
from toolkit.records.dataflow import Flow
from toolkit.records.finetuning import FineTuning
from toolkit.records.plan import Plan
from toolkit.records.trained import Trained
from toolkit.runs.finetuning import plans

from .conftest import STUDY

GPTQ = "gptq(activations=nvfp4)"
ARMS = [
    {"name": "frozen", "base": "nvfp4"},
    {"name": "pact", "base": "nvfp4", "dataflow": "pact"},
    {"name": "calibrated", "base": "nvfp4", "dataflow": "pact(layouts=shared)", "initializer": GPTQ},
    {
        "name": "protected", "base": "nvfp4", "dataflow": "pact",
        "protect": {"selector": "top-error", "budget": "layers=0.2"},
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory, model):
    """The small form, through the shell."""
    folder = tmp_path_factory.mktemp("flows")
    (folder / "text.txt").write_text("A text that nothing is scored on. " * 40, encoding="utf-8")
    more = {"calibration": {"text": "text.txt", "windows": 2, "window": 64}, "analysis": {"baseline": "frozen"}}
    small = {"seeds": 1, "repeats": None}
    data = STUDY | {"model": str(model), "arms": ARMS, "seeds": 3, "small": small} | more
    (folder / "study.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    line = ["run", str(folder), "--small", "--device", "cpu", "--dtype", "float32", "--out", str(folder / "out")]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    return folder / "out"


@pytest.fixture(scope="module")
def reports(results):
    found = [Trained.load(path) for path in sorted((results / "runs").glob("*/report.json"))]
    return {report.arm: report for report in found if report.role == "arm"}


def test_reports_hold_how_the_model_computed(reports):
    assert set(reports) == {"frozen", "pact", "calibrated", "protected"}
    assert all(report.finished for report in reports.values())
    assert reports["frozen"].dataflow is None and reports["frozen"].plan.dataflow == "stock"
    flow = reports["pact"].dataflow
    assert flow.key == reports["pact"].plan.dataflow == "pact"
    assert flow.execution and flow.because
    assert (flow.layers, flow.others, len(flow.fused), flow.left) == (21, 0, 9, {})
    assert "blocks along the input" in flow.forward and "Ŵ in NVFP4 blocks along the output" in flow.backward
    assert 0.03 < flow.gap < 0.2  # a second rounding
    shared = reports["calibrated"].dataflow
    assert (shared.key, shared.backward, shared.gap) == ("pact(layouts=shared)", "Ŵ, the same", 0)
    protected = reports["protected"].dataflow
    assert protected.others == 5 and protected.layers == 16
    assert len(protected.fused) + sum(map(len, protected.left.values())) == 9 and protected.left


def test_the_calibrated_arm_starts_from_its_folder(reports, results):
    start = reports["calibrated"].start
    assert start.layers == 21 and start.changed > 10 and start.calibration
    assert (results / "starts" / start.folder).is_dir() and start.residual > start.zero  # for the outputs, not weights


def test_the_arms_differ_in_how_they_compute_alone(reports):
    """The same rows, order, adapters and levers; the losses differ, by as much as rounding activations does."""
    one, other = reports["frozen"], reports["pact"]
    assert (one.levers, one.settings, one.seeds) == (other.levers, other.settings, other.seeds)
    assert one.course.target_tokens == other.course.target_tokens
    assert one.plan.model_copy(update={"dataflow": "pact"}).hash == other.plan.hash
    assert one.course.first_loss != other.course.first_loss
    assert one.course.first_loss == pytest.approx(other.course.first_loss, rel=0.05)


def test_tables_name_the_flow_where_it_is_not_stock(results):
    text = table(results)
    assert re.search(r"data flow pact, computed by \w+", text)
    assert re.search(r"data flow pact\(layouts=shared\), computed by \w+", text)
    line = next(line for line in text.splitlines() if line.startswith("| frozen "))
    assert "data flow" not in line


# records and plans


def test_a_stock_arm_is_declared_as_before():
    """Locks of studies from before there was a choice still hold."""
    assert "dataflow" not in Composition(name="a").model_dump()
    assert Composition(name="a", dataflow="pact").model_dump()["dataflow"] == "pact"


def test_an_arm_becomes_a_plan(declared, profile):
    flow = "pact(norm=16bit,gates=nvfp4)"
    study = declared(arms=[{"name": "one", "base": "nvfp4", "dataflow": flow}], analysis={"baseline": "one"})
    made, _, _ = plans.plan(study, "one", profile, study.runs_of_an_arm[0])
    assert made.dataflow == "pact(norm=16bit)"  # as its key is written
    assert ("dataflow", flow) in plans.components(study)


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ({"dataflow": "pakt", "base": "nvfp4"}, "arm 'one': .*'pakt'.*did you mean 'pact'"),
        (
            {"dataflow": "pact(gates=int3)", "base": "nvfp4"},
            "arm 'one': option 'gates' of dataflow 'pact': found 'int3'.*'int4' or",
        ),
        ({"dataflow": "pact"}, "arm 'one': data flow pact computes layers in nvfp4, and the plan has none.*nf4"),
        ({"dataflow": "pact", "base": "nvfp4", "dora": True}, "arm 'one': .*LoRA and not DoRA"),
    ],
)
def test_what_cannot_be_computed_is_refused_before_weights_are_read(declared, profile, arm, message):
    study = declared(arms=[{"name": "one"} | arm], analysis={"baseline": "one"})
    with pytest.raises(InputError, match=message):
        plans.check(study)
        plans.plan(study, "one", profile, study.runs_of_an_arm[0])


def test_two_arms_that_differ_in_their_flow_are_two(declared):
    arms = [{"name": "a", "base": "nvfp4"}, {"name": "b", "base": "nvfp4", "dataflow": "pact"}]
    plans.check(declared(arms=arms, analysis={"baseline": "a"}))
    with pytest.raises(InputError, match="are the same"):
        plans.check(declared(arms=[*arms, arms[1] | {"name": "c"}], analysis={"baseline": "a"}))


def test_the_flow_is_no_lever():
    arms = [{"name": "a"}, {"name": "b", "levers": {"dataflow": "pact"}}]
    with pytest.raises(InputError, match="names 'dataflow'"):
        FineTuning.model_validate(STUDY | {"arms": arms, "analysis": {"baseline": "a"}})


def test_a_plan_from_the_shell(tmp_path):
    line = ["plan", "--base", "nvfp4", "--rank", "4", "--dataflow", "pact(gates=int4)", "-o", str(tmp_path / "p.json")]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    assert Plan.load(tmp_path / "p.json").dataflow == "pact(gates=int4)"


def test_a_record_of_a_flow_is_strict():
    with pytest.raises(ValueError, match="gap"):
        Flow(key="x", execution="y", because="z", forward="a", backward="b", gap=-1, layers=1)


def test_one_run_from_python(tmp_path, model):
    plan = Plan.protecting(None, "nvfp4", rank=2, alpha=5, scaler="rslora", dataflow="pact(gradients=stochastic)")
    levers = tk.Levers(steps=2, batch=4, accumulation=1, length=48, learning_rate=1e-2)
    use = tk.Use(task="arithmetic(largest=10)", train_rows=12, rows=8)
    made = [
        tk.train(
            str(model), plan, use, levers=levers, out=tmp_path / name, device="cpu", dtype="bfloat16", progress=False
        )
        for name in "ab"
    ]
    assert made[0].dataflow == made[1].dataflow and made[0].dataflow.key == "pact(gradients=stochastic)"
    assert made[0].course.last_loss == made[1].course.last_loss  # noise is seeded with the run
    from safetensors.torch import load_file

    held = [load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in "ab"]
    assert all(torch.equal(held[0][key], held[1][key]) for key in held[0])


@pytest.mark.slow
def test_timing_sessions_hold_it_too(study):
    """Which execution was timed."""
    from toolkit.records.session import Session
    from toolkit.runs.timing.starting import time

    protocol = {"batches": 1, "rounds": 3, "seconds": 0.1, "warmup": 1}
    folder = study(arms=ARMS[:2], analysis={"baseline": "frozen"}, timing=protocol, seeds=1)
    path = time(folder, device="cpu", dtype="float32", beside_others=True, progress=False)
    held = {arm.arm: arm.dataflow for arm in Session.load(path).arms}
    assert held["frozen"] is None and held["pact"].key == "pact" and held["pact"].execution
