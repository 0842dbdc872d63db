"""What a model scores on windows of text: loss, divergence from the 16-bit model, and agreement with it.

For each window of T tokens, over the T − 1 positions t that predict the next token:

    nll = Σ_t −log q_t(x_{t+1})        kl = Σ_t Σ_v p_t(v)·(log p_t(v) − log q_t(v))
    top = #{t : q_t(argmax p_t) = max q_t}     (a tie for the first place agrees)

where q is the model in its present state and p the 16-bit model. log-softmax is taken in float32, sums over a
window in float64. Nothing here waits for the device: results stay on it until they are asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError, RunError
from toolkit.records.report import Score

if TYPE_CHECKING:
    import torch
    from torch import nn

CHUNK = {"cpu": 2**21, "other": 2**27}
"""Logits scored at once: 8 MB in float32 on a CPU, so that they stay in its cache; 512 MB elsewhere."""

REFERENCE_SHARE = 4
"""The reference logits may fill a quarter of the memory that is free when they are made."""

DECIMALS = 4
"""Sums of a window are kept to 1e-4 nats, which is below 1e-6 nats a token from windows of 128 tokens on."""


@dataclasses.dataclass(frozen=True)
class WindowScore:
    """One window: scored tokens, summed nll and KL in nats, and positions whose top token is the reference's."""

    tokens: int
    nll: float
    kl: float
    top: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Reference:
    """The 16-bit model on one batch: logits or log-probabilities (windows × T × V), top tokens, and log Σ exp
    of the logits (0 for log-probabilities).
    """

    values: torch.Tensor
    logarithms: bool
    top: torch.Tensor
    lse: torch.Tensor


class Evaluation:
    """Measures one model, in whatever state it is, always on the same batches.

    Args:
        model: a causal language model of transformers, on its device; its state may change between calls.
        texts: name → token ids (windows × window).
        batch: windows a forward pass.
        reference_memory: bytes that the reference logits may take, kept in the model's dtype; None takes a
            quarter of what is free. Batches beyond it are recomputed for every measurement.
        scored: called after every batch, for progress.

    Raises:
        InputError: windows that are longer than the model reads.
    """

    def __init__(
        self,
        model: nn.Module,
        texts: Mapping[str, torch.Tensor],
        *,
        batch: int,
        reference_memory: int | None = None,
        scored: Callable[[], object] = lambda: None,
    ) -> None:
        import torch

        self.model = model.eval()
        self.device = next(model.parameters()).device
        self.batches = [
            (name, ids[at : at + batch].to(self.device))
            for name, ids in texts.items()
            for at in range(0, len(ids), batch)
        ]
        self._window = {name: ids.shape[1] for name, ids in texts.items()}
        self._reference: list[_Reference | None] = []
        self._memory = reference_memory
        self._scored = scored
        self._chunk = CHUNK.get(self.device.type, CHUNK["other"])
        self._torch = torch
        self._kernel = _kernel(self.device)
        limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        for name, ids in texts.items():
            if isinstance(limit, int) and ids.shape[1] > limit:
                raise InputError(f"windows of {ids.shape[1]} tokens on text {name!r}: the model reads at most {limit}")

    @property
    def recomputed(self) -> int:
        """Batches whose reference logits did not fit and are recomputed for every measurement."""
        return sum(kept is None for kept in self._reference)

    def keep_reference(self) -> dict[str, torch.Tensor]:
        """Measure the present state as the 16-bit reference, and keep its logits as far as memory goes."""
        self._reference = []
        allowed = self._memory if self._memory is not None else _free_memory(self.device) // REFERENCE_SHARE
        found = []
        with self._torch.inference_mode():
            for name, ids in self.batches:
                logits = self._logits(ids)
                allowed -= logits.numel() * logits.element_size()
                reference = self._as_reference(logits.clone())
                found.append((name, self._score(logits, ids, reference)))
                self._reference.append(reference if allowed >= 0 else None)
                self._scored()
        return self._gather(found)

    def measure(
        self, as_reference: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    ) -> dict[str, torch.Tensor]:
        """Text → (windows × 3) of nll, kl and top, float64, still on the device.

        Args:
            as_reference: a context in which the model is in its 16-bit state; needed where the reference
                logits did not all fit into memory.

        Raises:
            RunError: no reference was kept; or it did not fit, and there is no `as_reference`.
        """
        if not self._reference:
            raise RunError("the reference is measured first (keep_reference), then the arms")
        found = []
        with self._torch.inference_mode():
            for (name, ids), kept in zip(self.batches, self._reference, strict=True):
                logits = self._logits(ids)
                if kept is None:
                    if as_reference is None:
                        raise RunError("the reference logits did not fit into memory, and no way to recompute them")
                    with as_reference():
                        kept = self._as_reference(self._logits(ids))
                found.append((name, self._score(logits, ids, kept)))
                self._scored()
        return self._gather(found)

    def scores(self, measured: Mapping[str, torch.Tensor], what: str) -> dict[str, list[WindowScore]]:
        """`window_scores` of what was measured.

        Raises:
            RunError: a sum is not finite; `what` was measured is said.
        """
        try:
            return window_scores(measured, self._window)
        except RunError as error:
            raise RunError(f"{what}: {error}") from None

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits

    def _gather(self, found: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        parts: dict[str, list[torch.Tensor]] = {}
        for name, scores in found:
            parts.setdefault(name, []).append(scores)
        return {name: self._torch.cat(scores) for name, scores in parts.items()}

    def _as_reference(self, logits: torch.Tensor) -> _Reference:
        """What scoring needs of the 16-bit model. Float32 logits become log-probabilities in place."""
        torch = self._torch
        top = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
        lse = torch.zeros(logits.shape[:2], dtype=torch.float32, device=logits.device)
        for w, start, stop in self._chunks(logits):
            rows = logits[w, start:stop]
            top[w, start:stop] = rows.argmax(-1)
            if logits.dtype == torch.float32:
                rows.copy_(torch.log_softmax(rows, dim=-1))
            else:
                lse[w, start:stop] = torch.logsumexp(rows.float(), -1)
        return _Reference(logits, logits.dtype == torch.float32, top, lse)

    def _chunks(self, logits: torch.Tensor) -> Iterator[tuple[int, int, int]]:
        windows, length, vocabulary = logits.shape
        step = max(1, self._chunk // vocabulary)
        for w in range(windows):
            for start in range(0, length - 1, step):
                yield w, start, min(start + step, length - 1)

    def _score(self, logits: torch.Tensor, ids: torch.Tensor, reference: _Reference) -> torch.Tensor:
        """(windows × 3) of nll, kl, top from logits (windows × T × V) of the present state."""
        torch = self._torch
        if self._kernel is not None:
            return self._kernel(logits, ids, reference.values, reference.lse, reference.top)
        sums: list[list[torch.Tensor]] = [[] for _ in range(logits.shape[0])]
        for w, start, stop in self._chunks(logits):
            q = logits[w, start:stop]
            log_q = torch.log_softmax(q, dim=-1, dtype=torch.float32)
            log_p = reference.values[w, start:stop]
            if not reference.logarithms:
                log_p = torch.log_softmax(log_p, dim=-1, dtype=torch.float32)
            nll = log_q.gather(1, ids[w, start + 1 : stop + 1, None])
            top = q.gather(1, reference.top[w, start:stop, None]) >= q.amax(-1, keepdim=True)
            kl = torch.sub(log_p, log_q, out=log_q).mul_(log_p.exp()).sum(-1)
            sums[w].append(torch.stack([-nll.double().sum(), kl.double().sum(), top.double().sum()]))
        return torch.stack([torch.stack(parts).sum(0) for parts in sums])


def _kernel(device: torch.device) -> Callable[..., torch.Tensor] | None:
    """The fused scores of a CUDA device, where triton is installed."""
    if device.type != "cuda":
        return None
    try:
        from toolkit.runs.texts.scoring_triton import score
    except ImportError:
        return None
    return score


def _free_memory(device: torch.device) -> int:
    """Bytes free on a device."""
    import torch

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 8 * 2**30


def window_scores(measured: Mapping[str, torch.Tensor], window: Mapping[str, int]) -> dict[str, list[WindowScore]]:
    """Plain numbers, window by window, from what `Evaluation` measured (the one wait for the device).

    Raises:
        RunError: a sum is not finite.
    """
    scores: dict[str, list[WindowScore]] = {}
    for name, values in measured.items():
        scores[name] = []
        for at, (nll, kl, top) in enumerate(values.tolist()):
            if nll != nll or kl != kl or abs(nll) == float("inf") or abs(kl) == float("inf"):
                raise RunError(f"the loss on text {name!r}, window {at}, is not finite (nll {nll}, KL {kl})")
            scores[name].append(WindowScore(window[name] - 1, round(nll, DECIMALS), round(kl, DECIMALS), int(top)))
    return scores


def total(windows: list[WindowScore]) -> Score:
    """The score of a text from its windows: sums over all scored tokens, divided by their number."""
    import math

    tokens = sum(w.tokens for w in windows)
    loss = math.fsum(w.nll for w in windows) / tokens
    return Score(
        tokens=tokens,
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        kl=math.fsum(w.kl for w in windows) / tokens,
        agreement=sum(w.top for w in windows) / tokens,
    )
