"""Tasks: a data set with its prompt, its target and its score."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from toolkit.interfaces.component import Component


@dataclasses.dataclass(frozen=True)
class Example:
    """One row as a model meets it: `prompt` is read, `target` is what should follow.

    Attributes:
        prompt: ends where the target begins; a space between their words belongs to the target.
        target: the gold continuation, which training teaches and whose negative log-likelihood is measured.
        options: the allowed targets, the gold one among them; empty where any text may be the answer. Their likelihoods
            are recorded for generated answers too, and chance is computed from them.
        gold: the gold option's place; None where there are no options.
        references: what a generated answer is compared with.
        group: the set that the row belongs to, where a task holds several; scores are also given a group.
        images: that the prompt speaks of, as the source gives them. No text model reads them: encoding for one refuses
            an example that has some, and a vision-language model's data flow takes them from here.
    """

    prompt: str
    target: str
    options: tuple[str, ...] = ()
    gold: int | None = None
    references: tuple[str, ...] = ()
    group: str = ""
    images: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Hub:
    """Where the Hub holds a task's rows: data set, configuration, and the name of each split there."""

    path: str
    name: str | None = None
    splits: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"train": "train", "test": "test"})
    revision: str | None = None


@dataclasses.dataclass(frozen=True)
class Answered:
    """One row's answer: the generated text parsed (None: no parsable answer, which counts as wrong), and its score.

    `score` is 1 or 0 where an answer is right or wrong, else a share such as F1, in [0, 1].
    """

    answer: str | None
    score: float


@dataclasses.dataclass(frozen=True)
class Windows:
    """How running text is cut for a perplexity.

    Attributes:
        window: tokens a window, a leading beginning-of-text token among them.
        stride: from one window's first token to the next one's; the tokens that two windows share are scored once,
            in the earlier of them.
        bos: whether each window begins with the tokenizer's beginning-of-text token.
    """

    window: int
    stride: int
    bos: bool = False


@dataclasses.dataclass(frozen=True)
class Scored:
    """One row of a task that does its own scoring.

    Attributes:
        prompt, target: of the gold answer, whose likelihood is measured as any task's is.
        score: in [0, 1].
        options: summed negative log-likelihoods of the allowed answers, where answers were compared.
        gold: the gold option's place; `prediction`: the predicted one's, or the answer.
    """

    prompt: str
    target: str
    score: float
    options: tuple[float, ...] | None = None
    gold: int | None = None
    prediction: int | str | None = None
    group: str = ""


class Task(Component):
    """rows → prompts and targets → a score a row and metrics over all rows.

    Implement `example`, and for generated answers `judge`. Rows come from the Hub (`hub`), from local JSON lines,
    or from code (`make`).

    Attributes:
        scored: `options`: the allowed target of the highest likelihood is the prediction; `generation`: greedy
            decoding, then `judge`; `text`: perplexity of running text, no prediction; `own`: by `score`.
        metric: the name of the mean score, as tables print it.
        columns: that every row must hold.
        parts: the sets that a task holds, where there are several: each is a subfolder of local data, and a group.
        new_tokens: the most that are generated.
        stop: texts that end a generated answer.
    """

    kind = "task"
    scored: ClassVar[Literal["options", "generation", "text", "own"]] = "options"
    metric: ClassVar[str] = "accuracy"
    columns: ClassVar[tuple[str, ...]] = ()
    hub: ClassVar[Hub | None] = None
    new_tokens: ClassVar[int] = 32
    stop: ClassVar[tuple[str, ...]] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        return ()

    def hub_of(self, part: str) -> Hub | None:
        """Where the Hub holds the rows of a part."""
        return self.hub

    def prepare(self, rows: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
        """Rows made from a source's rows, where they are not the same: several questions about one text."""
        return rows

    def make(self, split: Literal["train", "test"]) -> Iterable[Mapping[str, Any]] | None:
        """The rows of a task that is made by code, the same ones each time; None (the default): they are data."""
        return None

    @abstractmethod
    def example(self, row: Mapping[str, Any]) -> Example | None:
        """One row as prompt and target; None where the row cannot be used, which is counted.

        Raises:
            InputError: a value that no row of this task may hold (named).
        """

    def judge(self, text: str, example: Example) -> Answered:
        """The answer in a generated text, and its score. Only for `scored = "generation"`."""
        raise NotImplementedError(f"task {self.key} is scored by {self.scored} and generates nothing")

    def metrics(self, answers: Sequence[Answered], examples: Sequence[Example]) -> dict[str, float]:
        """Further metrics over all rows, beside the mean score; none by default."""
        return {}

    def windows(self, length: int) -> Windows:
        """How running text is cut, at most `length` tokens a window. Only for `scored = "text"`."""
        return Windows(length, length)

    def score(
        self, model: Any, tokenizer: Any, *, limit: int | None, length: int, batch: int
    ) -> tuple[list[Scored], dict[str, float]]:
        """Rows and further metrics of a task that does its own scoring. Only for `scored = "own"`."""
        raise NotImplementedError(f"task {self.key} is scored by {self.scored}, and not by itself")
