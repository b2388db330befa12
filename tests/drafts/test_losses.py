"""The distillation loss against a naive float64 computation with all logits: values, gradients, memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_train.drafts import losses
from eagle_train.drafts.losses import LOGITS_LOSSES, LossSums, default_chunk_rows, distillation_loss
from eagle_train.models.target import LMHead

R, H, V = 37, 24, 700  # V fills two blocks of row_max and leaves a rest
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.37},
    "softcap": {"softcap": 4.0},
    "all": {"bias": True, "scale": 1.7, "softcap": 5.0},
}


def make_head(vocabulary: int = V, dtype: torch.dtype = torch.float32, bias: bool = False, **fields) -> LMHead:
    generator = torch.Generator().manual_seed(vocabulary)
    weight = torch.randn(vocabulary, H, generator=generator).to(dtype)
    return LMHead(weight, torch.randn(vocabulary, generator=generator).to(dtype) if bias else None, **fields)


def make_hidden(rows: int = R, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of draft and target: near enough to agree at times, with differences on both sides of beta."""
    generator = torch.Generator().manual_seed(rows)
    target = torch.randn(rows, H, generator=generator)
    draft = target + 0.7 * torch.randn(rows, H, generator=generator)
    return draft.to(dtype).requires_grad_(), target.to(dtype)


def naive(
    draft, target, head, l1_weight=1.0, ce_weight=0.1, logits_loss="ce", scale=1.0
) -> tuple[LossSums, torch.Tensor]:
    """DESIGN section 3.2 literally, in float64, with all logits; and the gradient."""
    draft = draft.detach().double().requires_grad_()
    target = target.double()

    def logits(hidden):
        out = hidden @ head.weight.double().T
        out = head.scale * (out if head.bias is None else out + head.bias.double())
        return out if head.softcap is None else head.softcap * torch.tanh(out / head.softcap)

    distance = (draft - target).abs()
    l1 = torch.where(distance < 1, distance.square() / 2, distance - 0.5).mean(-1).sum()
    z_t, z_d = logits(target), logits(draft)
    by_row = -(z_t.softmax(-1) * z_d.log_softmax(-1)).sum(-1)
    ce = by_row.sum()
    if logits_loss == "lk":
        accepted = torch.minimum(z_t.softmax(-1), z_d.softmax(-1)).sum(-1)
        weight = torch.exp(-3 * accepted).detach()
        by_row = weight * by_row + (1 - weight) * (1 - accepted)
    loss = scale * (l1_weight * l1 + ce_weight * by_row.sum())
    (gradient,) = torch.autograd.grad(loss, draft)
    return LossSums(loss, l1, ce, (z_t.argmax(-1) == z_d.argmax(-1)).sum(), len(draft)), gradient


def assert_same(sums: LossSums, gradient: torch.Tensor, wanted: LossSums, wanted_gradient, bound: float = 1e-5) -> None:
    for name in ("loss", "l1", "ce"):
        found, right = getattr(sums, name).item(), getattr(wanted, name).item()
        assert found == pytest.approx(right, rel=bound), name
    error = (gradient.double() - wanted_gradient).abs().max()
    assert error <= bound * wanted_gradient.abs().max()


@pytest.mark.parametrize("kind", LOGITS_LOSSES)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("weights", [(1.0, 0.1), (0.0, 1.0)])
def test_equals_naive_float64(head, weights, kind):
    head = make_head(**HEADS[head])
    draft, target = make_hidden()
    options = {"l1_weight": weights[0], "ce_weight": weights[1], "logits_loss": kind, "scale": 1 / 91}
    sums = distillation_loss(draft, target, head, **options)
    sums.loss.backward()
    wanted, gradient = naive(draft, target, head, **options)
    assert_same(sums, draft.grad, wanted, gradient)
    assert sums.rows == R
    assert sums.agree == wanted.agree
    assert 0 < wanted.agree < R


@pytest.mark.parametrize("kind", LOGITS_LOSSES)
@pytest.mark.parametrize("chunk_rows", [1, 7, 36, R, 2 * R])
def test_chunks_do_not_matter(chunk_rows, kind):
    head = make_head(**HEADS["all"])
    draft, target = make_hidden()
    sums = distillation_loss(draft, target, head, logits_loss=kind, chunk_rows=chunk_rows)
    sums.loss.backward()
    assert_same(sums, draft.grad, *naive(draft, target, head, logits_loss=kind))


@pytest.mark.parametrize("vocabulary", [2, losses._STRIPE - 1, losses._STRIPE, losses._STRIPE + 1, 8 * losses._STRIPE])
def test_vocabulary_sizes(vocabulary):
    head = make_head(vocabulary)
    draft, target = make_hidden()
    sums = distillation_loss(draft, target, head)
    sums.loss.backward()
    assert_same(sums, draft.grad, *naive(draft, target, head))


def test_float64_stays_float64():
    head = make_head(dtype=torch.float64, **HEADS["all"])
    draft, target = make_hidden(dtype=torch.float64)
    sums = distillation_loss(draft, target, head)
    sums.loss.backward()
    assert_same(sums, draft.grad, *naive(draft, target, head), bound=1e-12)


def test_large_logits_do_not_cancel():
    """Logits near 4,096, exact in fp32, in a sum of a million terms: any loss of precision is the summation's own."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-8, 9, (4096, H), generator=generator).float()
    head = LMHead(weight, bias=torch.full((4096,), 4096.0))
    draft, target = ((8 * hidden).round() / 64 for hidden in make_hidden(256))
    sums = distillation_loss(draft, target, head)
    wanted, _ = naive(draft, target, head)
    assert sums.ce.item() == pytest.approx(wanted.ce.item(), rel=1e-6)


def test_packed_rows_equal_documents_alone():
    """Three documents packed into two rows with padding, against each document alone: sums and gradients are equal."""
    head, (draft, target) = make_head(), make_hidden()
    supervised = torch.arange(R) % 3 > 0
    documents = [slice(0, 9), slice(9, 20), slice(20, R)]
    packed = torch.full((2, 21), R)  # which slot of the documents lies where; R is padding
    packed[0, :20], packed[1, : R - 20] = torch.arange(20), torch.arange(20, R)
    chosen = packed[(packed < R) & torch.cat([supervised, torch.tensor([False])])[packed]]
    scale = 1 / int(supervised.sum())
    whole = distillation_loss(draft[chosen], target[chosen], head, scale=scale)
    (gradient,) = torch.autograd.grad(whole.loss, draft)

    parts = []
    for document in documents:
        rows = supervised[document]
        parts.append(distillation_loss(draft[document][rows], target[document][rows], head, scale=scale))
        parts[-1].loss.backward()
    torch.testing.assert_close(draft.grad, gradient, rtol=1e-5, atol=1e-8)
    assert not gradient[~supervised].any()
    for name in ("loss", "l1", "ce"):
        assert sum(getattr(part, name) for part in parts).item() == pytest.approx(getattr(whole, name).item(), rel=1e-5)
    assert sum(part.agree for part in parts) == whole.agree
    assert sum(part.rows for part in parts) == whole.rows


def test_no_rows():
    draft, target = make_hidden(0)
    sums = distillation_loss(draft, target, make_head())
    sums.loss.backward()
    assert (sums.loss.item(), sums.l1.item(), sums.ce.item(), sums.agree.item(), sums.rows) == (0, 0, 0, 0, 0)
    assert draft.grad.shape == (0, H)


def test_agreement_takes_the_first_of_equals():
    head = LMHead(torch.cat([torch.eye(H), torch.eye(H)]))
    target = torch.eye(H)[:4]
    draft = torch.eye(H)[[0, 1, 2, 7]]
    assert distillation_loss(draft, target, head).agree == 3


@pytest.mark.parametrize("size", [1, losses._STRIPE - 1, losses._STRIPE, losses._STRIPE + 1, 5 * losses._STRIPE + 3])
def test_row_max_is_the_first_argmax(size):
    x = torch.randint(4, (200, size), generator=torch.Generator().manual_seed(size)).float()
    value, index = losses._row_max(x)
    assert torch.equal(value, x.amax(-1, keepdim=True))
    assert torch.equal(index, x.argmax(-1, keepdim=True))


def test_bf16_is_near():
    """Only the rounding of logits to 8 bits remains: 2 % of the gradient, 0.2 % of the sums."""
    head = make_head(dtype=torch.bfloat16, bias=True)
    draft, target = make_hidden(256, torch.bfloat16)
    sums = distillation_loss(draft, target, head, chunk_rows=100)
    sums.loss.backward()
    wanted, gradient = naive(draft, target, head)
    assert sums.ce.dtype == sums.l1.dtype == torch.float32
    assert draft.grad.dtype == torch.bfloat16
    assert_same(sums, draft.grad, wanted, gradient, bound=0.02)
    for name in ("loss", "l1", "ce"):
        assert getattr(sums, name).item() == pytest.approx(getattr(wanted, name).item(), rel=2e-3), name


def test_autocast_changes_nothing():
    head, (draft, target) = make_head(), make_hidden()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = distillation_loss(draft, target, head)
    sums.loss.backward()
    assert_same(sums, draft.grad, *naive(draft, target, head))


def test_matmuls_run_in_the_heads_dtype():
    """A draft in fp32 with a head in bf16 (its last norm in fp32, for example) gets an fp32 gradient."""
    head = make_head(dtype=torch.bfloat16)
    draft, target = make_hidden()
    sums = distillation_loss(draft, target, head)
    sums.loss.backward()
    assert draft.grad.dtype == torch.float32
    low = distillation_loss(draft.detach().bfloat16(), target.bfloat16(), head)
    assert sums.ce == low.ce


@pytest.mark.parametrize("how", ["no_grad", "detached"])
def test_evaluation_forms_no_gradient(how, monkeypatch):
    head, (draft, target) = make_head(), make_hidden()
    wanted, _ = naive(draft, target, head)
    monkeypatch.setattr("eagle_train.drafts.losses._before_cap", None)
    with torch.set_grad_enabled(how != "no_grad"):
        sums = distillation_loss(draft.detach() if how == "detached" else draft, target, head)
    assert not sums.loss.requires_grad
    assert sums.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-5)


def test_only_the_draft_learns():
    head, (draft, target) = make_head(), make_hidden()
    with pytest.raises(AssertionError, match="target is frozen"):
        distillation_loss(draft, target.clone().requires_grad_(), head)
    with pytest.raises(AssertionError, match="LM head is frozen"):
        distillation_loss(draft, target, replace(head, weight=head.weight.clone().requires_grad_()))


def test_metrics_hold_no_graph():
    draft, target = make_hidden()
    sums = distillation_loss(draft, target, make_head())
    assert sums.loss.requires_grad
    assert not any(value.requires_grad for value in (sums.l1, sums.ce, sums.agree))


class TallestLogits(TorchDispatchMode):
    """Records the most rows of any tensor with the vocabulary's width."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim and out.shape[-1] == V:
            self.rows = max(self.rows, out.numel() // V)
        return out


def test_logits_never_exist_whole():
    head, (draft, target) = make_head(**HEADS["all"]), make_hidden(200)
    with TallestLogits() as seen:
        distillation_loss(draft, target, head, chunk_rows=30).loss.backward()
    assert seen.rows == 2 * 30  # both models'


@pytest.mark.parametrize(
    ("vocabulary", "rows", "on_a_gpu"),
    [(4096, 256, 1024), (128256, 256, 1024), (256000, 128, 1024), (2**20, 32, 256), (2**25, 1, 8)],
)
def test_default_chunk_is_small(vocabulary, rows, on_a_gpu):
    assert default_chunk_rows(vocabulary, "cpu") == rows
    assert default_chunk_rows(vocabulary, "cuda") == on_a_gpu


@pytest.fixture
def one_core():
    """The number of threads changes how a product is rounded; in training both threads have as many."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("kind", LOGITS_LOSSES)
def test_two_threads_divide_the_chunks(kind):
    draft, target, head = *make_hidden(), make_head(softcap=4.0)
    alone = distillation_loss(draft, target, head, logits_loss=kind, chunk_rows=5)
    (wanted,) = torch.autograd.grad(alone.loss, draft)
    begun, threads = threading.Barrier(2), set()
    whole = losses._chunk_loss

    def chunk_loss(*arguments):
        if threading.current_thread() not in threads:  # nobody is done before both have begun
            threads.add(threading.current_thread())
            begun.wait(10)
        return whole(*arguments)

    def run_parallel(work):
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            other = pool.submit(work)
            work()
            other.result()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "_chunk_loss", chunk_loss)
        shared = distillation_loss(draft, target, head, logits_loss=kind, chunk_rows=5, run_parallel=run_parallel)
    (gradient,) = torch.autograd.grad(shared.loss, draft)
    assert len(threads) == 2
    assert torch.equal(gradient, wanted)
    assert (shared.loss, shared.l1, shared.ce, shared.agree) == (alone.loss, alone.l1, alone.ce, alone.agree)
