"""bitsandbytes checkpoints: the list of modules that a stock loader must leave alone, and loading one to make sure.

transformers replaces every `nn.Linear` (and GPT-2's `Conv1D`) whose path no entry of `llm_int8_skip_modules` matches:
as a regular expression from the start up to a component's end, or as a plain suffix. With a list given it no longer
adds the output head by itself. So the list here names every such module that the plan does not quantize, the head and
routers included, and is tried on the model's own paths with the installed transformers' rule before anything is
written; an entry that would reach further is written as an anchored expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from toolkit.errors import InputError, RunError
from toolkit.records.plan import LayerPlan
from toolkit.runs.exporting.packing import Held

if TYPE_CHECKING:
    from torch import nn


def skip_list(model: nn.Module, quantized: Iterable[str]) -> list[str]:
    """Entries of `llm_int8_skip_modules` under which exactly these module paths are replaced.

    Raises:
        InputError: the installed transformers has no list that does; names the layers.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    wanted = set(quantized)
    found = [path for path, m in model.named_modules() if type(m) is nn.Linear or isinstance(m, Conv1D)]
    if strange := sorted(wanted - set(found)):
        raise InputError(f"transformers puts no 4-bit layer in the place of {strange[0]} ({len(strange)} such layers)")
    always = list(getattr(model, "_keep_in_fp32_modules", None) or ())
    others = [path for path in found if path not in wanted]
    for entries in (others, [f"^{re.escape(path)}$" for path in others]):
        replaced = {path for path in found if _replaced(path, [*entries, *always])}
        if replaced == wanted:
            return entries
    lost = sorted(wanted - replaced)
    raise InputError(
        f"no skip list of transformers gives this plan: {', '.join(lost[:5])} would stay in 16 bit, by what the model "
        "itself keeps in float32"
    )


def _replaced(path: str, entries: list[str]) -> bool:
    from transformers.quantizers.quantizers_utils import should_convert_module

    return bool(should_convert_module(path, entries))


def check(folder: Path, held: Mapping[str, Held], plans: Mapping[str, LayerPlan], dtype: torch.dtype) -> None:
    """Load the folder as anyone would, and audit every layer: storage against the plan, packed tensors bit for bit.

    Raises:
        RunError: a layer is not what was planned; names it.
    """
    from transformers import AutoModelForCausalLM

    from toolkit.runs.audit import audit
    from toolkit.runs.models import quiet

    with quiet():
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, device_map={"": "cpu"}, dtype=dtype, trust_remote_code=False, use_safetensors=True
        )
    bare = {
        name: plan.model_copy(update={"adapter": None, "range_guard": False, "compute_dtype": None})
        for name, plan in plans.items()
    }
    audit(loaded, bare, dtype)
    for name, each in held.items():
        found = loaded.get_submodule(name).state_dict()
        for key, tensor in each.layout.tensors(each.packed, dtype).items():
            if key not in found or not torch.equal(found[key].cpu(), tensor):
                raise RunError(f"layer {name}: {key} is not loaded as it was written; nothing was exported")
