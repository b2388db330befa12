"""A draft whose first token has no slot (`draft.first_token=skip`): what EAGLE-1, vLLM and SGLang compute.

The twin is a dense causal draft run over slots 1, 2, ... alone: there is no slot 0 that it could see.
"""

from functools import cache

import pytest
import torch

from eagle_train.drafts import Draft
from eagle_train.inference import Engine
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.rule import Attend, Rule
from tests.support.inside import active_in, drafter_of
from tests.support.reference_answers import GREEDY, LENGTH, PROMPTS, answers, cut, token_ids
from tests.support.reference_chains import LENGTHS, documents, draft_inputs, exact_draft
from tests.support.tiny import shared_target, trained_draft

KINDS = {
    "eagle1": {},
    "full": {"norms": "full"},
    "irope": {"irope": True, "attention_chunk": 4},
    "full, irope": {"norms": "full", "irope": True, "attention_chunk": 4},
    "window, sink": {"window": 5, "sink": True},
}


def dense(positions: torch.Tensor) -> Attend:
    """Causal attention of one document's tokens at `positions` [T]; of the rule it knows chunk, window and sinks."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        seen = positions[:, None] >= positions
        if rule.chunk is not None:
            seen = seen & (positions[:, None] // rule.chunk == positions // rule.chunk)
        if rule.window is not None:
            seen = seen & (positions[:, None] - positions < rule.window)
        scores = (q @ k.transpose(2, 3) * rule.scale).masked_fill(~seen, -torch.inf)
        sinks = -torch.inf if rule.sinks is None else rule.sinks.view(1, -1, 1, 1)
        with_sink = torch.cat((scores, torch.zeros_like(scores[..., :1]) + sinks), dim=-1)
        return with_sink.softmax(-1)[..., :-1] @ v

    return attend


def twin(draft: Draft, embeddings: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """The draft's outputs [n - 1, H] at slots 1..n-1 of a document [n, H]."""
    positions = torch.arange(1, len(embeddings))
    return draft(embeddings[None, 1:], previous[None, 1:], positions[None], dense(positions))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_training_begins_at_the_second_token(kind):
    """Rows of several documents, and a row that is one; no gradient reaches what lies at the first slot."""
    draft = exact_draft(num_layers=3, first_token="skip", **KINDS[kind])
    for lengths in (LENGTHS, [[20], [20]]):
        embeddings, previous, positions = draft_inputs(draft, lengths)
        leaves = [x.clone().requires_grad_() for x in (embeddings, previous)]
        found = draft(*leaves, positions, packed_attention(lengths))
        compared = 0
        for row, place in documents(lengths):
            wanted = twin(draft, embeddings[row, place], previous[row, place])
            torch.testing.assert_close(found[row, place][1:], wanted, rtol=1e-9, atol=1e-9)
            compared += len(wanted)
        assert compared == (positions > 0).sum()
        found[positions > 0].square().sum().backward()
        for leaf in leaves:
            reached = leaf.grad.any(-1)
            assert torch.equal(reached, positions > 0)


def drafted(target: Target, draft: Draft, tokens: list[int], depth: int) -> tuple[torch.Tensor, list[int]]:
    """The twin's hidden state at the last of `tokens`, and the chain that it drafts on its own features."""
    hidden = target.hidden_states(
        torch.tensor([tokens]), torch.arange(len(tokens))[None], packed_attention([[len(tokens)]])
    )
    previous, chain, states = list(hidden[0, :1]) + list(hidden[0, :-1]), [], []
    for _ in range(depth):
        states.append(twin(draft, target.embed(torch.tensor(tokens + chain)), torch.stack(previous))[-1])
        chain.append(int(target.lm_head(states[-1]).argmax()))
        previous.append(states[-1])
    return states[0], chain


@cache
def all_rounds(kind: str) -> list[list[int]]:
    """Those of PROMPTS."""
    pairs = zip(PROMPTS, answers("llama"), strict=True)
    return [expected_rounds(shared_target(), a_draft(kind), prompt, answer, 3) for prompt, answer in pairs]


def expected_rounds(target: Target, draft: Draft, prompt: list[int], answer: list[int], depth: int) -> list[int]:
    """Tokens that each call commits: drafted ones as far as they are the target's, and one of its own."""
    rounds, done = [], 1
    while done < LENGTH:
        _, chain = drafted(target, draft, prompt + answer[:done], depth)
        right = [drafted == true for drafted, true in zip(chain, answer[done:], strict=False)]
        rounds.append(min([*right, False].index(False) + 1, LENGTH - done))
        done += rounds[-1]
    return rounds


@cache
def a_draft(kind: str) -> Draft:
    return trained_draft(shared_target(), steps=60, num_layers=2, first_token="skip", **KINDS[kind])


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_size": 1},
        {"max_batch_size": 3, "prefill_tokens": 3},
        {"max_batch_size": 3, "kv_tokens": 6 * 16, "prefix_cache": True, "host_kv_tokens": 40 * 16},
    ],
    ids=["alone", "in chunks", "prefix cache"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_drafts_as_the_twin(kind, options):
    """In every round its hidden state at the pending token, and how many of its tokens are accepted."""
    target = shared_target()
    draft, checked = a_draft(kind), []
    engine = Engine(target, draft, "chain3", **options)
    grow = drafter_of(engine).grow

    def checking(plan, root_hidden, *rest):
        for row, sequence in enumerate(active_in(engine)):
            wanted, _ = drafted(target, draft, sequence.prompt + sequence.generated, 1)
            torch.testing.assert_close(root_hidden[row, 0], wanted, rtol=1e-4, atol=1e-4)
            checked.append(sequence.index)
        return grow(plan, root_hidden, *rest)

    drafter_of(engine).grow = checking
    times = 2 if "prefix_cache" in options else 1  # the second finds what was kept
    outputs, rounds = engine.generate(PROMPTS * times, GREEDY), all_rounds(kind)
    assert token_ids(outputs) == cut(answers("llama")) * times
    assert [output.rounds for output in outputs] == rounds * times
    assert {count for each in rounds for count in each} >= {1, 2}, "accepted and not"
    assert set(checked) == set(range(times * len(PROMPTS)))
