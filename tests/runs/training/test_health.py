"""What ends a bad run, and says where; what is flagged."""

import pytest
import torch

from toolkit.records.levers import Levers, Seeds
from toolkit.records.plan import Adapter, LayerPlan, Plan
from toolkit.runs.building import build
from toolkit.runs.tasks.encoding import Encoded
from toolkit.runs.training import train
from toolkit.runs.training.batches import schedule
from toolkit.runs.training.health import bare

LEVERS = Levers(batch=4, accumulation=2, steps=6, learning_rate=1e-2)
MARK = 63


@pytest.fixture
def marked(rows):
    """Examples of which only those of step 3 hold token 63."""
    data = [
        Encoded(tuple(i % MARK for i in row.ids), row.target)
        for row in rows(60)  # 63 becomes 0
    ]
    bad = schedule(data, LEVERS, 0).steps[2][1][0]
    data[bad] = Encoded((MARK, *data[bad].ids[1:]), data[bad].target)
    assert [bad in [r for m in step for r in m] for step in schedule(data, LEVERS, 0).steps] == [
        False, False, True, False, False, False,
    ]  # fmt: skip
    return data


def spoil(model, module, what):
    """Once a batch holds the mark, a module's output, or the gradient of its output, is not finite."""
    inner, seen = model.get_base_model(), []

    def look(module, args, output):
        seen[:] = [bool((args[0] == MARK).any())]

    def harm(module, args, output):
        if not seen[0]:
            return None
        if what == "output":
            return output * float("inf")
        output = output.clone()
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("nan"))
        return output

    inner.model.embed_tokens.register_forward_hook(look)
    inner.get_submodule(module).register_forward_hook(harm)
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("what", ["output", "gradient"])
def test_a_loss_or_gradient_that_is_not_finite_names_step_and_layer(
    arm, marked, adapters, tmp_path, what, checkpointing
):
    levers = LEVERS.model_copy(update={"checkpointing": checkpointing})
    model = spoil(arm("none"), "model.layers.1.mlp.act_fn", what)
    outcome = train(model, marked, levers, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    (flag,) = outcome.flags
    assert (flag.check, flag.severity, flag.step) == ("non-finite-loss", "fatal", 3)
    assert not outcome.finished
    assert flag.layer == "model.layers.1.mlp.act_fn" and flag.layer in flag.reason
    assert (("gradient of" if what == "gradient" else "output of") in flag.reason) and "step 3" in flag.reason
    # what was learned before it is kept, and nothing else
    expected = arm("none")
    plan = schedule(marked, LEVERS, 0)

    class Stop(Exception):
        pass

    passes = [0]

    def stop(*_):
        passes[0] += 1
        if passes[0] == 2 * len(plan.steps[0]) + 1:
            raise Stop

    expected.get_base_model().lm_head.register_forward_hook(stop)
    with pytest.raises(Stop):
        train(expected, marked, LEVERS, Seeds.all(0), folder=tmp_path / "b", pad=0, progress=False)
    for name, value in adapters(expected).items():
        torch.testing.assert_close(adapters(model)[name], value, rtol=1e-5, atol=1e-7)
    assert all(torch.isfinite(value).all() for value in adapters(model).values())


def test_the_layer_of_a_broken_adapter_is_named(arm, marked, tmp_path):
    """A weight that overflows: Ŵx is finite, BAx is not."""
    model = arm("nf4")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.2.mlp.down_proj.lora_B" in name:
                parameter.fill_(float("inf"))
    outcome = train(model, marked, LEVERS, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    assert outcome.flags[0].step == 1
    assert outcome.flags[0].layer.startswith("model.layers.2.mlp.down_proj")


def test_an_adapter_without_a_gradient_ends_the_run(arm, rows, tmp_path):
    model = arm("none")
    model.get_base_model().model.layers[1].stray = torch.nn.Parameter(torch.ones(3))
    outcome = train(model, rows(), LEVERS, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    assert [(f.check, f.step) for f in outcome.flags] == [("no-gradient", 1)]
    assert "model.layers.1.stray" in outcome.flags[0].reason and not outcome.finished


def test_a_zero_gradient_ends_the_run(arm, rows, tmp_path):
    model = arm("none")
    for name, parameter in model.named_parameters():
        if "layers.1.self_attn.v_proj.lora_B" in name:
            parameter.register_hook(lambda gradient: gradient * 0)
    outcome = train(model, rows(), LEVERS, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    (flag,) = outcome.flags
    assert (flag.check, flag.step, flag.layer) == ("zero-gradient", 1, "model.layers.1.self_attn.v_proj")


@pytest.mark.parametrize(("steps", "warmup", "step"), [(6, 0.0, 2), (1, 0.0, 1), (8, 0.5, 3)])
def test_an_adapter_that_does_not_move_ends_the_run(arm, rows, tmp_path, steps, warmup, step):
    """A learning rate that float32 cannot hold: all updates are zero. Under warm-up the first rate is zero by right."""
    levers = LEVERS.model_copy(update={"learning_rate": 1e-50, "steps": steps, "warmup": warmup})
    outcome = train(arm("none"), rows(), levers, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    (flag,) = outcome.flags
    assert (flag.check, flag.step) == ("adapter-still-zero", step)
    assert "28 adapters" in flag.reason


def started(dense, s: float = 2.75):
    """A model whose every B starts elsewhere than at zero."""
    adapter = Adapter(rank=4, alpha=4 * s, scaler="lora", scaling=s)
    return build(dense(), Plan(default=LayerPlan(quantizer="nf4", adapter=adapter, initializer="loftq(iterations=1)")))


@pytest.mark.parametrize(("steps", "step"), [(6, 2), (1, 1)])
def test_a_b_that_starts_elsewhere_and_does_not_move_ends_the_run(dense, rows, tmp_path, steps, step):
    levers = LEVERS.model_copy(update={"learning_rate": 1e-50, "steps": steps})
    outcome = train(started(dense), rows(), levers, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    (flag,) = outcome.flags
    assert (flag.check, flag.step) == ("adapter-did-not-move", step)
    assert "28 adapters" in flag.reason


def test_one_b_of_many_that_does_not_move_is_named(dense, rows, tmp_path):
    """Its gradient is that of a number that float32 cannot add: the others learn."""
    model = started(dense)
    path = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.default.weight"
    model.get_parameter(path).data *= 1e12
    outcome = train(model, rows(), LEVERS, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    (flag,) = outcome.flags
    assert (flag.check, flag.layer) == ("adapter-did-not-move", "model.layers.1.self_attn.v_proj")


def test_a_b_that_starts_elsewhere_and_learns_passes(dense, rows, tmp_path):
    levers = LEVERS.model_copy(update={"steps": 12})
    model = started(dense)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    outcome = train(model, rows(), levers, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    assert outcome.finished and not outcome.flags
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)


def test_padding_waste_is_flagged(arm, tmp_path):
    short, long = Encoded((1,) * 4, (False, False, True, True)), Encoded((2,) * 60, (False,) * 58 + (True,) * 2)
    levers = Levers(batch=8, accumulation=1, group_by_length=False)
    outcome = train(arm("none"), [long, *[short] * 7], levers, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    assert outcome.finished
    assert outcome.course.padding == pytest.approx(1 - (60 + 28) / (8 * 64))
    (flag,) = outcome.flags
    assert (flag.check, flag.severity) == ("padding-waste", "flag") and "83%" in flag.reason


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`, 2.00 GiB"),
        MemoryError("2.00 GiB"),
    ],
)
def test_out_of_memory_marks_the_run_and_its_step(arm, rows, adapters, tmp_path, error):
    """Simulated: the device's, the host's and a library's own error, raised in the seventh forward pass."""
    model, passes = arm("none"), [0]

    def hook(*_):
        passes[0] += 1
        if passes[0] == 7:
            raise error

    handle = model.get_base_model().lm_head.register_forward_hook(hook)
    outcome = train(model, rows(), LEVERS, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    (flag,) = outcome.flags
    assert (flag.check, flag.severity, flag.step) == ("out-of-memory", "fatal", 4)
    assert "step 4" in flag.reason and "2.00 GiB" in flag.reason
    assert not outcome.finished and outcome.course.steps == 3 and outcome.course.planned == 6
    assert len(outcome.curve.read_text().splitlines()) == 1 + 3
    handle.remove()
    again = train(arm("none"), rows(), LEVERS, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    assert again.finished  # the process, the folder and a new model are usable


def test_an_error_that_is_not_of_memory_is_not_called_so(arm, rows, tmp_path):
    model = arm("none")

    def hook(*_):
        raise RuntimeError("shapes do not fit")

    model.get_base_model().lm_head.register_forward_hook(hook)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        train(model, rows(), LEVERS, Seeds.all(0), folder=tmp_path, pad=0, progress=False)


def test_names_are_those_that_transformers_gives():
    path = "base_model.model.model.layers.10.mlp.up_proj"
    assert bare(path) == "model.layers.10.mlp.up_proj"
    assert bare("base_model.model.model.layers.1.mlp.up_proj.base_layer") == "model.layers.1.mlp.up_proj"


@pytest.mark.gpu
def test_a_loss_scale_at_its_floor_ends_the_run(arm, rows, tmp_path):
    """Every gradient of one layer's input overflows float16, at any scale."""
    model = arm("none", dtype=torch.float16).cuda()
    layer = model.get_base_model().model.layers[2].mlp

    def harm(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))

    layer.register_forward_hook(harm)
    levers = LEVERS.model_copy(update={"steps": 60})
    outcome = train(model, rows(), levers, Seeds.all(0), folder=tmp_path, pad=0, progress=False)
    (flag,) = [flag for flag in outcome.flags if flag.severity == "fatal"]
    assert flag.check == "loss-scale-at-floor" and not outcome.finished
    assert outcome.course.scale <= 1
    assert flag.step == 30  # 2^16 is halved every step: at 1 after 16, seen at 20, still there at 30
