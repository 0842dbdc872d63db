"""Keys: parsed, rendered, and the same again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit import spec
from toolkit.errors import InputError

WORD = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("nf4", "nf4", {}),
        (" nf4 ( block = 128 , double=false ) ", "nf4", {"block": "128", "double": "false"}),
        ("residual(inner=nf4(block=128,double=false))", "residual", {"inner": "nf4(block=128,double=false)"}),
        ("random-matched(within=0.01)", "random-matched", {"within": "0.01"}),
        ("x(per-layer=1)", "x", {"per_layer": "1"}),
        ("x()", "x", {}),
    ],
)
def test_parse(text, name, options):
    assert spec.parse(text) == (name, options)


@pytest.mark.parametrize("text", ["", "(a=1)", "x(a=1", "x)a=1(", "x(a)", "x(=1)", "x(a=)", "x(a=1,a=2)", "x(a=(1)"])
def test_unreadable(text):
    with pytest.raises(InputError):
        spec.parse(text)


@given(WORD, st.dictionaries(WORD, st.one_of(st.booleans(), st.integers(), WORD), max_size=4))
def test_round_trip(name, options):
    parsed_name, parsed = spec.parse(spec.render(name, options))
    assert parsed_name == name
    assert parsed == {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in options.items()}
