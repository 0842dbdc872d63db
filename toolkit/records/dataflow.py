"""How a built model computes, where its data flow had a choice: what a report says of it."""

from __future__ import annotations

from pydantic import Field

from toolkit.records.io import Record


class Flow(Record):
    """What a data flow made of a model; `model.dataflow` of a built one, left there by flows that have a choice.

    Attributes:
        key: of the data flow.
        execution: who computes, and `because` of what.
        forward, backward: the weights that the two products effectively read.
        gap: ‖W̃ − Ŵ‖_F/‖Ŵ‖_F of the weights W̃ of backward and Ŵ of forward, mean over the layers; 0: they are the same.
        layers: how many layers the data flow computes itself; `others`: how many planned ones it leaves to the stock.
        fused: paths of the parts of blocks that it computes as one operation.
        left: why a part keeps its own code → the paths.
    """

    key: str
    execution: str
    because: str
    forward: str
    backward: str
    gap: float = Field(ge=0)
    layers: int
    others: int = 0
    fused: list[str] = []
    left: dict[str, list[str]] = {}
