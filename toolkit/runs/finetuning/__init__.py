"""Fine-tuning studies: from arms, tasks and seeds to plans, runs and their reports."""

from toolkit.runs.finetuning.runner import run

__all__ = ["run"]
