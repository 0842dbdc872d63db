"""Group-wise integers: codes by hand, the largest error that they may have, and how many bytes they take."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toolkit_plugins.dataflows.pact.integers import GROUP, quantize, values


@pytest.mark.parametrize("bits", [2, 4])
def test_a_group_by_hand(bits):
    """Levels from −3 to 3 in equal steps: each is met, and what lies between goes to the nearest."""
    top = 2**bits - 1
    step = 6 / top  # 2 and .4
    levels = torch.linspace(-3, 3, top + 1)
    x = torch.cat([levels, levels[:-1] + 0.4 * step, levels[:-1] + 0.6 * step])
    x = torch.cat([x, torch.full((GROUP - len(x),), -3.0)])[None]
    codes, scale, low = quantize(x, bits)
    assert low.item() == -3 and scale.item() == pytest.approx(step, rel=2**-8)
    found = values(codes, scale, low, bits=bits, width=GROUP)[0]
    expected = torch.cat([torch.arange(top + 1), torch.arange(top), torch.arange(1, top + 1)])
    torch.testing.assert_close(found[: 3 * top + 1], -3 + scale.float().item() * expected)
    first = sum((int(code) << bits * at) for at, code in enumerate(expected[: 8 // bits]))
    assert codes[0, 0] == first  # the first in the lowest bits


@given(
    bits=st.sampled_from([2, 4]), count=st.integers(1, 4), width=st.integers(1, 300), seed=st.integers(0, 10**6),
    offset=st.sampled_from([0.0, 10.0]), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_the_error_is_half_a_step_and_the_rounding_of_the_scale(bits, count, width, seed, offset, dtype):
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    x = ((x + offset) * 3.0 ** (seed % 9 - 4)).to(dtype)
    codes, scale, low = quantize(x, bits)
    groups = math.ceil(width / GROUP)
    assert codes.dtype == torch.uint8 and codes.shape == (count, groups * GROUP * bits // 8)
    assert scale.shape == low.shape == (count, groups) and scale.dtype == low.dtype == torch.bfloat16
    found = values(codes, scale, low, bits=bits, width=width)
    for at in range(groups):
        part = slice(at * GROUP, min((at + 1) * GROUP, width))
        wide, size = x[:, part].float(), x[:, part].float().abs().amax(-1)
        spread = wide.amax(-1) - wide.amin(-1)
        allowed = spread / (2**bits - 1) / 2 + 2**-8 * (size + 1.1 * spread) * 1.01
        assert ((found[:, part] - wide).abs() <= allowed[:, None]).all()


def test_no_group_sees_another_and_padding_is_seen_by_none():
    x = torch.randn(2, 150, generator=torch.Generator().manual_seed(0)) + 5  # a padding of zeros would widen the range
    whole = values(*quantize(x, 4), bits=4, width=150)
    assert torch.equal(whole[:, :GROUP], values(*quantize(x[:, :GROUP], 4), bits=4, width=GROUP))
    assert torch.equal(whole[:, GROUP:], values(*quantize(x[:, GROUP:], 4), bits=4, width=150 - GROUP))
    assert (whole[:, GROUP:] - x[:, GROUP:]).abs().max() < 0.25


def test_constants_zeros_and_nan():
    x = torch.stack([torch.full((130,), 2.5), torch.zeros(130), torch.arange(130.0)])
    x[2, 3] = math.nan
    found = values(*quantize(x, 2), bits=2, width=130)
    assert torch.equal(found[:2], x[:2])
    assert found[2, :GROUP].isnan().all() and found[2, GROUP:].isfinite().all()
