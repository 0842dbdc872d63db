"""The study of starts: what layers' bases and adapters begin with, judged before any training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, FiniteFloat, model_validator

from toolkit.errors import InputError, closest
from toolkit.records.budget import Budget
from toolkit.records.composition import Name
from toolkit.records.declared import read_declared
from toolkit.records.io import File, Record, digest
from toolkit.records.study import DEMO_MODEL, beside

CALIBRATION = "calibration"
"""Under this name a lock holds the calibration text's hash."""


AS_THEY_ARE = "none"
"""Of `activations`: inputs are not rounded, whatever their dtype."""


class Protection(Record):
    """Which layers an arm keeps in 16 bit."""

    selector: str
    budget: Budget | None = None


class StartArm(Record):
    """One arm: how the layers that are not protected are quantized, and what they start from.

    Attributes:
        base: quantizer of the layers that are not protected.
        initializer: of these layers.
        protect: none where it is left out.
    """

    name: Name
    base: str = "nf4"
    initializer: str = "zero"
    protect: Protection | None = None


class CalibrationUse(Record):
    """The text that initializers are calibrated on, and on which layers' output errors are measured for every arm.

    It must be another text, or another split, than those that the study evaluates on.

    Attributes:
        text: a named source or a file, as the study's texts.
        windows: at most so many, from the text's beginning.
        window: tokens a window.
    """

    text: str
    windows: int = Field(default=64, gt=0)
    window: int = Field(default=512, gt=1)


class StartContrasts(Record):
    """What is compared, declared beforehand, at every scaling, text and rounding of inputs.

    Residuals are exact numbers of the weights and need no test; what is sampled is the text.

    Attributes:
        baseline: every other arm is compared with it.
        pairs: further comparisons, [arm, arm].
        outcome: `loss` or `kl` (against the 16-bit model), nats a token, paired by window.
        level: of the family of all declared comparisons.
        correction: `bonferroni`: each interval covers 1 − level/comparisons, so that all cover at once; or `none`.
        block: windows a block of the bootstrap; 2 covers windows that depend a little on their neighbours.
        resamples: of the bootstrap.
    """

    baseline: str
    pairs: list[tuple[str, str]] = []
    outcome: Literal["loss", "kl"] = "loss"
    level: float = Field(default=0.05, gt=0, lt=1)
    correction: Literal["bonferroni", "none"] = "bonferroni"
    block: int = Field(default=2, gt=0)
    resamples: int = Field(default=10_000, ge=200, le=100_000)


class Initialization(File):
    """A study of starts: arms × scalings, each merged, W' = Ŵ + s·BA, and scored on texts; nothing is trained.

    Attributes:
        model: a Hugging Face id, a local directory, or `demo` for the embedded model.
        texts, tokens, window, batch: as `toolkit.records.study.Study`.
        calibration: null where no arm needs it and no output error is asked for.
        rank: of every adapter.
        scaler: the factor on BA; alpha is chosen so that it gives each of the scalings.
        scalings: s, the values of the factor.
        activations: quantizers that the inputs of the layers that are not protected are rounded by while the model is
            scored, one after the other; `none` leaves them as they are.
        seed: of the adapters' A, and of random selections.
        small: fields that replace the above in the small form (`--small`).
    """

    kind: Literal["initialization"]
    name: Name
    question: str
    model: str = DEMO_MODEL
    texts: dict[str, str] = Field(min_length=1, default={"python-topics": "python-topics"})
    tokens: int | None = Field(default=None, gt=1)
    window: int = Field(default=512, gt=1)
    batch: int = Field(default=4, gt=0, description="windows a forward pass")
    calibration: CalibrationUse | None = None
    rank: int = Field(default=8, gt=0)
    scaler: str = "lora"
    scalings: list[FiniteFloat] = Field(default=[2.0], min_length=1)
    activations: list[str] = Field(default=["none"], min_length=1)
    arms: list[StartArm] = Field(min_length=1)
    seed: int = Field(default=0, ge=0, lt=2**32)
    analysis: StartContrasts
    form: Literal["full", "small"] = "full"
    small: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Initialization:
        if self.tokens is not None and self.tokens < self.window:
            raise InputError(
                f"tokens={self.tokens} is less than one window of {self.window}; ask for at least that many"
            )
        names = [arm.name for arm in self.arms]
        for what, found in (("arms", names), ("scalings", self.scalings), ("activations", self.activations)):
            for value in found:
                if found.count(value) > 1:
                    raise InputError(f"{what}: {value!r} stands twice; once is enough")
        for s in self.scalings:
            if s <= 0:
                raise InputError(f"scalings holds {s:g}; a factor above 0 is asked for")
        named = [("analysis.baseline", [self.analysis.baseline])]
        named += [("analysis.pairs", [arm for pair in self.analysis.pairs for arm in pair])]
        for key, found in named:
            for name in found:
                if name not in names:
                    raise InputError(f"{key} names {name!r}; {closest(name, names)}")
        for one, other in self.analysis.pairs:
            if one == other:
                raise InputError(f"analysis.pairs compares {one!r} with itself")
        if CALIBRATION in self.texts:
            raise InputError(f"texts: {CALIBRATION!r} is the name of the text that is calibrated on; choose another")
        if self.calibration is not None:
            for name, source in self.texts.items():
                if source == self.calibration.text:
                    raise InputError(
                        f"calibration.text is {source!r}, which text {name!r} is evaluated on: calibrate on another "
                        "text or split, or the arms that are calibrated are judged on what they were fitted to"
                    )
        return self

    def arm(self, name: str) -> StartArm:
        """The arm of a name."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(first, second), each once: every other arm − the baseline, then the declared pairs."""
        base = self.analysis.baseline
        found = [(arm.name, base) for arm in self.arms if arm.name != base]
        return found + [pair for pair in self.analysis.pairs if pair not in found]

    @property
    def family_size(self) -> int:
        """How many comparisons are declared: pairs × scalings × texts × activations."""
        return len(self.pairs) * len(self.scalings) * len(self.texts) * len(self.activations)

    @property
    def published(self) -> Initialization:
        """The study as it may be shown: folders of models and texts are the user's own, and stand by name alone."""
        changes: dict[str, Any] = {"texts": {name: Path(source).name for name, source in self.texts.items()}}
        if self.calibration is not None:
            changes["calibration"] = self.calibration.model_copy(update={"text": Path(self.calibration.text).name})
        if Path(self.model).is_dir():
            changes["model"] = Path(self.model).name
        return self.model_copy(update=changes)

    @property
    def declaration(self) -> str:
        """Hash of what is declared: the study as published, less its small form, its model by name alone."""
        data = self.published.model_copy(update={"small": None, "model": Path(self.model).name})
        return digest(data.to_json())

    @classmethod
    def read(cls, path: str | os.PathLike[str], small: bool = False, **changes: Any) -> Initialization:
        """A study from its folder or its `study.yaml`; with `small`, its small form; `changes` replace fields.

        A model's folder and a text's file are looked for beside the study first, so that it runs from any folder.

        Raises:
            InputError: no such study, an unknown key or a wrong type (with line), or no small form.
        """
        return read_declared(cls, path, _beside, small=small, changes=changes)


def _beside(data: Any, home: Path) -> Any:
    """A study's plain data, with the model and the texts that lie beside it as paths from here."""
    found = beside(data, home)
    if not isinstance(found, dict):
        return found
    for part in (found, found.get("small")):
        use = part.get("calibration") if isinstance(part, dict) else None
        if isinstance(use, dict) and isinstance(use.get("text"), str) and Path(use["text"]).suffix:
            path = home / use["text"]
            if path.exists():
                part["calibration"] = use | {"text": str(path)}
    return found
