"""The timed Trainer is the one that trains: the same updates, whole cycles, and nothing read back while it is timed."""

import time

import pytest
import torch

from toolkit.errors import InputError
from toolkit.records.levers import Levers, Seeds
from toolkit.records.plan import Plan
from toolkit.runs.building import build
from toolkit.runs.timing.batches import fixed, shared
from toolkit.runs.timing.cycling import driver
from toolkit.runs.training import trainer

LISTED = ((5, 8), (9, 4), (12, 12), (6, 7))


def built(model, dtype="float32", base="none"):
    return build(model, Plan.protecting(None, base=base, rank=4, alpha=16), dtype=dtype)


def seen_batches(model):
    """The token ids of each forward pass, as they come."""
    seen = []
    embedding = model.get_base_model().get_input_embeddings()
    embedding.register_forward_pre_hook(lambda module, args: seen.append(args[0].tolist()))
    return seen


def test_every_cycle_is_the_whole_list_in_its_order(tiny, examples, tmp_path):
    model = built(tiny())
    seen = seen_batches(model)
    found = driver(model, examples(*LISTED), Levers(batch=2, accumulation=2), Seeds.all(0), tmp_path, 0)
    ran = found.run(cycles=3)
    found.close()
    assert ran.cycles == 3 and found.steps == 2
    assert len(seen) == 4 * 4 and seen == seen[:4] * 4  # the leading cycle, and three
    assert [[sum(token != 0 for token in row) for row in batch] for batch in seen[:4]] == [list(n) for n in LISTED]


def test_a_duration_ends_at_the_first_whole_cycle_past_it(tiny, examples, tmp_path):
    found = driver(built(tiny()), examples(*LISTED), Levers(batch=2, accumulation=4), Seeds.all(0), tmp_path, 0)
    marks = []
    ran = found.run(
        seconds=0.5,
        begin=lambda: marks.append(time.perf_counter()),
        end=lambda: marks.append(time.perf_counter()),
    )
    found.close()
    assert ran.seconds >= 0.5 and ran.cycles >= 1
    assert ran.seconds == pytest.approx(marks[1] - marks[0], abs=0.05)
    assert (ran.cycles - 1) * ran.seconds / ran.cycles < 0.5 * 1.5  # one cycle fewer would have been too short


def test_updates_are_those_of_training(tiny, examples, tmp_path):
    """Two cycles of the list change the adapters as the same Trainer does by itself on the same micro-batches."""
    levers = Levers(batch=2, accumulation=2, schedule="constant", learning_rate=0.01, clip=0.3)
    timed = built(tiny())
    found = driver(timed, examples(*LISTED), levers, Seeds.all(0), tmp_path / "a", 0)
    found.run(lead=2, cycles=1)
    found.close()
    alone = built(tiny())
    rows = [row for batch in examples(*LISTED) for row in batch]
    plain = trainer(
        alone,
        rows,
        levers.model_copy(update={"steps": 4}),
        Seeds.all(0),
        folder=tmp_path / "b",
        pad=0,
        repeated=[[0, 1], [2, 3], [4, 5], [6, 7]],
    )
    with plain.ready():
        plain.train()
    before = built(tiny()).state_dict()
    for name, value in alone.state_dict().items():
        assert torch.equal(value, timed.state_dict()[name]), name
    assert any(not torch.equal(value, before[name]) for name, value in alone.state_dict().items())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_is_read_back_while_the_clock_runs(tiny, examples, tmp_path, monkeypatch, checkpointing):
    levers = Levers(batch=2, accumulation=2, checkpointing=checkpointing)
    found = driver(built(tiny(torch.bfloat16), "bfloat16"), examples(*LISTED), levers, Seeds.all(0), tmp_path, 0)
    reads, marks, item = [], [], torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(1) or item(self))
    found.run(cycles=4, begin=lambda: marks.append(len(reads)), end=lambda: marks.append(len(reads)))
    found.close()
    assert marks[0] == marks[1]
    assert len(reads) > marks[1]  # Trainer's own, after the end: the count counts


def test_every_sample_computes_under_autocast(tiny, examples, tmp_path):
    """Each call of `train()` begins anew; one that forgot to wrap the model would be timed in float32."""
    model = built(tiny(torch.bfloat16), "bfloat16")
    seen = []
    layer = model.get_base_model().model.layers[0].self_attn.q_proj.lora_A["default"]
    layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    found = driver(model, examples(*LISTED), Levers(batch=2, accumulation=2), Seeds.all(0), tmp_path, 0)
    for _ in range(3):
        seen.clear()
        found.run(cycles=1)
        assert set(seen) == {torch.bfloat16}
    found.close()


def test_a_closed_driver_leaves_the_model_as_it_was_built(tiny, examples, tmp_path):
    model = built(tiny())
    found = driver(model, examples(*LISTED), Levers(batch=2, accumulation=4), Seeds.all(0), tmp_path, 0)
    assert model.training
    found.close()
    assert not model.training and all(p.grad is None for p in model.parameters())


# -- the list ----------------------------------------------------------------------------------------------------


def test_the_list_is_fixed_whole_and_fills_optimizer_steps(examples):
    data = [row for batch in examples(*[(4 + i % 9, 5 + i % 7) for i in range(40)]) for row in batch]
    levers = Levers(batch=3, accumulation=4)
    made = fixed(data, levers, 6, 0)
    assert len(made.rows) == 8 and all(len(batch) == 3 for batch in made.rows)  # 6, rounded up to whole steps
    assert made == fixed(data, levers, 6, 0) != fixed(data, levers, 6, 1)
    assert made.real == sum(len(row.ids) for batch in made.rows for row in batch)
    for record, batch in zip(made.record, made.rows, strict=True):
        longest = max(len(row.ids) for row in batch)
        assert record == {
            "examples": 3,
            "real": sum(len(row.ids) for row in batch),
            "target": sum(len(row.ids) - 3 for row in batch),
            "computed": 3 * (-(-longest // 8) * 8),
        }
    assert len(made.widest) == 3 and max(len(row.ids) for row in made.widest) > 8  # padded to 16, as the longest


def test_too_few_rows_are_refused_with_both_numbers(examples):
    data = [row for batch in examples((5, 6), (7, 8)) for row in batch]
    with pytest.raises(InputError, match="8 batches of 2 examples, 16 in all, and the task gives 4"):
        fixed(data, Levers(batch=2, accumulation=8), 3, 0)


def test_arms_that_would_need_different_lists_are_refused():
    ours = {"qlora": Levers(), "wide": Levers(batch=12), "high": Levers(learning_rate=1e-3)}
    assert shared({name: ours[name] for name in ("qlora", "high")}) == Levers()
    with pytest.raises(InputError, match="arm 'wide' has lever batch 12 and arm 'qlora' 6"):
        shared(ours)
