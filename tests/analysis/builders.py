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
from toolkit.records.lock import LOCK, Lock
from toolkit.records.plan import Plan
from toolkit.records.profile import LayerErrors, LayerProfile, Profile, Reference
from toolkit.records.report import REPORT, ROWS, Draw, Law, Provenance, Report, Rows, Score, Text, mask
from toolkit.records.selection import Selection
from toolkit.records.study import Control, Study, slug
from toolkit.registry import registry
from toolkit.selection import select as selecting
from toolkit.selection.effects import reference_selection

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
                    error={
                        "nf4": LayerErrors(
                            mse=mse, mae=0.8 * mse**0.5, relative=0.08, max=9 * mse**0.5, bytes=size // 2 + size // 16
                        )
                    },
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
    form: str = "full",
    controls: list[dict[str, Any]] | None = None,
    headroom: dict[str, Any] | None = None,
    repeat: bool = False,
    **analysis: Any,
) -> Study:
    """A study file's record; `analysis` holds fields of its analysis."""
    if controls is None:
        controls = [{"selector": "random-matched", "name": "matched", "draws": draws}]
        if count_matched:
            controls.append(
                {"selector": "random-count", "name": "count-matched", "draws": draws, "like": ["top-error"]}
            )
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
            "headroom": headroom,
            "repeat": repeat,
            "analysis": {"control": controls[0]["name"]} | analysis,
            "form": form,
        }
    )


LAWS = (
    {"selector": "random-matched", "name": "matched", "chain": True},
    {"selector": "random-permuted", "name": "permuted"},
    {"selector": "random-matched(roles=true,thirds=true)", "name": "composition"},
    {"selector": "random-shuffle-matched", "name": "shuffled"},
)
"""The four standard laws as controls, the first one of nested families."""


def make_full_study(*, draws: int = 39, few: int = 19, **study: Any) -> Study:
    """A study with all there is: four laws and one flawed, families over budgets, headroom, a repeat."""
    controls = [law | {"draws": draws if at < 2 else few} for at, law in enumerate(LAWS)]
    controls.append({"selector": "random-count", "name": "count-matched", "draws": few, "like": ["top-error"]})
    full = {
        "controls": controls,
        "headroom": {"fit": "sweep", "resamples": 200},
        "repeat": True,
        "test": "joint",
        "margin": 0.005,
        "margin_reason": "half a percent of perplexity",
    }
    return make_study(**full | study)


class Builder:
    """Writes a study's folder, run by run; `put` may be given any report, also a wrong one.

    A set's loss is 16-bit + gap·(1 − Σ benefit of its layers) plus a little noise, a pure function of the set.
    With `real`, selections and draws are those that the selectors and laws give; else they are made up here.
    """

    SIXTEEN, GAP = 2.70, 0.16

    def __init__(
        self, folder: Path, study: Study, *, windows: int = 8, seed: int = 0, real: bool = False, blocks: int = 30
    ) -> None:
        self.folder, self.study, self.seed, self.windows, self.real = Path(folder), study, seed, windows, real
        self.lock: str | None = None
        self.families: dict[tuple[str, str], list[list[Selection]]] = {}
        self.results = self.folder / "results"
        self.profile = make_profile(blocks)
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
            "lock": self.lock,
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
        if self.real:
            return frozenset(self.selected(arm, budget).layers)
        count = budget.of(len(self.names))
        if arm in ("top-error", "bottom-error"):
            order = sorted(self.profile.layers, key=lambda row: row.error["nf4"].mse, reverse=arm == "top-error")
            return frozenset(row.name for row in order[:count])
        return frozenset(Random(f"arm {arm}").sample(self.names, count))

    def selected(self, arm: str, budget: Budget) -> Selection:
        """An arm's selection: its selector's, or made up."""
        if not self.real:
            return self.selection(arm, self.chosen(arm, budget), budget)
        made = self.study.arm(arm)
        if made.total_of is not None:
            budget = Budget(bytes=self.selected(made.total_of, budget).bytes)
        return selecting.select(made.selector, self.profile, budget, seed=self.study.seed)

    def arm(self, arm: str, budget: Budget) -> Report:
        selection = self.selected(arm, budget)
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
            scores={t: self.score(frozenset(selection.layers), t) for t in self.texts},
        )

    def draw(self, index: int, chosen: frozenset[str], total: int) -> Draw:
        """One measured set."""
        size = sum(self.size[n] for n in chosen)
        return Draw(
            index=index,
            mask=mask(chosen, self.names),
            layers=len(chosen),
            parameters=size,
            bytes=2 * size,
            mismatch=size / total - 1,
            scores={t: self.score(chosen, t) for t in self.texts},
        )

    def control(self, control: str, arm: str, budget: Budget, draws: int, *, first: int = 0, part: str = "") -> Report:
        """Draws `first` … of a control; `part` tells reports of one control apart."""
        target = self.chosen(arm, budget)
        total = sum(self.size[n] for n in target)
        if self.real:
            sets, law = self._drawn(next(c for c in self.study.controls if c.label == control), arm, budget)
            sets = sets[first : first + draws]
        else:
            matched, sets = "count" not in control, []
            for index in range(first, first + draws):
                rng = Random(f"{self.seed} {control} {arm} {budget} {index}")
                sets.append(self._swap(rng, target) if matched else frozenset(rng.sample(self.names, len(target))))
            law = Law(
                selector="random-matched" if matched else "random-count",
                options={"within": "0.001", "unit": "parameters", "thirds": False} if matched else {},
                like=arm,
                match="parameters" if matched else "layers",
                within=0.001 if matched else 0.0,
                feasible_subsets=math.comb(len(self.names), len(target)) // 7 if matched else None,
                inclusion=[0.1] * len(self.names),
                single_total=False if matched else None,
                **self._families(control),
            )
        return Report(
            **self.common(),
            run=f"{slug(str(budget))}--{arm}--{control}{part}",
            role="control",
            arm=arm,
            control=control,
            budget=budget,
            law=law,
            layers=self.names,
            draws=[self.draw(first + at, chosen, total) for at, chosen in enumerate(sets)],
        )

    def _families(self, control: str) -> dict[str, Any]:
        """What a made-up law says of itself where the study declares one of the standard laws."""
        declared = next((c for c in self.study.controls if c.label == control), None)
        selector = declared.selector if declared else ""
        shared = selector.startswith("random-permuted")
        holds = {"permuted": ["roles", "sizes"], "composition": ["roles", "thirds"]}.get(control, [])
        return {"shared": shared, "chain": shared or bool(declared and declared.chain), "holds": holds}

    def _drawn(self, control: Control, arm: str, budget: Budget) -> tuple[list[frozenset[str]], Law]:
        """What a control's law draws for an arm at a budget; families over all budgets where it draws those."""
        selector = registry.make("selector", control.selector)
        shared = getattr(selector, "shared", False)
        key, seed = (control.label, arm), self.study.seed
        if control.chain or shared:
            if key not in self.families:
                likes = [self.selected(arm, b) for b in self.study.budgets]
                families = selecting.chains(control.selector, self.profile, likes=likes, count=control.draws, seed=seed)
                self.families[key] = [list(column) for column in zip(*families, strict=True)]
            drawn = self.families[key][self.study.budgets.index(budget)]
        else:
            like = self.selected(arm, budget)
            drawn = selecting.draws(control.selector, self.profile, like=like, count=control.draws, seed=seed)
        one = drawn[0]
        expected: dict[str, float] = {}
        for row, p in zip(self.profile.layers, one.inclusion or [], strict=one.inclusion is not None):
            expected[row.role] = expected.get(row.role, 0.0) + p
        law = Law(
            selector=one.selector,
            options=one.options,
            like=arm,
            match=selector.match,
            within=None if selector.within is None else float(selector.within),
            holds=list(selector.holds),
            chain=control.chain or shared,
            shared=shared,
            feasible_subsets=one.feasible_subsets,
            inclusion=one.inclusion,
            inclusion_draws=one.inclusion_draws,
            expected=expected or None,
            single_total=one.single_total,
        )
        return [frozenset(s.layers) for s in drawn], law

    def sweep(self, arm: str) -> Report:
        """Each layer alone restored, or alone quantized."""
        everything = frozenset(self.names)
        sets = [frozenset([n]) if arm == "restore" else everything - {n} for n in self.names]
        return Report(
            **self.common(),
            run=f"sweep--{arm}",
            role="sweep",
            arm=arm,
            layers=self.names,
            draws=[self.draw(at, chosen, sum(self.size.values())) for at, chosen in enumerate(sets)],
        )

    def oracle(self, name: str, arm: str, budget: Budget) -> Report:
        """The best, or the worst, set of the arm's memory, were the layers' true benefits known."""
        sign = -1 if name == "anti-oracle" else 1
        values = [sign * self.benefit[n] for n in self.names]
        assert self.study.headroom is not None
        like = self.selected(arm, budget)
        selection = reference_selection(self.profile, values, like, self.study.headroom.within, name)
        return Report(
            **self.common(),
            run=f"{slug(str(budget))}--{arm}--{name}",
            role="oracle",
            arm=arm,
            control=name,
            budget=budget,
            selection=selection,
            scores={t: self.score(frozenset(selection.layers), t) for t in self.texts},
        )

    def repeat(self) -> Report:
        """The base once more, its losses a little off."""
        report = self.reference("base")
        off = {t: s.model_copy(update={"loss": s.loss + 3e-6}) for t, s in report.scores.items()}
        return report.model_copy(update={"run": "repeat--base", "role": "repeat", "scores": off})

    def seal(self) -> Lock:
        """Lock the study before its runs: every report written from now on carries the lock's hash."""
        lock = Lock(
            study=self.study.name,
            form=self.study.form,
            analysis=self.study.analysis,
            declaration=self.study.declaration,
            code={"toolkit": "0.1.0", "sources": "c0" * 32},
            model=MODEL,
            fingerprint=self.profile.fingerprint,
            texts={name: text.sha256 for name, text in self.texts.items()},
            created="2025-12-31T00:00:00Z",
        )
        self.lock = lock.hash
        lock.save(self.results / LOCK)
        return lock

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
        """Write a report, and beside it the rows: a line a draw and text, with one sum a window."""
        folder = self.results / report.run
        if rows:
            if report.draws:
                sets = [
                    frozenset(n for at, n in enumerate(self.names) if int(d.mask, 16) >> at & 1) for d in report.draws
                ]
                columns = ["draw", "text", "nll"]
            else:
                assert report.selection is not None
                sets, columns = [frozenset(report.selection.layers)], ["draw", "text", "nll", "kl", "top"]
            rest = [[0.1] * self.windows, [500] * self.windows][: len(columns) - 3]
            lines = [[at, text, self.nll(chosen, text), *rest] for at, chosen in enumerate(sets) for text in self.texts]
            content = gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode(), 1, mtime=0)
            with atomic(folder / ROWS) as temporary:
                temporary.write_bytes(content)
            described = Rows(file=ROWS, sha256=hashlib.sha256(content).hexdigest(), count=len(lines), columns=columns)
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
        if self.study.repeat:
            self.put(self.repeat(), rows)
        if self.study.headroom is not None and self.study.headroom.fit == "sweep":
            for arm in ("restore", "quantize"):
                self.put(self.sweep(arm), rows)
        for budget in self.study.budgets:
            for arm in self.study.arms:
                self.put(self.arm(arm.label, budget), rows)
                if self.study.headroom is not None and arm.label in (self.study.headroom.arms or [arm.label]):
                    for name in ("oracle-additive", "anti-oracle"):
                        self.put(self.oracle(name, arm.label, budget), rows)
            for control in self.study.controls:
                for like in self.study.likes(control):
                    self.put(self.control(control.label, like, budget, control.draws), rows)
        return self.folder
