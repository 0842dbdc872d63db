"""A base that other software made, read from its checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from toolkit.errors import InputError, closest
from toolkit.interfaces import Given, Initializer, Layout, Packed, Quantizer, Start
from toolkit_plugins.initializers.fitting import no_change, residual_of

FORMS = ("compressed-tensors", "bnb")


@dataclasses.dataclass(frozen=True)
class Stored(Initializer):
    """The base as a checkpoint of another library holds it, B = 0: what other software made, judged like any start.

    `stored(checkpoint=DIR)` reads the layer's codes and scales bit for bit from safetensors, in the layout of the
    plan's quantizer (compressed-tensors' for `nvfp4` and `mxfp4`, bitsandbytes' for `nf4` and `fp4-bnb`), under the
    layer's own name. Nothing is rounded again. NVFP4's tensor scale is stored there as a reciprocal, so that it may
    differ in its last bit from the one that was calibrated with. Iterate 0 is the zero start; what was read is iterate
    1, and is kept.

    Attributes:
        checkpoint: the folder.

    Raises:
        InputError: no folder, no safetensors in it, a layer that it does not hold in this format (the closest name is
            told), or holds in another shape.
    """

    name = "stored"
    positional = "checkpoint"
    needs_rank = False

    checkpoint: str = ""

    def check(self, shape: tuple[int, int], quantizer: Quantizer, rank: int | None) -> None:
        """Refuse a missing folder, and a format that no such checkpoint holds."""
        if not self.checkpoint:
            raise InputError("initializer stored reads a checkpoint: name its folder, as stored(checkpoint=DIR)")
        if not Path(self.checkpoint).is_dir():
            raise InputError(f"initializer stored: there is no folder {self.checkpoint}")
        if not self._layouts(quantizer):
            raise InputError(f"initializer stored: no checkpoint of {' or '.join(FORMS)} holds {quantizer.key}")

    def initialize(self, given: Given) -> Start:
        """What the checkpoint holds of this layer."""
        shape = (given.weight.shape[0], given.weight.shape[1])
        self.check(shape, given.quantizer, given.rank)
        base = self._read(given, shape).to(given.weight.device)
        plain = given.quantizer.quantize(given.weight)
        residuals = (residual_of(given, plain), residual_of(given, base))
        return Start(base, given.A, no_change(given), given.scaling, residuals, kept=1)

    def _read(self, given: Given, shape: tuple[int, int]) -> Packed:
        held = self._tensors(given.name)
        refusals = []
        for layout in self._layouts(given.quantizer):
            try:
                return layout.packed(held, shape, given.weight.dtype)
            except InputError as error:
                refusals.append(f"as {layout.name} it {error}")
        raise InputError(f"layer {given.name}: {self.checkpoint} does not hold it: {'; '.join(refusals)}")

    def _tensors(self, layer: str) -> dict[str, torch.Tensor]:
        """The tensors below the layer's path, by the rest of their names."""
        found: dict[str, torch.Tensor] = {}
        others: set[str] = set()
        files = sorted(Path(self.checkpoint).glob("*.safetensors"))
        if not files:
            raise InputError(f"{self.checkpoint} holds no safetensors")
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 — no mapping
                        if name.startswith(f"{layer}."):
                            found[name.removeprefix(f"{layer}.")] = file.get_tensor(name)
                        else:
                            others.add(name.rpartition(".")[0])
            except (OSError, SafetensorError) as error:
                raise InputError(f"cannot read {path}: {error}") from None
        if not found:
            raise InputError(f"{self.checkpoint} holds no layer {layer!r}; {closest(layer, others)}")
        return found

    @staticmethod
    def _layouts(quantizer: Quantizer) -> list[Layout]:
        return [layout for form in FORMS if (layout := quantizer.layout(form)) is not None]
