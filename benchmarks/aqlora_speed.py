"""The speed table of AQLoRA (§6, Tables 3 and 4) for this machine: timing sessions on a model of Llama-3.2-1B's shape.

    python benchmarks/aqlora_speed.py [--out build/aqlora-speed] [--sessions 2] [--rounds 5] [--graphs] [--small]

The paper's setting: batch 6 × 8, at most 600 tokens, r = 8, alpha = 16, no checkpointing; its data are not needed for
a time, so the rows are random text of 200 to 600 tokens. Weights are random too: which layers have the largest
quantization error is then left to chance, their number is not. Each session is a new process of `toolkit time`; the
table is that of `toolkit table`. The paper's sessions take five or seven rounds of 200 steps on a V100; rounds here
last a second by default, so that two sessions fit into six minutes. Sessions of one call share their allocation, and
the table says so.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from training import FULL, SMALL

from toolkit.runs.models import choose_device

PROTECTED = {"selector": "top-error", "budget": "layers=0.2"}
ARMS = [
    {"name": "qlora"},
    {"name": "rslora", "scaler": "rslora"},
    {"name": "aqlora-q", "protect": PROTECTED},
    {"name": "aqlora-s", "protect": PROTECTED, "adapt": {"selector": "depth", "budget": "layers=0.85"}},
    {"name": "lora", "base": "none"},
]
TOKENS = (200, 600)


def save_model(folder: Path, shape: dict[str, int], device: torch.device) -> None:
    """A checkpoint of random weights, made on the device, with a tokenizer of one token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(**shape, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=letters[0]).save_pretrained(folder)


def save_rows(folder: Path, count: int, tokens: tuple[int, int]) -> None:
    """Random text as a task's rows, one byte a token: `count` to train on, eight to score."""
    chance = random.Random(0)
    folder.mkdir(parents=True)
    for split, number in (("train", count), ("test", 8)):
        lines = []
        for _ in range(number):
            length = chance.randint(*tokens) - 64  # room for the prompt's words and the summary
            words = "".join(chance.choice("abcdefgh ") for _ in range(length)).strip() or "a"
            lines.append(json.dumps({"dialogue": f"x{words}", "summary": "".join(chance.choices("abcdefgh", k=24))}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def study(small: bool, rounds: int, seconds: float, graphs: bool) -> dict[str, Any]:
    """The study's file; defaults are the paper's setting."""
    levers: dict[str, Any] = {"batch": 2, "accumulation": 2, "length": 160} if small else {}
    levers |= {"graphs": True} if graphs else {}
    return {
        "kind": "fine-tuning",
        "name": "aqlora-speed",
        "question": "How much faster than QLoRA do AQLoRA's settings train on this device?",
        "model": "model",
        "tasks": {"text": {"task": "samsum", "data": "rows"}},
        "arms": ARMS,
        "levers": levers,
        "seeds": 1,
        "timing": {
            "rounds": rounds,
            "seconds": seconds,
            "batches": 4 if small else 8,
            "noisiest": "aqlora-q",
            "warmup": 3 if graphs else 1,  # a shape is computed plainly, then captured, then replayed
        },
        "analysis": {"baseline": "qlora"},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the model, time it in new processes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/aqlora-speed"), help="folder of sessions and table")
    parser.add_argument("--sessions", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each arm in each round, in whole cycles")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a smoke test")
    parser.add_argument(
        "--graphs", action="store_true", help="all arms replay CUDA graphs: the host does not limit them"
    )
    parser.add_argument("--device", default=None)
    parser.add_argument("--beside-others", action="store_true", help="on a CPU that others keep busy")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.make is not None:
        save_model(options.make, SMALL if options.small else FULL, choose_device(options.device))
        return
    toolkit = [sys.executable, "-m", "toolkit"]
    device = [] if options.device is None else ["--device", options.device]
    with tempfile.TemporaryDirectory(prefix="aqlora-speed-") as scratch:
        home = Path(scratch)
        # in a process that ends: one that stays on the device would be another compute process
        making = [sys.executable, __file__, "--make", str(home / "model"), *device] + ["--small"] * options.small
        subprocess.run(making, check=True)
        save_rows(home / "rows", 64 if options.small else 480, (80, 160) if options.small else TOKENS)
        declared = study(options.small, options.rounds, options.seconds, options.graphs)
        (home / "study.yaml").write_text(yaml.safe_dump(declared, sort_keys=False), encoding="utf-8")
        command = [*toolkit, "time", str(home), "--out", str(options.out), "--sessions", str(options.sessions)]
        command += [*device] + ["--beside-others"] * options.beside_others
        subprocess.run(command, check=True)
    done = subprocess.run([*toolkit, "table", str(options.out)], check=True, capture_output=True, text=True)
    (options.out / "table.md").write_text(done.stdout, encoding="utf-8")
    print(done.stdout)


if __name__ == "__main__":
    main()
