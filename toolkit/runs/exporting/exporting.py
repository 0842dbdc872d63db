"""`export`: a run, an adapter, starts or a plan, in a form that other libraries load."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from toolkit.errors import InputError, closest
from toolkit.records.exported import Exported, ExportedLayer
from toolkit.records.io import write_json
from toolkit.records.plan import LayerPlan
from toolkit.registry import registry
from toolkit.runs import adapters
from toolkit.runs.exporting import bnb, compressed_tensors, peft
from toolkit.runs.exporting.changes import Change, Kept, changes_of
from toolkit.runs.exporting.compressed_tensors import FUSED, Fused
from toolkit.runs.exporting.folder import PLAN, REPORT, check, whole, write_checkpoint
from toolkit.runs.exporting.origin import Origin, read
from toolkit.runs.exporting.packing import Held, arrived, layouts, pack, refuse_lost, total
from toolkit.runs.exporting.weights import Onto, Opened, is_dense, merge_dense, open_model, quantizer_of, refuse_shared

FORMATS = ("peft", "bnb", "compressed-tensors", "merged")
LEAST = 0.5
"""The share of an adapter's change that must arrive in each weight that is quantized again, and in all of them."""
PACKAGES = ("torch", "transformers", "safetensors", "peft", "bitsandbytes", "compressed-tensors")


def export(
    run: str | os.PathLike[str],
    format: str,
    output: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | None = None,
    start: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    merge: bool = False,
    onto: Onto | None = None,
    least: float = LEAST,
    fused: Fused = "shared",
    dtype: str | torch.dtype | None = None,
    shard: str = "5GB",
    verify: bool = True,
    force: bool = False,
) -> Exported:
    """Write what a run holds as a folder that other libraries load; the folder appears whole or not at all.

    `peft`: the adapter, for stock PEFT. `bnb`: the quantized base, as transformers loads it with bitsandbytes.
    `compressed-tensors`: the quantized base in the packed layout of its quantizer, as vLLM reads it; weights alone are
    quantized. `merged`: base and adapter in one 16-bit checkpoint, round(W₀ + ΔW), rounded once.

    Args:
        run: folder of a fine-tuning run, of an adapter or of starts; or a plan file.
        format: peft, bnb, compressed-tensors or merged.
        output: the folder to write.
        model: what the dense weights are loaded from; by default the model that the plan names.
        start: folder of starts, where the adapter was trained on a base that initializers changed.
        base: for `peft`: an exported base, which the adapter's config will name.
        merge: for `bnb` and `compressed-tensors`: merge the adapter, and quantize again.
        onto: what an adapter is merged onto: `base`, the decoded base that it was trained on (the default, but for a
            quantizer's own base that is quantized again); or `dense`, the original weights, which starts that an
            initializer made refuse: their A and B hold what the base lost.
        least: the share of the change that must arrive in each layer that is quantized again, and in all of them; 0
            takes it as it is.
        fused: `shared`, `separate` or `requantize`: the scales of layers that vLLM fuses
            (`toolkit.runs.exporting.compressed_tensors`).
        dtype: of what is not packed; by default the checkpoint's.
        shard: the most bytes of a file.
        verify: load what was written with its own library, and compare; before the folder appears.
        force: replace an earlier export.

    Raises:
        InputError: an unknown format; a run, adapter, start or model that is missing or does not fit; a layer that the
            format cannot hold; a plan that no skip list gives; a merge of which too little arrives.
        RunError: the folder cannot be written, or reads otherwise than it was written.
    """
    if format not in FORMATS:
        raise InputError(f"no format is called {format!r}; {closest(format, FORMATS)}")
    asked = Asked(format, Path(output), merge, onto, least, fused, shard, verify, force)
    asked.check()
    if base is not None and format != "peft":
        raise InputError("base= (--base) is what an adapter's config names: for the format peft alone")
    check(output, force=force)
    origin = read(run, model=model, start=start)
    if onto == "dense" and origin.fitted:
        raise InputError(
            f"{origin.path} belongs to layers that an initializer started, and its adapter holds what their base lost: "
            "merged onto the dense weights it would be added twice; leave onto='dense' out"
        )
    if format == "peft":
        return _peft(origin, asked, None if base is None else Path(base))
    opened = open_model(origin, dtype)
    with torch.no_grad():
        return _merged(origin, opened, asked) if format == "merged" else _packed(origin, opened, asked)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What `export` was asked for; its arguments, under its names."""

    form: str
    output: Path
    merge: bool
    onto: Onto | None
    least: float
    fused: Fused
    shard: str
    verify: bool
    force: bool

    def check(self) -> None:
        """Refuse options that are none, or that the format has no use for.

        Raises:
            InputError: names the option.
        """
        if self.merge and self.form not in ("bnb", "compressed-tensors"):
            raise InputError(
                f"merge= (--merge) merges the adapter into a quantized base; {self.form} "
                + ("merges anyway" if self.form == "merged" else "keeps the adapter apart")
            )
        if self.onto not in (None, "base", "dense"):
            raise InputError(f"onto is {self.onto!r}; {closest(str(self.onto), ['base', 'dense'])}")
        if self.onto is not None and not self.merge and self.form != "merged":
            raise InputError("onto= (--onto) says what an adapter is merged onto, and nothing is merged")
        if self.fused not in FUSED:
            raise InputError(f"fused is {self.fused!r}; {closest(str(self.fused), FUSED)}")
        if self.fused != FUSED[0] and self.form != "compressed-tensors":
            raise InputError(f"fused= (--fused) is of scales that compressed-tensors shares; {self.form} has none")
        if not isinstance(self.least, int | float) or not self.least <= 1:  # NaN is refused too
            raise InputError(f"least is {self.least!r}; a share of at most 1 is asked for")


def _peft(origin: Origin, asked: Asked, base: Path | None) -> Exported:
    from toolkit.runs.building import decide
    from toolkit.runs.models import skeleton

    layers = decide(skeleton(origin.model), origin.plan)
    with whole(asked.output, force=asked.force) as folder:
        notes = peft.write(origin, layers, folder, base)
        return _report(origin, folder, asked, adapter=_sha256(folder / adapters.WEIGHTS), notes=notes)


def _merged(origin: Origin, opened: Opened, asked: Asked) -> Exported:
    from toolkit.runs.models import cast

    onto = asked.onto or "base"
    changes = changes_of(origin, opened.plans)
    planned = opened.plans.items()
    quantized = {name: None for name, plan in planned if not is_dense(quantizer_of(plan))} if onto == "base" else {}
    refuse_shared(opened, {**quantized, **changes})
    kept = merge_dense(opened, changes, onto=onto)
    if onto == "base":
        opened.same_base(origin)
    cast(opened.model, opened.dtype)
    about = {name: ExportedLayer(merged=kept[name].survival() if name in kept else None) for name in opened.layers}
    with whole(asked.output, force=asked.force) as folder:
        notes = _anew(origin, opened) + write_checkpoint(opened.model, folder, origin.model, shard=asked.shard)
        return _report(
            origin,
            folder,
            asked,
            opened=opened,
            onto=onto,
            layers=about,
            notes=notes,
            merged=total(kept) if kept else None,
            adapter=_adapter(origin, changes),
        )


def _packed(origin: Origin, opened: Opened, asked: Asked) -> Exported:
    from toolkit.runs.models import cast

    held_as = layouts(opened, asked.form)
    layout = next(iter(held_as.values()))
    config = layout.config(opened.dtype)
    if asked.form == "bnb":
        config["llm_int8_skip_modules"] = bnb.skip_list(opened.model, held_as)
    else:
        config["ignore"] = compressed_tensors.ignored(opened.model, held_as)
    changes: Mapping[str, Change] = changes_of(origin, opened.plans) if asked.merge else {}
    if asked.merge and not changes:
        raise InputError(f"{origin.path} has no adapter to merge")
    refuse_shared(opened, changes)
    onto = asked.onto or ("base" if origin.fitted else "dense")
    held, kept = pack(opened, held_as, changes, onto=onto)
    opened.same_base(origin)
    notes = _notes(opened, origin, asked, held)
    if asked.form == "compressed-tensors":
        trained = origin.adapter is not None and not asked.merge
        fitted = set() if asked.merge else _fitted(opened.plans)
        notes += compressed_tensors.share(held, opened.layers, asked.fused, trained=trained, fitted=fitted)
    in_packed = arrived(held)
    refuse_lost(in_packed, held, asked.least)
    kept |= in_packed
    cast(opened.model, opened.dtype)
    about = _about(opened, held, kept)
    tensors = {name: each.layout.tensors(each.packed, opened.dtype) for name, each in held.items()}
    with whole(asked.output, force=asked.force) as folder:
        notes += write_checkpoint(
            opened.model, folder, origin.model, packed=tensors, quantization=config, shard=asked.shard
        )
        checked = _verify(asked.form, folder, held, opened, origin) if asked.verify else []
        if asked.verify and not checked:
            notes.append(compressed_tensors.UNREAD)
        return _report(
            origin,
            folder,
            asked,
            opened=opened,
            onto=onto if asked.merge else None,
            layers=about,
            notes=notes,
            merged=total(kept) if kept else None,
            adapter=_adapter(origin, changes) if asked.merge else None,
            layout=layout.name,
            checked=checked,
        )


def _about(opened: Opened, held: Mapping[str, Held], kept: Mapping[str, Kept]) -> dict[str, ExportedLayer]:
    found = {}
    for name in opened.layers:
        each = held.get(name)
        layer = ExportedLayer() if each is None else each.about
        update: dict[str, object] = {}
        if name in kept:
            update["merged"] = kept[name].survival()
        if each is not None:
            shape = (each.packed.shape[0], each.packed.shape[1])
            theirs = each.layout.decoded(each.layout.tensors(each.packed, opened.dtype), shape, torch.bfloat16)
            update["differing"] = int((theirs != each.packed.dequantize(torch.bfloat16)).sum())
        found[name] = layer.model_copy(update=update)
    return found


def _fitted(plans: Mapping[str, LayerPlan]) -> set[str]:
    """Layers whose adapter an initializer fits to what the base lost, whether it changes the base or not."""
    return {
        name
        for name, plan in plans.items()
        if plan.adapter is not None and not registry.make("initializer", plan.initializer).plain
    }


def _anew(origin: Origin, opened: Opened) -> list[str]:
    """Starts that were not read but made here."""
    made = list(opened.starts.records) if origin.start is None else []
    if not made:
        return []
    return [
        f"{len(made)} layers, such as {made[0]}, were started anew by their initializers, for no folder of starts was "
        "found or given (toolkit initialize PLAN -o DIR makes one, start= (--start DIR) names it)"
    ]


def _notes(opened: Opened, origin: Origin, asked: Asked, held: Mapping[str, Held]) -> list[str]:
    notes = _anew(origin, opened)
    adapted = any(plan.adapter is not None for plan in opened.plans.values())
    if adapted and (origin.adapter is not None or origin.begun) and not asked.merge:
        notes.append("the base alone: the adapter is exported apart, by the format peft")
    apart = [name for name, plan in opened.plans.items() if plan.compute_dtype is not None or plan.range_guard]
    if apart:
        notes.append(
            f"{len(apart)} layers, such as {apart[0]}, are planned with a compute dtype or a range guard of their own, "
            "which a checkpoint does not carry: stock loaders compute them in the model's dtype"
        )
    cautions: dict[str, list[str]] = {}
    for name, each in held.items():
        if text := each.layout.caution((each.packed.shape[0], each.packed.shape[1])):
            cautions.setdefault(text, []).append(name)
    return notes + [f"{len(names)} layers, such as {names[0]}: {text}" for text, names in cautions.items()]


def _verify(form: str, folder: Path, held: Mapping[str, Held], opened: Opened, origin: Origin) -> list[str]:
    if form == "bnb":
        bnb.check(folder, held, opened.plans, opened.dtype)
        return [f"loaded by transformers: storage of {len(opened.plans)} layers as planned, packed tensors bit for bit"]
    if compressed_tensors.check(folder, held, origin.model):
        return [
            f"read by compressed-tensors: {len(held)} layers quantized and no other, decoded in bfloat16 bit for bit"
        ]
    return []


def _adapter(origin: Origin, changes: Mapping[str, Change]) -> str | None:
    """SHA-256 of the adapter's file, or over the starts' A and B."""
    if not changes:
        return None
    if origin.adapter is not None:
        return _sha256(origin.adapter / adapters.WEIGHTS)
    found = hashlib.sha256()
    for name in sorted(changes):
        for tensor in (changes[name].A, changes[name].B):
            found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _report(origin: Origin, folder: Path, asked: Asked, *, opened: Opened | None = None, **more: object) -> Exported:
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    plan = origin.plan
    if opened is not None:
        start = opened.starts.digest or plan.start
        plan = plan.model_copy(update={"fingerprint": opened.fingerprint, "start": start})
    report = Exported(
        form=asked.form,
        model=plan.model,
        fingerprint=plan.fingerprint,
        plan=plan.hash,
        plan_base=peft.digest(plan),
        start=plan.start,
        dtype=None if opened is None else str(opened.dtype).removeprefix("torch."),
        packages=packages,
        **more,  # type: ignore[arg-type]
    )
    write_json(folder / PLAN, plan.to_json())
    write_json(folder / REPORT, report.to_json())
    return report
