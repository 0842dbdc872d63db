"""Running text in windows, each token of it scored once."""

from __future__ import annotations

from typing import Any

from toolkit.errors import InputError
from toolkit.interfaces import Windows
from toolkit.runs.tasks.encoding import Encoded


def cut_text(tokenizer: Any, text: str, cut: Windows, limit: int | None, name: str) -> list[Encoded]:
    """The text's windows, in order; a last one that is not full is left out.

    Window w reads tokens w·stride … w·stride + window − 1, and scores those that no window before it has scored.
    The first token of a window is never scored; with `bos` that is the beginning-of-text token. Under
    stride = window without it, one token in `window` is so never scored.

    Raises:
        InputError: a text shorter than one window, a stride that leaves tokens out, or no beginning-of-text token.
    """
    if not 1 <= cut.stride <= cut.window or cut.window < 2:
        raise InputError(
            f"task {name}: windows of {cut.window} tokens with a stride of {cut.stride}; "
            "at least 2 tokens, and a stride of 1 to a window, are asked for"
        )
    lead = ()
    if cut.bos:
        if tokenizer.bos_token_id is None:
            raise InputError(f"task {name}: the tokenizer has no beginning-of-text token; leave out bos=true")
        lead = (tokenizer.bos_token_id,)
    read = cut.window - len(lead)
    stride = min(cut.stride, read)
    ids = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    windows: list[Encoded] = []
    for at in range(0, len(ids) - read + 1, stride):
        if limit is not None and len(windows) == limit:
            break
        fresh = read if at == 0 else stride
        mask = [False] * (len(lead) + read - fresh) + [True] * fresh
        mask[0] = False
        windows.append(Encoded((*lead, *ids[at : at + read]), tuple(mask)))
    if not windows:
        raise InputError(f"task {name}: the text has {len(ids)} tokens, less than one window of {read}")
    return windows
