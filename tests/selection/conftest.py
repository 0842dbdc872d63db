"""Profiles without a model: layer lists of real shapes, and errors drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from toolkit.records.profile import LayerErrors, LayerProfile, Profile, Reference

QWEN_7B = {
    "self_attn.q_proj": (3584, 3584),
    "self_attn.k_proj": (512, 3584),
    "self_attn.v_proj": (512, 3584),
    "self_attn.o_proj": (3584, 3584),
    "mlp.gate_proj": (18944, 3584),
    "mlp.up_proj": (18944, 3584),
    "mlp.down_proj": (3584, 18944),
}
QWEN_14B = {
    "self_attn.q_proj": (5120, 5120),
    "self_attn.k_proj": (1024, 5120),
    "self_attn.v_proj": (1024, 5120),
    "self_attn.o_proj": (5120, 5120),
    "mlp.gate_proj": (13824, 5120),
    "mlp.up_proj": (13824, 5120),
    "mlp.down_proj": (5120, 13824),
}
PHI_3_MINI = {
    "self_attn.o_proj": (3072, 3072),
    "self_attn.qkv_proj": (9216, 3072),
    "mlp.gate_up_proj": (16384, 3072),
    "mlp.down_proj": (3072, 8192),
}
PHI_1_5 = {
    "self_attn.q_proj": (2048, 2048),
    "self_attn.k_proj": (2048, 2048),
    "self_attn.v_proj": (2048, 2048),
    "self_attn.dense": (2048, 2048),
    "mlp.fc1": (8192, 2048),
    "mlp.fc2": (2048, 8192),
}


def experts(hidden: int, attention: tuple[int, int], width: int, count: int) -> dict[str, tuple[int, int]]:
    """One mixture-of-experts block: q/o and k/v widths, and `count` experts of two fused projections."""
    q, kv = attention
    block = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
    }
    block |= {f"mlp.experts.gate_up_proj[{i}]": (2 * width, hidden) for i in range(count)}
    return block | {f"mlp.experts.down_proj[{i}]": (hidden, width) for i in range(count)}


def build(
    blocks: int,
    shapes: Mapping[str, tuple[int, int]] | Sequence[Mapping[str, tuple[int, int]]],
    *,
    seed: int = 0,
    model: str = "tiny",
    head: str | None = "lm_head",
) -> Profile:
    """`blocks` blocks of these layers; `shapes` is one mapping for all, or one a block."""
    rng = random.Random(seed)
    rows = []
    for block in range(blocks):
        for path, shape in (shapes if isinstance(shapes, Mapping) else shapes[block]).items():
            name = f"model.layers.{block}.{path}"
            mse = rng.lognormvariate(-10, 0.5)
            errors = LayerErrors(mse=mse, mae=rng.random(), relative=0.1 + rng.random() / 100, max=rng.random())
            count = shape[0] * shape[1]
            rows.append(
                LayerProfile(
                    name=name,
                    tensor=f"{name}.weight",
                    role=path.rpartition(".")[2].partition("[")[0],
                    block=block,
                    shape=shape,
                    parameters=count,
                    bytes=2 * count,
                    norm=rng.random() * count**0.5,
                    density=rng.random(),
                    error={"nf4": errors},
                )
            )
    reference = Reference(dtype="bfloat16", note="random numbers")
    return Profile(
        model=model, fingerprint=f"{model}-{seed}", reference=reference, head=head, blocks=blocks, layers=rows
    )


@pytest.fixture
def profile_of() -> Callable[..., Profile]:
    """The builder above."""
    return build


@pytest.fixture
def tiny() -> Profile:
    """Four blocks of four layers: three sizes, four roles."""
    return build(4, {"attn.q": (4, 4), "attn.k": (2, 4), "mlp.up": (12, 4), "mlp.down": (4, 12)})


@pytest.fixture
def qwen_7b() -> Profile:
    """The 196 layers of Qwen2.5-7B."""
    return build(28, QWEN_7B, model="Qwen/Qwen2.5-7B")


REAL = {
    "Qwen2.5-7B": (28, QWEN_7B),
    "Qwen2.5-14B": (48, QWEN_14B),
    "Phi-3-mini": (32, PHI_3_MINI),
    "Mixtral-8x7B": (32, experts(4096, (4096, 1024), 14336, 8)),
    "Qwen3-30B-A3B": (48, experts(2048, (4096, 512), 768, 128)),
}


@pytest.fixture(params=REAL)
def real(request: pytest.FixtureRequest) -> Profile:
    """The layer lists of real models."""
    return build(*REAL[request.param], model=request.param)


@pytest.fixture
def phi_1_5() -> Profile:
    """The 144 layers of phi-1.5: 24 blocks of 6."""
    return build(24, PHI_1_5, model="microsoft/phi-1_5")
