"""Device memory that products decode a weight into, and use again for the next weight."""

from __future__ import annotations

import math

import torch

_HELD: dict[tuple[torch.device, torch.dtype, int], torch.Tensor] = {}
_USED: dict[tuple[torch.device, torch.dtype, int], torch.cuda.Stream] = {}


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Contiguous memory (…) with any contents; the next call of equally many values of the dtype gives it again.

    What is written holds until that next call. A CUDA stream computes in order, so that a product is done with it by
    then; another stream waits for the one before. It is never freed or moved while the process lasts, but by
    `release`: a CUDA graph may hold its address. A CPU gets new memory.
    """
    if device.type != "cuda":
        return torch.empty(shape, dtype=dtype, device=device)
    key = (device, dtype, math.prod(shape))
    if key not in _HELD:
        with torch.inference_mode(False):
            _HELD[key] = torch.empty(key[2], dtype=dtype, device=device)
    stream = torch.cuda.current_stream(device)
    before = _USED.get(key)
    if before is not None and before != stream and not torch.cuda.is_current_stream_capturing():
        stream.wait_stream(before)  # while a graph is captured it may not; capture begins with everything done
    _USED[key] = stream
    return _HELD[key].view(shape)


def release() -> None:
    """Forget all of it; CUDA graphs captured before must not be replayed."""
    _HELD.clear()
    _USED.clear()
