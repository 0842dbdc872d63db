"""Calibration: what selectors ask data, answered once and kept in the profile."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.errors import InputError, RunError, ToolkitError
from toolkit.interfaces import CalibratedSelector, Selector, Task
from toolkit.records.io import digest
from toolkit.records.profile import Profile, Statistic
from toolkit.registry import registry
from toolkit.selection.ranking import check_scores
from toolkit.weights.reporting import Progress, reporting

if TYPE_CHECKING:
    import torch
    from torch import nn

ROWS, BATCH, LENGTH = 32, 8, 600
"""Rows, rows a batch, and the most tokens of a row, unless told otherwise."""


class Encoded(Protocol):
    """One example as tokens; `target[i]` says whether token i is to be predicted."""

    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def target(self) -> Sequence[bool]: ...


def asking(selectors: Sequence[str | Selector]) -> list[CalibratedSelector]:
    """The selectors among these that ask for data, each of a statistic once.

    Raises:
        InputError: an unknown selector or option.
    """
    made = [registry.make("selector", selector) for selector in selectors]
    asked = {s.statistic_key: s for s in reversed(made) if isinstance(s, CalibratedSelector)}
    return [s for s in made if isinstance(s, CalibratedSelector) and asked[s.statistic_key] is s]


def expect_asking(given: Sequence[str | Selector], asked: Sequence[CalibratedSelector]) -> None:
    """Refuse selectors none of which asks for data, before anything is loaded for them."""
    if not asked:
        raise InputError(
            f"{_listed(given)} asks for no data: nothing is to be calibrated. Those that do: {_listed(_all())}"
        )


@dataclasses.dataclass(frozen=True)
class Rows:
    """Training rows of a task as tokens: as many as asked for, and where they came from.

    `cut` rows among those that were looked at lost their whole target to the length, and were passed over.
    """

    encoded: list[Encoded]
    source: str
    cut: int


def training_rows(
    task: str | Task, tokenizer: Any, *, source: str | None = None, rows: int = ROWS, length: int = LENGTH
) -> Rows:
    """The first training rows of a task, in its fixed shuffled order, prompt and target as training has them.

    Args:
        task: key, or the task.
        source: folder or file of local JSON rows; None: the rows that the task makes, else the Hub's.
        rows: how many; fewer come back where the task has fewer.
        length: the most tokens of a row.

    Raises:
        InputError: no such task, no data, or no row whose target fits.
    """
    from toolkit.runs.tasks import encode, read

    if rows < 1:
        raise InputError(f"rows is {rows}; at least one row is needed to calibrate on")
    made: Task = registry.make("task", task)
    split = read(made, "train", source=source)
    encoded: list[Encoded] = []
    cut = 0
    for example in split.examples:
        row = encode(tokenizer, example, length)
        if row is None:
            cut += 1
            continue
        encoded.append(row)
        if len(encoded) == rows:
            break
    if not encoded:
        raise InputError(
            f"task {made.key}: no target of its {split.found} training rows ({split.source}) fits into {length} tokens"
        )
    return Rows(encoded, split.source, cut)


def calibrated(
    profile: Profile,
    selectors: str | Selector | Sequence[str | Selector],
    *,
    model: str | os.PathLike[str] | nn.Module,
    encoded: Sequence[Encoded],
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    batch: int = BATCH,
    task: str | None = None,
    source: str | None = None,
    progress: Progress | bool | None = False,
) -> Profile:
    """A profile with each selector's statistic, measured on a few rows; the given profile stays as it is.

    Rows are taken in order in ⌈rows/batch⌉ batches whose sizes differ by one at most, so that no short batch at the
    end weighs as much as a full one (the choice is ours). The gradients of frozen weights exist one layer at a time.

    Args:
        profile: of the model; what it holds is kept, a statistic of the same key is measured anew.
        selectors: keys or selectors; those that ask for no data are left out, one at least must.
        model: what `toolkit.runs.building.build` takes; a model object must be dense and is left as it was.
        encoded: the rows as tokens, with what of them is to be predicted (`toolkit.runs.tasks.encoding`).
        device, dtype: by default CUDA where there is one, and float32; a model object is measured where it is and as
            it is, and one that is asked for elsewhere or in another dtype is copied.
        batch: rows a batch.
        task, source: of the rows, for the record.
        progress: a function, or whether to draw a bar; None: a bar where stderr is a terminal.

    Raises:
        InputError: no selector that asks for data, no rows, a row without a token to predict, another model than
            the profile's, a quantized model, or numbers that are not finite (layer named).
        RunError: a selector failed, or the device has too little memory.
    """
    keys = [selectors] if isinstance(selectors, str | Selector) else list(selectors)
    asked = asking(keys)
    expect_asking(keys, asked)
    batches = _batches(encoded, batch)
    about = {"rows": len(encoded), "batches": len(batches), "sha256": digest_of(encoded)}
    about |= {"task": task, "source": source}
    try:
        made = _statistics(profile, asked, _dense(profile, model, device, dtype), batches, about, progress)
    finally:
        _release()
    return profile.model_copy(update={"statistics": dict(profile.statistics or {}) | made})


def digest_of(encoded: Sequence[Encoded]) -> str:
    """SHA-256 of rows: their token ids and which of them are to be predicted, in order."""
    return digest([[list(row.ids), [int(bool(t)) for t in row.target]] for row in encoded])


def _statistics(
    profile: Profile,
    asked: Sequence[CalibratedSelector],
    model: nn.Module,
    batches: Sequence[Sequence[Encoded]],
    about: dict[str, Any],
    progress: Progress | bool | None,
) -> dict[str, Statistic]:
    from toolkit.runs.models import check_vocabulary

    check_vocabulary(model, (row.ids for rows in batches for row in rows))
    with _prepared(model), _memory(), reporting(progress, len(asked) * len(batches), "calibration") as report:
        where = next(model.parameters())
        tensors = [_tensors(rows, where.device) for rows in batches]
        loss, tokens = _loss(model, tensors)
        found = {}
        for selector in asked:
            values = _measured(selector, model, tensors, profile, report)
            found[selector.statistic_key] = Statistic(
                values=[0.0 if value is None else value for value in values],
                tokens=tokens,
                loss=loss,
                dtype=str(where.dtype).removeprefix("torch."),
                unreached=[n for n, v in zip(profile.names, values, strict=True) if v is None],
                **about,
            )
    return found


def _release() -> None:
    """Give the device's memory back: what is measured next on it must not find the rest of this."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _measured(
    selector: CalibratedSelector, model: nn.Module, batches: list[Any], profile: Profile, report: Progress
) -> list[float | None]:
    import torch

    key = selector.statistic_key
    try:
        answer = list(selector.measure(model, batches, profile, lambda done, total: report(done, total, key)))
    except (ToolkitError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a plug-in's own mistake
        raise RunError(f"selector {key} failed: {type(error).__name__}: {error}") from error
    reached = check_scores(profile, [0.0 if value is None else value for value in answer], key)
    if not any(reached):
        raise InputError(f"{key} measured 0 for every layer of {profile.model}: these rows tell none from another")
    return [None if value is None else number for value, number in zip(answer, reached, strict=True)]


def _batches(encoded: Sequence[Encoded], batch: int) -> list[Sequence[Encoded]]:
    """⌈rows/batch⌉ runs of rows, of sizes that differ by one at most, the larger ones first."""
    if batch < 1:
        raise InputError(f"batch is {batch}; a batch holds at least one row")
    if not encoded:
        raise InputError("there are no rows to calibrate on")
    for number, row in enumerate(encoded, 1):
        if len(row.ids) != len(row.target):
            raise InputError(f"calibration row {number} has {len(row.ids)} tokens and {len(row.target)} marks")
        if not any(row.target[1:]):
            raise InputError(f"calibration row {number} has no token to predict after its first")
    count = math.ceil(len(encoded) / batch)
    small, larger = divmod(len(encoded), count)
    starts = [at * small + min(at, larger) for at in range(count + 1)]
    return [encoded[start:end] for start, end in itertools.pairwise(starts)]


def _tensors(rows: Sequence[Encoded], device: torch.device) -> dict[str, torch.Tensor]:
    """One batch, padded on the right: the padding is masked, predicts nothing, and comes after all that is read."""
    import torch

    from toolkit.runs.gradients import IGNORED

    length = max(len(row.ids) for row in rows)
    shape = (len(rows), length)
    ids = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED, dtype=torch.int64)
    for at, row in enumerate(rows):
        tokens, n = torch.tensor(list(row.ids)), len(row.ids)
        ids[at, :n], mask[at, :n] = tokens, 1
        labels[at, :n] = torch.where(torch.tensor([bool(t) for t in row.target]), tokens, IGNORED)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}


def _loss(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> tuple[float, int]:
    """Nats a predicted token over all batches, and the number of these tokens."""
    import torch

    from toolkit.runs.gradients import token_loss

    total, tokens = 0.0, 0
    with torch.no_grad():
        for number, batch in enumerate(batches, 1):
            loss, count = token_loss(model, batch)
            if not torch.isfinite(loss):
                raise InputError(f"the loss of calibration batch {number} of {len(batches)} is {loss.item()}")
            total, tokens = total + loss.item() * count, tokens + count
    return total / tokens, tokens


def _dense(
    profile: Profile, model: str | os.PathLike[str] | nn.Module, device: str | None, dtype: str | torch.dtype | None
) -> nn.Module:
    """The profile's model, dense, on its device and in its dtype."""
    from torch import nn

    from toolkit.runs.models import cast, choose_device, compute_dtype, load_model
    from toolkit.weights.profiling import fingerprint_of

    given = isinstance(model, nn.Module)
    dense = model if given else load_model(os.fspath(model), device="cpu")
    name = getattr(dense, "name_or_path", "") or type(dense).__name__ if given else os.fspath(model)
    profile.expect(name, fingerprint_of(dense), "the model to calibrate on")
    first = next(dense.parameters())
    where = first.device if given and device is None else choose_device(device)
    target = first.dtype if given and dtype is None else compute_dtype(where, dtype or "float32")
    if given and where == first.device and (dtype is None or all(p.dtype == target for p in dense.parameters())):
        return dense
    return cast(copy.deepcopy(dense) if given else dense, target).to(where)


@contextmanager
def _prepared(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, then as it was."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _memory() -> Iterator[None]:
    """Out of memory becomes an error that says what to change."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(f"calibration ran out of the device's memory; take fewer rows a batch: {reason}") from error


def _all() -> list[str]:
    return [name for name, (cls, _) in registry.of_kind("selector").items() if issubclass(cls, CalibratedSelector)]


def _listed(keys: Sequence[str | Selector]) -> str:
    return ", ".join(key if isinstance(key, str) else key.key for key in keys) or "no selector"
