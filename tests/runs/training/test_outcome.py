"""`train` against the stock Trainer, under its levers, and what it reports."""

import csv
import math
import os
import re
import warnings

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from toolkit.errors import InputError
from toolkit.records.levers import Levers, Seeds
from toolkit.runs.training import train, trainer
from toolkit.runs.training.batches import schedule

LEVERS = Levers(batch=4, accumulation=2, steps=6, learning_rate=1e-2, warmup=0.3)


def run(model, data, folder, levers=LEVERS, seeds=None, **options):
    options = {"progress": False} | options
    return train(model, data, levers, seeds or Seeds.all(0), folder=folder, pad=0, **options)


@pytest.mark.parametrize(
    "change", [{}, {"schedule": "linear", "weight_decay": 0.1, "clip": 0.01}, {"schedule": "constant", "warmup": 0.0}]
)
def test_it_trains_as_the_stock_trainer_does(arm, rows, adapters, tmp_path, change):
    """The same batches, padded and masked, through transformers' own Trainer, loss and loop."""
    data, levers = rows(), LEVERS.model_copy(update=change)
    ours = arm("nf4")
    outcome = run(ours, data, tmp_path / "ours", levers)
    assert outcome.finished and not outcome.flags

    plan = schedule(data, levers, 0)
    flat = [data[r] for step in plan.steps for micro in step for r in micro]
    assert all(len(m) == 4 for step in plan.steps for m in step[:-1])
    stock = arm("nf4")

    def collated(batch):
        width = max(len(row.ids) for row in batch)
        pad = [width - len(row.ids) for row in batch]
        labels = [[i if t else -100 for i, t in zip(row.ids, row.target, strict=True)] for row in batch]
        return {
            "input_ids": torch.tensor([[*row.ids, *[0] * n] for row, n in zip(batch, pad, strict=True)]),
            "attention_mask": torch.tensor([[1] * len(r.ids) + [0] * n for r, n in zip(batch, pad, strict=True)]),
            "labels": torch.tensor([[*one, *[-100] * n] for one, n in zip(labels, pad, strict=True)]),
        }

    class Sequential(transformers.Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "stock"),
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type={"constant": "constant"}.get(levers.schedule, levers.schedule),
        warmup_steps=math.ceil(levers.warmup * 6),
        weight_decay=levers.weight_decay,
        max_grad_norm=levers.clip,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    other = Sequential(model=stock, args=arguments, data_collator=collated, train_dataset=flat)
    other.train()
    theirs = [line["loss"] for line in other.state.log_history if "loss" in line]
    rates = [line["learning_rate"] for line in other.state.log_history if "loss" in line]
    lines = list(csv.DictReader(outcome.curve.open()))
    assert [float(line["loss"]) for line in lines] == pytest.approx(theirs, rel=1e-4)
    assert [float(line["learning_rate"]) for line in lines] == pytest.approx(rates, rel=1e-9)
    for name, value in adapters(stock).items():
        torch.testing.assert_close(adapters(ours)[name], value, rtol=2e-3, atol=2e-4)  # of 6 steps of .01


def test_the_course_counts_by_hand(arm, rows, tmp_path):
    data = rows()
    outcome = run(arm("nf4", {2, 3}), data, tmp_path)
    course, plan = outcome.course, schedule(data, LEVERS, 0)
    lines = list(csv.DictReader(outcome.curve.open()))
    used = [r for step in plan.steps for m in step for r in m]
    assert (course.steps, course.planned, course.examples) == (6, 6, len(used))
    assert course.real_tokens == sum(len(data[r].ids) for r in used)
    assert course.target_tokens == sum(sum(data[r].target) for r in used)
    assert [int(line["target_tokens"]) for line in lines] == plan.target
    losses = [float(line["loss"]) for line in lines]
    assert (course.first_loss, course.last_loss) == (losses[0], losses[-1])  # a tenth of six steps is one
    assert course.lowest == 2 and course.scale is None and course.resumed == 0 and course.paused == 0
    # per block: q, k, v, o, gate, up, down at rank 4
    block = 4 * ((32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 48))
    assert course.trainable == 2 * block
    rates = [float(line["learning_rate"]) for line in lines]
    warm = [0.0, 0.5e-2]
    decay = [0.5e-2 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    assert rates == pytest.approx(warm + decay)
    seconds = [float(line["seconds"]) for line in lines]
    assert seconds == sorted(seconds) and 0 < seconds[-1] <= course.seconds + 1e-3


def test_seeds_are_separate_factors(arm, rows, adapters, tmp_path):
    def trained(name, seeds, adapter=0):
        model = arm("none", {3}, seed=adapter)
        outcome = run(model, rows(), tmp_path / name, seeds=seeds)
        return adapters(model), outcome.curve.read_text().splitlines()[1].split(",")[1]

    first, _ = trained("a", Seeds(adapter=0, data=1, draw=2))
    torch.manual_seed(99)  # what came before plays no part
    again, _ = trained("b", Seeds(adapter=5, data=1, draw=9, repeat=3))
    other, _ = trained("c", Seeds(adapter=0, data=2, draw=2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_every_arm_sees_the_same_batches(arm, rows, tmp_path):
    seen = {}
    for name, model in {"nf4": arm("nf4"), "depth": arm("none", {3}), "phi3": arm("nf4", family="phi3")}.items():
        ids = seen[name] = []
        model.get_base_model().model.embed_tokens.register_forward_hook(
            lambda m, args, output, ids=ids: ids.append(args[0].tolist())
        )
        run(model, rows(), tmp_path / name)
    assert seen["nf4"] == seen["depth"] == seen["phi3"] and len(seen["nf4"]) == 12


def test_sixteen_bit_models_train_adapters_in_float32(arm, rows, adapters, tmp_path):
    """Losses near those of float32; both runs of one model compute in bfloat16."""
    exact = run(arm("none"), rows(), tmp_path / "exact")
    model = arm("none", dtype=torch.bfloat16)
    dtypes = set()
    for module in model.modules():
        if type(module).__name__ == "Linear" and module.weight.dtype == torch.float32:
            module.register_forward_hook(lambda m, args, output: dtypes.add(output.dtype))
    outcome = run(model, rows(), tmp_path / "half")
    assert dtypes == {torch.bfloat16}
    assert {value.dtype for value in adapters(model).values()} == {torch.float32}
    assert outcome.course.first_loss == pytest.approx(exact.course.first_loss, rel=0.02)
    assert outcome.course.last_loss == pytest.approx(exact.course.last_loss, rel=0.05)
    dtypes.clear()
    run(model, rows(), tmp_path / "again", seeds=Seeds.all(1))
    assert dtypes == {torch.bfloat16}


def test_float16_trains_on_a_cpu_without_a_scale(arm, rows, tmp_path):
    outcome = run(arm("none", dtype=torch.float16), rows(), tmp_path)
    assert outcome.finished and outcome.course.scale is None


def test_dropout_is_the_levers_alone(dense, rows, tmp_path):
    """GPT-2's own dropout of .1 is off; the adapters' is on where the lever asks for it, and off again afterwards."""
    model = get_peft_model(dense("gpt2"), LoraConfig(r=2, lora_alpha=5, target_modules=["c_attn"], fan_in_fan_out=True))
    inner = model.get_base_model()
    assert inner.transformer.drop.p == 0.1
    made = trainer(model, rows(), LEVERS, Seeds.all(0), folder=tmp_path, pad=0)
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = model(input_ids=ids).logits
    with made.ready():
        assert model.training
        torch.testing.assert_close(model(input_ids=ids).logits, expected)
    made = trainer(model, rows(), LEVERS.model_copy(update={"dropout": 0.5}), Seeds.all(0), folder=tmp_path, pad=0)
    with made.ready():
        found = {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)}
        assert found == {0.0, 0.5}
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}


def test_deterministic_holds_inside_alone(arm, rows, tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    model, seen = arm("none", {3}), []
    model.get_base_model().lm_head.register_forward_hook(
        lambda *_: seen.append(torch.are_deterministic_algorithms_enabled())
    )
    run(model, rows(), tmp_path / "a", LEVERS.model_copy(update={"deterministic": True}))
    assert set(seen) == {True} and not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    run(model, rows(), tmp_path / "b")
    assert not seen[-1]


def test_progress_shows_step_loss_speed_and_what_is_left(arm, rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("toolkit.runs.progress.EVERY", 0.0)  # a line a step
    run(arm("none", {3}), rows(), tmp_path, progress=True, name="sst2--qlora")
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("sst2--qlora, loss ")
    assert re.search(r"[\d,]+ tokens/s, step: 6 of 6, in \d+ s$", lines[-1])
    assert any(re.search(r"step: [1-5] of 6, \d+ s left$", line) for line in lines)


def test_nothing_is_printed_to_stdout(arm, rows, tmp_path, capsys):
    model = arm("none", {3})
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        run(model, rows(), tmp_path, LEVERS.model_copy(update={"checkpointing": True}))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"report_to": ["tensorbord"]}, "did you mean 'tensorboard'"),
        ({"levers": LEVERS.model_copy(update={"attention": "eager"})}, "built with attention 'sdpa'.*'eager'"),
    ],
)
def test_what_cannot_be_trained_is_refused(arm, rows, tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        run(arm("none", {3}), rows(), tmp_path, **change)


def test_a_model_without_adapters_is_refused(dense, rows, tmp_path):
    with pytest.raises(InputError, match="gives no layer an adapter"):
        run(dense(), rows(), tmp_path)


def test_a_tracker_hears_of_the_losses(arm, rows, tmp_path):
    pytest.importorskip("tensorboard")
    run(arm("none", {3}), rows(), tmp_path, report_to=["tensorboard"])
    assert list(tmp_path.rglob("events.out.tfevents*"))


def test_a_tracker_that_is_not_installed_is_named(arm, rows, tmp_path):
    from transformers.integrations import is_comet_available

    if is_comet_available():
        pytest.skip("comet_ml is installed")
    with pytest.raises(InputError, match=r"report_to comet_ml: .*comet"):
        run(arm("none", {3}), rows(), tmp_path, report_to=["comet_ml"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("base", ["none", "nf4", "nvfp4"])
def test_on_a_gpu_the_losses_are_the_cpus(arm, rows, tmp_path, dtype, base):
    exact = run(arm(base), rows(), tmp_path / "cpu")
    model = arm(base, dtype=dtype).cuda()
    outcome = run(model, rows(), tmp_path / "gpu", LEVERS.model_copy(update={"checkpointing": True}))
    assert outcome.finished and not [flag for flag in outcome.flags if flag.severity == "fatal"]
    close = 1e-3 if dtype == torch.float32 else 0.03
    assert outcome.course.first_loss == pytest.approx(exact.course.first_loss, rel=close)
    assert outcome.course.last_loss == pytest.approx(exact.course.last_loss, rel=2 * close)
    assert (outcome.course.scale is not None) == (dtype == torch.float16)


@pytest.mark.gpu
def test_deterministic_runs_on_a_gpu_are_the_same_bits(arm, rows, adapters, tmp_path):
    found = []
    for name in "ab":
        model = arm("nf4", dtype=torch.bfloat16).cuda()
        run(model, rows(), tmp_path / name, LEVERS.model_copy(update={"deterministic": True}))
        found.append(adapters(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_what_the_trainer_overrides_is_what_transformers_calls():
    """A method that a release of transformers renames would be passed over in silence."""
    import inspect

    from transformers import Trainer

    from toolkit.runs.training.fair_trainer import FairTrainer

    own = {"ready", "not_graphed", "_graphed", "_forward_backward"}
    for name, method in vars(FairTrainer).items():
        if name.startswith("__") or name in own or not inspect.isfunction(method):
            continue
        theirs, ours = (inspect.signature(m).parameters for m in (getattr(Trainer, name), method))
        open_ended = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in ours.values())
        assert open_ended or list(ours)[: len(theirs)] == list(theirs), name
