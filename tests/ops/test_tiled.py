"""Tiles of queries: which keys each reads, and that their attention and gradients are those of whole score matrices."""

import pytest
import torch

from eagle_train.ops import tiled
from eagle_train.ops.attention import plain_partial
from eagle_train.ops.rule import Rule, additive_mask
from eagle_train.ops.tiled import Scores, tiled_attention, tiled_gradients
from tests.support.attention_cases import random_qkv

LENGTH = 23


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("scores", [Scores(0.4), Scores(0.4, window=3), Scores(0.4, softcap=1.5), Scores(0.4, 7, 2.0)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_tiles_and_whole_matrices_agree(monkeypatch, kv_heads, scores, rows):
    monkeypatch.setattr(tiled, "MIN_ROWS", rows)
    monkeypatch.setattr(tiled, "TILE_SCORES", {"cpu": 1})
    given = random_qkv(kv_heads=kv_heads, queries=LENGTH, keys=LENGTH, dtype=torch.float64)
    q, k, v = (x.requires_grad_() for x in given)
    rule, places = Rule(scores.scale, scores.window, softcap=scores.softcap), torch.arange(LENGTH)
    seen = (places[:, None] >= places) & rule.sees(places[:, None], places)
    wanted, total = plain_partial(q, k, v, additive_mask(seen[None, None]), rule)
    out, lse = (x.detach() for x in tiled_attention(q, k, v, scores))
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, total, rtol=1e-10, atol=1e-10)
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    with torch.no_grad():
        found = tiled_gradients(grad, q, k, v, lse, (grad * out).sum(-1), scores)
    for one, other in zip(found, torch.autograd.grad(wanted, (q, k, v), grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("window", "most"), [(None, 2000), (100, 199), (1000, 1063)])
def test_a_tile_reads_the_keys_that_it_can_see_and_no_others(window, most):
    tiles = list(tiled._tiles(torch.empty(1, 32, 2000, 8), window))
    assert [rows.start for rows, _, _ in tiles] == [0, *(rows.stop for rows, _, _ in tiles[:-1])]
    assert tiles[-1][0].stop == 2000
    for rows, keys, mask in tiles:
        assert mask.shape == (rows.stop - rows.start, keys.stop - keys.start)
        assert keys.stop == rows.stop
        assert (mask == 0).any(0).all()  # each key is seen by some query
    assert max(mask.shape[1] for _, _, mask in tiles) == most


def test_short_sequences_are_one_tile_and_long_ones_have_few_scores():
    assert len(list(tiled._tiles(torch.empty(1, 4, 100, 8), None))) == 1
    scores = [32 * mask.numel() for _, _, mask in tiled._tiles(torch.empty(1, 32, 8192, 8), None)]
    assert max(scores) <= 32 * tiled.MIN_ROWS * 8192
