"""Starts of a plan's layers by calibration, block by block: each sees what the quantized blocks before it make."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import InputError, RunError
from toolkit.interfaces import FALLBACK, Initializer, Moments, Quantizer, Start
from toolkit.records.plan import LayerPlan, Plan
from toolkit.records.start import CalibrationText, StartFile
from toolkit.registry import registry
from toolkit.runs import started, starts
from toolkit.runs.progress import reporting
from toolkit.runs.starting.computing import above, settings_of
from toolkit.runs.starting.folder import Folder
from toolkit.runs.starting.sources import Source, source_of
from toolkit.runs.texts.documents import Windows, cut, read_text

if TYPE_CHECKING:
    import torch
    from torch import nn

    from toolkit.runs.starting.blocks import Block, Group
    from toolkit.runs.starting.shell import Call
    from toolkit.weights.layers import Layer
    from toolkit.weights.reporting import Progress

WINDOWS, WINDOW, BATCH = 128, 512, 8
"""Windows, tokens a window, and windows a forward pass, unless told otherwise (our choice)."""

FALLBACKS = 0.1
"""The largest share of calibrated layers that may be started otherwise."""

PLAIN = LayerPlan.model_fields["initializer"].default
UNSEEN = "no calibration token reached it: started plainly"


def calibrate(
    plan: Plan,
    text: str,
    out: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | nn.Module | None = None,
    tokenizer: Any = None,
    windows: int = WINDOWS,
    window: int = WINDOW,
    batch: int = BATCH,
    seed: int = 0,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    sequential: bool = True,
    fallbacks: float = FALLBACKS,
    progress: Progress | bool | None = None,
) -> StartFile:
    """Calibrate and write the start of every layer whose initializer is not plain; `build(..., start=out)` reads them.

    Block by block: R = E[xxᵀ] of a layer's inputs is gathered over all windows while the blocks before it, and the
    layers before it in its own block, compute with what they start with, Ŵ + s·BA. Layers that are called with one
    tensor share one R and are started together, as are the experts of one parameter. Hidden states of all windows stay
    on the CPU, and one block at a time is on the device. Windows have no padding; every token counts alike.

    Where the initializers name a quantizer of activations, inputs of all layers that the plan quantizes are rounded by
    it, for moments and forward pass alike; those that it keeps in 16 bit take theirs as they are. A token is rounded
    as if it were alone (`Quantizer.each_row`), so that nothing depends on the batch. Both are our choice: PACT says
    that the inputs are quantized, and not over which tokens a scale is taken.

    Each layer is written when it is done, the report `start.json` last. The same call goes on where an earlier one was
    cut short, and comes to the same starts; a finished folder is only read. Layers that no token reached, as experts
    may be, start plainly; these and the fall-backs that initializers report are counted and named.

    Args:
        plan: what becomes of each layer.
        text: `wikitext2`, `python-topics`, or a file (.txt, .jsonl with a key `text`, or .gz of them).
        out: folder to write.
        model: a Hugging Face id, a local directory, `demo`, or a dense model object (unchanged); None: the plan's.
        tokenizer: of a model object.
        windows, window: the first so many windows of so many tokens; fewer where the text is shorter.
        batch: windows a forward pass.
        seed: of the adapters.
        dtype: the compute dtype; by default as `build` has it.
        device: to compute on; by default CUDA where there is one; a model object's own.
        sequential: whether later layers of a block see what the earlier ones start with; else all layers of a block are
            calibrated on one pass through the dense block.
        fallbacks: the largest share of the calibrated layers that may be started otherwise.
        progress: a function, called with (layers done, layers in all, the last one's name); or False: silent. By
            default a bar with the time left on a terminal, and a line every half minute elsewhere.

    Raises:
        InputError: the plan does not fit the model, asks for no calibration or for two kinds of activations; a
            calibrated layer outside the blocks; a text shorter than a window; inputs with NaN (layer and windows are
            named); or the folder holds something else.
        RunError: more fall-backs than allowed, too little memory, or a full disk.
    """
    from torch import nn

    from toolkit.runs.models import check_vocabulary, load_model, load_tokenizer
    from toolkit.runs.provenance import Recorder, peak_memory, reset_memory

    _check(windows=windows, window=window, batch=batch, fallbacks=fallbacks)
    document = read_text(text)
    given = isinstance(model, nn.Module)
    if given and tokenizer is None:
        raise InputError("a model object is given without its tokenizer, which the text is cut by")
    source = source_of(plan, model, device=device, dtype=dtype, calibrated=True)
    name = source.plan.model if model is None else model
    if tokenizer is None:
        tokenizer = load_tokenizer(name)  # type: ignore[arg-type]
    chosen = _Chosen.of(source)
    found = cut(document, tokenizer, window=window, tokens=windows * window)
    told = CalibrationText(
        source=document.source,
        sha256=document.sha256,
        windows=found.record.windows,
        window=window,
        tokens=found.record.tokens,
        activations=chosen.activations,
    )
    how = {"batch": batch, "sequential": sequential}
    settings = settings_of(source.asked, source.plan.fingerprint, seed, source.dtype, source.device)
    text_settings = {f"calibration {key}": value for key, value in told.model_dump(exclude={"source"}).items()}
    folder = Folder(out, settings | text_settings | how)
    if folder.finished:
        return folder.report()
    folder.open(source.plan)
    recorder = Recorder(Path.cwd(), source.device, source.dtype, ignore=[folder.path])
    recorder.start()
    before, began = reset_memory(source.device), time.perf_counter()
    with _memory(), reporting(progress, len(source.begun), f"calibration of {source.model}") as report:
        work = _Work(source, chosen, folder, seed, report)
        if not all(folder.holds(each) for each in source.begun):
            dense = model if given else load_model(name, device="cpu")  # type: ignore[arg-type]
            check_vocabulary(dense, found.ids.tolist())
            _check_length(dense, window)
            work.through(dense, found, batch, sequential)
    peak = peak_memory(source.device)
    return folder.close(
        list(source.begun),
        sorted(chosen.calibrated, key=list(source.begun).index),
        fallbacks,
        model=source.model,
        fingerprint=source.plan.fingerprint,
        reference=source.reference,
        plan=source.asked,
        seed=seed,
        dtype=str(source.dtype).removeprefix("torch."),
        calibration=told,
        seconds=round(time.perf_counter() - began, 3),
        peak_bytes=above(peak, before),
        provenance=recorder.finish(memory=peak),
    )


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """The layers that are calibrated, and the quantizer of activations: its key, and it where there is one."""

    calibrated: frozenset[str]
    activations: str
    quantizer: Quantizer | None

    @classmethod
    def of(cls, source: Source) -> _Chosen:
        """As the plan's initializers say.

        Raises:
            InputError: two ask for different activations.
        """
        made: dict[str, Initializer] = {
            key: registry.make("initializer", key) for key in {layer.initializer for layer in source.begun.values()}
        }
        calibrated = [name for name, layer in source.begun.items() if made[layer.initializer].needs_calibration]
        first: dict[str, str] = {}
        for name in calibrated:
            first.setdefault(made[source.begun[name].initializer].activations, name)
        if len(first) > 1:
            (one, here), (other, there) = list(first.items())[:2]
            raise InputError(
                f"layer {here} is calibrated on inputs rounded by {one} and layer {there} by {other}: a data flow "
                "rounds all of them alike"
            )
        key = next(iter(first))
        rounds = key != "none"  # what `Initializer.activations` calls inputs that are left as they are
        return cls(frozenset(calibrated), key, registry.make("quantizer", key) if rounds else None)


class _Work:
    """The pass through a model."""

    def __init__(self, source: Source, chosen: _Chosen, folder: Folder, seed: int, report: Progress) -> None:
        self._source, self._chosen, self._folder, self._seed = source, chosen, folder, seed
        self._report, self._done = report, 0
        self._rounds: dict[str, bool] = {}

    def through(self, model: nn.Module, text: Windows, batch: int, sequential: bool) -> None:
        """Start every layer: those outside the blocks first, then block after block as far as any is calibrated."""
        from toolkit.runs.starting.blocks import Block
        from toolkit.runs.starting.shell import Shell, list_of_blocks
        from toolkit.weights.layers import head_of, layers_of

        head, source = head_of(model), self._source
        layers = layers_of(model, include_head=head in source.layers)
        path = list_of_blocks(model, [layer for layer in layers if layer.name in self._chosen.calibrated])
        inside: dict[int, list[Layer]] = {}
        outside = []
        for layer in layers:
            rest = layer.path.removeprefix(f"{path}.") if layer.path.startswith(f"{path}.") else ""
            if rest:
                inside.setdefault(int(rest.partition(".")[0]), []).append(layer)
            else:
                outside.append(layer)
        shell = Shell(model, path, source.dtype)
        for layer in outside:
            effective = self._start(layer.name, None)
            if effective is not None and layer.name != head:
                own = dataclasses.replace(layer, module=shell.model.get_submodule(layer.path))
                own.weight().copy_(effective)
        entered = [shell.calls(text.ids[at : at + batch]) for at in range(0, len(text.ids), batch)]
        hidden, calls = [first for first, _ in entered], [each for _, each in entered]
        del entered
        last = max(at for at, own in inside.items() if any(one.name in self._chosen.calibrated for one in own))
        for at in range(last + 1):
            own = inside.get(at, [])
            block = Block(
                shell.copy_of(at).to(source.device),
                f"{path}.{at}",
                own,
                [layer.name for layer in own if self._quantized(layer.name)],
                self._chosen.quantizer,
            )
            self._block(block, [each[at] for each in calls], hidden, sequential, text)
            if at < last:
                for number, states in enumerate(hidden):
                    out = block.run(calls[number][at], states.to(source.device))
                    assert out is not None
                    hidden[number] = out.cpu()
        for at in range(last + 1, max(inside) + 1):
            for layer in inside.get(at, []):
                self._start(layer.name, None)

    def _block(
        self, block: Block, calls: Sequence[Call], hidden: Sequence[torch.Tensor], sequential: bool, text: Windows
    ) -> None:
        if not block.layers:
            return
        shared, repeated = block.order(calls[0], hidden[0].to(self._source.device))
        for group in block.groups(shared, sequential=sequential):
            wanted = {n for n in group.names if n in self._chosen.calibrated and not self._folder.holds(n)}
            found = self._gather(block, group, wanted, repeated, calls, hidden, text) if wanted else {}
            for name in group.names:
                effective = self._start(name, found.get(name))
                if effective is not None:
                    block.put(name, effective)

    def _gather(
        self,
        block: Block,
        group: Group,
        wanted: set[str],
        repeated: set[str],
        calls: Sequence[Call],
        hidden: Sequence[torch.Tensor],
        text: Windows,
    ) -> dict[str, Moments]:
        """Moments of the wanted layers' inputs over all windows; layers that no token reached are left out."""
        from toolkit.runs.starting.moments import Gathered
        from toolkit.runs.starting.shell import Enough

        owner: dict[str, str] = {}
        for names in group.inputs:
            first: dict[bool, str] = {}  # a layer whose input is not rounded has moments of its own
            for name in names:
                if name in wanted:
                    owner[name] = first.setdefault(self._quantized(name), name)
        sums = {name: Gathered() for name in owner.values()}
        experts = any(block.layers[name].index is not None for name in sums)
        until = set() if experts or repeated & set(group.names) else set(sums)  # no early end where more may come
        seen: set[str] = set()
        at = 0
        count = 0

        def see(name: str, x: torch.Tensor) -> torch.Tensor:
            if name in sums:
                if not sums[name].add(x):
                    raise InputError(
                        f"layer {name}: its inputs in {_windows(x, at, count)} of {text.record.source} hold NaN, "
                        "infinity, or numbers too large to be squared"
                    )
                seen.add(name)
                if until and seen >= until:
                    raise Enough
            return x

        for call, states in zip(calls, hidden, strict=True):
            seen.clear()
            count = len(states)
            block.run(call, states.to(self._source.device), see)
            at += count
        made = {name: each.moments(self._chosen.activations) for name, each in sums.items()}
        return {name: moments for name, one in owner.items() if (moments := made[one]) is not None}

    def _quantized(self, name: str) -> bool:
        """Whether the plan quantizes the layer: one that it keeps in 16 bit takes its inputs as they are."""
        if name not in self._rounds:
            layer = self._source.layers.get(name)
            self._rounds[name] = layer is not None and not registry.make("quantizer", layer.quantizer).keeps(
                self._source.read(name).dtype
            )
        return self._rounds[name]

    def _start(self, name: str, moments: Moments | None) -> torch.Tensor | None:
        """The weight that a layer starts with, float32, after its start was written; None where it stays as it is."""
        import torch

        source = self._source
        layer = source.layers.get(name)
        if layer is None:
            return None
        compute = getattr(torch, layer.compute_dtype) if layer.compute_dtype else source.dtype
        if name not in source.begun:
            weight, quantizer = source.read(name).to(source.device), registry.make("quantizer", layer.quantizer)
            return None if quantizer.keeps(weight.dtype) else quantizer.quantize(weight).dequantize(compute).float()
        if self._folder.holds(name):
            start = starts.read(self._folder.path, name, source.device)
        else:
            start = self._computed(name, layer, moments)
        self._done += 1
        self._report(self._done, len(source.begun), name)
        return start.effective(compute)

    def _computed(self, name: str, layer: LayerPlan, moments: Moments | None) -> Start:
        source = self._source
        weight = source.read(name).to(source.device)
        unseen = name in self._chosen.calibrated and moments is None
        start, record = started.computed(
            name, layer, weight, source.dtype, self._seed, moments, initializer=PLAIN if unseen else None
        )
        if unseen:
            start = dataclasses.replace(start, notes={**start.notes, FALLBACK: UNSEEN})
            record = record.model_copy(update={"notes": dict(start.notes)})
        self._folder.put(name, start, record)
        return start


def _windows(x: torch.Tensor, at: int, count: int) -> str:
    """Which windows of a batch hold what is not finite, counted from 1."""
    if x.shape[0] == count and x.ndim == 3:
        bad = [at + n + 1 for n in range(count) if not bool(x[n].float().square().isfinite().all())]
        if bad:
            return f"window {bad[0]}" + (f" (and {len(bad) - 1} more)" if len(bad) > 1 else "")
    return f"windows {at + 1} to {at + count}"


def _check(windows: int, window: int, batch: int, fallbacks: float) -> None:
    for what, found, least in (("windows", windows, 1), ("window", window, 2), ("batch", batch, 1)):
        if found < least:
            raise InputError(f"{what} is {found}; at least {least} is needed")
    if not 0 <= fallbacks <= 1:
        raise InputError(f"fallbacks is {fallbacks}; a share from 0 to 1 is asked for")


def _check_length(model: nn.Module, window: int) -> None:
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(limit, int) and window > limit:
        raise InputError(f"windows of {window} tokens: the model reads at most {limit}")


@contextmanager
def _memory() -> Iterator[None]:
    """Out of memory becomes an error that says what to change."""
    from toolkit.runs.provenance import out_of_memory

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise RunError(
            f"calibration ran out of memory; take a smaller batch: layers that are done are kept: {reason}"
        ) from error
