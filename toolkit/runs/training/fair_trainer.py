"""The Hugging Face Trainer under the study's levers: one configuration for every arm.

What differs from the stock Trainer changes no number: the loss is taken at the target tokens alone
(`toolkit.runs.training.loss`), the order of the data is a pure function (`batches`), checkpoints hold only what is
trained, without pickles (`checkpoints`), and work that the stock loop repeats in every micro-batch over all modules
of the model (mode, operation counts) is done once.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from toolkit.errors import InputError, RunError
from toolkit.records.plan import Plan
from toolkit.runs.adapters import uncast
from toolkit.runs.models import check_vocabulary
from toolkit.runs.training import checkpoints, settings
from toolkit.runs.training.backward import bare_model, blocks_of, lowest_block, run_through, stop_backward
from toolkit.runs.training.batches import Schedule, collate, schedule
from toolkit.runs.training.dropout import lever_dropout
from toolkit.runs.training.graphs import Graphs, refused
from toolkit.runs.training.loss import TargetLoss

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from toolkit.records.levers import Levers, Seeds
    from toolkit.runs.tasks.encoding import Encoded


class FairTrainer(Trainer):
    """Trains the adapters of a built model; made by `trainer`.

    Attributes:
        plan: the steps, their micro-batches and tokens.
        lowest: where backward ends; None: it runs through all blocks.
        losses, norms: of the steps since they were last taken, on the device: nats a target token, and the
            gradient's norm before clipping.
        broken: on the device, whether any step so far had a loss or gradient that is not finite; such a step and
            those after it change nothing (under a loss scale the scale decides instead).
    """

    def __init__(self, *, plan: Schedule, levers: Levers, data: Sequence[Encoded], pad: int, **kwargs: Any) -> None:
        self.plan, self.levers, self.data, self.pad = plan, levers, data, pad
        super().__init__(**kwargs)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.lowest = lowest_block(self.model) if levers.backward_stop else None
        self.losses: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []
        self.broken = torch.zeros((), dtype=torch.bool, device=self.args.device)
        self.graphs: Graphs | None = None
        self._loss: TargetLoss | None = None
        self._sum = torch.zeros((), device=self.args.device)
        self.position: Callable[[], dict[str, Any]] = dict
        self.identity: dict[str, Any] = {}

    # -- data --------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """All micro-batches of the run in order, as one epoch; of this process only."""
        from torch.utils.data import DataLoader

        mine = self.plan.of_rank(self.args.process_index, self.args.world_size)
        return DataLoader(
            self.data,
            batch_sampler=mine,
            collate_fn=lambda rows: collate(rows, self.pad, coarse=self.levers.graphs),
            pin_memory=self.args.device.type == "cuda",
        )

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list, int]:
        """The next step's micro-batches and its number of target tokens, over all processes."""
        return list(itertools.islice(epoch_iterator, num_batches)), self.plan.target[self.state.global_step]

    def _prepare_input(self, data: Any) -> Any:
        if isinstance(data, torch.Tensor):
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    # -- one step ----------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        """The micro-batch's share of the step's loss, times the processes, whose gradients are averaged."""
        count = num_items_in_batch if num_items_in_batch is not None else int(inputs["targets"].ge(0).sum())
        return self._loss(model, inputs, count / self.args.world_size)

    def training_step(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; the model's mode was set once, before the first."""
        inputs = self._prepare_inputs(inputs)
        if self.graphs is None:
            loss = self._forward_backward(model, inputs, num_items_in_batch)
        else:
            loss = self.graphs(inputs, num_items_in_batch)
        self._sum += loss
        return loss

    def _forward_backward(self, model: nn.Module, inputs: dict[str, torch.Tensor], count: Any) -> torch.Tensor:
        """Gradients are added to the parameters'; the loss comes back, detached."""
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=count)
        self.accelerator.backward(loss)
        return loss.detach()

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: the stock count walks over all modules for every micro-batch."""
        return 0

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip the norm of all gradients; mark the step where it, or the loss, is not finite."""
        norm = self.accelerator.clip_grad_norm_(self.trained, self.args.max_grad_norm).detach()
        self.losses.append(self._sum.clone())
        self.norms.append(norm)
        self._sum.zero_()
        if self.accelerator.scaler is None:
            self.broken |= ~torch.isfinite(norm + self.losses[-1])
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            if optimizer.defaults.get("fused"):  # the fused kernel leaves all as it is where this is 1
                optimizer.found_inf = self.broken.float()
            elif self.broken:
                norm = norm.new_zeros(())
                for parameter in self.trained:
                    if parameter.grad is not None:
                        parameter.grad.zero_()
        else:
            self.broken |= ~torch.isfinite(self.losses[-1])
        return norm

    # -- the model's state ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """The model as it is trained; afterwards as it was built, in evaluation mode, with its new adapters."""
        config = getattr(self.model, "config", None)
        cached = getattr(config, "use_cache", None)
        self._loss = TargetLoss(self.model)
        handle = None if self.levers.backward_stop else run_through(self.model)
        try:
            autocast = self.args.bf16 or self.args.fp16
            narrow = uncast(self.model) if autocast else contextlib.nullcontext()
            with lever_dropout(self.model, self.levers.dropout), narrow:
                self.model.train()
                yield
        finally:
            self._loss.remove()
            if handle is not None:
                handle.remove()
            _checkpointing_off(self.model)
            stop_backward(self.model)
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
            self.model.__dict__.pop("_is_accelerate_prepared", None)  # else a second training goes without autocast
            self.model.zero_grad(set_to_none=True)
            self.model.eval()
            if config is not None and cached is not None:
                config.use_cache = cached

    @property
    def not_graphed(self) -> str | None:
        """Why the lever `graphs` has no effect, or None."""
        if not self.levers.graphs:
            return None
        scaled = self.accelerator.scaler is not None
        reason = refused(self.levers.checkpointing, self.args.device, self.args.world_size, scaled)
        return reason or (self.graphs.failed if self.graphs is not None else None)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; under the lever `graphs`, on a stream that can be captured."""
        if not self.levers.graphs or self.not_graphed is not None:
            return super().train(*args, **kwargs)
        if self.graphs is None:
            work = lambda inputs, count: self._forward_backward(self.model_wrapped, inputs, count)  # noqa: E731
            self.graphs = Graphs(work, self.trained)
        with self.graphs.stream():
            return super().train(*args, **kwargs)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        checkpoints.save(self, Path(self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoints.load_adapters(self, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.load_optimizer(self, Path(checkpoint))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """With the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.load_chance(self, Path(checkpoint))


class Levered(TrainerCallback):
    """Sets backward's end once Trainer has turned on what undoes it, and watches in the first step that it holds."""

    def __init__(self, trainer: FairTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After Trainer's own enabling of checkpointing.

        Raises:
            RunError: in the first forward pass, where the lowest adapted block's input asks for a gradient.
        """
        lowest = self._trainer.lowest
        if not self._trainer.levers.backward_stop:
            return
        stop_backward(self._trainer.model)
        block = None if lowest is None else blocks_of(self._trainer.model).get(lowest)
        if block is None:
            return

        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            handle.remove()
            if any(isinstance(x, torch.Tensor) and x.requires_grad for x in (*args, *kwargs.values())):
                raise RunError(
                    f"backward would run below block {lowest}, the lowest with an adapter, although the lever "
                    "backward_stop is on: something else asks for a gradient of the block's input"
                )

        handle = block.register_forward_pre_hook(look, with_kwargs=True)


def _checkpointing_off(model: nn.Module) -> None:
    bare = bare_model(model)
    for name in ("activation_checkpointing_disable", "gradient_checkpointing_disable"):
        if hasattr(bare, name) and getattr(bare, "supports_gradient_checkpointing", False):
            getattr(bare, name)()
            return


def trainer(
    model: nn.Module,
    data: Sequence[Encoded],
    levers: Levers,
    seeds: Seeds,
    *,
    folder: str | Path,
    pad: int,
    callbacks: Sequence[TrainerCallback] = (),
    report_to: Sequence[str] = (),
    name: str = "",
    repeated: Sequence[Sequence[int]] | None = None,
) -> FairTrainer:
    """The configured Trainer, not yet started: run it inside `with trainer.ready(): trainer.train()`.

    Adapters are trained in float32, whatever the model computes in; a 16-bit model runs under autocast, float16 on a
    GPU with a loss scale too.

    Args:
        model: a built model with adapters, on its device.
        data: examples in a fixed order.
        seeds: the data seed fixes the order and everything else left to chance; the adapters are made already.
        folder: for checkpoints and trackers' logs.
        pad: id of the token that fills rows up.
        callbacks: further ones.
        report_to: trackers, by Trainer's names.
        repeated: micro-batches to repeat in place of the shuffled epochs (`batches.schedule`).

    Raises:
        InputError: nothing to train, no usable examples, a token without an embedding, an accumulation that the
            processes do not divide, an attention or dropout that the model was not built with, or an unknown tracker.
    """
    folder = Path(folder)
    trained = {path: p for path, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise InputError("the model has no parameter to train: its plan gives no layer an adapter")
    for parameter in trained.values():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
    _check_built(model, levers)
    plan = schedule(data, levers, seeds.data, repeated=repeated)
    check_vocabulary(model, (row.ids for row in data))
    device = next(iter(trained.values())).device
    args = settings.arguments(
        levers, seeds, len(plan.steps), folder, device, _dtype(model), report_to=report_to, name=name
    )
    try:
        made = FairTrainer(
            plan=plan, levers=levers, data=data, pad=pad, model=model, args=args, train_dataset=list(data)
        )
    except (RuntimeError, ImportError) as error:
        if not report_to:
            raise
        raise InputError(f"report_to {', '.join(report_to)}: {error}") from error
    for stock in (PrinterCallback, ProgressCallback):
        made.remove_callback(stock)
    made.add_callback(Levered(made))
    for callback in callbacks:
        made.add_callback(callback)
    made.identity = {
        "levers": levers.model_dump(mode="json"),
        "seeds": seeds.model_dump(mode="json"),
        "steps": len(plan.steps),
        "data": _digest(data),
        "dtype": str(_dtype(model)).removeprefix("torch."),
        "trained": {path: list(p.shape) for path, p in trained.items()},
        "plan": found.hash if isinstance(found := getattr(model, "plan", None), Plan) else None,
    }
    return made


def _digest(data: Sequence[Encoded]) -> str:
    """Hash of the examples' ids and targets, in order."""
    found = hashlib.sha256()
    for row in data:
        found.update(array.array("q", (len(row.ids), *row.ids)).tobytes() + bytes(row.target))
    return found.hexdigest()


def _dtype(model: nn.Module) -> torch.dtype:
    """What the model computes in: the dtype of its frozen embeddings, or of its first frozen weight."""
    found = [p.dtype for p in model.parameters() if not p.requires_grad and p.dtype.is_floating_point]
    return found[0] if found else torch.float32


def _check_built(model: nn.Module, levers: Levers) -> None:
    """Levers that a model is built with must be those that it is trained with."""
    built = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if built is not None and built != levers.attention:
        raise InputError(f"the model was built with attention {built!r}, and the levers ask for {levers.attention!r}")
