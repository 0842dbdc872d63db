"""Checkpoint tensor names → module paths in the model that transformers builds, without importing it.

The table is keyed on `model_type` in config.json. A block's projections stand in the order in which the model
registers them. A type that is not in the table is mapped by `toolkit.weights.skeleton`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

import torch

from toolkit.errors import InputError, closest
from toolkit.weights.checkpoints import Checkpoint

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
SHARED = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj")
BUFFERS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias)")
"""Constants that older checkpoints carry and that are no parameters."""


@dataclasses.dataclass(frozen=True)
class Family:
    """How one model type names its layers.

    Attributes:
        projections: what a block may hold, in model order: one tuple a kind of block.
        blocks: path of the list of blocks.
        base: prefix of the base model; checkpoints of the bare base model lack it.
        head, heads: module path of the output embedding, and the names it has in checkpoints.
        embedding: the input embedding's path, whose weight a tied head shares.
        tied: whether the head is tied where the config does not say.
        before: projections that stand before the blocks, where the model has them.
        transposed: weights stored (in, out).
        renames: parts of a path in checkpoints → in the model.
        parts: an expert's tensor → (projection it goes to, place in it).
        others: matrices of a block that are no layers.
    """

    projections: tuple[tuple[str, ...], ...] = (ATTENTION + GATED,)
    blocks: str = "model.layers"
    base: str = "model"
    head: str = "lm_head"
    heads: tuple[str, ...] = ("lm_head",)
    embedding: str = "model.embed_tokens"
    tied: bool = False
    before: tuple[str, ...] = ()
    transposed: bool = False
    renames: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parts: Mapping[str, tuple[str, int]] = dataclasses.field(default_factory=dict)
    others: tuple[str, ...] = ()


QWEN_PARTS = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)}
DENSE = Family()
GEMMA = Family(tied=True)

FAMILIES: dict[str, Family] = {
    "llama": DENSE,
    "mistral": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "phi": Family(projections=((*ATTENTION[:3], "self_attn.dense", "mlp.fc1", "mlp.fc2"),)),
    "phi3": Family(projections=(("self_attn.o_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"),)),
    "gpt2": Family(
        projections=(("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),),
        blocks="transformer.h",
        base="transformer",
        embedding="transformer.wte",
        tied=True,
        transposed=True,
    ),
    "opt": Family(
        projections=(("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj", "fc1", "fc2"),),
        blocks="model.decoder.layers",
        embedding="model.decoder.embed_tokens",
        tied=True,
        before=("model.decoder.project_out", "model.decoder.project_in"),
    ),
    "gpt_neox": Family(
        projections=(("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),),
        blocks="gpt_neox.layers",
        base="gpt_neox",
        heads=("embed_out", "lm_head"),
        embedding="gpt_neox.embed_in",
    ),
    "mixtral": Family(
        projections=(ATTENTION + EXPERTS,),
        renames={"block_sparse_moe": "mlp"},
        parts={"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0)},
        others=("mlp.gate",),
    ),
    "qwen2_moe": Family(
        projections=(ATTENTION + EXPERTS + SHARED + ("mlp.shared_expert_gate",), ATTENTION + GATED),
        parts=QWEN_PARTS,
        others=("mlp.gate",),
    ),
    "qwen3_moe": Family(projections=(ATTENTION + EXPERTS, ATTENTION + GATED), parts=QWEN_PARTS, others=("mlp.gate",)),
}


@dataclasses.dataclass(frozen=True)
class StoredLayer:
    """One layer of a checkpoint: its place in the model, and the tensors that hold it.

    Attributes:
        tensors: names in the checkpoint; several stand below one another (gate above up).
        transposed: stored (in, out).
        index: which expert of a 3-D tensor.
    """

    name: str
    role: str
    block: int | None
    shape: tuple[int, int]
    tensors: tuple[str, ...]
    transposed: bool = False
    index: int | None = None

    @property
    def tensor(self) -> str | list[str]:
        """The tensor's name, or the names of several."""
        return self.tensors[0] if len(self.tensors) == 1 else list(self.tensors)

    def read(self, checkpoint: Checkpoint) -> torch.Tensor:
        """The weight as (out, in): a view of the mapped file, or a copy of this layer where it has several parts."""
        parts = [checkpoint[name] for name in self.tensors]
        if self.index is not None:
            parts = [p[self.index] for p in parts]
        if self.transposed:
            parts = [p.mT for p in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a checkpoint holds, in the model's terms.

    Attributes:
        layers: in model order, without the head.
        head: the head's module path; `head_layer`: its weight, where the checkpoint has one.
        blocks: number of blocks.
        other_parameters: parameters outside the layers, a tied head counted once.
        note: how the names were mapped, where it was not by the table.
    """

    layers: list[StoredLayer]
    head: str | None
    head_layer: StoredLayer | None
    blocks: int
    other_parameters: int
    note: str | None = None


def layout(checkpoint: Checkpoint) -> Layout:
    """Map a checkpoint's tensors to layers.

    Raises:
        InputError: no model type, a quantized checkpoint, a projection that is missing or not known, or
            another number of blocks or experts than the config says.
    """
    config = checkpoint.config
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise InputError(f"{checkpoint.folder / 'config.json'} has no `model_type`")
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown method")
        raise InputError(
            f"{checkpoint.folder} is already quantized ({method}): give the 16-bit checkpoint that it was made from"
        )
    if kind not in FAMILIES:
        from toolkit.weights.skeleton import skeleton_layout

        return skeleton_layout(checkpoint)
    return _Reader(checkpoint, FAMILIES[kind], kind).layout()


class _Reader:
    """Sorts a checkpoint's tensors into layers and the rest, by a family's table."""

    def __init__(self, checkpoint: Checkpoint, family: Family, kind: str) -> None:
        self.checkpoint = checkpoint
        self.family = family
        self.kind = kind
        self.known = {p for kinds in family.projections for p in kinds}
        self.places: dict[int, dict[str, dict[int | None, dict[int, str]]]] = {}  # block → path → expert → part
        self.outer: dict[str, str] = {}
        self.others = 0

    def layout(self) -> Layout:
        for name in self.checkpoint.tensors:
            self._sort(name)
        count = self._count(("num_hidden_layers", "n_layer"))
        if not self.places:
            some = ", ".join(list(self.checkpoint.tensors)[:3])
            raise InputError(
                f"{self.checkpoint.folder}: no tensor belongs to a block of {self.kind!r} "
                f"({self.family.blocks}.0.…); it holds {some} …"
            )
        found = sorted(self.places)
        if found != list(range(count if count is not None else len(found))):
            raise InputError(
                f"{self.checkpoint.folder}: the config tells of {count} blocks, and the tensors of "
                f"{len(found)} ({found[0]} to {found[-1]})"
            )
        layers = [self._plain(p, None, {0: self.outer[p]}) for p in self.family.before if p in self.outer]
        for block in found:
            layers += self._block(block)
        own = self.outer.get(self.family.head)
        if own and not (self._tied() and self.family.embedding in self.outer):
            self.others += self.checkpoint.tensors[own].elements  # else it is the embedding, which is counted
        return Layout(layers, self.family.head, self._head(), len(found), self.others)

    def _sort(self, name: str) -> None:
        family = self.family
        elements = self.checkpoint.tensors[name].elements
        if BUFFERS.fullmatch(name):
            return
        head, _, leaf = name.rpartition(".")
        if head in family.heads:
            if leaf != "weight":
                self.others += elements
                return
            self._once(self.outer, family.head, name)
            return
        path = name if name.startswith(family.base + ".") else f"{family.base}.{name}"
        inside = re.fullmatch(re.escape(family.blocks) + r"\.(\d+)\.(.+)", path)
        if inside:
            if not self._in_block(int(inside[1]), inside[2], name):
                self.others += elements
        elif path.removesuffix(".weight") in family.before:
            self._once(self.outer, path.removesuffix(".weight"), name)
        else:
            if path == f"{family.embedding}.weight":
                self.outer[family.embedding] = name
            self.others += elements

    def _in_block(self, block: int, rest: str, name: str) -> bool:
        """Note a tensor of a block; whether it belongs to a layer."""
        paths = self.places.setdefault(block, {})
        rest = ".".join(self.family.renames.get(part, part) for part in rest.split("."))
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", rest)
        if expert and expert[3] in self.family.parts:
            role, place = self.family.parts[expert[3]]
            self._once(paths.setdefault(f"{expert[1]}.{role}", {}).setdefault(int(expert[2]), {}), place, name)
            return True
        path = rest.removesuffix(".weight")
        if path in self.known:
            self._once(paths.setdefault(path, {}).setdefault(None, {}), 0, name)
            return True
        if len(self.checkpoint.tensors[name].shape) > 1 and path not in self.family.others:
            raise InputError(
                f"{self.checkpoint.folder}: tensor {name!r} is no layer that {self.kind!r} is known to have; "
                f"{closest(path, self.known)}"
            )
        return False

    def _once(self, slots: dict, key: object, name: str) -> None:
        if key in slots:
            raise InputError(f"{self.checkpoint.folder}: {slots[key]!r} and {name!r} are the same layer")
        slots[key] = name

    def _block(self, block: int) -> Iterator[StoredLayer]:
        paths = self.places[block]
        kinds = [k for k in self.family.projections if set(k) == set(paths)]
        if not kinds:
            nearest = min(self.family.projections, key=lambda k: len(set(k) ^ set(paths)))
            lacking = sorted(set(nearest) - set(paths)) or sorted(set(paths) - set(nearest))
            what = "lacks" if set(nearest) - set(paths) else "should not hold"
            raise InputError(f"{self.checkpoint.folder}: block {block} {what} {', '.join(lacking)}")
        for path in kinds[0]:
            full = f"{self.family.blocks}.{block}.{path}"
            experts = paths[path]
            if path in EXPERTS:
                yield from self._experts(full, block, path, experts)
            else:
                yield self._plain(full, block, experts[None])

    def _plain(self, path: str, block: int | None, parts: dict[int, str]) -> StoredLayer:
        name = parts[0]
        shape = self._shape(name, 2)
        if self.family.transposed:
            shape = shape[::-1]
        role = path.rpartition(".")[2]
        return StoredLayer(path, role, block, (shape[0], shape[1]), (name,), self.family.transposed)

    def _experts(
        self, full: str, block: int, path: str, experts: dict[int | None, dict[int, str]]
    ) -> Iterator[StoredLayer]:
        role = path.rpartition(".")[2]
        count = self._count(("num_local_experts", "num_experts"))
        if set(experts) == {None}:  # already merged into one 3-D tensor
            name = experts[None][0]
            number, rows, columns = self._shape(name, 3)
            self._same_count(full, count, number)
            for index in range(number):
                yield StoredLayer(f"{full}[{index}]", role, block, (rows, columns), (name,), index=index)
            return
        self._same_count(full, count, len(experts))
        wanted = sorted(place for part, place in self.family.parts.values() if part == role)
        for index in range(len(experts)):
            parts = experts.get(index, {})
            if sorted(parts) != wanted:
                raise InputError(f"{self.checkpoint.folder}: expert {index} of {full} lacks a tensor")
            names = tuple(parts[place] for place in wanted)
            shapes = [self._shape(n, 2) for n in names]
            if len({s[1] for s in shapes}) != 1:
                raise InputError(f"{self.checkpoint.folder}: parts of {full}[{index}] have shapes {shapes}")
            shape = (sum(s[0] for s in shapes), shapes[0][1])
            yield StoredLayer(f"{full}[{index}]", role, block, shape, names)

    def _same_count(self, full: str, count: int | None, found: int) -> None:
        if count is not None and count != found:
            raise InputError(f"{self.checkpoint.folder}: the config tells of {count} experts, and {full} has {found}")

    def _shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        shape = self.checkpoint.tensors[name].shape
        if len(shape) != dimensions or 0 in shape:
            raise InputError(
                f"{self.checkpoint.folder}: tensor {name!r} has shape {shape}; a weight of "
                f"{dimensions} dimensions is asked for"
            )
        return shape

    def _head(self) -> StoredLayer | None:
        name = self.outer.get(self.family.head)
        if name is None and self._tied():
            name = self.outer.get(self.family.embedding)
        if name is None:
            return None
        rows, columns = self._shape(name, 2)
        return StoredLayer(self.family.head, self.family.head, None, (rows, columns), (name,))

    def _tied(self) -> bool:
        return bool(self.checkpoint.config.get("tie_word_embeddings", self.family.tied))

    def _count(self, keys: tuple[str, ...]) -> int | None:
        key = next((k for k in keys if self.checkpoint.config.get(k)), None)
        if key is None:
            return None
        found = self.checkpoint.config[key]
        if isinstance(found, bool) or not isinstance(found, int):
            raise InputError(f"{self.checkpoint.folder / 'config.json'}: {key} is {found!r}, and an integer is needed")
        return found
