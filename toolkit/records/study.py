"""The study file: factors, seeds, fixed settings and the analysis, as a researcher writes them in YAML."""

from __future__ import annotations

import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from toolkit.errors import InputError, closest
from toolkit.records.budget import TEXT, Budget
from toolkit.records.declared import read_declared
from toolkit.records.io import File, Record, digest

NAME = r"^[A-Za-z0-9][A-Za-z0-9._@+-]*$"
STUDY_COPY = "study.json"
"""The study as it ran, kept beside its runs."""

OUTCOMES = ("loss", "kl")
MOST_DRAWS = 1_000_000
"""The most draws of one control: they are all made before the first is measured, and kept."""

DEMO_MODEL = "demo"
"""The model id that stands for the embedded demo model."""


class Arm(Record):
    """One selection that is judged: a selector under each budget.

    `total_of` names another arm: the selector then gets that arm's reached parameters as its budget.
    """

    selector: str
    name: Annotated[str, Field(pattern=NAME)] | None = None
    total_of: str | None = None

    @property
    def label(self) -> str:
        """The arm's name: as given, or made from the selector's key."""
        return self.name or slug(self.selector)


class Control(Record):
    """Random selections that arms are judged against: `draws` of a random selector, matched to each arm.

    `like` names the arms; left out, every arm gets its own draws. With `chain`, a draw is one nested family over
    all budgets.
    """

    selector: str
    name: Annotated[str, Field(pattern=NAME)] | None = None
    draws: int = Field(gt=0)
    like: list[str] | None = None
    chain: bool = False

    @property
    def label(self) -> str:
        """The control's name: as given, or made from the selector's key."""
        return self.name or slug(self.selector)


class Exclusion(Record):
    """Comparisons that are left out of the claims, and why; they are still shown. What is not named stands for all."""

    arm: str | None = None
    text: str | None = None
    budget: Budget | None = None
    reason: str = Field(min_length=1)

    @model_validator(mode="after")
    def _names_something(self) -> Exclusion:
        if self.arm is None and self.text is None and self.budget is None:
            raise InputError("an exclusion names an arm, a text or a budget; found none of them")
        return self


class Analysis(Record):
    """What is tested, declared beforehand; `toolkit lock` seals it.

    The claims are one a judged arm and text (`test: joint`), or one an arm, text and budget (`test: each`), less
    the exclusions; all of them are the family that is corrected for.

    Attributes:
        outcome: the primary outcome, which is ranked: `loss` or `kl`, in nats a token.
        control: the contrast is the arm against the draws of this control; the other controls' verdicts stand
            beside it.
        arms: the arms that claims are made of; every arm where it is left out.
        side: `less`: the claim is that the arm's outcome is lower than its draws'.
        test: `each` ranks the arm among the draws at each budget; `joint` ranks the mean over budgets of the
            standardized gap among families of draws, which needs a control that draws such families.
        margin: the smallest gap to the median draw that matters, in the outcome's unit, and its reason.
        level: of the family, after correction.
        correction: `holm`, `max-t` (the largest statistic over arms that share their draws), or `none`.
    """

    outcome: str = "loss"
    control: str
    arms: list[str] | None = None
    side: Literal["less", "greater"] = "less"
    test: Literal["each", "joint"] = "each"
    margin: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    margin_reason: str | None = None
    level: float = Field(default=0.05, gt=0, lt=1)
    correction: Literal["holm", "max-t", "none"] = "holm"
    exclusions: list[Exclusion] = []

    @model_validator(mode="after")
    def _reasoned(self) -> Analysis:
        if self.margin and not (self.margin_reason or "").strip():
            raise InputError(f"margin {self.margin} has no margin_reason: say why a smaller gap does not matter")
        return self

    def reachable(self, tests: int, draws: int) -> float:
        """The smallest corrected p that n draws can give a family of m claims.

        Holm: min(1, m/(n + 1)), because the smallest p is multiplied by m. Max-T and no correction: 1/(n + 1).
        """
        return min(1.0, (tests if self.correction == "holm" else 1) / (draws + 1))

    def excluded(self, arm: str, text: str, budget: str | None = None) -> str | None:
        """Why a claim is left out; None where it is not. A claim over all budgets has no budget."""
        for item in self.exclusions:
            same = (item.arm in (None, arm), item.text in (None, text))
            if all(same) and (item.budget is None or (budget is not None and str(item.budget) == budget)):
                return item.reason
        return None


class Headroom(Record):
    """How much better than chance a selection of the same memory can be: the reference selections and their text split.

    The first half of each text's windows fits, the second half scores.

    Attributes:
        fit: `sweep`: the effect of restoring each layer alone; `ridge`: a ridge regression of the draws' losses on
            which layers they hold.
        arms: the arms whose memory the reference selections hold; every arm where it is left out.
        within: tolerance of that memory, a fraction of the arm's parameters.
        block: windows a block of the bootstrap; 2 covers windows that depend a little on their neighbours, as those
            of a running text do (coverage in simulation: `toolkit.analysis.statistics.bootstrap`).
        resamples: of the bootstrap.
    """

    fit: Literal["sweep", "ridge"] = "sweep"
    arms: list[str] | None = None
    within: Decimal = Field(default=Decimal("0.001"), ge=0, lt=1)
    block: int = Field(default=2, gt=0)
    resamples: int = Field(default=2000, ge=200, le=100_000)


def split(windows: int) -> int:
    """How many of a text's windows fit the reference selections: the first ⌈n/2⌉; the others score them."""
    return -(-windows // 2)


def _budgets(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Study(File):
    """A controlled ablation over selections of protected layers.

    Attributes:
        model: a Hugging Face id, a local directory, or `demo` for the embedded model.
        base: quantizer key of the layers that are not protected; `protect`, of those that are.
        texts: name → source: `python-topics` (embedded), `wikitext2` (hub) or a file.
        tokens: at most this many tokens of each text; null takes all.
        window: tokens a window; windows do not overlap, and the first token of each is not scored.
        seed: of the draws.
        headroom: reference selections at each arm's memory; left out, none are made.
        repeat: measure the base once more with another batch size and thread count, for the numerical floor.
        small: fields that replace the above in the small form (`--small`).
    """

    kind: Literal["ranking-control"] = "ranking-control"
    name: Annotated[str, Field(pattern=NAME)]
    question: str
    model: str = DEMO_MODEL
    base: str = "nf4"
    protect: str = "none"
    texts: dict[str, str] = Field(min_length=1, default={"python-topics": "python-topics"})
    tokens: int | None = Field(default=None, gt=1)
    window: int = Field(default=512, gt=1)
    batch: int = Field(default=4, gt=0, description="windows a forward pass")
    budgets: Annotated[
        list[Budget],
        Field(min_length=1),
        BeforeValidator(
            _budgets,
            json_schema_input_type=Annotated[str, Field(pattern=TEXT)] | Annotated[list[Budget], Field(min_length=1)],
        ),
    ]
    arms: list[Arm] = Field(min_length=1)
    controls: list[Control] = Field(min_length=1)
    seed: int = 0
    analysis: Analysis
    headroom: Headroom | None = None
    repeat: bool = True
    form: Literal["full", "small"] = "full"
    small: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _windows(self) -> Study:
        if self.tokens is not None and self.tokens < self.window:
            raise InputError(
                f"tokens={self.tokens} is less than one window of {self.window}; ask for at least that many"
            )
        return self

    @model_validator(mode="after")
    def _names(self) -> Study:
        arms = [a.label for a in self.arms]
        controls = [c.label for c in self.controls]
        for what, names in (("arm", arms), ("control", controls)):
            for name in names:
                if names.count(name) > 1:
                    raise InputError(f"two {what}s are called {name!r}; give one of them a name of its own")
        listed = {f"control {c.label!r}: like": c.like for c in self.controls} | {"analysis.arms": self.analysis.arms}
        if self.headroom is not None:
            listed["headroom.arms"] = self.headroom.arms
        for where, given in listed.items():
            if given == []:
                raise InputError(f"{where} is empty: leave it out for every arm, or name {' or '.join(arms)}")
        for where, given in (listed | {"budgets": [str(b) for b in self.budgets]}).items():
            for name in given or []:
                if (given or []).count(name) > 1:
                    raise InputError(f"{where} names {name!r} twice; once is enough")
        for arm in self.arms:
            if arm.total_of is None:
                continue
            if arm.total_of not in arms:
                raise InputError(f"arm {arm.label!r}: total_of names {arm.total_of!r}; {closest(arm.total_of, arms)}")
            if self.arm(arm.total_of).total_of is not None:
                raise InputError(
                    f"arm {arm.label!r}: total_of names {arm.total_of!r}, which takes its total from another arm"
                )
        for control in self.controls:
            if control.draws > MOST_DRAWS:
                raise InputError(f"control {control.label!r}: {control.draws} draws; at most {MOST_DRAWS:,} are made")
            for like in control.like or []:
                if like not in arms:
                    raise InputError(f"control {control.label!r}: like names {like!r}; {closest(like, arms)}")
        self._check_analysis(arms, controls)
        return self

    def _check_analysis(self, arms: list[str], controls: list[str]) -> None:
        analysis = self.analysis
        named = [("control", [analysis.control], controls), ("outcome", [analysis.outcome], OUTCOMES)]
        named += [("arms", analysis.arms or [], arms)]
        if self.headroom is not None:
            named.append(("headroom.arms", self.headroom.arms or [], arms))
        for key, found, allowed in named:
            for name in found:
                if name not in allowed:
                    place = key if key.startswith("headroom") else f"analysis.{key}"
                    raise InputError(f"{place} names {name!r}; {closest(name, allowed)}")
        for at, item in enumerate(analysis.exclusions):
            budgets = [str(b) for b in self.budgets]
            for name, allowed in ((item.arm, arms), (item.text, list(self.texts)), (item.budget, budgets)):
                if name is not None and str(name) not in allowed:
                    raise InputError(f"analysis.exclusions.{at} names {str(name)!r}; {closest(str(name), allowed)}")
        if self.family_size == 0:
            raise InputError("analysis.exclusions leave no claim to test; exclude less, or judge other arms")

    @property
    def declaration(self) -> str:
        """Hash of what is declared: the study less its small form, its model and each text's file by name alone.

        Folders are a matter of the machine; weights and texts have hashes of their own.
        """
        texts = {name: Path(source).name for name, source in self.texts.items()}
        data = self.model_copy(update={"small": None, "model": Path(self.model).name, "texts": texts})
        return digest(data.to_json())

    @classmethod
    def read(cls, path: str | os.PathLike[str], small: bool = False, **changes: Any) -> Study:
        """A study from its folder or its `study.yaml`; with `small`, its small form; `changes` replace fields.

        A model's folder and a text's file are looked for beside the study first, so that it runs from any folder.

        Raises:
            InputError: no such study, an unknown key or a wrong type (with line), or no small form.
        """
        return read_declared(cls, path, beside, small=small, changes=changes)

    def arm(self, label: str) -> Arm:
        """The arm of that name."""
        return next(a for a in self.arms if a.label == label)

    def likes(self, control: Control) -> list[str]:
        """The arms that a control is matched to."""
        return control.like or [a.label for a in self.arms]

    @property
    def family_size(self) -> int:
        """How many claims are tested together: arms × texts, × budgets under `test: each`, less the exclusions."""
        analysis = self.analysis
        arms = analysis.arms or [a.label for a in self.arms]
        budgets = [None] if analysis.test == "joint" else [str(b) for b in self.budgets]
        claims = [(arm, text, budget) for arm in arms for text in self.texts for budget in budgets]
        return sum(analysis.excluded(*claim) is None for claim in claims)

    def reachable(self, draws: int) -> float:
        """The smallest corrected p that so many draws can give the declared family."""
        return self.analysis.reachable(max(1, self.family_size), draws)


def beside(data: Any, home: Path) -> Any:
    """A study's plain data, with the model and the texts that lie beside it as paths from here."""
    if not isinstance(data, dict):
        return data
    found = dict(data)
    model, texts = data.get("model"), data.get("texts")
    if isinstance(model, str) and model not in ("", DEMO_MODEL) and os.path.exists(home / model):
        found["model"] = str(home / model)
    if isinstance(texts, dict):
        files = {name: home / text for name, text in texts.items() if isinstance(text, str) and Path(text).suffix}
        found["texts"] = texts | {name: str(path) for name, path in files.items() if os.path.exists(path)}
    if "small" in data:
        found["small"] = beside(data["small"], home)
    return found


def slug(key: str) -> str:
    """A component key as part of a folder name: only letters, digits, dot, @, + and dash; a hash where none is left."""
    return re.sub(r"[^A-Za-z0-9._@+]+", "-", key).strip("-") or digest(key)[:8]
