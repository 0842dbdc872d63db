"""OLoRA, as PEFT makes it.

PEFT's EVA is not among these starts: its A are principal components of centred inputs, for which a layer's second
moments alone do not suffice, and it moves ranks between layers, which a plan decides.
"""

from __future__ import annotations

import dataclasses

import torch

from toolkit.interfaces import Given, Initializer, Quantizer, Start
from toolkit.weights.precision import full_float32
from toolkit_plugins.initializers.fitting import Base, adapter_of, check_rank, error_of, left_over, norm


@dataclasses.dataclass(frozen=True)
class OLoRA(Initializer):
    """Orthonormal columns in B, from PEFT's own code; the rest quantized by the plan's quantizer.

    W = QR, B = Q[:, :r], A = R[:r], Ŵ = Q(W − s·BA) (Büyükakyüz, 2024, OLoRA; `peft.tuners.lora.LoraLayer.olora_init`
    on the dense weight in float32). Nothing is fitted to the quantization error, and the base depends on s: PEFT's
    choice, kept. `residuals` has the zero start's and this one's.
    """

    name = "olora"

    def check(self, shape: tuple[int, int], quantizer: Quantizer, rank: int | None) -> None:
        """Refuses a rank outside 1 to min(shape)."""
        check_rank(self, shape, rank)

    @full_float32()
    def initialize(self, given: Given) -> Start:
        """The start.

        Raises:
            InputError: a rank outside 1 to min(shape), a scaling of 0, or a weight that the quantizer refuses.
        """
        from peft import LoraConfig
        from peft.tuners.lora.layer import Linear

        rank, _ = adapter_of(self, given)
        base = Base.of("zero")
        made = base.make(given, given.weight)
        weight = given.weight.detach().float()
        whole = norm(weight) or 1.0
        zero = norm(error_of(given, made.base)) / whole
        dense = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        dense.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        devices = [weight.device] if weight.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # PEFT first draws an A that it then replaces
            config = LoraConfig(r=rank, lora_alpha=given.scaling * rank, init_lora_weights="olora")
            layer = Linear(dense, "default", config, r=rank, lora_alpha=given.scaling * rank)
        a = layer.lora_A["default"].weight.detach().to(weight.device, torch.float32).contiguous()
        b = layer.lora_B["default"].weight.detach().to(weight.device, torch.float32).contiguous()
        made = base.make(given, layer.get_base_layer().weight.detach())
        residual = left_over(error_of(given, made.base), a, b, given.scaling) / whole
        return Start(made.base, a, b, given.scaling, (zero, residual), 1)
