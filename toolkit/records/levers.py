"""What a fine-tuning is done with: the levers that every arm shares, and its seeds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, FiniteFloat

from toolkit.records.io import Record


class Levers(Record):
    """The training settings, the same for every arm unless a study declares one a factor.

    Defaults are the paper's (AQLoRA §4): r = 8, alpha = 16, lr 3e-4 cosine, one epoch, batch 6 × 8, 600 tokens.
    Where it is silent the choice is ours: no warm-up, no weight decay, gradient norms clipped at 1.

    Attributes:
        rank, alpha: of every adapter; the factor on BA is the arm's scaler's.
        warmup: share of the steps.
        steps: optimizer steps; where given, `epochs` is not used.
        batch, accumulation: examples a micro-batch, and micro-batches an optimizer step.
        length: the most tokens of an example, prompt and target together.
        group_by_length: batches of examples of like length, in an order that (seed, epoch) fixes.
        checkpointing: non-reentrant gradient checkpointing of every block.
        backward_stop: run no backward pass below the lowest adapted block.
        deterministic: deterministic kernels only.
        graphs: replay forward and backward as CUDA graphs, one a shape, with rows padded to multiples of 32 tokens:
            for small models, whose steps a GPU waits for (`toolkit.runs.training.graphs`).
    """

    rank: int = Field(default=8, gt=0)
    alpha: FiniteFloat = Field(default=16.0, gt=0)
    learning_rate: FiniteFloat = Field(default=3e-4, gt=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    clip: float = Field(default=1.0, gt=0, allow_inf_nan=False, description="largest norm of the gradient")
    epochs: int = Field(default=1, gt=0)
    steps: int | None = Field(default=None, gt=0)
    batch: int = Field(default=6, gt=0)
    accumulation: int = Field(default=8, gt=0)
    length: int = Field(default=600, gt=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    group_by_length: bool = True
    checkpointing: bool = False
    backward_stop: bool = True
    deterministic: bool = False
    graphs: bool = False


class Seeds(Record):
    """The seeds of one run, separate factors: adapters, order of the data, random selections; `repeat` changes nothing.

    Two runs that differ in `repeat` alone are an A/A pair: what differs between them is run-to-run noise.
    """

    adapter: int = Field(ge=0, lt=2**32, description="numpy's generators, which Trainer seeds too, take 32 bits")
    data: int = Field(ge=0, lt=2**32)
    draw: int = Field(ge=0, lt=2**32)
    repeat: int = Field(default=0, ge=0)

    @classmethod
    def all(cls, seed: int, repeat: int = 0) -> Seeds:
        """One seed for everything."""
        return cls(adapter=seed, data=seed, draw=seed, repeat=repeat)

    def __str__(self) -> str:
        text = f"a{self.adapter}-d{self.data}-s{self.draw}"
        if self.adapter == self.data == self.draw:
            text = f"seed{self.adapter}"
        return text + (f"-r{self.repeat}" if self.repeat else "")
