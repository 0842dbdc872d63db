"""Budgets: exact decimals, one unit each, the same after a round trip."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from toolkit.errors import InputError
from toolkit.records.budget import UNITS, Budget

fractions = st.decimals(min_value="1e-12", max_value=1, allow_nan=False).filter(lambda d: 0 < d <= 1)
budgets = (
    st.builds(lambda v: Budget(layers=v), fractions)
    | st.builds(lambda v: Budget(parameters=v), fractions)
    | st.builds(lambda v: Budget(bytes=v), st.integers(1, 2**70))
)
BUDGET = TypeAdapter(Budget)


@given(budgets)
def test_json_round_trip(budget):
    assert BUDGET.validate_json(BUDGET.dump_json(budget)) == budget
    assert Budget.parse(str(budget)) == budget
    assert str(Budget.parse(str(budget))) == str(budget)


@given(fractions, st.integers(1, 10**30))
def test_shares_are_exact(share, total):
    exact = Fraction(share) * total
    budget = Budget(parameters=share)
    assert budget.of(total) == math.ceil(exact) and budget.of(total, "floor") == math.floor(exact)


@pytest.mark.parametrize(
    ("share", "total", "ceil", "floor"),
    [
        (".55", 100, 55, 55),
        (0.55, 100, 55, 55),
        (0.2, 211, 43, 42),
        (0.7, 144, 101, 100),
        (0.5, 144, 72, 72),
        (1, 7, 7, 7),
    ],
)
def test_a_float_is_read_as_it_is_written(share, total, ceil, floor):
    assert Budget(layers=share).of(total) == ceil
    assert Budget(layers=share).of(total, "floor") == floor


def test_shares_are_exact_whatever_the_decimal_context():
    with localcontext(prec=2):
        assert Budget(layers="0.12345").of(100_000) == 12_345
    assert Budget(layers="0.55" + "0" * 40 + "1").of(100) == 56


def test_equal_amounts_are_equal_budgets():
    assert Budget(layers=0.2) == Budget(layers="0.20") == Budget(layers=Decimal(".2")) == Budget.parse("layers=.2")
    assert str(Budget(layers="0.200")) == "layers=0.2" and str(Budget(layers="1.0")) == "layers=1"
    assert hash(Budget(layers=0.2)) == hash(Budget(layers="0.20"))


@pytest.mark.parametrize(
    ("text", "count"),
    [("512MiB", 2**29), ("1.5 KiB", 1536), ("2GB", 2 * 10**9), ("3", 3), (" 7b ", 7), ("0.5gib", 2**29), (12, 12)],
)
def test_sizes(text, count):
    budget = Budget(bytes=text)
    assert budget.of(10) == count and budget.unit == "bytes" and budget.amount == count
    assert BUDGET.dump_python(budget) == {"bytes": count}


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)))
def test_every_unit(number, unit):
    assert Budget.parse(f"bytes={number}{unit}").of(1) == number * UNITS[unit]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of layers, parameters, bytes; found none"),
        ({"layers": None}, "exactly one"),
        ({"layers": 0.1, "bytes": 3}, r"found \['layers', 'bytes'\]"),
        ({"layer": 0.1}, "no budget is called 'layer'; did you mean 'layers'"),
        ({"layers": 0}, r"layers=0 is outside \(0, 1\]"),
        ({"layers": -0.1}, "outside"),
        ({"parameters": 1.01}, "outside"),
        ({"layers": "nan"}, "outside"),
        ({"layers": float("inf")}, "outside"),
        ({"layers": "half"}, "layers='half' is no number"),
        ({"layers": True}, "is no number"),
        ({"bytes": 0}, "bytes=0 selects nothing"),
        ({"bytes": -5}, "selects nothing"),
        ({"bytes": "0.2B"}, "selects nothing"),
        ({"bytes": "5 parsecs"}, "is no size; write a number with B, KiB"),
        ({"bytes": True}, "is no size"),
        ({"bytes": 1.5e3}, None),
    ],
)
def test_refusals(values, message):
    if message is None:
        assert Budget(**values).of(1) == 1500
        return
    with pytest.raises(InputError, match=message):
        Budget(**values)


@pytest.mark.parametrize("text", ["layers", "0.2", "", "layers:0.2"])
def test_text_without_a_unit(text):
    with pytest.raises(InputError, match=r"write layers=0\.2, parameters=0\.1 or bytes=512MiB"):
        Budget.parse(text)


@pytest.mark.parametrize("value", [0.2, ["layers"], None])
def test_in_a_file_only_text_or_a_mapping(value):
    with pytest.raises(ValueError, match=r"a budget is written layers=0\.2"):
        BUDGET.validate_python(value)
