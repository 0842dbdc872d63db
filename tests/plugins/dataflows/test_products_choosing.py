"""Which execution a device gets, and what is said where it cannot have the one that was asked for."""

from __future__ import annotations

import pytest
import torch
from toolkit_plugins.dataflows.pact import choosing
from toolkit_plugins.dataflows.pact.choosing import Found, able, choose
from toolkit_plugins.dataflows.pact.settings import Settings

from toolkit.errors import InputError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("found", "names"),
    [
        (Found("cpu"), ["reference"]),
        (Found("rocm"), ["reference"]),
        (Found("mps", triton=True), ["reference"]),
        (Found("cuda", (7, 5), True), ["reference"]),
        (Found("cuda", (8, 0), True), ["reference", "exact"]),
        (Found("cuda", (8, 6), False), ["reference"]),
        (Found("cuda", (8, 9), True), ["reference", "exact", "fp8"]),
        (Found("cuda", (9, 0), True), ["reference", "exact", "fp8"]),
        (Found("cuda", (10, 0), True), ["reference", "exact", "fp8", "native"]),
        (Found("cuda", (11, 0), True), ["reference", "exact", "fp8"]),
        (Found("cuda", (12, 1), True), ["reference", "exact", "fp8", "native"]),
    ],
)
def test_what_a_device_runs(found, names):
    assert able(found) == names


def fastest(monkeypatch, found: Found, failed: str | None = None) -> tuple[str, str]:
    monkeypatch.setattr(choosing, "look", lambda device: found)
    monkeypatch.setattr(choosing, "_trial", lambda name, device: failed if name == "native" else None)
    monkeypatch.setattr(choosing.Offer, "make", lambda offer: type("Taken", (), {"name": offer.target})())
    execution, why = choose("auto", CPU)
    return execution.name.rpartition(":")[2], why


@pytest.mark.parametrize(
    ("capability", "name"),
    [((7, 5), "Execution"), ((8, 0), "Exact"), ((9, 0), "Exact"), ((10, 3), "Native"), ((12, 0), "Native")],
)
def test_auto_takes_the_fastest_that_keeps_the_numerics(monkeypatch, capability, name):
    taken, why = fastest(monkeypatch, Found("cuda", capability, True))
    assert taken == name and "{}.{}".format(*capability) in why


def test_auto_says_why_a_gpu_is_too_old_or_lacks_triton(monkeypatch):
    assert "8.0 or later; found: CUDA 7.0" in fastest(monkeypatch, Found("cuda", (7, 0), True))[1]
    assert "triton, which is not installed" in fastest(monkeypatch, Found("cuda", (9, 0), False))[1]


def test_auto_passes_over_what_fails_its_trial_and_says_so(monkeypatch):
    taken, why = fastest(monkeypatch, Found("cuda", (10, 0), True), failed="a product is off by 0.3")
    assert taken == "Exact" and "native was passed over, because its trial failed: a product is off by 0.3" in why


def test_on_a_cpu():
    execution, why = choose("auto", CPU)
    assert execution.name == "reference" and "found: cpu" in why
    execution, why = choose("reference", CPU)
    assert execution.name == "reference" and why == "it was asked for"


@pytest.mark.parametrize(("asked", "needed"), [("exact", "8.0 or later"), ("fp8", "8.9 or later"), ("native", "12.x")])
def test_what_cannot_run_is_refused_with_what_was_found_and_what_runs(asked, needed):
    with pytest.raises(InputError, match=f"execution {asked} cannot run here.*{needed}; found: cpu; what runs: ref"):
        choose(asked, CPU)


def test_a_failed_trial_refuses_what_was_asked_for(monkeypatch):
    monkeypatch.setattr(choosing, "look", lambda device: Found("cuda", (12, 0), True))
    monkeypatch.setattr(choosing, "_trial", lambda name, device: "RuntimeError: no kernel")
    monkeypatch.setattr(choosing.Offer, "make", lambda offer: offer)
    with pytest.raises(InputError, match=r"trial failed.*no kernel.*what runs: reference, exact, fp8"):
        choose("native", CPU)


def test_an_unknown_name_is_answered_with_the_closest():
    with pytest.raises(InputError, match="no execution 'natve'; did you mean 'native'"):
        choose("natve", CPU)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("native", Settings(layouts="shared"), "layouts=shared: backward is exact's product"),
        ("native", Settings(layouts="shared", gradients="16bit"), "layouts=shared and gradients=16bit: backward is"),
        ("native", Settings(), None),
        ("fp8", Settings(gradients="16bit"), "gradients=16bit: backward is exact's product"),
        ("fp8", Settings(layouts="shared"), None),
    ],
)
def test_the_record_says_where_an_execution_departs_from_its_name(monkeypatch, name, settings, said):
    monkeypatch.setattr(choosing, "look", lambda device: Found("cuda", (12, 0), True))
    monkeypatch.setattr(choosing, "_trial", lambda name, device: None)
    execution, why = choose(name, CPU, settings)
    assert execution.name == name
    assert why == "it was asked for" if said is None else said in why


def test_native_passes_its_own_trial_and_a_wrong_product_does_not(monkeypatch):
    from toolkit_plugins.dataflows.pact.native import Native
    from toolkit_plugins.dataflows.pact.products import native

    assert Native().trial(CPU) is None
    plain = native.product
    monkeypatch.setattr(native, "product", lambda *args: plain(*args) * 1.02)
    assert "a product is off by 0.0" in Native().trial(CPU)
    monkeypatch.setattr(native, "product", lambda *args: 1 / 0)
    assert "ZeroDivisionError: division by zero" in Native().trial(CPU)
