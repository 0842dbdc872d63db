"""Examples as token ids, with a mask of the tokens that are to be predicted.

Prompt and target are rendered as one text and tokenized once: tokenized apart, the tokens at the boundary differ
from those that a model meets (" 4" and "2" for " 42"). The mask is taken at character offsets of that text.

Rows are text. Where the letters of a special token stand in one ("<|im_end|>"), they are tokenized as letters: rows
come from strangers, and would else end a turn or a text in the middle. Only the tokenizer and `encode` put special
tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from toolkit.errors import InputError
from toolkit.interfaces import Example


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Token ids of prompt and target, and which of them are to be predicted.

    Attributes:
        target: `target[i]`: token i is predicted, from those before it. Never true of the first token.
        shortened: tokens that were cut from the beginning of the prompt.
    """

    ids: tuple[int, ...]
    target: tuple[bool, ...]
    shortened: int = 0

    @property
    def start(self) -> int:
        """Place of the first token that is predicted; all later ones are, too."""
        return self.target.index(True)

    @property
    def tokens(self) -> int:
        """How many tokens are predicted."""
        return sum(self.target)


def encode(tokenizer: Any, example: Example, length: int) -> Encoded | None:
    """Prompt, target and end-of-text token; None where the whole target does not fit.

    A token belongs to the target where any of its characters does. Special tokens stand as the tokenizer puts them;
    the end-of-text token follows the target, once, and is predicted, although it may equal the padding token. A
    tokenizer that has none teaches no end. Where the text is too long, tokens are cut from the beginning of the
    prompt, after a leading special token; at least one token stands before the target. LLM-Adapters cuts the end,
    and with it the target; the choice is ours.

    Args:
        tokenizer: a fast tokenizer of transformers.
        length: the most tokens, the end-of-text token among them.

    Raises:
        InputError: the tokenizer gives no character offsets, or the example holds images.
    """
    check_text(example)
    return encode_options(tokenizer, example.prompt, [example.target], length, end=True)[0]


def check_text(example: Example) -> None:
    """Refuse an example that a text model cannot read."""
    if example.images:
        raise InputError(
            f"an example holds {len(example.images)} images, and the model reads text alone; leave such rows out"
        )


def encode_options(
    tokenizer: Any, prompt: str, targets: Sequence[str], length: int, *, end: bool = False
) -> list[Encoded | None]:
    """One prompt with each of its allowed targets, every one after the same cut of the prompt.

    Returns:
        one `Encoded` a target; all None where the longest does not fit.
    """
    parts = [_tokenize(tokenizer, prompt, target, end) for target in targets]
    excess = max(0, max(len(ids) for ids, *_ in parts) - length)
    found: list[Encoded | None] = []
    for ids, start, leading in parts:
        if start is None or start - leading < excess or start - excess < 1:
            return [None] * len(parts)
        ids = ids[:leading] + ids[leading + excess :]
        start -= excess
        found.append(Encoded(tuple(ids), (False,) * start + (True,) * (len(ids) - start), excess))
    return found


def encode_prompt(tokenizer: Any, prompt: str, length: int) -> tuple[tuple[int, ...], int]:
    """Token ids of a prompt alone, for generation, and how many were cut from its beginning."""
    ids, _, leading = _tokenize(tokenizer, prompt, "", False)
    excess = max(0, len(ids) - length)
    return tuple(ids[:leading] + ids[leading + excess :]), excess


def _tokenize(tokenizer: Any, prompt: str, target: str, end: bool) -> tuple[list[int], int | None, int]:
    """Ids, the first target token's place (None: there is none), and the number of leading special tokens."""
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"tokenizer {type(tokenizer).__name__} gives no character offsets, from which the target tokens are known; "
            "load its fast form (AutoTokenizer does so where there is a tokenizer.json)"
        )
    made = tokenizer(
        prompt + target,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        return_attention_mask=False,
        split_special_tokens=True,  # "<|im_end|>" in a row is ten letters
        verbose=False,
    )
    ids, special, offsets = list(made["input_ids"]), made["special_tokens_mask"], made["offset_mapping"]
    while ids and special[len(ids) - 1] and len(ids) > 1:  # an end that some tokenizers add themselves
        ids.pop()
    leading = next((i for i in range(len(ids)) if not special[i]), len(ids))
    start = _first_after(tokenizer, ids, offsets, leading, len(prompt))
    if start == 0:  # nothing stands before the first token, from which it could be predicted
        start = 1 if len(ids) > 1 or (end and tokenizer.eos_token_id is not None) else None
    if end and start is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return ids, start, leading


def _first_after(
    tokenizer: Any, ids: Sequence[int], offsets: Sequence[tuple[int, int]], leading: int, boundary: int
) -> int | None:
    """The first token that ends after the boundary.

    Some tokenizers leave the spaces of a token out of its offsets. Of one that is nothing but spaces no offset is
    left; it ends as many letters after the token before it as it holds.
    """
    end = 0
    for i in range(leading, len(ids)):
        begin, found = offsets[i]
        end = found if found > begin else end + len(tokenizer.convert_ids_to_tokens(ids[i]))
        if end > boundary:
            return i
    return None


def padding(tokenizer: Any) -> int:
    """The id that fills short rows of a batch: the tokenizer's own, else its end-of-text, else its unknown, else 0.

    Padding is masked in attention and never a label, so that its id changes no result.
    """
    for name in ("pad_token_id", "eos_token_id", "unk_token_id"):
        found = getattr(tokenizer, name, None)
        if found is not None:
            return int(found)
    return 0


def check_length(model: Any, length: int, new_tokens: int = 0) -> None:
    """Refuse more tokens than a model reads.

    Raises:
        InputError: names both numbers.
    """
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < length + new_tokens:
        more = f" and {new_tokens} generated ones" if new_tokens else ""
        raise InputError(
            f"length: {length} tokens{more} are asked for, and the model reads at most {limit}; "
            f"give a length of at most {max(limit - new_tokens, 0)}"
        )
