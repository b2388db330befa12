"""A draft that is prepared for its backend: what torch.compile does with its layers."""

from functools import partialmethod

import torch
from torch._dynamo import config as dynamo

from eagle_train.distributed import World
from eagle_train.drafts.unroll import unroll
from eagle_train.ops.attention import packed_attention
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.parallelize import prepare
from tests.support.tiny import shared_target, tiny_draft


def test_every_layer_is_compiled(monkeypatch):
    """In training, unrolled and not, and in evaluation, which may have fewer rows: torch keeps eight graphs of a
    function, and what exceeds them runs as it is. Half of them do, however many layers and ways to attend there are."""
    torch.compiler.reset()
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="aot_eager"))
    draft, plain = (tiny_draft(shared_target("llama"), num_layers=4) for _ in range(2))
    prepare(draft, OptimConfig(), ParallelConfig(compile=True), World(), torch.float32)
    generator = torch.Generator().manual_seed(0)
    with dynamo.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        for lengths in ([[20, 4], [24]], [[7, 17], [9, 15]], [[10, 14]]):
            rows, length = len(lengths), sum(lengths[0])
            embeddings, previous = (torch.randn(rows, length, 32, generator=generator) for _ in range(2))
            positions = torch.cat([torch.arange(each) for each in lengths[0]]).expand(rows, -1)
            given = embeddings, previous, positions
            for passes in (1, 3) if rows == 2 else ():
                states = [unroll(each, *given, lengths, passes)[-1] for each in (draft, plain)]
                torch.testing.assert_close(*states)
            with torch.no_grad():
                within = packed_attention(lengths)
                torch.testing.assert_close(draft(*given, within), plain(*given, within))
