"""llm-compressor's and ModelOpt's GPTQ for NVFP4 on one weight and one matrix of second moments, where installed.

Each is a function (weight, R) → Ŵ in float32, of the library's own code with the library's own settings but for those
in its name. Neither library is a dependency of the project.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import torch

Peer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def peers() -> tuple[dict[str, Peer], dict[str, str]]:
    """(name → function, library → its version or why it does not run)."""
    found: dict[str, Peer] = {}
    about = {}
    for library, load in (("llmcompressor", _llm_compressor), ("nvidia-modelopt", _modelopt)):
        try:
            found |= load()
            about[library] = importlib.metadata.version(library)
        except (ImportError, OSError) as error:
            about[library] = f"not run: {error}"
    return found, about


def _llm_compressor() -> dict[str, Peer]:
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
    from llmcompressor.observers import Observer

    def peer(observer: str, order: str | None) -> Peer:
        def run(weight: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
            args = scheme.weights.model_copy(update={"actorder": order, "observer": observer})
            watcher = Observer.load_from_registry(observer, base_name="weight", args=args)
            scales = watcher(weight).get_qparams()
            made, _, fell_back = quantize_weight(
                weights=weight[None].clone(),
                hessians=2 * second[None],
                scale=scales["scale"][None],
                zero_point=scales["zero_point"][None],
                global_scale=scales["global_scale"].reshape(-1)[:1],
                quant_args=args,
            )
            if bool(fell_back.any()):
                raise RuntimeError("llm-compressor fell back to rounding")
            return made[0]

        return run

    kinds = {"": "memoryless_minmax", ", mse scales": "memoryless_mse", ", expanded mse scales": "nvfp4_expanded_mse"}
    return {
        f"llm-compressor{said}{', no order' if order is None else ''}": peer(observer, order)
        for said, observer in kinds.items()
        for order in ("static", None)
        if order is not None or not said
    }


def _modelopt() -> dict[str, Peer]:
    import copy

    if not torch.cuda.is_available():
        raise ImportError("its NVFP4 quantizer needs CUDA")
    import modelopt.torch.quantization as mtq

    def run(weight: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight.clone()
        model = torch.nn.Sequential(layer).cuda()
        ridge = 1e-9 * float(second.diagonal().mean()) * torch.eye(len(second), dtype=torch.float64)
        inputs = torch.linalg.cholesky(second.cpu().double() + ridge)
        inputs = (inputs.T * len(second) ** 0.5).float()  # as many tokens as inputs, with these very moments
        config = copy.deepcopy(mtq.W4A16_NVFP4_CFG)
        config["algorithm"] = {"method": "gptq"}
        mtq.quantize(model, config, forward_loop=lambda m: m(inputs.cuda()))
        return model[0].weight.detach().float().to(weight.device)

    return {"ModelOpt": run}
