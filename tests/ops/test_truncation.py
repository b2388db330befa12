"""Top-k and top-p by a search keep what a sort keeps: compared with float64 exactly, and with the sorted twin."""

import pytest
import torch

from eagle_train.ops import truncation
from eagle_train.ops.truncation import searched_truncation, sorted_truncation, truncated_softmax
from tests.support.graph_recorder import no_values

SETTINGS = [(0, 0.9), (50, 0.95), (0, 1.0), (3, 1.0), (1, 0.5), (10**9, 0.3), (200, 0.999), (0, 1e-6), (0, 1 - 2**-24)]


def scaled_logits(kind: str, rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    """[rows, 2, vocabulary], the greatest of a row 0."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 2, vocabulary, generator=rng) * 3
    if kind == "ties":
        logits = logits.round()
    elif kind == "bf16":
        logits = logits.bfloat16().float()
    elif kind == "flat":
        logits = logits * 1e-9
    elif kind == "steep":
        logits = logits * 100
    elif kind == "grammar":
        logits[torch.rand(logits.shape, generator=rng) < 0.99] = -torch.inf
        logits[..., 7] = 1.0
    return logits - logits.amax(-1, keepdim=True)


def settings_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    given = [SETTINGS[row % len(SETTINGS)] for row in range(rows)]
    return torch.tensor([k for k, _ in given]), torch.tensor([p for _, p in given])


def exactly_kept(scaled: torch.Tensor, top_k: int, top_p: torch.Tensor) -> torch.Tensor:
    """bool [V], by a sort and sums in float64 that are rounded once: of the probabilities that float32 has."""
    ordered, index = scaled.sort(descending=True, stable=True)
    last = ordered[min(top_k or len(ordered), len(ordered)) - 1]
    probs = scaled.masked_fill(scaled < last, -torch.inf).softmax(-1)
    before = torch.cat((torch.zeros(1, dtype=torch.float64), probs[index].double().cumsum(-1)[:-1]))
    kept = (before.float() < top_p) | (top_p >= 1) | (before == 0)
    return torch.zeros(len(scaled), dtype=torch.bool).scatter_(0, index, kept) & (probs > 0)


@pytest.mark.parametrize("vocabulary", [1, 2, 100, 3001, 20_000])
@pytest.mark.parametrize("kind", ["plain", "ties", "bf16", "flat", "steep", "grammar"])
def test_exactly_the_smallest_set_is_kept(kind, vocabulary):
    rows = len(SETTINGS)
    scaled = scaled_logits("plain" if vocabulary < 8 else kind, rows, vocabulary)
    top_k, top_p = settings_of(rows)
    ours = searched_truncation(scaled, top_k, top_p)
    for row in range(rows):
        for node in range(2):
            kept = exactly_kept(scaled[row, node], int(top_k[row]), top_p[row])
            assert torch.equal(ours[row, node] > 0, kept), (row, node)
    torch.testing.assert_close(ours.sum(-1), torch.ones(rows, 2))


def mass_before(scaled: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Of each entry of [B, N, V], after top-k [B] and before top-p, in float64."""
    ordered, index = scaled.double().sort(descending=True, stable=True)
    k = torch.where(top_k > 0, top_k, scaled.shape[-1]).clamp(max=scaled.shape[-1])[:, None, None]
    last = ordered.gather(-1, (k - 1).expand(*scaled.shape[:-1], 1))
    probs = ordered.masked_fill(ordered < last, -torch.inf).softmax(-1)
    return torch.zeros_like(probs).scatter_(-1, index, probs.cumsum(-1) - probs)


@pytest.mark.parametrize("kind", ["plain", "ties", "bf16", "flat", "steep", "grammar"])
def test_as_by_a_sort(kind):
    """But for entries before which there is top-p to the last bits: softmax adds up in another order."""
    rows, vocabulary = 3 * len(SETTINGS), 12_000
    scaled, (top_k, top_p) = scaled_logits(kind, rows, vocabulary, 1), settings_of(rows)
    ours, theirs = searched_truncation(scaled, top_k, top_p), sorted_truncation(scaled, top_k, top_p)
    differs = (ours > 0) != (theirs > 0)
    from_top_p = (mass_before(scaled, top_k) - top_p[:, None, None]).abs()
    assert (from_top_p[differs] < 1e-5).all()
    same = ~differs.any(-1)
    assert same.float().mean() > 0.8
    torch.testing.assert_close(ours[same], theirs[same], rtol=4e-6, atol=0)


def test_sums_that_float32_cannot_tell_from_top_p_reach_it():
    """Three times 0.1 are 0.3, though float32's 0.3 is greater than three times its 0.1."""
    scaled = torch.zeros(1, 1, 10).expand(9, 1, 10)
    top_p = torch.tensor([count / 10 for count in range(1, 10)])
    top_k = torch.zeros(9, dtype=torch.int64)
    ours = searched_truncation(scaled, top_k, top_p)
    assert torch.equal(ours > 0, sorted_truncation(scaled, top_k, top_p) > 0)
    assert ours[2, 0].count_nonzero() == 3


def test_among_equals_the_lower_indices_are_kept():
    scaled = torch.full((1, 1, 9000), -1.0)
    scaled[..., 8000] = 0.0
    ours = searched_truncation(scaled, torch.tensor([0]), torch.tensor([0.5]))
    kept = ours[0, 0].nonzero().flatten().tolist()
    assert kept == [*range(len(kept) - 1), 8000]
    assert 4490 < len(kept) < 4510


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocabulary", [97, 4096, 9000])
def test_rows_without_top_k_and_top_p_are_their_softmax(vocabulary, dtype):
    """To the bit, whichever of the two sorts or searches."""
    rows = len(SETTINGS)
    scaled, (top_k, top_p) = scaled_logits("plain", rows, vocabulary).to(dtype), settings_of(rows)
    row = SETTINGS.index((0, 1.0))
    assert torch.equal(truncated_softmax(scaled, top_k, top_p)[row], scaled[row].softmax(-1))


@pytest.fixture
def two_threads():
    """Which share a sum over a row that is alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocabulary", [97, 4096, 9000, 100_000])
def test_a_row_has_the_same_bits_in_any_batch(vocabulary, monkeypatch):
    rows = len(SETTINGS)
    scaled, (top_k, top_p) = scaled_logits("bf16", rows, vocabulary)[:, :1], settings_of(rows)
    for truncate in (truncated_softmax, searched_truncation):
        ours = truncate(scaled, top_k, top_p)
        for row in range(rows):
            one = slice(row, row + 1)
            any_top_k = bool(top_k[row] > 0)
            assert torch.equal(truncate(scaled[one], top_k[one], top_p[one], any_top_k)[0], ours[row])
    monkeypatch.setattr(truncation, "_CPU_CHUNK", 5 * vocabulary)  # the rows are in two chunks
    assert torch.equal(searched_truncation(scaled, top_k, top_p), ours)


def test_extreme_settings_and_logits():
    scaled = torch.tensor([[[-torch.inf, 0.0, -torch.inf, 0.0, -1e-45, -3e38]]])
    for top_k, top_p, expected in (
        (0, 0.0, [0, 1, 0, 0, 0, 0]),
        (0, 1e-45, [0, 1, 0, 0, 0, 0]),
        (1, 1.0, [0, 0.5, 0, 0.5, 0, 0]),
        (0, 0.5, [0, 0.5, 0, 0.5, 0, 0]),
        (2, 0.4, [0, 1, 0, 0, 0, 0]),
        (6, 1.0, [0, 1 / 3, 0, 1 / 3, 1 / 3, 0]),
    ):
        ours = searched_truncation(scaled, torch.tensor([top_k]), torch.tensor([top_p]))
        torch.testing.assert_close(ours[0, 0], torch.tensor(expected, dtype=torch.float32))


def test_nothing_waits_for_the_device():
    scaled, (top_k, top_p) = scaled_logits("plain", 4, 9000), settings_of(4)
    with torch.inference_mode(), no_values():
        ours = truncated_softmax(scaled, top_k, top_p)
    assert torch.equal(ours, searched_truncation(scaled, top_k, top_p))


@pytest.mark.parametrize(("vocabulary", "dtype", "sorts"), [(8192, 32, True), (8193, 32, False), (8193, 64, True)])
def test_which_is_used(vocabulary, dtype, sorts, monkeypatch):
    called = []
    for name in ("sorted_truncation", "searched_truncation"):
        monkeypatch.setattr(truncation, name, lambda scaled, *_, name=name: called.append(name))
    scaled = torch.zeros(1, 1, vocabulary, dtype=torch.float64 if dtype == 64 else torch.float32)
    truncated_softmax(scaled, torch.tensor([0]), torch.tensor([0.9]))
    assert called == ["sorted_truncation" if sorts else "searched_truncation"]


def test_compiles_as_one_graph():
    compiled = torch.compile(truncated_softmax, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 2, 5):
        scaled, (top_k, top_p) = scaled_logits("plain", rows, 9000), settings_of(rows)
        assert torch.equal(compiled(scaled, top_k, top_p, True), truncated_softmax(scaled, top_k, top_p, True))
    torch.library.opcheck(torch.ops.eagle_train.searched_truncation.default, (scaled, top_k, top_p, True))
