"""Calibration: rows to batches, the statistic's record, a stranger's selector, the verb, and bad input."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

import toolkit as tk
from toolkit.cli import main
from toolkit.interfaces import CalibratedSelector
from toolkit.records.profile import Statistic
from toolkit.registry import registry
from toolkit.runs import calibration
from toolkit.runs.calibration import _batches, _tensors, calibrated, training_rows
from toolkit.runs.models import load_tokenizer

KEY = "gradient-sensitivity"
DATA = Path(__file__).parents[2].parent / "shared" / "data"


@dataclasses.dataclass(frozen=True)
class Row:
    ids: tuple[int, ...]
    target: tuple[bool, ...]


def row(*ids: int, targets: int = 1) -> Row:
    return Row(ids, tuple(i >= len(ids) - targets for i in range(len(ids))))


@dataclasses.dataclass
class InputNorm(CalibratedSelector):
    """A stranger's: the mean squared input of each layer, by a hook and no gradient."""

    name = "input-norm"

    scale: float = 1.0
    broken: str = ""

    def measure(self, model: nn.Module, batches, profile, progress=None) -> Sequence[float]:
        if self.broken == "raises":
            raise KeyError("mine")
        sums = dict.fromkeys(profile.names, 0.0)
        for name in profile.names:
            model.get_submodule(name).register_forward_pre_hook(
                lambda module, args, name=name: sums.__setitem__(name, sums[name] + args[0].square().mean().item())
            )
        with torch.no_grad():
            for batch in batches:
                model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        values = [self.scale * v for v in sums.values()]
        return {"": values, "short": values[1:], "zero": [0.0] * len(values), "nan": [float("nan"), *values[1:]]}[
            self.broken
        ]


@pytest.fixture
def folder(checkpoints) -> Path:
    return checkpoints("llama", torch.float32)


@pytest.fixture
def profile(folder) -> tk.Profile:
    return tk.profile(folder, progress=False)


@given(st.integers(1, 60), st.integers(1, 20))
def test_batches_hold_all_rows_in_order_and_differ_by_one_at_most(count, size):
    rows = [row(1, 2 + at) for at in range(count)]
    made = _batches(rows, size)
    assert [r for group in made for r in group] == rows
    sizes = [len(group) for group in made]
    assert len(made) == -(-count // size) and max(sizes) - min(sizes) <= 1 and max(sizes) <= size


def test_a_batch_by_hand():
    made = _tensors([row(5, 6, 7, targets=2), row(9, 8)], torch.device("cpu"))
    assert made["input_ids"].tolist() == [[5, 6, 7], [9, 8, 0]]
    assert made["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert made["labels"].tolist() == [[-100, 6, 7], [-100, 8, -100]]


def test_the_recorded_loss_is_that_of_the_rows_one_by_one(folder, profile):
    """Weighted by tokens and not by batches; the oracle knows no batch and no padding."""
    data = [row(1, 2, 3, 4, targets=3), row(7, 8), row(9, 10, 11, targets=1)]
    found = calibrated(profile, KEY, model=folder, encoded=data, batch=2, device="cpu").statistics[KEY]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    total = 0.0
    for one in data:
        logs = torch.log_softmax(model(torch.tensor([one.ids])).logits[0], -1)
        total -= sum(logs[at - 1, one.ids[at]].item() for at in range(1, len(one.ids)) if one.target[at])
    assert (found.tokens, found.rows, found.batches) == (5, 3, 2)
    assert found.loss == pytest.approx(total / 5, rel=1e-5)


def test_the_hash_is_of_tokens_and_targets(folder, profile):
    def of(*rows):
        return calibrated(profile, KEY, model=folder, encoded=rows, device="cpu").statistics[KEY].sha256

    first = of(row(1, 2, 3))
    assert first == of(row(1, 2, 3))
    assert len({first, of(row(1, 2, 4)), of(row(1, 2, 3, targets=2)), of(row(1, 2), row(2, 3))}) == 4


def test_a_strangers_selector_is_measured_kept_and_ranked(folder, profile):
    data = [row(1, 2, 3), row(4, 5, 6, 7)]
    chosen = InputNorm(scale=3.0)
    made = calibrated(profile, [chosen, KEY], model=folder, encoded=data, device="cpu")
    assert set(made.statistics) == {"input-norm(scale=3.0)", KEY}
    values = made.statistic("input-norm(scale=3.0)")
    best = sorted(range(len(profile)), key=lambda at: -values[at])[:2]  # ⌈.05 · 21⌉
    assert tk.select(chosen, made, "layers=0.05").layers == [profile.names[at] for at in sorted(best)]
    assert tk.select(InputNorm(scale=3.0, rounding="floor"), made, "layers=0.5").layers
    assert "reads data: toolkit calibrate" in InputNorm.summary()


def test_one_statistic_serves_two_roundings():
    keys = [KEY, f"{KEY}(rounding=floor)", f"{KEY}(elementwise=false)", "top-error", "random-matched"]
    assert [s.key for s in calibration.asking(keys)] == [KEY, f"{KEY}(elementwise=false)"]


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        ("raises", tk.RunError, "selector input-norm.* failed: KeyError: 'mine'"),
        ("short", tk.InputError, r"gave 20 scores for the 21 layers"),
        ("zero", tk.InputError, "measured 0 for every layer"),
        ("nan", tk.InputError, r"scored layer model\.layers\.0\.self_attn\.q_proj with nan"),
    ],
)
def test_what_a_selector_does_wrong_is_told(folder, profile, broken, error, message):
    with pytest.raises(error, match=message):
        calibrated(profile, InputNorm(broken=broken), model=folder, encoded=[row(1, 2)], device="cpu")


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "no rows to calibrate on"),
        ([row(1, 2)], {"batch": 0}, "batch is 0"),
        ([row(1, 2), row(1, 2, targets=0)], {}, "row 2 has no token to predict"),
        ([Row((1,), (True,))], {}, "row 1 has no token to predict after its first"),
        ([Row((1, 2), (True,))], {}, "row 1 has 2 tokens and 1 marks"),
        ([row(1, 2)], {"dtype": "float8"}, "no compute dtype is called 'float8'"),
        ([row(1, 2)], {"device": "cpuu"}, "did you mean 'cpu'"),
    ],
)
def test_bad_rows_and_options(folder, profile, rows, options, message):
    with pytest.raises(tk.InputError, match=message):
        calibrated(profile, KEY, model=folder, encoded=rows, **({"device": "cpu"} | options))


def test_selectors_that_ask_for_no_data_are_refused(folder, profile):
    with pytest.raises(tk.InputError, match=r"top-error, depth asks for no data.*gradient-sensitivity"):
        calibrated(profile, ["top-error", "depth"], model=folder, encoded=[row(1, 2)])


def test_layers_of_another_shape_or_name(folder, profile):
    from toolkit.runs.gradients import layers_in

    model = AutoModelForCausalLM.from_pretrained(folder)
    other = profile.layers[0].model_copy(update={"name": "model.layers.0.self_attn.q_prj"})
    with pytest.raises(tk.InputError, match=r"no layer 'model\.layers\.0\.self_attn\.q_prj'; did you mean"):
        layers_in(model, profile.model_copy(update={"layers": [other, *profile.layers[1:]]}))
    other = profile.layers[0].model_copy(update={"shape": (32, 128)})
    with pytest.raises(tk.InputError, match=r"q_proj is \(64, 64\) in the model and \(32, 128\) in the profile"):
        layers_in(model, profile.model_copy(update={"layers": [other, *profile.layers[1:]]}))


def test_a_head_with_a_row_gets_the_whole_gradient_of_its_tied_weight(folder):
    """One weight, used as embedding and as head: autograd's gradient of it is the sum of both."""
    profile, data = tk.profile(folder, include_head=True, progress=False), [row(1, 2, 3, targets=2)]
    made = calibrated(profile, KEY, model=folder, encoded=data, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logs = torch.log_softmax(model(torch.tensor([[1, 2, 3]])).logits[0], -1)
    (gradient,) = torch.autograd.grad(-(logs[0, 2] + logs[1, 3]) / 2, [model.lm_head.weight])
    weight = model.lm_head.weight.detach()
    error = weight - registry.make("quantizer", "nf4").quantize(weight.float()).dequantize().double()
    assert profile.names[-1] == "lm_head"
    assert made.statistic(KEY)[-1] == pytest.approx((gradient**2 * error**2).sum().item(), rel=1e-4)


def test_statistics_fit_the_profile_or_are_refused(profile):
    held = {"rows": 1, "batches": 1, "tokens": 1, "loss": 1.0, "sha256": "", "dtype": "float32"}
    with pytest.raises(tk.InputError, match=r"statistic 'mine' holds 2 values, and the profile has 21 layers"):
        tk.Profile.model_validate(profile.model_dump() | {"statistics": {"mine": {"values": [1.0, 2.0], **held}}})
    with pytest.raises(ValueError, match="finite"):
        Statistic(values=[float("inf")], **held)


def test_the_verb_calibrates_and_select_follows(folder, tmp_path, capsys):
    made, out = tmp_path / "profile.json", tmp_path / "calibrated.json"
    assert main(["profile", str(folder), "-o", str(made)]) == 0
    command = ["calibrate", KEY, "--model", str(folder), "--profile", str(made), "--task", "arithmetic"]
    assert main([*command, "--rows", "5", "--batch", "2", "--device", "cpu", "-o", str(out)]) == 0
    held = json.loads(out.read_text())["statistics"][KEY]
    assert (held["rows"], held["batches"], held["task"], held["source"]) == (5, 3, "arithmetic", "code")
    selected = ["select", KEY, "--profile", str(out), "--budget", "layers=0.2", "-o", str(tmp_path / "s.json")]
    assert main(selected) == 0
    assert len(tk.Selection.load(tmp_path / "s.json").layers) == 5  # ⌈.2 · 21⌉
    capsys.readouterr()
    assert main([*selected[:3], str(made), *selected[4:]]) == 2
    assert "toolkit calibrate 'gradient-sensitivity' --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selector": "top-error"}, "asks for no data"),
        ({"selector": "gradient-sensitivty"}, "did you mean 'gradient-sensitivity'"),
        ({"--task": "arithmetics"}, "did you mean 'arithmetic'"),
        ({"--length": "2"}, "fits into 2 tokens"),
        ({"--profile": "none.json"}, "no file none.json"),
        ({"--data": "nowhere"}, "no data at nowhere"),
        ({"-o": "."}, "is a folder"),
    ],
)
def test_the_verbs_errors(folder, profile, tmp_path, capsys, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    profile.save("profile.json")
    options = {"--model": str(folder), "--profile": "profile.json", "--task": "arithmetic", "-o": "out.json"} | change
    selector = options.pop("selector", KEY)
    assert main(["calibrate", selector, "--device", "cpu", *(w for pair in options.items() for w in pair)]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not Path("out.json").exists()


def test_training_rows_come_in_the_order_that_training_reads(folder):
    from toolkit.runs.tasks import encode, read

    tokenizer, task = load_tokenizer(folder), registry.make("task", "arithmetic")
    found = training_rows("arithmetic", tokenizer, rows=3, length=64)
    split = read(task, "train", limit=3)
    assert [r.ids for r in found.encoded] == [encode(tokenizer, e, 64).ids for e in split.examples]
    assert found.cut == 0 and found.source == "code"
    scored = {e.prompt for e in read(task, "test").examples}
    assert not scored & {e.prompt for e in split.examples}


@pytest.mark.skipif(not (DATA / "sst2").is_dir(), reason="needs the rows of ../shared/data")
def test_real_rows(folder, profile):
    tokenizer = load_tokenizer(folder)
    found = training_rows("sst2", tokenizer, source=str(DATA / "sst2"), rows=4, length=200)
    made = calibrated(profile, KEY, model=folder, encoded=found.encoded, device="cpu", task="sst2")
    assert made.statistics[KEY].rows == 4 and (made.statistic(KEY) > 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu(folder, profile):
    data = [row(1, 2, 3, targets=2), row(4, 5, 6, 7, targets=3)]
    on_cpu = calibrated(profile, KEY, model=folder, encoded=data, device="cpu")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        on_gpu = calibrated(profile, KEY, model=folder, encoded=data, device="cuda")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert on_gpu.statistic(KEY) == pytest.approx(on_cpu.statistic(KEY), rel=1e-3)


@pytest.mark.slow
def test_a_studys_arm_is_protected_by_what_its_own_training_rows_say(folder, tmp_path):
    """Through the study's runner: the profile of the task holds the statistic, and the report the layers."""
    from toolkit.records.finetuning import FineTuning
    from toolkit.records.trained import Trained
    from toolkit.runs.tasks import encode, read

    study = FineTuning.model_validate(
        {
            "kind": "fine-tuning",
            "name": "data",
            "question": "?",
            "model": str(folder),
            "tasks": {"sums": {"task": "arithmetic", "train_rows": 24, "rows": 6}},
            "arms": [
                {"name": "plain"},
                {"name": "data", "protect": {"selector": KEY, "budget": "layers=0.2", "calibration_rows": 7}},
                {"name": "chance", "protect": {"selector": "random-matched", "like": "data"}},
            ],
            "levers": {"steps": 2, "batch": 4, "accumulation": 1, "length": 64},
            "seeds": 2,
            "analysis": {"baseline": "plain"},
        }
    )
    results = tk.run(study, out=tmp_path / "results", device="cpu", dtype="float32", progress=False)
    kept = tk.Profile.load(results / "profile--sums.json")
    tokenizer = load_tokenizer(folder)
    split = read(registry.make("task", "arithmetic"), "train", limit=24)
    expected = [encode(tokenizer, example, 64) for example in split.examples[:7]]
    again = calibrated(tk.profile(folder, progress=False), KEY, model=folder, encoded=expected, device="cpu")
    assert kept.statistics[KEY].sha256 == again.statistics[KEY].sha256 and kept.statistics[KEY].rows == 7
    chosen = tk.select(KEY, again, "layers=0.2")
    reports = {(r.arm, r.seeds.draw): r for r in map(Trained.load, (results / "runs").glob("*/report.json"))}
    for seed in (0, 1):
        assert reports["data", seed].protect.layers == chosen.layers
        assert reports["chance", seed].protect.matched_to.hash == chosen.layers_hash
        assert {n for n, p in reports["data", seed].plan.layers.items() if p.quantizer == "none"} == set(chosen.layers)
    assert reports["chance", 0].protect.layers != reports["chance", 1].protect.layers
    assert kept.model == reports["data", 0].model == folder.name  # not where it lies
    assert str(folder) not in (results / "profile--sums.json").read_text()


def test_a_statistic_of_other_rows_is_measured_anew(folder, tmp_path):
    """Fewer rows, or other ones of another folder: what is kept answers for its own rows alone."""
    from toolkit.records.finetuning import FineTuning
    from toolkit.runs.finetuning.kept import calibrated_for
    from toolkit.runs.tasks import read

    def study(rows):
        choice = {"selector": KEY, "budget": "layers=0.2", "calibration_rows": rows}
        return FineTuning.model_validate(
            {
                "kind": "fine-tuning",
                "name": "data",
                "question": "?",
                "model": str(folder),
                "tasks": {"sums": {"task": "arithmetic"}},
                "arms": [{"name": "plain"}, {"name": "data", "protect": choice}],
                "levers": {"length": 64},
                "analysis": {"baseline": "plain"},
            }
        )

    plain = tk.profile(folder, progress=False)
    split = read(registry.make("task", "arithmetic"), "train", limit=24)

    def made(rows, start=0):
        return calibrated_for(tmp_path, study(rows), "sums", plain, split.part(start), device="cpu").statistics[KEY]

    first = made(6)
    assert first.rows == 6 and made(6) == first
    assert (fewer := made(3)).rows == 3 and fewer.values != first.values
    assert made(3, start=5).sha256 != fewer.sha256
