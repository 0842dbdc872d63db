"""Backward really ends at the lowest adapted block: counted through the real Trainer."""

import pytest
import torch

from toolkit.errors import RunError
from toolkit.records.levers import Levers, Seeds
from toolkit.runs.training import lowest_block, train, trainer
from toolkit.runs.training.backward import blocks_of, run_through, stop_backward


def counted(model, data, folder, **levers):
    """One step's forward passes of each block, blocks that backward entered, whose input asked for it, gradients.

    Forward passes are counted by a pre-hook on the block's first part: non-reentrant recomputation stops early, so
    that post-hooks miss it, and transformers checkpoints a block's `forward`, with the block's own hooks outside.
    """
    blocks = blocks_of(model)
    forwards, entered, asked, gradients = dict.fromkeys(blocks, 0), set(), set(), {}
    handles = []
    for index, block in blocks.items():

        def inside(module, args, index=index):
            forwards[index] += 1

        def before(module, args, kwargs, index=index):
            hidden = args[0] if args else kwargs["hidden_states"]
            if hidden.requires_grad:
                asked.add(index)

        def after(module, args, output, index=index):
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient, index=index: entered.add(index))

        handles += [block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)]
        handles.append(block.input_layernorm.register_forward_pre_hook(inside))
    levers = Levers(batch=4, accumulation=1, steps=1, clip=1e9, **levers)
    made = trainer(model, data, levers, Seeds.all(0), folder=folder, pad=0)
    clip = made._clip_grad_norm

    def look(wrapped):
        gradients.update({n: p.grad.clone() for n, p in made.model.named_parameters() if p.requires_grad})
        return clip(wrapped)

    made._clip_grad_norm = look
    with made.ready():
        made.train()
    for handle in handles:
        handle.remove()
    return [forwards[i] for i in sorted(forwards)], sorted(entered), sorted(asked), gradients


CASES = [("llama", "none"), ("llama", "nf4"), ("llama", "nvfp4"), ("phi3", "none"), ("phi3", "nf4")]


@pytest.mark.parametrize(("family", "base"), CASES)
@pytest.mark.parametrize(("adapted", "forwards", "entered"), [({3}, [1, 1, 1, 2], [3]), ({2}, [1, 1, 2, 2], [2, 3])])
def test_with_checkpointing_nothing_below_runs_again(arm, rows, tmp_path, family, base, adapted, forwards, entered):
    data = rows(4)
    stopped = counted(arm(base, adapted, family=family), data, tmp_path, checkpointing=True)
    assert stopped[:3] == (forwards, entered, [i for i in entered if i > min(entered)])
    through = counted(arm(base, adapted, family=family), data, tmp_path, checkpointing=True, backward_stop=False)
    assert through[:3] == ([2, 2, 2, 2], [0, 1, 2, 3], [0, 1, 2, 3])
    plain = counted(arm(base, adapted, family=family), data, tmp_path)
    assert plain[:3] == ([1, 1, 1, 1], entered, [i for i in entered if i > min(entered)])
    for name, gradient in stopped[3].items():
        assert gradient.any() or "lora_A" in name
        torch.testing.assert_close(through[3][name], gradient, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(plain[3][name], gradient, rtol=1e-5, atol=1e-8)


def test_without_checkpointing_the_lever_off_runs_through_all(arm, rows, tmp_path):
    forwards, entered, asked, _ = counted(arm("none", {2}), rows(4), tmp_path, backward_stop=False)
    assert (forwards, entered, asked) == ([1] * 4, [0, 1, 2, 3], [0, 1, 2, 3])


def nodes(tensor):
    """Every autograd node that a backward pass from the tensor would run."""
    seen, left = set(), [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
    return seen


def test_the_graph_holds_no_node_below_the_lowest_block(arm, rows, tmp_path):
    """The nodes of a four-block model adapted in its last block are those of a one-block model."""
    counts = []
    for blocks in (1, 4):
        made = trainer(
            arm("none", {blocks - 1}, blocks=blocks),
            rows(4),
            Levers(batch=4, accumulation=1, steps=1),
            Seeds.all(0),
            folder=tmp_path,
            pad=0,
        )
        step = made.training_step

        def look(model, inputs, num_items_in_batch=None, made=made, step=step):
            loss = made.compute_loss(model, made._prepare_inputs(dict(inputs)), num_items_in_batch=num_items_in_batch)
            counts.append(sorted(node.name() for node in nodes(loss)))
            return step(model, inputs, num_items_in_batch)

        made.training_step = look
        with made.ready():
            made.train()
    assert counts[0] == counts[1]


def test_the_lowest_block_is_that_of_the_lowest_adapter(arm, dense):
    assert lowest_block(arm("nf4")) == 0
    assert lowest_block(arm("nf4", {2, 3})) == 2
    assert lowest_block(arm("none", {1}, family="gpt2")) == 1
    model = dense()
    assert lowest_block(model) is None  # nothing is trained
    model.lm_head.weight.requires_grad_(True)
    assert lowest_block(model) == 4
    model.model.embed_tokens.weight.requires_grad_(True)
    assert lowest_block(model) is None


def test_hooks_left_behind_are_removed(arm):
    """Enabling twice leaves the first hook, which transformers' own disabling no longer finds."""
    model = arm("none", {3})
    inner = model.get_base_model()
    inner.enable_input_require_grads()
    inner.enable_input_require_grads()
    stop_backward(model)
    assert not inner.get_input_embeddings()._forward_hooks
    handle = run_through(model)
    ids = torch.tensor([[1, 2, 3]])
    assert inner.get_input_embeddings()(ids).requires_grad
    handle.remove()
    assert not inner.get_input_embeddings()(ids).requires_grad


def test_a_graph_that_still_runs_below_is_an_error(arm, rows, tmp_path):
    model = arm("none", {3})
    model.get_base_model().model.layers[1].register_forward_hook(lambda m, args, output: output.requires_grad_(True))
    with pytest.raises(RunError, match="below block 3"):
        train(model, rows(4), Levers(batch=4, accumulation=1, steps=1), Seeds.all(0), folder=tmp_path, pad=0)


def test_the_model_comes_back_as_it_was(arm, rows, tmp_path):
    model = arm("nf4", {3}, dtype=torch.bfloat16)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    forward, cache = model.forward.__func__, model.config.use_cache
    train(model, rows(8), Levers(batch=4, accumulation=1, checkpointing=True), Seeds.all(0), folder=tmp_path, pad=0)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks
    assert model.forward.__func__ is forward and model.config.use_cache == cache
    assert not model.training and not any(m.training for m in model.modules())
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
