"""What bitsandbytes' two 4-bit formats share: flat blocks with a float32 maximum each, themselves quantizable.

The reference is bitsandbytes' CPU code, which this module equals bit for bit (codes, maxima, the maxima's own
codes, scales and offset). Its CUDA kernel differs in two places: it multiplies by 1/absmax in a short last block
as well, where the CPU divides, and it finds the nearest 8-bit level of a maximum by an exact search, where the
CPU rounds to one of 65,536 table entries first (about 3 maxima in 1,000 get a neighbouring level). This module
does as the CPU code on every device, but for the mean of the maxima: PyTorch sums it in an order that depends on
the device and the number of threads, so that its last bit, in bitsandbytes as here, is theirs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.interfaces import Layout, Packed
from toolkit.weights import native
from toolkit_plugins.quantizers.codebook import CodebookQuantizer

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
GROUP = 256
"""Maxima a group of the double quantization."""
FLOOR = 1e-38
"""No maximum is divided by below this (bitsandbytes' own floor): a block of zeros stays zero."""
TABLE = 65536

# Said on import about a kernel that `linear` switches off: it reads like a failure, and nothing has failed.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit_forward" not in str(record.msg))


class BitsAndBytes4Bit(CodebookQuantizer):
    """Common base of the bitsandbytes formats; its subclasses declare the options `block` and `double`."""

    by_row = False
    mode = "divide-partial"
    first_nibble = "high"
    scale_name = "absmax"
    quant_type: ClassVar[str]
    block: int
    double: bool

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            allowed = ", ".join(map(str, BLOCKS))
            raise InputError(f"{self.name} has no block size {self.block}; allowed: {allowed}")

    @property
    def block_size(self) -> int:
        """Weights a block."""
        return self.block

    def pack_scales(self, absmax: torch.Tensor, partial: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """absmax (float32 a block), or with double quantization 8-bit codes of absmax − mean in groups of 256."""
        absmax = absmax.view(-1)
        if partial:
            absmax = torch.cat([absmax[:-1], absmax[-1:].clamp(min=FLOOR)])
        factor = 1.0 / absmax.clamp(min=FLOOR)
        if partial:
            factor[-1] = absmax[-1]
        factor = factor.view(1, -1)
        if not self.double:
            return {"absmax": absmax}, factor
        offset = absmax.mean()
        codes, nested = quantize_8bit(absmax - offset)
        return {"absmax": codes, "nested_absmax": nested, "nested_offset": offset}, factor

    def unpack_scales(self, kept: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """absmax as it is read back: 8-bit level · the group's maximum + offset."""
        if not self.double:
            return kept["absmax"]
        levels = dynamic_map(kept["absmax"].device).index_select(0, kept["absmax"].int())
        groups = kept["nested_absmax"].repeat_interleave(GROUP)[: levels.numel()]
        return levels.mul_(groups).add_(kept["nested_offset"])

    def scale_entries(
        self, kept: Mapping[str, torch.Tensor], blocks: torch.Tensor, absmax: torch.Tensor
    ) -> torch.Tensor:
        """absmax; with double quantization its 8-bit code, the groups' maxima and the offset being as kept."""
        if not self.double:
            return absmax
        nested = kept["nested_absmax"][blocks // GROUP]
        return _codes((absmax - kept["nested_offset"]) * (1.0 / nested))

    def scale_values(
        self, kept: Mapping[str, torch.Tensor], blocks: torch.Tensor, entries: torch.Tensor
    ) -> torch.Tensor:
        """absmax as it is read back."""
        if not self.double:
            return entries
        levels = dynamic_map(entries.device)[entries.int()]
        return levels.mul_(kept["nested_absmax"][blocks // GROUP]).add_(kept["nested_offset"])

    def layout(self, form: str) -> Layout | None:
        """bitsandbytes' own 4-bit checkpoints."""
        from toolkit_plugins.quantizers.layouts import BitsAndBytesLayout

        return BitsAndBytesLayout(self) if form == "bnb" else None

    def linear(self, linear: nn.Linear, compute_dtype: torch.dtype, packed: Packed | None = None) -> nn.Module | None:
        """A bitsandbytes `Linear4bit` that holds Q(W), or `packed`, as it is; nothing is quantized twice.

        `None` for a layer on the CPU whose rows are no whole number of blocks: bitsandbytes' AVX512 kernel then
        reads the wrong maxima (measured in 0.50.2: twice the error), so that the data flow must decode it.

        Its switch to a bfloat16 layout on processors with AVX512-BF16 is turned off: it would round the scales
        to bfloat16 in the first evaluation, and it fails on widths that are no multiple of 32.

        Raises:
            InputError: bitsandbytes is not installed.
        """
        try:
            import bitsandbytes as bnb
        except ImportError:
            raise InputError(f"{self.key} computes through bitsandbytes: pip install bitsandbytes") from None
        weight = linear.weight.detach()
        if weight.device.type == "cpu" and weight.shape[1] % self.block:
            return None
        held = self.quantize(weight).tensors if packed is None else packed.to(weight.device).tensors
        layer = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=compute_dtype,
            compress_statistics=self.double,
            quant_type=self.quant_type,
            quant_storage=torch.uint8,
            device="meta",
        )
        nested = None
        if self.double:
            nested = bnb.functional.QuantState(
                absmax=held["nested_absmax"],
                code=dynamic_map(weight.device).clone(),
                blocksize=GROUP,
                dtype=torch.float32,
            )
        state = bnb.functional.QuantState(
            absmax=held["absmax"],
            shape=weight.shape,
            code=torch.tensor(self.levels, dtype=torch.float32, device=weight.device),
            blocksize=self.block,
            quant_type=self.quant_type,
            dtype=weight.dtype if weight.dtype in native.DTYPES else torch.float32,
            offset=held.get("nested_offset"),
            state2=nested,
        )
        layer.weight = bnb.nn.Params4bit(
            held["codes"].view(-1, 1),
            requires_grad=False,
            quant_state=state,
            blocksize=self.block,
            compress_statistics=self.double,
            quant_type=self.quant_type,
            quant_storage=torch.uint8,
            module=layer,
            bnb_quantized=True,
        )
        layer.quant_state = state
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=linear.bias.requires_grad)
        layer.support_avx512bf16_for_cpu = False
        return layer.train(linear.training)


def quantize_8bit(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(8-bit codes, max|v| of each group of 256) of a float32 vector, as bitsandbytes' CPU kernel has them.

    y = v·(1/max) goes to one of 65,536 even steps on [−1, 1], and that to its nearest level of the dynamic map.
    A group of zeros has the code 0.
    """
    groups = torch.nn.functional.pad(values, (0, -values.numel() % GROUP)).view(-1, GROUP)
    absmax = groups.abs().amax(1)
    codes = _codes(groups * (1.0 / absmax)[:, None])
    codes[absmax == 0] = 0
    return codes.view(-1)[: values.numel()].contiguous(), absmax


def _codes(ratio: torch.Tensor) -> torch.Tensor:
    ratio = ratio.nan_to_num_(0, torch.inf, -torch.inf).clamp_(-1, 1)
    step = ratio.add_(1).mul_((TABLE - 1) / 2).add_(0.5).int()
    return _table(ratio.device).index_select(0, step.view(-1)).view_as(step)


@functools.cache
def dynamic_map(device: torch.device) -> torch.Tensor:
    """The 256 levels of bitsandbytes' signed dynamic 8-bit type, ascending (Dettmers et al., 2022, §2.1).

    With i = 0 … 6, the magnitudes 10^(i−6)·m, m the 2^i midpoints of an even split of [0.1, 1]; zero; and one.
    """
    positive: list[float] = []
    for i in range(7):
        ends = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        positive += (10.0 ** (i - 6) * ((ends[:-1] + ends[1:]) / 2)).tolist()
    levels = sorted([-x for x in positive] + [0.0] + positive + [1.0])
    return torch.tensor(levels, dtype=torch.float32).to(device)


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    levels = dynamic_map(torch.device("cpu"))
    grid = torch.arange(TABLE, dtype=torch.float32) * 2 / (TABLE - 1) - 1
    return torch.bucketize(grid, (levels[:-1] + levels[1:]) / 2).to(torch.uint8).to(device)
