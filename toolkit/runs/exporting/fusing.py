"""`fuse`: one scale for layers that engines compute as one product, decided in the plan before anything is rounded."""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.records.plan import Plan
from toolkit.runs.exporting.compressed_tensors import fused
from toolkit.runs.exporting.weights import quantizer_of

FORM = "compressed-tensors"


def fuse(plan: Plan, model: str | os.PathLike[str]) -> Plan:
    """The plan with quantizers that share their scale among q, k and v, and gate and up, of one module.

    The scale covers the largest weight of the group, so that bases made under it, by any initializer, are exported for
    engines bit for bit. Layers whose quantizer has no scale of a tensor stay as they are planned, and so does a group
    of several quantizers or with a layer in 16 bit.

    Args:
        model: a Hugging Face id, a local directory, or `demo`.

    Raises:
        InputError: the model cannot be loaded, has not the plan's layers, or has other weights.
    """
    from toolkit.runs.exporting.origin import Origin
    from toolkit.runs.exporting.weights import dense_model

    origin = Origin(path=Path(plan.model or "the plan"), plan=plan, model=os.fspath(model))
    loaded, plans, fingerprint = dense_model(origin)
    from toolkit.weights.layers import layers_of

    layers = {layer.name: layer for layer in layers_of(loaded)}
    made = dict(plan.layers)
    for group in fused(layers):
        if len({plans[name].quantizer for name in group}) > 1:
            continue
        layout = quantizer_of(plans[group[0]]).layout(FORM)
        covering = None if layout is None else layout.covering([layers[name].weight() for name in group])
        if covering is not None:
            made |= {name: plans[name].model_copy(update={"quantizer": covering.key}) for name in group}
    return plan.model_copy(update={"layers": made, "fingerprint": fingerprint})
