"""A model without its blocks: what it calls them with, found by running it and not by knowing how it is made.

The shell is the model with a stub in each block's place. A stub notes what it is called with and hands on the hidden
states as they came, so that the model's own code makes embeddings, masks and positions, and no block is computed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from toolkit.errors import InputError
from toolkit.weights.layers import Layer


class Enough(Exception):
    """A forward pass has gone as far as it is needed."""


@dataclasses.dataclass(frozen=True)
class Call:
    """What a block is called with besides the hidden states.

    Attributes:
        rest: further arguments by place; `named`: by name.
        key: the name that hidden states are given by; None: the first place.
    """

    rest: tuple[Any, ...]
    named: dict[str, Any]
    key: str | None = None

    def __call__(self, block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """The block's hidden states, on the device where `hidden` is."""
        rest, named = moved(self.rest, hidden.device), moved(self.named, hidden.device)
        out = block(hidden, *rest, **named) if self.key is None else block(*rest, **{self.key: hidden}, **named)
        return out[0] if isinstance(out, tuple | list) else out


def moved(value: Any, device: torch.device) -> Any:
    """Nested arguments with their tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(each, device) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(moved(each, device) for each in value)
    return value


class _Stub(nn.Module):
    """In a block's place; other attributes are the block's, which models ask their blocks for."""

    def __init__(self, index: int, block: nn.Module, shell: Shell) -> None:
        super().__init__()
        self.__dict__.update(index=index, block=block, shell=shell)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.shell.visit(self.index, args, kwargs)


class Shell:
    """The model around its blocks.

    Args:
        model: dense; it stays as it is.
        blocks: path of the list of its blocks.
        dtype: the compute dtype.

    Attributes:
        model: the copy without blocks, on the CPU.
    """

    def __init__(self, model: nn.Module, blocks: str, dtype: torch.dtype) -> None:
        from toolkit.runs.models import cast

        self._blocks = list(model.get_submodule(blocks))
        self._dense, self._dtype = model, dtype
        stubs = {id(block): _Stub(at, block, self) for at, block in enumerate(self._blocks)}
        self.model = cast(copy.deepcopy(model, dict(stubs)), dtype).eval().cpu()
        self._form: type | None = None
        self._calls: list[Call] = []
        self._first: torch.Tensor | None = None
        self._last: torch.Tensor | None = None
        self._known: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        self._same: dict[int, torch.Tensor] = {}  # of one pass: blocks mostly share their arguments

    def copy_of(self, at: int) -> nn.Module:
        """A copy of one block in the compute dtype; experts are computed one by one, as the model's code has it."""
        from toolkit.runs.models import cast

        block = copy.deepcopy(self._blocks[at])
        for declared in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):  # which `cast` asks a model for
            block.__dict__.setdefault(declared, getattr(self._dense, declared, None))
        for module in block.modules():
            if getattr(getattr(module, "config", None), "_experts_implementation", None) is not None:
                module.config._experts_implementation = "eager"  # a copy's config
        return cast(block, self._dtype).eval().requires_grad_(False)

    def calls(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[Call]]:
        """The hidden states that enter the first block, and what each block is called with, on the CPU.

        Args:
            ids: (windows, window) token ids.

        Raises:
            InputError: the model does not call its blocks one after the other on the hidden states.
        """
        if self._form is None:
            self._probe(ids[:1, : min(ids.shape[1], 8)])
        found = self._run(ids)
        if len(found) != len(self._blocks):
            raise InputError(
                f"{type(self._dense).__name__} calls {len(found)} of its {len(self._blocks)} blocks: it cannot be "
                "calibrated block by block"
            )
        assert self._first is not None
        self._same.clear()
        return self._first, [Call(self._shared(call.rest), self._shared(call.named), call.key) for call in found]

    def visit(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a stub answers: the hidden states, in the form in which the blocks give them.

        Raises:
            InputError: the block is not called on what the one before it made.
            Enough: nothing more need be computed.
        """
        key = None if args else next((k for k in kwargs if k == "hidden_states"), next(iter(kwargs), None))
        hidden = args[0] if args else kwargs.get(key or "")
        if not isinstance(hidden, torch.Tensor) or index != len(self._calls) or (index and hidden is not self._last):
            raise InputError(
                f"{type(self._dense).__name__} does not call block {index} on what block {len(self._calls) - 1} made: "
                "it cannot be calibrated block by block"
            )
        if self._form is None:
            out = self.copy_of(index).cpu()(*args, **kwargs)
            self._form = type(out)
            raise Enough
        if index == 0:
            self._first = hidden
        self._calls.append(Call(args[1:], {k: v for k, v in kwargs.items() if k != key}, key))
        if len(self._calls) == len(self._blocks):
            raise Enough
        self._last = hidden
        return hidden if issubclass(self._form, torch.Tensor) else self._form((hidden,))

    def _probe(self, ids: torch.Tensor) -> None:
        self._run(ids)

    def _run(self, ids: torch.Tensor) -> list[Call]:
        self._calls, self._first, self._last = [], None, None
        try:
            with torch.no_grad():
                self.model(input_ids=ids, use_cache=False)
        except Enough:
            pass
        return self._calls

    def _shared(self, value: Any) -> Any:
        """The same arguments, with tensors that are equal to earlier ones kept once: masks, positions."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._same:
                self._same[id(value)] = self._earlier(value)
            return self._same[id(value)]
        if isinstance(value, dict):
            return {key: self._shared(each) for key, each in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._shared(each) for each in value)
        return value

    def _earlier(self, value: torch.Tensor) -> torch.Tensor:
        alike = self._known.setdefault((value.shape, value.dtype), [])
        for known in alike:
            if known is value or torch.equal(known, value):
                return known
        if len(alike) < 8:  # beyond that they differ by batch
            alike.append(value)
        return value


def list_of_blocks(model: nn.Module, layers: Sequence[Layer]) -> str:
    """Path of the one list that holds the blocks of these layers.

    Raises:
        InputError: a layer outside any list of blocks (named), or several lists.
    """
    lists = {path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    found: dict[str, str] = {}
    for layer in layers:
        parts = layer.path.split(".")
        outer = next((".".join(parts[:n]) for n in range(len(parts)) if ".".join(parts[:n]) in lists), None)
        if outer is None:
            raise InputError(
                f"layer {layer.name} lies outside the blocks of {type(model).__name__}, and calibration goes block by "
                "block: give it an initializer that needs none"
            )
        found.setdefault(outer, layer.name)
    if len(found) != 1:
        raise InputError(
            f"{type(model).__name__} has several lists of blocks ({', '.join(found)}): calibration follows one"
        )
    return next(iter(found))
