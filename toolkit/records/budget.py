"""A budget: how much may be selected, in layers, in parameters, or in 16-bit bytes."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from pydantic import ValidationError, model_serializer, model_validator

from toolkit.errors import closest
from toolkit.records.io import Record, Refusal

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}

DIGITS = 1000
"""Most decimal places of a fraction: exact arithmetic on 1e-99999999 would take hours."""

TEXT = r"^\s*(layers|parameters|bytes)\s*=\s*[0-9.]"
"""How a budget looks as text, for the files' schemas; `Budget.parse` reads it."""


class Budget(Record):
    """One of `layers` (a fraction of the layers), `parameters` (a fraction of the profile's) or `bytes`.

    Fractions lie in (0, 1]; bytes are 16-bit bytes, an integer or text such as "512MiB". Fractions are kept
    as exact decimals: .55 of 100 layers is 55, not 56. The layers fraction is AQLoRA's (§3.2); it does not
    transfer between architectures (§4), which is why the other two exist.
    """

    layers: Decimal | None = None
    parameters: Decimal | None = None
    bytes: int | None = None

    def __init__(self, **values: Any) -> None:
        unknown = set(values) - {"layers", "parameters", "bytes"}
        if unknown:
            name = sorted(unknown)[0]
            raise Refusal(f"no budget is called {name!r}; {closest(name, ['layers', 'parameters', 'bytes'])}")
        try:
            super().__init__(**{k: _amount(k, v) for k, v in values.items() if v is not None})
        except ValidationError as error:
            raise Refusal(error.errors()[0]["msg"].removeprefix("Value error, ")) from None

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = dict([_split(data)])
        if isinstance(data, dict):
            return {k: _amount(k, v) if k in cls.model_fields else v for k, v in data.items()}
        if isinstance(data, Budget):
            return data
        raise Refusal(f"a budget is written layers=0.2, parameters=0.1 or bytes=512MiB; found {data!r}")

    @model_validator(mode="after")
    def _one(self) -> Budget:
        given = [k for k in ("layers", "parameters", "bytes") if getattr(self, k) is not None]
        if len(given) != 1:
            raise Refusal(f"a budget has exactly one of layers, parameters, bytes; found {given or 'none'}")
        return self

    @model_serializer
    def _plain(self) -> dict[str, Any]:
        return {self.unit: int(self.amount) if self.unit == "bytes" else str(self.amount)}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        """As files hold it: one key, or text such as `layers=0.2`."""
        handler(core)
        fraction = {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                {"type": "string", "pattern": r"^[0-9.eE+-]+$"},
            ]
        }
        size = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^\s*[0-9]"}]}
        return {
            "title": "Budget",
            "description": (cls.__doc__ or "").partition("\n")[0],
            "anyOf": [
                {"type": "string", "pattern": TEXT},
                {
                    "type": "object",
                    "properties": {"layers": fraction, "parameters": fraction, "bytes": size},
                    "additionalProperties": False,
                    "minProperties": 1,
                    "maxProperties": 1,
                },
            ],
        }

    @classmethod
    def parse(cls, text: str) -> Budget:
        """A budget from `layers=0.2`, `parameters=0.1` or `bytes=512MiB`."""
        if not isinstance(text, str):
            raise Refusal(f"budget {text!r:.60} is no text: write layers=0.2, parameters=0.1 or bytes=512MiB")
        return cls(**dict([_split(text)]))

    @property
    def unit(self) -> Literal["layers", "parameters", "bytes"]:
        """Which of the three it is."""
        return next(k for k in ("layers", "parameters", "bytes") if getattr(self, k) is not None)  # type: ignore[return-value]

    @property
    def amount(self) -> Decimal:
        """The fraction, or the number of bytes."""
        return Decimal(getattr(self, self.unit))

    def of(self, total: int, rounding: Literal["ceil", "floor"] = "ceil") -> int:
        """⌈ρ·total⌉ (or ⌊ρ·total⌋) for a fraction, exactly; the bytes themselves for bytes."""
        if self.unit == "bytes":
            return int(self.amount)
        over, under = self.amount.as_integer_ratio()
        return -(-over * total // under) if rounding == "ceil" else over * total // under

    def __str__(self) -> str:
        return f"{self.unit}={self.amount}"


def _split(text: str) -> tuple[str, str]:
    unit, equals, amount = text.partition("=")
    if not equals:
        raise Refusal(f"cannot read budget {text!r}: write layers=0.2, parameters=0.1 or bytes=512MiB")
    return unit.strip(), amount.strip()


def _amount(unit: str, value: Any) -> Decimal | int | None:
    if value is None:
        return None
    if unit == "bytes":
        return _bytes(value)
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        raise Refusal(f"budget {unit}={value!r} is no number") from None
    if not amount.is_finite() or not 0 < amount <= 1:
        raise Refusal(f"budget {unit}={value} is outside (0, 1]: it is a fraction of the {unit}")
    if amount.as_tuple().exponent < -DIGITS:
        raise Refusal(f"budget {unit}={value!s:.40} has more than {DIGITS} decimal places")
    text = format(amount, "f")
    return Decimal(text.rstrip("0").rstrip(".") if "." in text else text)


def _bytes(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        count = value
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
        if not match or match[2].upper() not in UNITS:
            raise Refusal(f"budget bytes={value!r} is no size; write a number with B, KiB, MiB, GiB, KB, MB or GB")
        count = int(Decimal(match[1]) * UNITS[match[2].upper()])
    if count <= 0:
        raise Refusal(f"budget bytes={value} selects nothing: it must be positive")
    return count
