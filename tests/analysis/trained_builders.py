"""Fine-tuning studies on disk with known outcomes, written through the records: reports, rows and timing sessions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.records import rows as rows_file
from toolkit.records.finetuning import FineTuning
from toolkit.records.io import parse
from toolkit.records.levers import Seeds
from toolkit.records.plan import Adapter, LayerPlan, Plan
from toolkit.records.profile import Reference
from toolkit.records.report import Provenance
from toolkit.records.selection import MatchedTo, Selection
from toolkit.records.session import Machine, Memory, Sample, Session, Timed
from toolkit.records.timing import Timing
from toolkit.records.trained import ROW, Course, Data, Flag, Scores, Trained

FINGERPRINT = "cd" * 32
MODEL = "tiny-llama"
GIB = 2**30

ARMS: list[dict[str, Any]] = [
    {"name": "qlora"},
    {"name": "aqlora-q", "protect": {"selector": "top-error", "budget": "layers=0.2"}},
    {"name": "matched", "protect": {"selector": "random-matched", "like": "aqlora-q"}},
]

Values = Callable[[str, str, int, int, np.random.Generator], tuple[np.ndarray, np.ndarray]]
"""(task, arm, data seed, rows, rng) → each row's loss a token, and its score."""


def study(*, tasks: tuple[str, ...] = ("sums",), arms: list[dict[str, Any]] | None = None, **given: Any) -> FineTuning:
    """A study of made-up tasks."""
    data = {
        "kind": "fine-tuning",
        "name": "made-up",
        "question": "Does protection help?",
        "model": MODEL,
        "tasks": {name: {"task": "arithmetic"} for name in tasks},
        "arms": arms or ARMS,
        "seeds": 4,
        "analysis": {"baseline": "qlora"},
    }
    analysis = {"baseline": "qlora"} | given.pop("analysis", {})
    return parse(FineTuning, data | given | {"analysis": analysis}, "a test", {})


def noisy(effects: dict[str, float] | None = None, *, seed_sd: float = 0.02, row_sd: float = 0.3) -> Values:
    """Losses with a row's difficulty, an arm's effect, a run's luck and noise, right where it is low."""

    def values(task: str, arm: str, seed: int, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        difficulty = np.random.default_rng(len(task)).normal(1.0, row_sd, rows)
        loss = difficulty + (effects or {}).get(arm, 0.0) + seed_sd * rng.normal() + 0.05 * rng.normal(size=rows)
        loss = np.abs(loss)
        return loss, (loss < 1.0).astype(float)

    return values


class Builder:
    """Writes a study's results, one report a run."""

    def __init__(self, folder: Path, study: FineTuning, *, rows: int = 60, values: Values | None = None) -> None:
        self.folder, self.study, self.rows, self.values = folder, study, rows, values or noisy()
        self.results = folder / "results"
        study.save(self.results / "study.json")

    def write(self) -> Builder:
        """Every run that the study declares."""
        from toolkit.analysis.reading.trained import declared_runs

        for key in declared_runs(self.study):
            self.run(key.task, key.arm, key.seeds, role=key.role, draw=key.draw, value=key.value)
        return self

    def write_own(self, value: float) -> Builder:
        """Every arm's runs at one value of the tuned lever, as if all trials had chosen it."""
        for task in self.study.tasks:
            for arm in self.study.arms:
                for seeds in self.study.runs_of_an_arm:
                    self.run(task, arm.name, seeds, value=value, own=True)
        return self

    def name(self, task: str, arm: str, seeds: Seeds, role: str, draw: int | None, value: float | None, own: bool):
        more = "" if draw is None else f"-draw{draw}"
        more += "" if value is None else f"-{value:g}"
        return f"{task}--{arm}--{seeds}{more}{'-own' if own else ''}{'' if role in ('arm', 'repeat') else '-' + role}"

    def run(
        self,
        task: str,
        arm: str,
        seeds: Seeds | int,
        *,
        role: str = "arm",
        draw: int | None = None,
        value: float | None = None,
        own: bool = False,
        loss: np.ndarray | None = None,
        score: np.ndarray | None = None,
        groups: list[str] | None = None,
        tokens: np.ndarray | None = None,
        with_score: bool = True,
        chance: float | None = 0.25,
        constant: bool = False,
        unparsed: float = 0.0,
        metric: str = "accuracy",
        fatal: Flag | None = None,
        **changed: Any,
    ) -> Path:
        """One run's report and rows; given values stand in the report as they are."""
        seeds = Seeds.all(seeds) if isinstance(seeds, int) else seeds
        label = self.name(task, arm, seeds, role, draw, value, own)
        folder = self.results / "runs" / label
        rng = np.random.default_rng(list(label.encode()))
        if loss is None:
            loss, made = self.values(task, arm, seeds.data, self.rows, rng)
            score = made if score is None else score
        rows = len(loss)
        score = np.zeros(rows) if score is None else score
        tokens = np.array([1 + n % 3 for n in range(rows)]) if tokens is None else tokens
        groups = groups or [""] * rows
        lines = [
            [g, n, float(v * t), int(t), None, None, None, float(s) if with_score else None, True]
            for n, (g, v, t, s) in enumerate(zip(groups, loss, tokens, score, strict=True))
        ]
        written = rows_file.write(folder, ROW, lines)

        def scores(at: np.ndarray) -> Scores:
            return Scores(
                rows=int(at.sum()),
                loss=float((loss * tokens)[at].sum() / tokens[at].sum()),
                metric=metric,
                score=float(score[at].mean()) if with_score else None,
                chance=chance,
                constant=constant,
                unparsed=unparsed,
            )

        found = {"": scores(np.ones(rows, dtype=bool))}
        found |= {g: scores(np.array([x == g for x in groups])) for g in dict.fromkeys(groups) if g}
        flags = [fatal] if fatal else []
        given = {
            "study": self.study.name,
            "form": self.study.form,
            "run": label,
            "role": role,
            "arm": arm,
            "task": task,
            "seeds": seeds,
            "draw": draw,
            "value": value,
            "own": own,
            "levers": self.study.levers_of(task, arm, **({} if value is None else {self.study.tune.lever: value})),
            "model": MODEL,
            "fingerprint": FINGERPRINT,
            "reference": Reference(dtype="bfloat16", note="weights as published"),
            "settings": f"{task}{'-tune' if role == 'tune' else ''}" + "0" * 20,
            "plan": plan(),
            "protect": selection(self.study, arm, seeds) if self.study.arm(arm).protect else None,
            "finished": fatal is None,
            "flags": flags,
            "train": Data(source="made", sha256="a" * 64, found=900, rows=880, unusable=15, cut=5),
            "test": Data(source="made", sha256="b" * 64, found=rows, rows=rows),
            "course": Course(
                steps=100 if fatal is None else fatal.step or 0,
                planned=100,
                examples=880,
                target_tokens=2000,
                real_tokens=9000,
                computed_tokens=10000,
                first_loss=2.0,
                last_loss=1.0,
                seconds=12.0,
                trainable=1000 + 7 * len(arm),
            ),
            "scores": found if fatal is None else {},
            "rows": written if fatal is None else None,
            "provenance": provenance(seeds.data),
        }
        return Trained.model_validate(given | changed).save(folder / "report.json")

    def session(
        self,
        name: str,
        speeds: dict[tuple[str, int], list[float]],
        *,
        peaks: dict[str, float] | None = None,
        **changed: Any,
    ) -> Path:
        """One timing session: (arm, duplicate) → steps a second, round by round; 64 tokens a step; peaks in GiB."""
        arms = [
            Timed(
                arm=arm,
                duplicate=duplicate,
                plan=plan(),
                levers=self.study.levers,
                trainable=1000,
                samples=[
                    Sample(round=n, order=at, seconds=10.0 / value, cycles=1, steps=10, tokens=640, clock=1980.0)
                    for n, value in enumerate(values)
                ],
                memory=Memory(
                    base_allocated=GIB,
                    base_reserved=2 * GIB,
                    peak_allocated=int((peaks or {}).get(arm, 3 + at) * GIB),
                    peak_reserved=9 * GIB,
                ),
                profile={"matrix products": 0.6, "host": 0.4},
            )
            for at, ((arm, duplicate), values) in enumerate(speeds.items())
        ]
        given = {
            "study": self.study.name,
            "form": self.study.form,
            "session": name,
            "declaration": self.study.declaration,
            "task": next(iter(self.study.tasks)),
            "model": MODEL,
            "fingerprint": FINGERPRINT,
            "baseline": self.study.analysis.baseline,
            "protocol": Timing(rounds=len(next(iter(speeds.values())))),
            "seed": 0,
            "batches": [{"examples": 4, "real": 60, "target": 20, "computed": 64}],
            "machine": Machine(host="node", device="cpu", allocation=name),
            "arms": arms,
            "provenance": provenance(0).model_copy(update={"started": f"2026-01-01T00:00:00Z-{name}"}),
        }
        return Session.model_validate(given | changed).save(self.results / "timing" / f"{name}.json")


def plan() -> Plan:
    """A plan of one line."""
    return Plan(default=LayerPlan(quantizer="nf4", adapter=Adapter(rank=8, alpha=16, scaler="lora", scaling=2.0)))


def selection(study: FineTuning, arm: str, seeds: Seeds) -> Selection:
    """Two layers; a matched arm's depend on its draw's seed."""
    like = study.arm(arm).protect.like
    at = seeds.draw % 50 if like and study.arm(arm).protect.draw == "each-seed" else 0
    return Selection(
        selector=study.arm(arm).protect.selector,
        model=MODEL,
        fingerprint=FINGERPRINT,
        layers=[f"model.layers.{at}.q_proj", f"model.layers.{at + 1}.v_proj"],
        parameters=2000 + at,
        bytes=4000 + 2 * at,
        of={"layers": 20, "parameters": 40_000, "bytes": 80_000},
        matched_to=MatchedTo(selector="top-error", hash="e" * 64, layers=2, parameters=2000, bytes=4000)
        if like
        else None,
        mismatch=at / 2000 if like else None,
    )


def provenance(seed: int) -> Provenance:
    """Where the runs were made."""
    return Provenance(
        toolkit="0",
        python="3.11",
        packages={"torch": "2.13"},
        platform="Linux",
        device="cpu",
        threads=1,
        compute_dtype="float32",
        started="2026-01-01T00:00:00Z",
        seconds=20.0,
        peak_memory={"base_allocated": GIB, "peak_allocated": 3 * GIB + seed * 2**20, "peak_reserved": 4 * GIB},
    )
