"""The fused scores against float64 arithmetic, at several dtypes, sizes and references."""

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2, 5), (3, 17, 8192), (2, 9, 49152), (2, 5, 10007)])
@pytest.mark.parametrize("logarithms", [False, True])
def test_scores_are_those_of_the_equations(dtype, shape, logarithms):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from toolkit.runs.texts.scoring_triton import score

    torch.manual_seed(0)
    q, p = ((4 * torch.randn(shape, device="cuda")).to(dtype) for _ in range(2))
    ids = torch.randint(0, shape[2], shape[:2], device="cuda")
    lse = torch.logsumexp(p.float(), -1)
    if logarithms:
        p, lse = torch.log_softmax(p.float(), -1).to(dtype), torch.zeros_like(lse)
    top = p.argmax(-1)
    found = score(q, ids, p, lse, top)

    log_q = torch.log_softmax(q.double(), -1)[:, :-1]
    log_p = (p.double() - lse.double()[..., None])[:, :-1]
    nll = -log_q.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).sum(-1)
    agree = (q[:, :-1].gather(-1, top[:, :-1, None]).squeeze(-1) >= q[:, :-1].amax(-1)).sum(-1)
    tokens = shape[1] - 1
    torch.testing.assert_close(found[:, 0] / tokens, nll / tokens, atol=1e-4, rtol=0)
    torch.testing.assert_close(found[:, 1] / tokens, kl / tokens, atol=1e-4, rtol=0)
    assert torch.equal(found[:, 2], agree.double())
