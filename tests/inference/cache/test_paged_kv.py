"""The contents of the engine's caches, round by round; slots without a committed token are never read. DESIGN 3.1,
3.6.
"""

import random
from unittest.mock import patch

import pytest
import torch

from eagle_train.drafts import shift_hidden
from eagle_train.errors import UserError
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.cache import paged_kv
from eagle_train.inference.cache.prefix import BLOCK, Prefix
from eagle_train.inference.cache.suffix import Masks, joint_attention
from eagle_train.inference.decode.tree import full
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.inference.requests.scheduler import Scheduler
from eagle_train.models.target import Target
from eagle_train.ops import paged
from eagle_train.ops.attention import merge, partial_attention, slot_attention, with_sinks
from eagle_train.ops.rule import Rule
from tests.support.cache_checks import Recorder, check_cache, fresh, spoil
from tests.support.inside import active_in, drafter_of, inside, runner_of
from tests.support.reference_answers import GREEDY, PROMPTS, TREES, answers, cut, guide, token_ids
from tests.support.tiny import shared_target, tiny_draft, tiny_target, trained_draft


@pytest.mark.parametrize(
    "overrides",
    [{}, {"irope": True, "attention_chunk": 6, "first_token": "skip"}, {"window": 6, "sink": True}],
    ids=["plain", "irope", "window, sink"],
)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("kv_tokens", [None, 4 * BLOCK], ids=["roomy", "tight"])
@pytest.mark.parametrize("tree", ["d3_bf2", "chain3"])
@pytest.mark.parametrize("overlap", [False, True])
def test_caches_are_those_of_a_fresh_prefill(tree, kv_tokens, family, overrides, overlap, monkeypatch):
    """In every round: the target's n - 1 slots, the draft's n, and the draft's hidden state at the pending token.

    Also after a preemption with more than one token that the drafter had not processed.
    """
    target, rng = shared_target(family), random.Random(3)
    unread, preempt = [], Scheduler.preempt
    monkeypatch.setattr(
        Scheduler, "preempt", lambda self, one: (unread.append(one.num_known - one.num_computed), preempt(self, one))
    )
    draft, rounds = tiny_draft(target, **overrides), []
    engine = Engine(target, draft, tree, max_batch_size=3, kv_tokens=kv_tokens, overlap=overlap)
    guide(engine, answers(family), lambda _: rng.randint(0, 3))
    grow = drafter_of(engine).grow

    def checked(plan, root_hidden, root_token, nodes, choice):
        for row, sequence in enumerate(active_in(engine)):
            tokens = (sequence.prompt + answers(family)[sequence.index])[: nodes.prefix.lengths[row] + 1]
            assert overlap or tokens == sequence.prompt + sequence.generated
            _, predicted, _, of_draft = fresh(target, draft, tokens)
            check_cache(drafter_of(engine).cache, sequence, of_draft)
            torch.testing.assert_close(root_hidden[row, 0], predicted[-1], rtol=1e-4, atol=1e-4)
            check_cache(runner_of(engine).cache, sequence, fresh(target, draft, tokens[:-1])[2])
            rounds.append(sequence.index)
        return grow(plan, root_hidden, root_token, nodes, choice)

    drafter_of(engine).grow = checked
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers(family))
    assert set(rounds) == set(range(len(PROMPTS)))
    assert (max(unread, default=0) > 1) == (kv_tokens is not None)


@pytest.mark.parametrize("tree", TREES)
def test_aligned_with_the_last_token_alone(tree):
    """Of a round's tokens, only the pending one and a leaf before it are processed with the target's hidden states;
    the draft's slots keep its own at the others."""
    target, rng, leaves = shared_target("llama"), random.Random(3), set()
    draft = trained_draft(target, steps=60)  # an untrained one's own states make much of a rounding
    engine = Engine(target, Eagle(draft, target, "last"), tree, max_batch_size=2)
    guide(engine, answers("llama"), lambda _: rng.randint(0, 3))
    grow, pairs_of = drafter_of(engine).grow, {}

    def forward(tokens: list[int], pairs: list[torch.Tensor]) -> tuple[torch.Tensor, Recorder]:
        recorder, positions = Recorder(), torch.arange(len(tokens))[None]
        return draft(target.embed(torch.tensor([tokens])), torch.stack(pairs)[None], positions, recorder)[0], recorder

    def checked(plan, root_hidden, *rest):
        for row, sequence in enumerate(active_in(engine)):
            tokens = sequence.prompt + sequence.generated
            hidden = fresh(target, draft, tokens)[0]
            wanted = [hidden[0], *hidden[:-1]]
            pairs = pairs_of.get(sequence.index, wanted)
            while len(pairs) < len(tokens):  # each accepted slot is paired with the draft's output at the one before
                pairs = [*pairs, forward(tokens[: len(pairs)], pairs)[0][-1]]
            accepted = sequence.rounds[-1] - 1 if sequence.rounds else 0
            unread = sequence.num_known - sequence.num_computed
            if tree != "n8":
                assert unread == 1 + (accepted == 3)
            leaves.add(unread)
            pairs = [*pairs[:-unread], *wanted[-unread:]]
            outputs, recorder = forward(tokens, pairs)
            torch.testing.assert_close(root_hidden[row, 0], outputs[-1], rtol=1e-4, atol=1e-4)
            check_cache(drafter_of(engine).cache, sequence, recorder)
            pairs_of[sequence.index] = pairs
        return grow(plan, root_hidden, *rest)

    drafter_of(engine).grow = checked
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama"))
    assert leaves == {1, 2}


def test_alignment_is_checked():
    target = shared_target("llama")
    with pytest.raises(UserError, match=r"^alignment=first: must be accepted or last$"):
        Eagle(tiny_draft(target), target, "first")


FEW = list(range(0, 96, 3))


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"norms": "full", "irope": True, "attention_chunk": 6},
        {"vocab_size": len(FEW), "vocabulary": FEW, "first_token": "skip"},
        {"window": 3, "sink": True},
    ],
    ids=["plain", "irope", "few tokens, skip", "window, sink"],
)
@pytest.mark.parametrize("tree", TREES)
def test_trees_are_drafted_and_validated_as_each_path_alone(tree, overrides):
    """Each node's children are the most likely ones after its path, over which the draft uses its own hidden states."""
    target = shared_target("gemma2")
    draft = tiny_draft(target, **overrides)
    engine, seen = Engine(target, draft, tree, max_batch_size=2), []

    def grow(tokens: list[int], hidden: torch.Tensor, tail: list[int], pairs: list[torch.Tensor]) -> torch.Tensor:
        """The draft's hidden state after `tokens` and the drafted `tail`. `pairs`: the draft's own hidden states
        before the tokens of the tail."""
        ids, positions = torch.tensor([tokens + tail]), torch.arange(len(tokens + tail))[None]
        given = shift_hidden(hidden[None], positions[:, : len(tokens)])
        given = torch.cat((given, *[pair[None, None] for pair in pairs]), 1)
        return draft(target.embed(ids), given, positions, Recorder())[0, -1]

    def check_tree(plan, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        for row, sequence in enumerate(active_in(engine)):
            committed = sequence.prompt + sequence.generated
            hidden = fresh(target, draft, committed)[0]
            outputs: dict[int, torch.Tensor] = {}
            for node in range(plan.tree.num_nodes):
                path = plan.tree.path_to[node][: int(plan.tree.depth[node]) + 1].tolist()
                tail = tokens[row, path[1:]].tolist()
                whole = target.lm_head(fresh(target, draft, committed + tail)[0][-1])
                torch.testing.assert_close(logits[row, node], whole, rtol=1e-3, atol=1e-3)
                kids = [kid for kid in plan.tree.children[node].tolist() if kid >= 0]
                if kids:
                    outputs[node] = grow(committed, hidden, tail, [outputs[above] for above in path[:-1]])
                    known = torch.tensor(draft.config.vocabulary or range(96))
                    best = known[target.lm_head(outputs[node])[known].topk(len(kids)).indices]
                    assert tokens[row, kids].tolist() == best.tolist()
            seen.append(row)

    sample = runner_of(engine).sample

    def checked(inputs, drafted, logits):
        check_tree(inputs.plan, drafted.tokens, logits)
        return sample(inputs, drafted, logits)

    runner_of(engine).sample = checked
    engine.generate(PROMPTS[:3], SamplingParams(max_tokens=6, ignore_eos=True))
    assert set(seen) == {0, 1}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tree", TREES)
def test_rejected_slots_are_never_read(tree, rows):
    """Overwriting those slots after every round changes neither the committed nor the proposed tokens."""
    target = shared_target("gemma2")
    proposed: list[list[list[int]]] = [[], []]
    for spoilt, proposals in enumerate(proposed):
        rng = random.Random(2)
        engine = Engine(target, tiny_draft(target), tree, max_batch_size=rows)
        own = drafter_of(engine).children
        guide(engine, answers("gemma2"), lambda _, rng=rng: rng.randint(0, 3))
        guided, run = drafter_of(engine).children, runner_of(engine).run

        def both(*args, own=own, guided=guided, proposals=proposals):
            proposals += own(*args)[0].tolist()
            return guided(*args)

        def run_and_spoil(inputs, engine=engine, run=run, spoilt=spoilt):
            pending, result = run(inputs)
            if spoilt:
                inside(engine).batch.pending = pending  # as the engine is about to do
                spoil(engine)
            return pending, result

        drafter_of(engine).children, runner_of(engine).run = both, run_and_spoil
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("gemma2"))
    assert proposed[0] == proposed[1]


@pytest.mark.parametrize("lengths", [[9, 9], [9, 4]])
@pytest.mark.parametrize(
    "limits", [{}, {"window": 4}, {"softcap": 5.0}, {"sinks": torch.tensor([0.5, 1.0, -1.0, 2.0])}]
)
def test_joint_attention_over_prefix_and_tree_is_the_split_one(lengths, limits):
    torch.manual_seed(0)
    tree, rule = full(2, 2), Rule(scale=0.5, **limits)
    prefix = Prefix.of(lengths, [[2], [3]], torch.device("cpu"))
    positions = prefix.lengths.unsqueeze(1) + tree.depth
    q, (keys, values), (k, v) = (
        torch.randn(2, 4, 7, 8),
        torch.randn(2, 2, 2, 9, 8),
        torch.randn(2, 2, 2, 7, 8),
    )
    masks = Masks(prefix, positions, positions, tree.ancestors)
    parts = slot_attention(q, keys, values, masks.prefix, rule), partial_attention(q, k, v, masks.suffix(rule), rule)
    wanted = with_sinks(*merge(*parts), rule)
    for _ in range(2):  # the mask is made once
        torch.testing.assert_close(joint_attention(q, keys, values, k, v, rule, masks), wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles; only its interpreter takes such heads")
@pytest.mark.parametrize(
    ("family", "tree"), [("llama", "chain3"), ("gemma2", "n8"), ("gpt_oss", "chain3"), ("llama4", "n8")]
)
def test_slots_read_and_written_by_kernels_give_the_same_tokens(family, tree, monkeypatch):
    """By Triton's interpreter, with rows that come and go, whose heads are narrower than a matrix unit takes."""
    pytest.importorskip("triton")
    calls, attention, written, write = [], paged.paged_attention, [], paged.write
    monkeypatch.setattr(paged, "supports", lambda q, keys, values: True)
    monkeypatch.setattr(paged, "writes", lambda keys, values: True)
    monkeypatch.setattr(paged, "paged_attention", lambda *given: (calls.append(1), attention(*given))[1])
    monkeypatch.setattr(paged, "write", lambda *given: (written.append(1), write(*given))[1])
    target = shared_target(family)
    engine = Engine(target, tiny_draft(target), tree, max_batch_size=2, prefill_tokens=7)
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (5, 3, 4)]
    found = token_ids(engine.generate(PROMPTS[:3], params))
    assert found == [answers(family)[i][: len(tokens)] for i, tokens in enumerate(found)]
    assert list(map(len, found)) == [5, 3, 4]
    assert len(calls) > 10
    assert written


@pytest.mark.gpu
@pytest.mark.parametrize("tree", ["chain3", "n8"])
@pytest.mark.parametrize(
    ("family", "graphs"),
    [("llama", False), ("llama", True), ("gemma2", False), ("gemma2", True), ("gpt_oss", False), ("llama4", False)],
)
def test_a_gpu_reads_slots_through_the_block_table(family, graphs, tree, monkeypatch):
    calls, attention = [], paged.paged_attention
    monkeypatch.setattr(paged, "paged_attention", lambda *given: (calls.append(1), attention(*given))[1])
    own = tiny_target(family, head_dim=64)
    target = Target(own.model.cuda())
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (40, 9, 24, 33)]
    found = []
    for kernels in ("plain", "auto"):
        engine = Engine(target, tiny_draft(own), tree, max_batch_size=3, attention=kernels, graphs=graphs)
        found.append(token_ids(engine.generate(PROMPTS[:4], params)))
        assert bool(calls) == (kernels == "auto")
    assert found[0] == found[1]


def test_an_engine_with_joint_attention_gives_the_same_tokens():
    target = shared_target("llama")
    split = Engine(target, tiny_draft(target), "n8")
    with patch.object(paged_kv, "joint_attention", wraps=joint_attention) as called:
        joint = Engine(target, tiny_draft(target), "n8", tree_attention="joint")
        assert token_ids(joint.generate(PROMPTS, GREEDY)) == token_ids(split.generate(PROMPTS, GREEDY))
    assert called.called
