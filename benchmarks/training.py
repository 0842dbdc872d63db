"""Our stock arms against hand-written training loops, interleaved in one session, and where their time goes.

    python benchmarks/training.py [-o benchmarks/results/training.json] [--small] [--seconds 1.5] [--rounds 5]

A model of Llama-3.2-1B's shape with random weights, made on the device; batch 8 × 512, r = 8 on all seven
projections, loss on the last 32 tokens, whose logits alone are computed. By hand: PEFT's model in a plain loop with a
fused AdamW and nothing else (no clipping, no schedule, no logging), in bfloat16 under autocast, the same with 16-bit
adapters, over bitsandbytes' NF4 layers, and under torch.compile. Ours: the arms `base: none` and `base: nf4` through
the Trainer that trains studies, as a timing session drives it, plainly and with its lever `graphs`. Each is timed in
whole cycles of one list of batches, in rounds of random order; three runs of each loop that ours is held against give
the floor. Needs one GPU, and under three minutes, of which the compiled loop's making is the largest part
(`--no-compile` leaves it out). The result is written after every round, and says how many it holds; seconds of each
stage are told. `--small` is a smoke test of tiny shapes on any device.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import gc
import importlib.metadata
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from loops import RATE, Loop, to_nf4
from torch import nn

from toolkit.analysis.statistics.timing import floor, margin, paired_ratio, speed
from toolkit.records.io import write_json
from toolkit.records.levers import Levers, Seeds
from toolkit.records.plan import Plan
from toolkit.runs.building import build
from toolkit.runs.models import choose_device
from toolkit.runs.provenance import device_name
from toolkit.runs.tasks.encoding import Encoded
from toolkit.runs.timing import machine
from toolkit.runs.timing.cycling import driver
from toolkit.runs.timing.order import Entry, rounds
from toolkit.runs.timing.profiling import shares

FULL = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, ALPHA = 8, 16
ALLOWED = 0.05
"""Ours may be slower than the loop by this, or by the floor where that is larger."""

OURS = {"ours, bf16": "by hand, bf16", "ours, NF4": "by hand, NF4"}
"""Ours → the loop that it is held against."""

COMPILED = "by hand, bf16, compiled"


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is computed: the model's configuration, and the list of batches."""

    config: dict[str, int]
    batch: int
    length: int
    target: int
    batches: int


class Session:
    """Makes the variants, one list of batches for all."""

    def __init__(self, shape: Shape, device: torch.device, folder: Path) -> None:
        self.shape, self.device, self.folder = shape, device, folder
        chance = torch.Generator().manual_seed(0)
        count, vocabulary = shape.batches, shape.config["vocab_size"]
        self.ids = torch.randint(1, vocabulary, (count, shape.batch, shape.length), generator=chance)
        self.batches = [ids.pin_memory() if device.type == "cuda" else ids for ids in self.ids]
        self._kept: dict[bool, nn.Module] = {}

    def base(self, *, nf4: bool = False) -> nn.Module:
        """A base of its own, dense or of bitsandbytes' layers: each is made once, and copied on the device."""
        if nf4 not in self._kept:
            self._kept[nf4] = to_nf4(self.base(), self.device) if nf4 else self._dense()
        return copy.deepcopy(self._kept[nf4])

    def forget(self) -> None:
        """Give back the memory of what is copied."""
        self._kept.clear()

    def _dense(self) -> nn.Module:
        """The model with random weights, in bfloat16, on the device."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(**self.shape.config, tie_word_embeddings=True, attn_implementation="sdpa")
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.device:
                model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        model.config.dtype = torch.bfloat16
        return model.requires_grad_(False)

    def by_hand(self, *, nf4: bool = False, compiled: bool = False, autocast: bool = True) -> Loop:
        """PEFT's model in a plain loop."""
        from peft import LoraConfig, get_peft_model

        model = self.base(nf4=nf4)
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=PROJECTIONS, lora_dropout=0.0)
        model = get_peft_model(model, config, autocast_adapter_dtype=autocast)
        return Loop(torch.compile(model) if compiled else model, self.batches, self.shape.target, self.device, autocast)

    def ours(self, base: str, *, dataflow: str = "stock", graphs: bool = False, checkpointing: bool = False) -> Any:
        """Our arm, and the Trainer that trains it."""
        plan = Plan.protecting(None, base=base, rank=RANK, alpha=ALPHA, dataflow=dataflow)
        model = build(self.base(), plan, dtype="bfloat16")
        first = self.shape.length - self.shape.target
        mask = (False,) * first + (True,) * self.shape.target
        rows = [[Encoded(tuple(ids.tolist()), mask) for ids in batch] for batch in self.ids]
        levers = Levers(
            rank=RANK,
            alpha=ALPHA,
            learning_rate=RATE,
            batch=self.shape.batch,
            accumulation=1,
            length=self.shape.length,
            graphs=graphs,
            checkpointing=checkpointing,
        )
        return driver(model, rows, levers, Seeds.all(0), self.folder, 0)


def variants(session: Session) -> dict[str, Callable[[], Any]]:
    """Name → what makes it; all but the compiled loop."""
    return {
        "by hand, bf16": session.by_hand,
        "by hand, bf16, 16-bit adapters": lambda: session.by_hand(autocast=False),
        "by hand, NF4": lambda: session.by_hand(nf4=True),
        "ours, bf16": lambda: session.ours("none"),
        "ours, NF4": lambda: session.ours("nf4"),
        "ours, bf16, CUDA graphs": lambda: session.ours("none", graphs=True),
        "ours, NF4, CUDA graphs": lambda: session.ours("nf4", graphs=True),
    }


class Resident:
    """The variants side by side on the device, and what each added to its memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: dict[Entry, Any] = {}
        self.memory: dict[str, dict[str, float]] = {}
        self.failed: dict[str, str] = {}

    def add(self, entry: Entry, make: Callable[[], Any]) -> None:
        """Make a variant, run two cycles, keep it; one that fails is told of, and costs the others nothing."""
        try:
            before = self._allocated()
            runner = make()
            gc.collect()
            base = self._allocated()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            runner.run(lead=runner.steps, cycles=1)
            if self.device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(self.device)
                gib = {"base GiB": (base - before) / 2**30, "peak GiB": (peak - before) / 2**30}
                self.memory[entry.arm] = {key: round(value, 2) for key, value in gib.items()}
            self.held[entry] = runner
        except Exception as error:
            traceback.print_exc(limit=3, file=sys.stderr)
            self.failed[str(entry)] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

    def _allocated(self) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device)


def measure(
    shape: Shape,
    device: torch.device,
    *,
    seconds: float,
    count: int,
    compiled: bool,
    seed: int,
    say: Callable[..., None],
    save: Callable[[dict[str, Any]], Any],
) -> dict[str, Any]:
    """The whole session as plain data, which is saved after each round as well."""
    watch = machine.watch(device)
    labels = []
    try:
        watch.refuse(device.type == "cpu")
    except Exception as error:
        labels.append(f"not quiet: {error}")
    watch.claim(lambda: torch.zeros(1, device=device))
    stages: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(name: str) -> Iterator[None]:
        started = time.perf_counter()
        say(name, end=" … ")
        yield
        stages[name] = round(time.perf_counter() - started, 1)
        say(f"{stages[name]} s")

    samples: dict[Entry, list[float]] = {}
    profiles: dict[str, dict[str, float]] = {}
    seen: list[Any] = []

    def result(done: int) -> dict[str, Any]:
        return {
            "device": device_name(device),
            "machine": watch.machine().model_dump(mode="json", exclude_none=True, exclude={"host", "identity"}),
            "labels": [*labels, *watch.labels],
            "throttled": sorted({reason for one in seen for reason in one.throttled}),
            "load": sorted({name for one in seen for name in one.load}),
            "packages": _versions(),
            "shape": dataclasses.asdict(shape),
            "seconds a sample": seconds,
            "rounds asked for": count,
            "rounds": done,
            "seed": seed,
            "variants": _table(samples, resident, profiles, shape),
            "against the loops": _verdicts(samples),
            "failed": resident.failed,
            "seconds of each stage": stages,
        }

    with tempfile.TemporaryDirectory() as scratch:
        session = Session(shape, device, Path(scratch))
        resident = Resident(device)
        for base in (False, True):
            with stage("making the NF4 base by hand" if base else "making the dense base"):
                session.base(nf4=base)
        made = variants(session)
        entries = [Entry(name) for name in made]
        entries += [Entry(name, number) for name in dict.fromkeys(OURS.values()) for number in (1, 2)]
        if compiled:  # last, because it takes longest: what it costs can be seen, and left out
            made[COMPILED] = lambda: session.by_hand(compiled=True)
            entries.append(Entry(COMPILED))
        for entry in entries:
            with stage(f"making {entry}"):
                resident.add(entry, made[entry.arm])
        session.forget()
        samples |= {entry: [] for entry in resident.held}
        for number, order in enumerate(rounds(list(resident.held), count, seed)):
            with stage(f"round {number + 1} of {count}"):
                for entry in order:
                    runner = resident.held[entry]
                    ran = runner.run(seconds=seconds, begin=watch.begin, end=lambda: seen.append(watch.end()))
                    samples[entry].append(ran.cycles * runner.steps / ran.seconds)
            save(result(number + 1))
        for entry, runner in resident.held.items():
            if entry.duplicate == 0:
                with stage(f"profile of {entry}"), contextlib.suppress(RuntimeError):
                    profiles[entry.arm] = shares(device, runner, 1 / statistics.median(samples[entry]))
        for runner in resident.held.values():
            runner.close()
    save(found := result(count))
    return found


def _table(
    samples: dict[Entry, list[float]], resident: Resident, profiles: dict[str, dict[str, float]], shape: Shape
) -> dict[str, Any]:
    """A variant's first run, as the paper estimates speed and as medians."""
    found = {}
    for entry, paces in samples.items():
        estimate = speed(paces, str(entry))
        found[str(entry)] = {
            "ms a step, median": round(1e3 / estimate.median, 2),
            "ms a step, fastest half": round(1e3 / estimate.fastest_half, 2),
            "tokens/s, median": round(estimate.median * shape.batch * shape.length),
            **(resident.memory.get(entry.arm, {}) if entry.duplicate == 0 else {}),
            "ms a step, rounds": [round(1e3 / pace, 2) for pace in paces],
            **({"where a step goes": profiles[entry.arm]} if entry.duplicate == 0 and entry.arm in profiles else {}),
        }
    return found


def _verdicts(samples: dict[Entry, list[float]]) -> dict[str, Any]:
    """Each of ours against its loop: not slower by more than 5%, or the floor where that is larger."""
    found: dict[str, Any] = {}
    for ours, loop in OURS.items():
        mine = samples.get(Entry(ours))
        theirs = [paces for entry, paces in samples.items() if entry.arm == loop]
        if mine is None or not theirs:
            continue
        ratio = paired_ratio(mine, theirs)
        told: dict[str, Any] = {"loop": loop, "speed over the loop's, paired": round(ratio.value, 4)}
        if ratio.low is not None and ratio.high is not None:
            told["interval of the ratio over rounds"] = [round(ratio.low, 4), round(ratio.high, 4)]
        allowed = ALLOWED
        if len(theirs) >= 3:
            noise = floor([speed(paces).fastest_half for paces in theirs])
            allowed = max(ALLOWED, noise.bound)
            gain = margin(speed(mine).fastest_half, [speed(paces).fastest_half for paces in theirs], noise.bound)
            told |= {
                "floor": round(noise.bound, 4),
                "single gap": round(noise.single, 4),
                "margin, fastest half": round(gain.value, 4),
                "verdict": gain.verdict,
            }
        told["allowed"] = round(allowed, 4)
        told["not slower than allowed"] = ratio.value >= 1 / (1 + allowed)
        found[ours] = told
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "training.json")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a smoke test")
    parser.add_argument("--seconds", type=float, default=None, help="of a sample")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args(arguments)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for name in ("transformers", "torchao", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    device = choose_device(options.device)
    shape = Shape(SMALL, 2, 16, 4, 2) if options.small else Shape(FULL, 8, 512, 32, 4)
    result = measure(
        shape,
        device,
        seconds=options.seconds if options.seconds is not None else (0.02 if options.small else 1.5),
        count=options.rounds,
        compiled=not (options.no_compile or options.small),
        seed=options.seed,
        say=lambda text, end="\n": print(text, file=sys.stderr, flush=True, end=end),
        save=lambda found: write_json(options.output, found),
    )
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
