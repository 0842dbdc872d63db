"""What may be matched, from shapes and packed bytes alone."""

from __future__ import annotations

import pytest

import toolkit as tk
from toolkit.records.profile import Profile
from toolkit.selection.quantities import quantities


def with_bytes(profile: Profile, packed) -> Profile:
    """The profile with bytes under nf4 from (parameters → bytes or None)."""
    rows = [
        layer.model_copy(
            update={"error": {"nf4": layer.error["nf4"].model_copy(update={"bytes": packed(layer.parameters)})}}
        )
        for layer in profile.layers
    ]
    return profile.model_copy(update={"layers": rows})


def test_each_quantity(tiny):
    profile = with_bytes(tiny, lambda n: n // 2 + 3)
    for row, *found in zip(
        profile.layers,
        quantities(profile, "layers"),
        quantities(profile, "parameters"),
        quantities(profile, "bytes"),
        quantities(profile, "extra-bytes"),
        quantities(profile, "adapter-parameters"),
        strict=True,
    ):
        n = row.shape[0] * row.shape[1]
        assert found == [1, n, 2 * n, 2 * n - n // 2 - 3, row.shape[0] + row.shape[1]]


def test_fused_and_stacked_layers_have_one_adapter_each(profile_of):
    profile = profile_of(
        1, {"self_attn.qkv_proj": (9216, 3072), "mlp.experts.up[0]": (7, 5), "mlp.experts.up[1]": (7, 5)}
    )
    assert quantities(profile, "adapter-parameters") == (12288, 12, 12)


@pytest.mark.parametrize("match", ["parameters", "bytes", "extra-bytes", "adapter-parameters"])
def test_draws_match_what_they_say(qwen_7b, match):
    profile = with_bytes(qwen_7b, lambda n: n // 2 + 4 * (n // 64))
    like = tk.select("top-error", profile, "layers=0.2")
    size = dict(zip(profile.names, quantities(profile, match), strict=True))
    target = sum(size[n] for n in like.layers)
    for selection in tk.draws("random-matched", profile, like=like, match=match, count=5):
        total = sum(size[n] for n in selection.layers)
        assert abs(total - target) * 1000 <= target
        assert selection.mismatch == (total - target) / target
    other = tk.select("random-matched", profile, like=like)
    assert tk.select("random-matched", profile, like=like, match="parameters") == other
    assert other.options["match"] == "parameters" and other.selector == "random-matched"


def test_adapters_are_not_weights(qwen_7b):
    like = tk.select("top-error", qwen_7b, "layers=0.2")
    found = tk.draws("placement-matched", qwen_7b, like=like, count=20)
    assert max(abs(s.parameters / like.parameters - 1) for s in found) > 0.01
    assert found[0].selector == "placement-matched" and found[0].options["match"] == "adapter-parameters"


@pytest.mark.parametrize(
    ("packed", "quantizer", "message"),
    [
        (lambda n: None, "nf4", r"does not say how many bytes layer .*toolkit profile tiny --quantizer 'nf4'"),
        (lambda n: 2 * n, "nf4", "keeping it in 16 bit costs nothing"),
        (lambda n: n, "nf5", r"holds no errors under 'nf5'; did you mean 'nf4'\?"),
    ],
)
def test_extra_bytes_need_packed_bytes(tiny, packed, quantizer, message):
    profile = with_bytes(tiny, packed)
    like = tk.select("top-error", profile, "layers=0.5")
    with pytest.raises(tk.InputError, match=message):
        tk.select("random-matched", profile, like=like, match="extra-bytes", quantizer=quantizer)


def test_an_unknown_quantity(tiny):
    with pytest.raises(tk.InputError, match="'match'"):
        tk.select("random-matched", tiny, like=tk.select("top-error", tiny, "layers=0.5"), match="memory")
