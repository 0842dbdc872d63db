"""Checkpoint layouts of other libraries: bitsandbytes' 4-bit state, and compressed-tensors' packed E2M1."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from toolkit.errors import InputError, closest
from toolkit.interfaces import Layout, Packed
from toolkit_plugins.quantizers.bitsandbytes_4bit import GROUP, BitsAndBytes4Bit, dynamic_map
from toolkit_plugins.quantizers.e2m1 import LARGEST, MAGNITUDES, divide
from toolkit_plugins.quantizers.mxfp4 import MXFP4
from toolkit_plugins.quantizers.nvfp4 import E4M3_FLOOR, E4M3_LARGEST, NVFP4

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

KEPT = (torch.float32, torch.bfloat16, torch.float16)
"""What bitsandbytes decodes to."""


@dataclasses.dataclass(frozen=True)
class BitsAndBytesLayout(Layout):
    """`weight` (codes, uint8) and what `QuantState.as_dict(packed=True)` keeps of its maxima, beside it.

    A stock loader takes these as they are: nothing is quantized again.
    """

    quantizer: BitsAndBytes4Bit
    name = "bitsandbytes 4-bit"

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        """A `BitsAndBytesConfig` as data."""
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": self.quantizer.quant_type,
            "bnb_4bit_use_double_quant": self.quantizer.double,
            "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_threshold": 6.0,
        }

    def tensors(self, packed: Packed, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """`weight`, `weight.absmax`, `weight.quant_map`, with double quantization `weight.nested_…`, and the rest."""
        state = self._state(packed.tensors, tuple(packed.shape), dtype)
        kept = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        return {"weight": packed.tensors["codes"].view(-1, 1), **kept}

    def _state(self, kept: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> QuantState:
        try:
            from bitsandbytes.functional import QuantState
        except ImportError:
            raise InputError("a checkpoint for bitsandbytes needs it: pip install bitsandbytes") from None
        device = kept["codes"].device
        nested = None
        if self.quantizer.double:
            code = dynamic_map(device).clone()
            nested = QuantState(absmax=kept["nested_absmax"], code=code, blocksize=GROUP, dtype=torch.float32)
        return QuantState(
            absmax=kept["absmax"],
            shape=torch.Size(shape),
            code=torch.tensor(self.quantizer.levels, dtype=torch.float32, device=device),
            blocksize=self.quantizer.block,
            quant_type=self.quantizer.quant_type,
            dtype=dtype if dtype in KEPT else torch.float32,
            offset=kept.get("nested_offset"),
            state2=nested,
        )

    def packed(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Packed:
        """Codes and maxima as they are; the offset of double quantization from the state's JSON."""
        return Packed(self.quantizer, self._kept(tensors, shape), shape, dtype)

    def _kept(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        count = math.prod(shape)
        blocks = -(-count // self.quantizer.block)
        kept = {
            "codes": _held(tensors, "weight", -(-count // 2)).view(-1),
            "absmax": _held(tensors, "weight.absmax", blocks),
        }
        if self.quantizer.double:
            state = f"weight.quant_state.bitsandbytes__{self.quantizer.quant_type}"
            about = json.loads(bytes(_held(tensors, state).tolist()))
            kept["nested_absmax"] = _held(tensors, "weight.nested_absmax", -(-blocks // GROUP))
            kept["nested_offset"] = kept["nested_absmax"].new_tensor(about["nested_offset"])
        return kept

    def decoded(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """absmax·level in float32, rounded to `dtype`: bitsandbytes' own values.

        Not by its own code, whose CPU kernel reads the wrong maxima where rows are no whole number of blocks.
        """
        return self.quantizer.decode(self._kept(tensors, shape), shape).reshape(shape).to(dtype)

    def caution(self, shape: tuple[int, int]) -> str | None:
        """Rows that are no whole number of blocks, on a CPU (measured in 0.50.2)."""
        if shape[1] % self.quantizer.block == 0:
            return None
        return (
            f"rows of {shape[1]} weights are no whole number of blocks of {self.quantizer.block}, and bitsandbytes' "
            "CPU kernels then read the wrong maxima; its CUDA kernels read them rightly"
        )


class PackedE2M1(Layout):
    """What compressed-tensors' two packed layouts share: two codes a byte, the first in the low half, (out, in/2)."""

    weights: dict[str, Any]

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        """One group for every `Linear`, weights alone: activations stay in 16 bit."""
        common = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
        group = {
            "targets": ["Linear"],
            "weights": {**common, **self.weights},
            "input_activations": None,
            "output_activations": None,
            "format": self.name,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.name,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "kv_cache_scheme": None,
        }

    def _codes(self, packed: Packed) -> torch.Tensor:
        out, columns = packed.shape
        return packed.tensors["codes"].view(out, columns // 2)


@dataclasses.dataclass(frozen=True)
class NVFP4Layout(PackedE2M1):
    """`nvfp4-pack-quantized`: `weight_packed`, `weight_scale` in E4M3, and G = fl(1/g) as `weight_global_scale`.

    The library computes x̂ = bf16((bf16(s)/G)·e2m1) with a division by the stored reciprocal, where g·s·e2m1 in
    float32 is this quantizer's own; the two differ in the last bit of float32, and in bfloat16 where that bit decides
    a rounding.
    """

    quantizer: NVFP4
    name = "nvfp4-pack-quantized"
    multiple = 16
    weights = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}

    def tensors(self, packed: Packed, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Codes and block scales as they are; the tensor's scale as the format has it, a reciprocal of one element."""
        kept = packed.tensors
        g = kept["global_scale"].float()
        return {
            "weight_packed": self._codes(packed),
            "weight_scale": kept["scales"].view(packed.shape[0], -1),
            "weight_global_scale": (torch.ones_like(g) / g).view(1),
        }

    def packed(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Packed:
        """Codes and block scales as they are; g = fl(1/G), within a last bit of the g that G was made from."""
        stored = _held(tensors, "weight_global_scale", 1).float().view(())
        kept = {
            "codes": _held(tensors, "weight_packed", shape[0], shape[1] // 2).reshape(-1),
            "scales": _held(tensors, "weight_scale", shape[0], -(-shape[1] // self.multiple)),
            "global_scale": torch.ones_like(stored) / stored,
        }
        return Packed(self.quantizer, kept, shape, dtype)

    def decoded(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """(s/G)·e2m1 in float32, rounded to bfloat16, which is what the library returns; then to `dtype`."""
        scale = tensors["weight_scale"].float() / tensors["weight_global_scale"]
        return _times(tensors["weight_packed"], scale, shape, self.multiple).to(torch.bfloat16).to(dtype)

    def scale(self, packed: Packed) -> float | None:
        """g."""
        return float(packed.tensors["global_scale"])

    def at_scale(self, weight: torch.Tensor, scale: float) -> Packed:
        """As the quantizer does, under another g."""
        weight = weight.detach()
        under = _NVFP4AtScale(g=scale)
        return Packed(self.quantizer, under.encode(weight), tuple(weight.shape), weight.dtype)

    def covering(self, weights: Sequence[torch.Tensor]) -> NVFP4:
        """With the largest |w| of all of them as `amax`."""
        largest = max(weight.abs().amax().float().item() for weight in weights)
        return dataclasses.replace(self.quantizer, amax=largest)


@dataclasses.dataclass(frozen=True)
class _NVFP4AtScale(NVFP4):
    """NVFP4 whose tensor's scale is given; never registered, and its tensors are read back by NVFP4 itself."""

    g: float = 1.0

    def pack_scales(self, absmax: torch.Tensor, partial: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """As NVFP4's, but for g."""
        g = absmax.new_tensor(self.g)
        scale = (divide(absmax, LARGEST) / g).clamp(E4M3_FLOOR, E4M3_LARGEST).to(torch.float8_e4m3fn)
        kept = {"scales": scale, "global_scale": g}
        return kept, self.unpack_scales(kept)


@dataclasses.dataclass(frozen=True)
class MXFP4Layout(PackedE2M1):
    """`mxfp4-pack-quantized`: `weight_packed`, and the exponents plus 127 as `weight_scale`, uint8."""

    quantizer: MXFP4
    name = "mxfp4-pack-quantized"
    multiple = 32
    weights = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}

    def tensors(self, packed: Packed, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Codes and exponents as they are."""
        scales = packed.tensors["scales"].view(packed.shape[0], -1)
        return {"weight_packed": self._codes(packed), "weight_scale": scales}

    def packed(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Packed:
        """Codes and exponents as they are."""
        kept = {
            "codes": _held(tensors, "weight_packed", shape[0], shape[1] // 2).reshape(-1),
            "scales": _held(tensors, "weight_scale", shape[0], -(-shape[1] // self.multiple)),
        }
        return Packed(self.quantizer, kept, shape, dtype)

    def decoded(self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """2^(byte − 127)·e2m1, rounded to bfloat16."""
        scale = self.quantizer.unpack_scales({"scales": tensors["weight_scale"]})
        return _times(tensors["weight_packed"], scale, shape, self.multiple).to(torch.bfloat16).to(dtype)


def _held(tensors: Mapping[str, torch.Tensor], name: str, *shape: int) -> torch.Tensor:
    """One tensor, of so many elements in this shape (none given: any).

    Raises:
        InputError: it is missing, or has another shape.
    """
    if name not in tensors:
        raise InputError(f"holds no {name!r}; {closest(name, tensors)}")
    found = tensors[name]
    if (shape and found.numel() != math.prod(shape)) or (len(shape) > 1 and tuple(found.shape) != shape):
        raise InputError(f"holds {name!r} of shape {tuple(found.shape)}, and {'×'.join(map(str, shape))} is asked for")
    return found


def _times(packed: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int], group: int) -> torch.Tensor:
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).view(shape)
    magnitudes = torch.tensor(MAGNITUDES, device=packed.device)[(codes & 7).long()]
    values = torch.where(codes > 7, -magnitudes, magnitudes)
    return values * scale.repeat_interleave(group, dim=1)
