"""What the test of waiting on a CUDA device reasons from, as far as it can be seen without one."""

from __future__ import annotations

import warnings

import pytest
import torch

from toolkit.records.levers import Levers, Seeds
from toolkit.records.plan import Plan
from toolkit.runs.building import build
from toolkit.runs.timing.cycling import driver

CASTING = "Casting complex values to real discards the imaginary part"
"""A warning that torch raises in C++, as it raises those of the synchronization debug mode."""


@pytest.fixture
def always():
    """Warnings that torch gives once are given each time."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


def cast(values):
    return values.float()


def test_a_warning_of_torch_is_counted_at_the_line_of_python_that_called_it(waits, always):
    values, seen = torch.zeros(2, dtype=torch.complex64), waits(CASTING)
    seen.begin()
    cast(values), cast(values)
    values.float()
    warnings.warn("another message", stacklevel=1)
    seen.end()
    line = test_a_warning_of_torch_is_counted_at_the_line_of_python_that_called_it.__code__.co_firstlineno + 4
    assert seen.split(cast) == (2, {f"{__file__}:{line}": 1})
    assert seen.split() == (0, {f"{__file__}:{line}": 1, f"{__file__}:{cast.__code__.co_firstlineno + 1}": 2})
    assert waits().split(cast) == (0, {})


def test_a_warning_in_a_backward_has_a_place(waits, always):
    """It is raised in the engine, and told where `backward` was called."""

    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return cast(gradient.to(torch.complex64))

    x, seen = torch.ones(2, requires_grad=True), waits(CASTING)
    seen.begin()
    Careless.apply(x).sum().backward()
    seen.end()
    known, elsewhere = seen.split(cast)
    assert known + sum(elsewhere.values()) == 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_rows_are_looked_for_at_most_once_a_forward(
    tiny, examples, tmp_path, packing, monkeypatch, checkpointing
):
    """Once a micro-batch; recomputed blocks do not look again."""
    if not packing:
        pytest.skip("this transformers looks for no packed rows")
    looked = []

    def counted(*args, **kwargs):
        looked.append(packing[0](*args, **kwargs))
        return looked[-1]

    monkeypatch.setattr(f"{packing[0].__module__}.{packing[0].__name__}", counted)
    model = build(tiny(), Plan.protecting(None, base="none", rank=4))
    levers = Levers(batch=2, accumulation=2, checkpointing=checkpointing)
    found = driver(model, examples((5, 8), (9, 4), (12, 12), (6, 7)), levers, Seeds.all(0), tmp_path, 0)
    ran = found.run(cycles=3, begin=looked.clear)
    found.close()
    assert ran.cycles == 3 and len(looked) == 3 * 4
    assert set(looked) == {None}  # ours are never packed: nothing depends on the answer
