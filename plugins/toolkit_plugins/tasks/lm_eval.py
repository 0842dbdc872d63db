"""Any task of lm-evaluation-harness."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from toolkit.errors import InputError, closest
from toolkit.interfaces import Example, Scored, Task

MARK = "exact_match", "acc", "acc_norm", "f1", "em"
"""A sample's scores, the first that it has is the row's."""


@dataclasses.dataclass
class LMEval(Task):
    """A task of lm-evaluation-harness, scored by that library: `lm-eval:arc_easy`.

    It only scores; what is trained on is another task. A row's score is its sample's `exact_match`, `acc`, … and
    further metrics are the library's own. Needs the extra `lm-eval`.

    Options:
        task: its name there.
        shots: examples in the prompt.
    """

    name = "lm-eval"
    scored = "own"
    positional: ClassVar[str] = "task"

    task: str = ""
    shots: int = 0

    def make(self, split: str) -> list[Mapping[str, Any]]:
        """None: the library reads its own data."""
        if split == "train":
            raise InputError(f"task {self.key} only scores: name the task that is trained on, `train: TASK`")
        return []

    def example(self, row: Mapping[str, Any]) -> Example | None:
        return None

    def score(
        self, model: Any, tokenizer: Any, *, limit: int | None, length: int, batch: int
    ) -> tuple[list[Scored], dict[str, float]]:
        """The library's samples as rows, in its order, and its metrics.

        Raises:
            InputError: the library is not installed, or has no such task.
        """
        evaluator, tasks, huggingface = (_library(part) for part in ("evaluator", "tasks", "models.huggingface"))
        manager = tasks.TaskManager()
        if self.task not in manager.all_tasks:
            raise InputError(f"lm-eval has no task {self.task!r}; {closest(self.task, manager.all_tasks)}")
        wrapped = huggingface.HFLM(
            pretrained=model,
            tokenizer=copy.deepcopy(tokenizer),  # the library sets its padding
            batch_size=batch,
            max_length=length,
            backend="causal",
        )
        results = evaluator.simple_evaluate(
            wrapped,
            tasks=[self.task],
            num_fewshot=self.shots,
            limit=limit,
            bootstrap_iters=0,
            task_manager=manager,
            random_seed=None,  # the run's own generators stay as they are
            numpy_random_seed=None,
            torch_random_seed=None,
        )
        rows = [_row(sample, name) for name, samples in results["samples"].items() for sample in samples]
        return rows, _metrics(results["results"])


def _library(part: str) -> Any:
    try:
        return importlib.import_module(f"lm_eval.{part}")
    except ImportError as error:
        raise InputError(
            f"lm-evaluation-harness is not installed ({error}); it is the extra lm-eval: pip install "
            "'qlora-toolkit[lm-eval]'"
        ) from None


def _row(sample: Mapping[str, Any], name: str) -> Scored:
    """A sample: its score, its gold answer, and where options were compared, their negative log-likelihoods."""
    score = next((float(sample[key]) for key in MARK if isinstance(sample.get(key), int | float)), None)
    if score is None:
        raise InputError(f"lm-eval task {name!r} gives its samples none of {', '.join(MARK)}: rows cannot be compared")
    asked, options, gold = sample["arguments"], _options(sample.get("filtered_resps")), sample.get("target")
    if options is None or type(gold) is not int or not 0 <= gold < len(options):
        given = gold[0] if isinstance(gold, list) and gold else gold
        return Scored(str(asked[0][0]), str(given), score, prediction=str(sample.get("filtered_resps"))[:200])
    prediction = min(range(len(options)), key=options.__getitem__)
    return Scored(asked[gold][0], asked[gold][1], score, tuple(options), gold, prediction)


def _options(answers: Any) -> list[float] | None:
    """Negative log-likelihoods of several options: each answer there is (log-likelihood, whether greedy)."""
    if not isinstance(answers, Sequence) or len(answers) < 2:
        return None
    if not all(isinstance(a, Sequence) and len(a) == 2 and isinstance(a[0], float) for a in answers):
        return None
    return [-float(a[0]) for a in answers]


def _metrics(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    many = len(results) > 1
    return {
        (f"{task} " if many else "") + key.partition(",")[0]: float(value)
        for task, scores in results.items()
        for key, value in scores.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and "stderr" not in key
    }
