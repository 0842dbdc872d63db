"""Greedy answers, batched: padded on the left and masked, so that a row's answer does not depend on its neighbours.

Positions count the real tokens alone (transformers makes them from the mask). In float32 an answer is the same in
every batch; in 16 bit, rounding depends on the shape of a batch, and where two tokens are almost equally likely the
choice between them may, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from toolkit.runs.tasks.scoring import Halvings, halved, scoring


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    stop: Sequence[str] = (),
    pad: int,
    batch: int,
    halvings: Halvings | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """The greedy continuation of each prompt, as text, up to its end-of-text token or the first stop text.

    Args:
        prompts: token ids.
        new_tokens: the most that are generated.
        stop: texts that end an answer; they are not part of it.
        batch: prompts a pass; halved where the device's memory does not hold them.
    """
    order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]), reverse=True)
    answers = [""] * len(prompts)

    def work(chosen: list[int]) -> None:
        made = _batch(model, tokenizer, [prompts[at] for at in chosen], new_tokens, stop, pad)
        for at, text in zip(chosen, made, strict=True):
            answers[at] = text

    with scoring(model), _plain_settings(model):
        for at in range(0, len(order), batch):
            chosen = order[at : at + batch]
            halved(work, chosen, halvings)
            if progress is not None:
                progress(len(chosen))
    return answers


@contextlib.contextmanager
def _plain_settings(model: Any) -> Iterator[None]:
    """Without the checkpoint's own generation settings: a repetition penalty there would not be greedy decoding."""
    from transformers import GenerationConfig

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    kept = inner.generation_config
    inner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        inner.generation_config = kept


def _batch(
    model: Any, tokenizer: Any, prompts: list[Sequence[int]], new_tokens: int, stop: Sequence[str], pad: int
) -> list[str]:
    import torch
    from transformers import GenerationConfig, StoppingCriteriaList

    device = next(model.parameters()).device
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad, dtype=torch.int64)
    mask = torch.zeros((len(prompts), width), dtype=torch.int64)
    for at, prompt in enumerate(prompts):
        ids[at, width - len(prompt) :] = torch.tensor(prompt)
        mask[at, width - len(prompt) :] = 1
    end = tokenizer.eos_token_id
    settings = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, num_beams=1, use_cache=True, pad_token_id=pad, eos_token_id=end
    )
    criteria = StoppingCriteriaList([_StopTexts(tokenizer, stop, width)] if stop else [])
    made = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        generation_config=settings,
        stopping_criteria=criteria,
    )
    answers = []
    for new in made[:, width:].tolist():
        if end in new:
            new = new[: new.index(end)]
        answers.append(_until(tokenizer.decode(new, skip_special_tokens=True), stop))
    return answers


def _until(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of the stop texts."""
    return text[: min([at for mark in stop if (at := text.find(mark)) >= 0], default=len(text))]


class _StopTexts:
    """Which rows of a batch have met a stop text."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], width: int) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.width = width

    def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
        import torch

        texts = self.tokenizer.batch_decode(ids[:, self.width :], skip_special_tokens=True)
        return torch.tensor([any(mark in text for mark in self.stop) for text in texts], device=ids.device)
