"""The timing protocol, as a study declares it."""

from __future__ import annotations

from pydantic import Field

from toolkit.records.io import Record


class Timing(Record):
    """The timing protocol (AQLoRA §4, §6).

    Attributes:
        task: whose training rows are the fixed list of batches; the study's first where it is left out.
        arms: that are timed; all where it is left out.
        duplicates: runs of the baseline beside the first, for the floor.
        noisiest: the arm that gets a duplicate as well; where it is left out, the arm beside the baseline whose samples
            spread most in earlier sessions, and before those the one with most quantized layers.
        rounds: of all arms, each in a new random order.
        seconds: of each arm in each round, in whole cycles of the list.
        batches: micro-batches of the list, rounded up to whole optimizer steps.
        warmup: cycles before the first round.
        floor: a session at or above it is shown and kept out.
    """

    task: str | None = None
    arms: list[str] | None = None
    duplicates: int = Field(default=2, ge=2, description="with the first, at least three runs of the baseline")
    noisiest: str | None = None
    rounds: int = Field(default=5, ge=3)
    seconds: float = Field(default=10.0, gt=0)
    batches: int = Field(default=8, gt=0)
    warmup: int = Field(default=1, ge=1)
    floor: float = Field(default=0.03, gt=0, lt=1)
