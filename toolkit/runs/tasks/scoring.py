"""Summed negative log-likelihoods of targets, batched.

For a sequence x_1 … x_n whose targets begin at place s:

    nll = Σ_{i ≥ s} −log q(x_i | x_1 … x_{i−1})

log-softmax is taken in float32, sums in float64. Rows are padded on the right and masked, and sorted by length, so
that a batch holds little padding. What is read once serves several targets: a context that is the beginning of
another one of the same row (all options of one token share theirs) is not computed again, which is exact in a causal
model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from toolkit.errors import RunError
from toolkit.runs.models import check_vocabulary
from toolkit.runs.tasks.encoding import Encoded

CHUNK = 2**26
"""Logits turned into log-probabilities at once: 256 MB in float32."""

LOGITS = {"cpu": 2**27, "other": 2**30}
"""The most logits of one pass: half a GB in float32 on a CPU, 4 GB elsewhere; a batch is smaller where it must be."""


@dataclasses.dataclass(frozen=True)
class _Context:
    """One sequence to read: its ids, and what is looked up there: (position, token, number of the sum)."""

    ids: tuple[int, ...]
    asked: list[tuple[int, int, int]]


@dataclasses.dataclass
class Halvings:
    """How often a batch did not fit into the device's memory and was cut in two."""

    count: int = 0


def nlls(
    model: Any,
    rows: Sequence[Sequence[Encoded]],
    *,
    pad: int,
    batch: int,
    halvings: Halvings | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[list[float]]:
    """The summed negative log-likelihood in nats of every row's every target.

    Args:
        model: a causal language model, on its device.
        rows: of each row, its encoded options (or the gold target alone); they may share their contexts.
        batch: sequences a forward pass; halved where the device's memory does not hold them.
        progress: is told how many sequences were read.

    Raises:
        InputError: a token that the model does not know.
        RunError: a sum is not finite.
    """
    import torch

    contexts, count = _contexts(rows)
    check_vocabulary(model, (option.ids for row in rows for option in row))
    contexts.sort(
        key=lambda context: len(context.ids), reverse=True
    )  # the largest first: what does not fit shows early
    device = next(model.parameters()).device
    sums = torch.zeros(count, dtype=torch.float64, device=device)
    with scoring(model):
        for chosen in _batches(contexts, batch, LOGITS.get(device.type, LOGITS["other"]) // _vocabulary(model)):
            halved(lambda part: _add(model, part, pad, sums), chosen, halvings)
            if progress is not None:
                progress(len(chosen))
    values = iter(sums.tolist())
    found = [[next(values) for _ in row] for row in rows]
    for number, row in enumerate(found):
        if any(value != value or value in (float("inf"), float("-inf")) for value in row):
            raise RunError(f"the loss of a target in scored row {number} is not finite: {row}")
    return found


def _batches(contexts: Sequence[_Context], batch: int, most: int) -> Iterator[list[_Context]]:
    """Contexts in order, at most `batch` at a time and at most `most` positions whose logits are computed."""
    chosen: list[_Context] = []
    first = last = 0
    for context in contexts:
        begin, end = (f(position for position, *_ in context.asked) for f in (min, max))
        wider = (min(first, begin), max(last, end)) if chosen else (begin, end)
        if chosen and (len(chosen) == batch or (len(chosen) + 1) * (wider[1] - wider[0] + 1) > most):
            yield chosen
            chosen, wider = [], (begin, end)
        chosen.append(context)
        first, last = wider
    if chosen:
        yield chosen


def _vocabulary(model: Any) -> int:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return max(1, getattr(head, "out_features", 0) or getattr(getattr(model, "config", None), "vocab_size", 0))


@contextlib.contextmanager
def scoring(model: Any) -> Iterator[None]:
    """The model in evaluation mode, without gradients; its mode before is restored."""
    import torch

    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)


def _contexts(rows: Sequence[Sequence[Encoded]]) -> tuple[list[_Context], int]:
    contexts: list[_Context] = []
    number = 0
    for row in rows:
        kept: list[_Context] = []
        numbered = list(enumerate(row, number))
        number += len(row)
        for at, option in sorted(numbered, key=lambda item: -len(item[1].ids)):
            read = option.ids[:-1]  # the last token is predicted, and never read
            context = next((c for c in kept if c.ids[: len(read)] == read), None)
            if context is None:
                context = _Context(read, [])
                kept.append(context)
            context.asked.extend((i - 1, option.ids[i], at) for i, wanted in enumerate(option.target) if wanted)
        contexts.extend(kept)
    return contexts, number


def halved(work: Callable[[list[Any]], Any], items: list[Any], halvings: Halvings | None) -> list[Any]:
    """`work` on all items, or on its halves where the device's memory does not hold them."""
    import torch

    try:
        return [work(items)]
    except torch.cuda.OutOfMemoryError:
        if len(items) == 1:
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if halvings is not None:
        halvings.count += 1
    half = len(items) // 2
    return halved(work, items[:half], halvings) + halved(work, items[half:], halvings)


def _add(model: Any, contexts: list[_Context], pad: int, sums: Any) -> None:
    """Read a batch of contexts and add their targets' negative log-likelihoods to the sums."""
    import torch

    device = sums.device
    width = max(len(c.ids) for c in contexts)
    ids = torch.full((len(contexts), width), pad, dtype=torch.int64)
    mask = torch.zeros((len(contexts), width), dtype=torch.int64)
    for at, context in enumerate(contexts):
        ids[at, : len(context.ids)] = torch.tensor(context.ids)
        mask[at, : len(context.ids)] = 1
    asked = torch.tensor(
        [(at, position, token, number) for at, c in enumerate(contexts) for position, token, number in c.asked]
    )
    positions, place = torch.unique(asked[:, 1], return_inverse=True)
    row, token, number, place = (t.to(device) for t in (asked[:, 0], asked[:, 2], asked[:, 3], place))
    given = {"input_ids": ids.to(device), "attention_mask": mask.to(device), "use_cache": False}
    if _keeps(model):
        logits = model(**given, logits_to_keep=positions.to(device)).logits
    else:
        logits = model(**given).logits[:, positions.to(device)]
    step = max(1, CHUNK // logits.shape[-1])
    found = []
    for start in range(0, len(token), step):
        part = slice(start, start + step)
        values = logits[row[part], place[part]].float()
        chosen = values.gather(1, token[part, None]).squeeze(1)
        found.append(torch.logsumexp(values, -1).double() - chosen.double())
    sums.index_add_(0, number, torch.cat(found))


def _keeps(model: Any) -> bool:
    """Whether the model computes logits at chosen positions alone."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "logits_to_keep" in inspect.signature(inner.forward).parameters
