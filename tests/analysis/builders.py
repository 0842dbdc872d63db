"""Realistic studies on disk, written through the records: what the analysis tests and the benchmark read."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from pathlib import Path
from random import Random
from typing import Any

import yaml

from toolkit.records.budget import Budget
from toolkit.records.io import atomic
from toolkit.records.plan import Plan
from toolkit.records.profile import LayerErrors, LayerProfile, Profile, Reference
from toolkit.records.report import REPORT, ROWS, Draw, Law, Provenance, Report, Rows, Score, Text, mask
from toolkit.records.selection import Selection
from toolkit.records.study import Study, slug

SHAPES = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576),
    "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}
MODEL = "SmolLM2-135M-Instruct (dequantized Q4_1)"
NOTE = "weights are dequantized 4-bit values (at most 16 distinct per 32 weights)"
FINGERPRINT = "ab" * 32


def make_profile(blocks: int = 30, seed: int = 0, fingerprint: str = FINGERPRINT) -> Profile:
    """A profile of SmolLM2-135M's shape with made-up errors."""
    rng = Random(f"profile {seed}")
    layers = []
    for block in range(blocks):
        for path, (rows, columns) in SHAPES.items():
            name, size = f"model.layers.{block}.{path}", rows * columns
            mse = rng.uniform(1e-6, 1e-4)
            layers.append(
                LayerProfile(
                    name=name,
                    tensor=f"{name}.weight",
                    role=path.rpartition(".")[2],
                    block=block,
                    shape=(rows, columns),
                    parameters=size,
                    bytes=2 * size,
                    norm=rng.uniform(10, 90),
                    density=rng.uniform(0.01, 0.1),
                    error={"nf4": LayerErrors(mse=mse, mae=0.8 * mse**0.5, relative=0.08, max=9 * mse**0.5)},
                )
            )
    return Profile(
        model=MODEL,
        fingerprint=fingerprint,
        reference=Reference(dtype="bfloat16", lattice=True, note=NOTE),
        head="lm_head",
        blocks=blocks,
        other_parameters=28_000_000,
        layers=layers,
    )


def make_study(
    *,
    name: str = "ranking-control",
    budgets: tuple[str, ...] = ("layers=0.05", "layers=0.10", "layers=0.20"),
    draws: int = 10,
    texts: tuple[str, ...] = ("python-topics",),
    count_matched: bool = True,
    extra_arms: tuple[str, ...] = (),
    level: float = 0.05,
    side: str = "less",
    outcome: str = "loss",
    form: str = "full",
) -> Study:
    """A study file's record."""
    controls: list[dict[str, Any]] = [{"selector": "random-matched", "name": "matched", "draws": draws}]
    if count_matched:
        controls.append({"selector": "random-count", "name": "count-matched", "draws": draws, "like": ["top-error"]})
    return Study.model_validate(
        {
            "name": name,
            "question": "Does a ranking by error protect better layers than chance with the same memory?",
            "model": "demo",
            "texts": {text: text for text in texts},
            "budgets": [str(b) for b in budgets],
            "arms": [
                {"selector": "top-error"},
                {"selector": "bottom-error"},
                *({"selector": arm} for arm in extra_arms),
            ],
            "controls": controls,
            "seed": 7,
            "analysis": {"control": "matched", "level": level, "side": side, "outcome": outcome},
            "form": form,
        }
    )


class Builder:
    """Writes a study's folder, run by run; `put` may be given any report, also a wrong one.

    A set's loss is 16-bit + gap·(1 − Σ benefit of its layers) plus a little noise, a pure function of the set.
    """

    SIXTEEN, GAP = 2.70, 0.16

    def __init__(self, folder: Path, study: Study, *, windows: int = 8, seed: int = 0) -> None:
        self.folder, self.study, self.seed, self.windows = Path(folder), study, seed, windows
        self.results = self.folder / "results"
        self.profile = make_profile()
        self.names = self.profile.names
        self.size = {layer.name: layer.parameters for layer in self.profile.layers}
        rng = Random(f"benefit {seed}")
        raw = {n: rng.random() * self.size[n] for n in self.names}
        self.benefit = {n: v / sum(raw.values()) for n, v in raw.items()}
        self.texts = {
            text: Text(
                source=text,
                sha256=hashlib.sha256(text.encode()).hexdigest(),
                characters=465_000,
                tokens=512 * windows,
                windows=windows,
                window=512,
                stride=512,
                bos=False,
            )
            for text in study.texts
        }

    def score(self, chosen: frozenset[str], text: str) -> Score:
        nll, tokens = self.nll(chosen, text), 511 * self.windows
        loss = sum(nll) / tokens
        part = max(0.0, 1 - sum(self.benefit[n] for n in chosen))
        return Score(tokens=tokens, loss=loss, perplexity=math.exp(loss), kl=0.11 * part, agreement=1 - 0.17 * part)

    def nll(self, chosen: frozenset[str], text: str) -> list[float]:
        """Summed losses of each window."""
        noise = Random(f"{self.seed} {text} {mask(chosen, self.names)}")
        level = Random(f"{text}")
        lost = 1 - sum(self.benefit[n] for n in chosen)
        return [
            511 * (self.SIXTEEN + level.uniform(-0.4, 0.4) + self.GAP * lost + noise.gauss(0, 0.002) * (lost > 1e-9))
            for _ in range(self.windows)
        ]

    def selection(self, selector: str, chosen: frozenset[str], budget: Budget | None) -> Selection:
        layers = [n for n in self.names if n in chosen]
        total = sum(self.size[n] for n in layers)
        return Selection(
            selector=selector,
            options={"quantizer": "nf4", "measure": "mse"},
            budget=budget,
            model=MODEL,
            fingerprint=self.profile.fingerprint,
            layers=layers,
            parameters=total,
            bytes=2 * total,
            of={"layers": len(self.names), "parameters": self.profile.parameters, "bytes": self.profile.bytes},
        )

    def common(self) -> dict[str, Any]:
        return {
            "study": self.study.name,
            "form": self.study.form,
            "model": MODEL,
            "fingerprint": self.profile.fingerprint,
            "reference": self.profile.reference,
            "settings": "5e" * 32,
            "seed": self.study.seed,
            "texts": self.texts,
            "provenance": Provenance(
                toolkit="0.1.0",
                python="3.11.9",
                packages={"torch": "2.13.0", "transformers": "5.24.0"},
                platform="Linux",
                device="cpu",
                threads=2,
                compute_dtype="float32",
                commit="0" * 40,
                dirty=False,
                started="2026-01-01T00:00:00Z",
                seconds=12.5,
                peak_memory={"base": 10**9, "peak": 2 * 10**9},
            ),
        }

    def reference(self, arm: str) -> Report:
        chosen = frozenset(self.names) if arm == "16-bit" else frozenset()
        return Report(
            **self.common(),
            run=f"reference-{slug(arm)}",
            role="reference",
            arm=arm,
            selection=self.selection("all" if chosen else "none", chosen, None),
            scores={t: self.score(chosen, t) for t in self.texts},
        )

    def chosen(self, arm: str, budget: Budget) -> frozenset[str]:
        count = budget.of(len(self.names))
        if arm in ("top-error", "bottom-error"):
            order = sorted(self.profile.layers, key=lambda row: row.error["nf4"].mse, reverse=arm == "top-error")
            return frozenset(row.name for row in order[:count])
        return frozenset(Random(f"arm {arm}").sample(self.names, count))

    def arm(self, arm: str, budget: Budget) -> Report:
        chosen = self.chosen(arm, budget)
        selection = self.selection(arm, chosen, budget)
        return Report(
            **self.common(),
            run=f"{slug(str(budget))}--{arm}",
            role="arm",
            arm=arm,
            budget=budget,
            plan=Plan.model_validate(
                {
                    "default": {"quantizer": "nf4"},
                    "layers": {n: {"quantizer": "none"} for n in selection.layers},
                }
            ),
            selection=selection,
            scores={t: self.score(chosen, t) for t in self.texts},
        )

    def control(self, control: str, arm: str, budget: Budget, draws: int, *, first: int = 0, part: str = "") -> Report:
        """Draws `first` … of a control; `part` tells reports of one control apart."""
        target = self.chosen(arm, budget)
        total = sum(self.size[n] for n in target)
        matched = control == "matched"
        made = []
        for index in range(first, first + draws):
            rng = Random(f"{self.seed} {control} {arm} {budget} {index}")
            chosen = self._swap(rng, target) if matched else frozenset(rng.sample(self.names, len(target)))
            size = sum(self.size[n] for n in chosen)
            made.append(
                Draw(
                    index=index,
                    mask=mask(chosen, self.names),
                    layers=len(chosen),
                    parameters=size,
                    bytes=2 * size,
                    mismatch=size / total - 1,
                    scores={t: self.score(chosen, t) for t in self.texts},
                )
            )
        return Report(
            **self.common(),
            run=f"{slug(str(budget))}--{arm}--{control}{part}",
            role="control",
            arm=arm,
            control=control,
            budget=budget,
            law=Law(
                selector="random-matched" if matched else "random-count",
                options={"within": "0.001", "unit": "parameters", "thirds": False} if matched else {},
                like=arm,
                feasible_subsets=math.comb(len(self.names), len(target)) // 7 if matched else None,
                inclusion=[0.1] * len(self.names),
                single_total=False if matched else None,
            ),
            layers=self.names,
            draws=made,
        )

    def _swap(self, rng: Random, target: frozenset[str]) -> frozenset[str]:
        """Another set with as many layers of each size: exactly matched."""
        by_size: dict[int, list[str]] = {}
        for name in self.names:
            by_size.setdefault(self.size[name], []).append(name)
        found: set[str] = set()
        for names in by_size.values():
            found.update(rng.sample(names, sum(n in target for n in names)))
        return frozenset(found)

    def put(self, report: Report, rows: bool = False) -> Path:
        """Write a report, and beside it the rows of an arm or a reference."""
        folder = self.results / report.run
        if rows:
            assert report.selection is not None
            chosen = frozenset(report.selection.layers)
            lines = [[text, at, 511, value] for text in self.texts for at, value in enumerate(self.nll(chosen, text))]
            content = gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode(), mtime=0)
            with atomic(folder / ROWS) as temporary:
                temporary.write_bytes(content)
            described = Rows(
                file=ROWS,
                sha256=hashlib.sha256(content).hexdigest(),
                count=len(lines),
                columns=["text", "window", "tokens", "nll"],
            )
            report = report.model_copy(update={"rows": described})
        return report.save(folder / REPORT)

    def write(self, *, rows: bool = False, profile: bool = True) -> Path:
        """The whole study; returns its folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(self.study.to_json(), sort_keys=False)
        (self.folder / "study.yaml").write_text(text, encoding="utf-8")
        if profile:
            self.profile.save(self.results / "profile.json")
        for arm in ("16-bit", "base"):
            self.put(self.reference(arm), rows)
        for budget in self.study.budgets:
            for arm in self.study.arms:
                self.put(self.arm(arm.label, budget), rows)
            for control in self.study.controls:
                for like in self.study.likes(control):
                    self.put(self.control(control.label, like, budget, control.draws))
        return self.folder
