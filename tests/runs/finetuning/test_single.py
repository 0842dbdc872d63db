"""One run from Python: arguments that are none are named before anything is read."""

import pytest

import toolkit as tk
from toolkit.errors import InputError

PLAN = tk.Plan.protecting(None, "nf4", rank=2, alpha=4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"plan": None}, "plan: None is a NoneType, and a Plan is asked for"),
        ({"task": None}, "task: None is a NoneType, and a str is asked for"),
        ({"model": None}, "model: None is a NoneType"),
        ({"levers": {"steps": 2}}, r"levers: \{'steps': 2\} is a dict, and a Levers is asked for"),
        ({"seeds": "0"}, "seeds: '0' is a str, and a Seeds is asked for"),
        ({"seeds": -1}, "seeds: -1; a number from 0 to 4294967295"),
        ({"seeds": 2**40}, "seeds: 1099511627776; a number from 0"),
        ({"plan": tk.Plan.protecting(None, "nf4")}, "has no adapters, and nothing would be trained"),
        ({"task": "arithmetics"}, "did you mean 'arithmetic'"),
    ],
)
def test_arguments_that_are_none(tmp_path, given, message):
    asked = {"model": "demo", "plan": PLAN, "task": "arithmetic"} | given
    with pytest.raises(InputError, match=message):
        tk.train(out=tmp_path / "run", **asked)
    assert not (tmp_path / "run").exists()
