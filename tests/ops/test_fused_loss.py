"""The fused loss against the plain twin in float64: on a GPU, or in Triton's interpreter where there is none."""

import pytest
import torch

from eagle_train.drafts import losses
from eagle_train.drafts.losses import LOGITS_LOSSES, distillation_loss
from eagle_train.models.head import LMHead
from eagle_train.ops import fused_loss
from eagle_train.ops.kernels import plain

pytest.importorskip("triton", reason="it comes with torch for CUDA, and with xgrammar")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the gradient, rounded to that dtype
HEADS = {
    "plain": {},
    "bias": {"bias": True, "scale": 0.5},
    "cap": {"softcap": 3.0},
    "all": {"bias": True, "scale": 2.0, "softcap": 5.0},
}
ROWS = 4


def a_head(
    vocabulary: int, bias: bool = False, scale: float = 1.0, softcap: float | None = None, width: int = 8
) -> LMHead:
    weight = torch.randn(vocabulary, width, device=DEVICE)
    return LMHead(weight, torch.randn(vocabulary, device=DEVICE) if bias else None, scale, softcap)


def of_dtype(head: LMHead, dtype: torch.dtype) -> LMHead:
    return LMHead(head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype), head.scale, head.softcap)


def some_products(vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows that differ, of equal ones, of ones with two equal peaks, and of large numbers."""
    of_target, of_draft = (torch.randn(ROWS, vocabulary, device=DEVICE) * 3 for _ in range(2))
    of_draft[1] = of_target[1]
    of_target[2, [vocabulary - 1, vocabulary // 2]] = 20.0
    of_draft[2, vocabulary // 2] = 20.0
    of_draft[3] += 200.0
    return of_target.to(dtype), of_draft.to(dtype)


def twin(of_target: torch.Tensor, of_draft: torch.Tensor, head: LMHead, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and gradient in float64."""
    head, (of_target, of_draft) = of_dtype(head, torch.float64), (x.double() for x in (of_target, of_draft))
    buffers = losses.Buffers(head, len(of_draft), kind)
    return losses._plain_loss(of_target, of_draft, head, kind, True, buffers), of_draft


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("vocabulary", [3, 64, 4100])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", LOGITS_LOSSES)
def test_it_equals_the_twin(kind, dtype, vocabulary, head):
    torch.manual_seed(0)
    exact = of_dtype(a_head(vocabulary, **HEADS[head]), dtype)
    of_target, of_draft = some_products(vocabulary, dtype)
    wanted, slope = twin(of_target, of_draft, exact, kind)
    rule = {"bias": exact.bias, "scale": exact.scale, "softcap": exact.softcap}
    without = fused_loss.fused_loss(of_target, of_draft.clone(), kind, with_gradient=False, **rule)
    sums = fused_loss.fused_loss(of_target, of_draft, kind, **rule)
    assert torch.equal(sums, without)
    torch.testing.assert_close(sums, wanted, rtol=1e-5, atol=1e-5)
    assert (of_draft.double() - slope).norm() <= BOUNDS[dtype] * slope.norm()


def test_without_a_gradient_nothing_is_written():
    of_target, of_draft = some_products(64, torch.float32)
    before = of_target.clone(), of_draft.clone()
    fused_loss.fused_loss(of_target, of_draft, "ce", with_gradient=False)
    assert torch.equal(of_target, before[0])
    assert torch.equal(of_draft, before[1])


@pytest.mark.parametrize("kind", LOGITS_LOSSES)
def test_a_number_that_is_none_stays_in_its_row(kind):
    of_target, of_draft = some_products(64, torch.float32)
    of_draft[0, 7] = float("nan")
    sums = fused_loss.fused_loss(of_target, of_draft, kind)
    assert not sums[:2].isfinite().any()
    assert of_draft[0].isnan().all()
    assert of_draft[1:].isfinite().all()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", LOGITS_LOSSES)
def test_the_loss_of_training_is_the_same_by_it(monkeypatch, kind, head):
    torch.manual_seed(0)
    exact = a_head(300, width=16, **HEADS[head])
    target, draft = (torch.randn(70, 16, device=DEVICE) for _ in range(2))
    found = []
    for is_fused in (True, False):
        monkeypatch.setattr(fused_loss, "supports", lambda logits, is_fused=is_fused: is_fused)
        given = draft.clone().requires_grad_()
        sums = distillation_loss(given, target, exact, logits_loss=kind, chunk_rows=32, scale=0.5)
        sums.loss.backward()
        found.append((sums.loss, sums.ce, sums.agree, given.grad))
    assert not torch.equal(found[0][3], found[1][3])  # each is rounded in its own way
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_a_gpu_takes_it_unless_told():
    logits = torch.zeros(1, 8, device="cuda", dtype=torch.bfloat16)
    assert fused_loss.supports(logits)
    assert not fused_loss.supports(logits.double())
    with plain("loss"):
        assert not fused_loss.supports(logits)


def test_a_cpu_takes_the_plain_one():
    assert not fused_loss.supports(torch.zeros(1, 8))
