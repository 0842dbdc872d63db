"""A model's scores on a task's rows: likelihoods of all targets, predictions, and what is doubtful about them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from toolkit.errors import InputError
from toolkit.interfaces import Answered, Example, Task, Windows
from toolkit.records.trained import Flag, Scores
from toolkit.runs.tasks.answers import answering, check_answered, check_metrics, check_scored, check_windows
from toolkit.runs.tasks.encoding import Encoded, check_length, check_text, encode_options, encode_prompt, padding
from toolkit.runs.tasks.generating import generate
from toolkit.runs.tasks.scoring import Halvings, nlls
from toolkit.runs.tasks.split import Split
from toolkit.runs.tasks.summary import flags, summarise
from toolkit.runs.tasks.text import cut_text

DECIMALS = 6
"""Sums of a row are kept to 1e-6 nats."""

Progress = Callable[[int, int], None]
"""Is told how many rows are done, and of how many."""


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """What a model scored.

    Attributes:
        rows: one a scored row, in the order of `toolkit.records.trained.ROW`.
        scores: set → scores; "" holds all rows.
        cut: rows that were left out, as their whole target did not fit.
        shortened: rows whose prompt lost its beginning.
    """

    rows: list[list[Any]]
    scores: dict[str, Scores]
    flags: list[Flag]
    cut: int = 0
    shortened: int = 0


def evaluate(
    model: Any,
    tokenizer: Any,
    task: Task,
    split: Split,
    *,
    length: int,
    batch: int,
    progress: Progress | None = None,
) -> Evaluated:
    """Every row's gold and option likelihoods, its prediction and score, and the scores over rows.

    A row's options are compared by the *sum* of their tokens' log-likelihoods, without the end-of-text token; the
    first of equal ones is taken. Where one option is the beginning of another, which then could never win, the
    end-of-text token is counted in all options of that row. The choice is ours (PACT says only that targets are
    scored by likelihood). The gold target's own loss is always without that token. A generated answer is judged by
    the task. The model's mode is restored.

    Args:
        length: the most tokens of prompt and target.
        batch: sequences a forward pass.

    Raises:
        InputError: more tokens than the model reads, or no row that fits.
        RunError: a likelihood is not finite.
    """
    if batch < 1:
        raise InputError(f"batch: {batch}; at least one row at a time is needed")
    if task.scored == "own":
        return _own(model, tokenizer, task, split, length, batch)
    if task.scored == "text":
        return _text(model, tokenizer, task, split, length, batch, progress)
    check_task(model, task, length)
    generated = task.scored == "generation"
    kept, encoded, shortened = _fitting(tokenizer, task, split, length)
    halvings = Halvings()
    pad = padding(tokenizer)
    total = len(kept) * (2 if generated else 1)
    told = _teller(progress, len(kept), total)
    sums = nlls(model, encoded, pad=pad, batch=batch, halvings=halvings, progress=told)
    examples = [split.examples[at] for at in kept]
    answers: list[Answered] = []
    predictions: list[Any] = []
    if generated:
        prompts = [encode_prompt(tokenizer, example.prompt, length)[0] for example in examples]
        texts = generate(
            model, tokenizer, prompts, new_tokens=task.new_tokens, stop=task.stop, pad=pad, batch=batch,
            halvings=halvings, progress=told,
        )  # fmt: skip
        answers = []
        for at, text, example in zip(kept, texts, examples, strict=True):
            with answering(task, f"judge, of the answer to row {split.numbers[at]},"):
                answers.append(check_answered(task, task.judge(text, example), split.numbers[at]))
        predictions = [answer.answer for answer in answers]
    else:
        predictions = [
            min(range(len(example.options)), key=values.__getitem__)
            for example, values in zip(examples, sums, strict=True)
        ]
        answers = [Answered(str(p), float(p == example.gold)) for p, example in zip(predictions, examples, strict=True)]
    rows = []
    for at, example, options, values, prediction, answer in zip(
        kept, examples, encoded, sums, predictions, answers, strict=True
    ):
        count = len(example.options)
        gold = count if len(values) > count else example.gold or 0  # the gold target stands alone after the options
        rows.append(
            [
                example.group,
                split.numbers[at],
                round(values[gold], DECIMALS),
                options[gold].tokens,
                [round(value, DECIMALS) for value in values[:count]] if count else None,
                example.gold,
                prediction,
                answer.score,
                answer.answer is not None,
            ]
        )
    scores = {}
    groups = sorted({example.group for example in examples})
    for group in ["", *groups] if groups != [""] else [""]:
        chosen = [n for n, example in enumerate(examples) if group in ("", example.group)]
        with answering(task, "metrics"):
            further = task.metrics([answers[n] for n in chosen], [examples[n] for n in chosen])
        scores[group] = summarise(
            [rows[n] for n in chosen], [examples[n] for n in chosen], task.metric, check_metrics(task, further)
        )
    cut = len(split.examples) - len(kept)
    return Evaluated(rows, scores, flags(scores, cut=cut, shortened=shortened, halved=halvings.count), cut, shortened)


def check_task(model: Any, task: Task, length: int) -> None:
    """Refuse, before anything is trained, a length at which the model cannot be scored.

    Raises:
        InputError: prompt, target and what is generated, or a window, are longer than what the model reads.
    """
    try:
        check_length(model, length, task.new_tokens if task.scored == "generation" else 0)
        if task.scored == "text":
            check_length(model, _windows(task, length).window)
    except InputError as error:
        raise InputError(f"task {task.key}: {error}") from None


def _windows(task: Task, length: int) -> Windows:
    with answering(task, "windows"):
        return check_windows(task, task.windows(length))


def _fitting(tokenizer: Any, task: Task, split: Split, length: int) -> tuple[list[int], list[list[Encoded]], int]:
    """The rows whose targets fit, their encoded options (or gold target), and how many prompts were shortened."""
    kept: list[int] = []
    encoded: list[list[Encoded]] = []
    for at, example in enumerate(split.examples):
        check_text(example)
        targets = example.options or (example.target,)
        found = _whole(encode_options(tokenizer, example.prompt, targets, length))
        if _ambiguous([option.ids for option in found]):
            ended = _whole(encode_options(tokenizer, example.prompt, targets, length, end=True))
            found = [*ended, _without_end(ended[example.gold or 0], found[example.gold or 0])] if ended else []
        if found:
            kept.append(at)
            encoded.append(found)
    if not kept:
        raise InputError(
            f"task {task.key}: none of {len(split.examples)} rows has a target that fits into a length of {length} "
            "tokens; give a larger length"
        )
    return kept, encoded, sum(any(option.shortened for option in options) for options in encoded)


def _whole(options: list[Encoded | None]) -> list[Encoded]:
    """The options, or nothing where they do not fit."""
    return [option for option in options if option is not None] if None not in options else []


def _ambiguous(options: Sequence[tuple[int, ...]]) -> bool:
    """Whether one option is the beginning of another, and so at least as likely."""
    ordered = sorted(options)
    return any(len(a) < len(b) and b[: len(a)] == a for a, b in itertools.pairwise(ordered))


def _without_end(ended: Encoded, plain: Encoded) -> Encoded:
    """The gold target without its end-of-text token, after the same cut of the prompt."""
    extra = len(ended.ids) - ended.start - plain.tokens
    return Encoded(ended.ids[: len(ended.ids) - extra], ended.target[: len(ended.ids) - extra], ended.shortened)


def _teller(progress: Progress | None, rows: int, total: int) -> Callable[[int], None] | None:
    """Turns counts of sequences into rows done; contexts may be more than rows."""
    if progress is None:
        return None
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done = min(done + count, total)
        progress(done, total)

    return tell


def _text(
    model: Any, tokenizer: Any, task: Task, split: Split, length: int, batch: int, progress: Progress | None
) -> Evaluated:
    """Windows of running text: their losses, and the perplexity of all."""
    check_task(model, task, length)
    cut = _windows(task, length)
    windows = cut_text(tokenizer, "".join(example.target for example in split.examples), cut, split.limit, task.key)
    halvings = Halvings()
    told = _teller(progress, len(windows), len(windows))
    sums = nlls(model, [[w] for w in windows], pad=padding(tokenizer), batch=batch, halvings=halvings, progress=told)
    rows = [
        ["", number, round(values[0], DECIMALS), window.tokens, None, None, None, None, True]
        for number, (window, values) in enumerate(zip(windows, sums, strict=True))
    ]
    scores = summarise(rows, [], task.metric, {})
    perplexity = math.exp(scores.loss) if scores.loss < 700 else math.inf
    further = {
        "perplexity": perplexity,
        "window": float(cut.window),
        "stride": float(cut.stride),
        "bos": float(cut.bos),
        "tokens": float(sum(window.tokens for window in windows)),
    }
    scores = scores.model_copy(update={"further": further})
    return Evaluated(rows, {"": scores}, flags({"": scores}, cut=0, shortened=0, halved=halvings.count))


def _own(model: Any, tokenizer: Any, task: Task, split: Split, length: int, batch: int) -> Evaluated:
    """A task that does its own scoring; the gold targets' losses are measured as everywhere, null where one is cut."""
    check_task(model, task, length)
    with answering(task, "score"):
        found = task.score(model, tokenizer, limit=split.limit, length=length, batch=batch)
    scored, further = check_scored(task, found)
    if not scored:
        raise InputError(f"task {task.key} scored no row")
    golds = [encode_options(tokenizer, row.prompt, [row.target], length)[0] for row in scored]
    halvings = Halvings()
    sums = iter(nlls(model, [[g] for g in golds if g], pad=padding(tokenizer), batch=batch, halvings=halvings))
    rows = [
        [
            row.group,
            number,
            round(next(sums)[0], DECIMALS) if gold else None,
            gold.tokens if gold else 0,
            None if row.options is None else [round(value, DECIMALS) for value in row.options],
            row.gold,
            row.prediction,
            row.score,
            True,
        ]
        for number, (row, gold) in enumerate(zip(scored, golds, strict=True))
    ]
    examples: Sequence[Example] = [
        Example(row.prompt, row.target, tuple(map(str, range(len(row.options or ())))), row.gold) for row in scored
    ]
    scores = {"": summarise(rows, examples, task.metric, further)}
    return Evaluated(rows, scores, flags(scores, cut=0, shortened=0, halved=halvings.count))
