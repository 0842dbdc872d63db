"""llm-compressor's GPTQ for NVFP4 on the study's model and calibration windows: the checkpoint that an arm reads.

In an environment that has llm-compressor (0.14) beside the toolkit:

    python studies/nvfp4-calibration/llm_compressor.py --calibration c4.jsonl.gz
    python studies/nvfp4-calibration/llm_compressor.py --calibration c4.jsonl.gz --observer nvfp4_expanded_mse

`stored(checkpoint=…)` then reads codes and scales bit for bit. All layers but the head are quantized, weights alone, by
the library's defaults: blocks of 128 columns, 1% of damping, columns in order of activation, block by block.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from pathlib import Path

import yaml
from compressed_tensors.quantization import preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.runs.texts.documents import cut, read_text
from toolkit.weights.demo_model import demo_model

OBSERVERS = ("memoryless_minmax", "memoryless_mse", "nvfp4_expanded_mse")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    options.add_argument("--calibration", required=True, help="the text: a name, .txt or .jsonl, also .gz")
    options.add_argument("--observer", default=OBSERVERS[0], choices=OBSERVERS, help="how block scales are chosen")
    options.add_argument("-o", "--out", type=Path, help="the folder; llm-compressor-OBSERVER if not given")
    given = options.parse_args()
    out = given.out or Path(f"llm-compressor-{given.observer}")
    use = yaml.safe_load((Path(__file__).parent / "study.yaml").read_text())["calibration"]

    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype="float32")
    windows = cut(read_text(given.calibration), tokenizer, window=use["window"], tokens=use["windows"] * use["window"])
    rows = windows.ids.tolist()
    weights = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights.model_dump() | {"observer": given.observer}
    recipe = GPTQModifier(
        ignore=["lm_head"],
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
    )
    oneshot(
        model=model,
        dataset=Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * use["window"]] * len(rows)}),
        recipe=recipe,
        num_calibration_samples=len(rows),
        max_seq_length=use["window"],
    )
    model.save_pretrained(out, save_compressed=True)
    for path in out.glob("*.safetensors"):  # an arm needs the layers alone
        held = load_file(path)
        save_file({name: tensor for name, tensor in held.items() if "_proj." in name}, path)
    about = {name: importlib.metadata.version(name) for name in ("llmcompressor", "compressed-tensors", "torch")}
    (out / "about.json").write_text(
        json.dumps(about | {"observer": given.observer, "calibration": windows.record.model_dump()}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
