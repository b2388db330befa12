"""Speculation changes no distribution: the engine's sampled tokens against the target's exact probabilities.

Drafts of point masses: with a vocabulary of 5 the engine is given the numbers that each sequence of four tokens stands
for, so that its joint distribution is compared exactly (tests/support/every_sequence.py).

Drafts that are drawn, and random numbers as they are: with a vocabulary of 16 all sequences of four tokens are
enumerated; the model's own forward in float64 gives their exact probabilities, and Pearson's chi-square test compares
the engine's samples with them. DESIGN section 3.7.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import pytest
import torch
from scipy import stats

from eagle_train.inference import DraftModel, Eagle, LayerSkip, SamplingParams
from eagle_train.inference.decode import adjustments, sampling, verification
from eagle_train.models.target import Target
from tests.support.drafters import DRAWN, KINDS, Kind, close_to, draft_for, drawing, eagle
from tests.support.every_sequence import PROMPT as ENUMERATED
from tests.support.every_sequence import SIZES as TINIEST
from tests.support.every_sequence import check_every_sequence, enumerated_target
from tests.support.tiny import random_tokens, tiny_model

VOCABULARY = 16
PROMPT = [7, 1]
ROWS = 1024  # requests in a batch
COUNT = 3 * ROWS  # more than 50 cells, and below 1e-9 for what is wrong
SIZES = TINIEST | {"vocab_size": VOCABULARY}


def with_few_tokens(target: Target, texts: list[list[int]]) -> Eagle:
    """An EAGLE draft of half of the vocabulary."""
    draft = draft_for(target)
    few = list(range(1, target.identity.vocab_size, 2))
    little = replace(draft.config, vocab_size=len(few), vocabulary=few).module()
    little.load_state_dict(draft.state_dict())
    return Eagle(little, target)


FEW_TOKENS = Kind(with_few_tokens, draws=True)


@dataclass(frozen=True)
class Toy:
    """A target, and a way to draft that agrees with it at times."""

    target: Target
    kind: Kind

    @cached_property
    def conditionals(self) -> list[torch.Tensor]:
        """For n = 0..3 float64 [V, ..., V] (n + 1 axes): p(token n | tokens before), by transformers in float64."""
        return [table.softmax(-1) for table in self.logits]

    @cached_property
    def logits(self) -> list[torch.Tensor]:
        """As `conditionals`, before the softmax."""
        model = tiny_model(std=0.4, **SIZES).double()
        axes = torch.meshgrid(*[torch.arange(VOCABULARY)] * 3, indexing="ij")
        histories = torch.stack(axes, -1).flatten(0, 2)
        tokens = torch.cat((torch.tensor(PROMPT).expand(len(histories), -1), histories), 1)
        with torch.no_grad():
            logits = model(tokens).logits.view(VOCABULARY, VOCABULARY, VOCABULARY, -1, VOCABULARY)
        first = len(PROMPT) - 1
        by_length = [logits[0, 0, 0], logits[:, 0, 0], logits[:, :, 0], logits]
        return [table[..., first + n, :] for n, table in enumerate(by_length)]

    def joint(self, num_tokens: int, top_p: float, is_changed: bool = False) -> torch.Tensor:
        """float64 [V, V, V]: the probability of the last three of `num_tokens` tokens, 3 or 4. `is_changed`: with
        CHANGES."""
        mass = torch.ones((), dtype=torch.float64)
        for place in range(num_tokens):
            table = changed(self.logits[place]) if is_changed else self.conditionals[place]
            mass = mass.unsqueeze(-1) * nucleus(table, top_p)
        return mass.view(-1, *[VOCABULARY] * 3).sum(0)


CHANGES = {
    "logit_bias": {3: 0.8, 4: -1.5},
    "repetition_penalty": 1.5,
    "presence_penalty": 1.2,
    "frequency_penalty": -0.7,
    "min_p": 0.02,
}


def adjusted(logits: torch.Tensor, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Logits [V] after an answer, with biases and penalties of CHANGES, from their definitions."""
    row = logits.clone()
    for token, bias in CHANGES["logit_bias"].items():
        row[token] += bias
    for token in {*prompt, *answer}:
        row[token] = row[token] * 1.5 if row[token] < 0 else row[token] / 1.5
    for token in set(answer):
        row[token] -= 1.2 - 0.7 * answer.count(token)
    return row


def changed(logits: torch.Tensor) -> torch.Tensor:
    """p(token n | tokens before) with CHANGES, for logits [V, ..., V] (n + 1 axes)."""
    rows = []
    for number, row in enumerate(logits.reshape(-1, VOCABULARY)):
        answer = [number // VOCABULARY**place % VOCABULARY for place in range(logits.ndim - 1)]
        rows.append(adjusted(row, PROMPT, answer))
    p = torch.stack(rows).softmax(-1)
    p *= p >= CHANGES["min_p"] * p.amax(-1, keepdim=True)
    return (p / p.sum(-1, keepdim=True)).view_as(logits)


def nucleus(p: torch.Tensor, top_p: float) -> torch.Tensor:
    """p restricted to the fewest tokens that hold `top_p` of its mass."""
    ordered, index = p.sort(descending=True)
    kept = ordered * (ordered.cumsum(-1) - ordered < top_p)
    return torch.zeros_like(p).scatter(-1, index, kept / kept.sum(-1, keepdim=True))


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy(Target(tiny_model(std=0.4, **SIZES)), KINDS["eagle"])


def sampled(
    toy: Toy, count: int, num_tokens: int, tree: Any, top_p: float, is_changed: bool, **options: str
) -> torch.Tensor:
    """Counts [V, V, V] of the last three of `num_tokens` tokens, of `count` requests."""
    changes = CHANGES if is_changed else {}
    engine = replace(toy.kind, tree=tree).engine(toy.target, [], max_batch_size=ROWS, **options)
    counts = torch.zeros(VOCABULARY**3, dtype=torch.int64)
    accepted = drafted = 0
    for start in range(0, count, ROWS):
        given = {"temperature": 1.0, "top_p": top_p, "max_tokens": num_tokens, "ignore_eos": True} | changes
        params = SamplingParams(seed=start, **given)
        outputs = engine.generate([PROMPT] * min(ROWS, count - start), params)
        tokens = torch.tensor([output.token_ids[-3:] for output in outputs])
        counts += (tokens * torch.tensor([VOCABULARY**2, VOCABULARY, 1])).sum(-1).bincount(minlength=len(counts))
        accepted += sum(sum(output.stats.accepted_per_depth[:1]) for output in outputs)
        drafted += sum(sum(output.stats.drafted_per_depth[:1]) for output in outputs)
    assert counts.sum() == count
    assert 0.2 < accepted / drafted < 0.8, "both acceptance and rejection must be common"
    return counts.view([VOCABULARY] * 3)


def p_value(
    toy: Toy, count: int, num_tokens: int, tree: Any, top_p: float = 1.0, is_changed: bool = False, **options: str
) -> float:
    """Of the chi-square test; cells with an expected count below 5 are merged. `options`: the engine's."""
    observed = sampled(toy, count, num_tokens, tree, top_p, is_changed, **options).double()
    expected = toy.joint(num_tokens, top_p, is_changed) * count
    assert not observed[expected == 0].any(), "a token was sampled that top-p or min-p excludes"
    often, rare = expected >= 5, (expected > 0) & (expected < 5)
    assert often.sum() > 50, "too few cells to tell anything"
    cells = [torch.cat((x[often], x[rare].sum(0, keepdim=True)[: rare.sum()])) for x in (observed, expected)]
    return stats.chisquare(*(x.numpy() for x in cells)).pvalue


def test_three_tokens_have_the_targets_joint_distribution(toy):
    """The prefill's token and two of decoding, with drafts that are the most likely tokens."""
    assert p_value(toy, COUNT, 3, "d3_bf2") > 1e-3


@pytest.mark.parametrize("drafting", DRAWN)
def test_with_a_draft_of_few_tokens(toy, drafting):
    assert p_value(replace(toy, kind=FEW_TOKENS), COUNT, 4, "d3_bf2", drafting=drafting) > 1e-3


@pytest.mark.filterwarnings("ignore:draft_lm_head=fp8")
@pytest.mark.parametrize("drafting", DRAWN)
def test_with_drafts_of_an_lm_head_in_fp8(toy, drafting):
    """The q of drawn drafts is that head's."""
    assert p_value(toy, COUNT, 4, "d3_bf2", drafting=drafting, draft_lm_head="fp8") > 1e-3


@pytest.mark.parametrize("drafting", DRAWN)
def test_with_penalties_biases_and_min_p(toy, drafting):
    """Of chains too, where the engine chooses them: see below."""
    assert p_value(toy, COUNT, 4, "d3_bf2", is_changed=True, drafting=drafting) > 1e-3


DRAWING = {name: kind for name, kind in KINDS.items() if kind.draws} | {
    # wrong more often, as this target's weights are larger and its layers fewer
    "draft_model": Kind(lambda target, _: DraftModel(close_to(target, 0.2), target)),
    "layer_skip": Kind(lambda target, _: LayerSkip(target, [1])),
}


@pytest.mark.parametrize(("kind", "drafting"), drawing(KINDS))
def test_drafts_that_every_kind_draws(toy, kind, drafting):
    """Those whose engine chooses the trees, with penalties."""
    given = DRAWING[kind]
    assert p_value(replace(toy, kind=given), COUNT, 4, given.tree, 1.0, given.is_moody, drafting=drafting) > 1e-3


def no_residual_update(tree, tokens, logits, settings, draws, q, replacement):
    """Broken: after a rejection the token is drawn from the target's distribution, not from the residual."""
    found = sampling.verify_drawn(tree, tokens, logits, settings, draws, q, replacement)
    last = sampling.probabilities(logits, settings)[torch.arange(len(tokens)), found.node]
    return found._replace(next_token=sampling.sample(last, draws[:, 0]))


def test_the_test_can_tell(toy, monkeypatch):
    """Broken verification is detected."""
    monkeypatch.setattr(verification, "verify_drawn", no_residual_update)
    assert p_value(toy, COUNT, 4, "d3_bf2", drafting="multinomial") < 1e-9


# --- drafts of point masses, exactly


ALL = CHANGES | {"top_p": 0.9, "min_p": 0.1}  # each of which leaves tokens out


def unchanged(logits: torch.Tensor, answer: list[int]) -> torch.Tensor:
    return logits.softmax(-1)


def with_all(logits: torch.Tensor, answer: list[int]) -> torch.Tensor:
    """With ALL."""
    p = nucleus(adjusted(logits, ENUMERATED, answer).softmax(-1), ALL["top_p"])
    p = p * (p >= ALL["min_p"] * p.max())
    return p / p.sum()


@cache
def enumerated() -> tuple[Target, list[list[int]]]:
    """A target, and texts of its vocabulary."""
    tokens = random_tokens(*[20] * 6, vocabulary=TINIEST["vocab_size"], seed=2)
    return enumerated_target(), [ENUMERATED[:-place] + text for place, text in enumerate(tokens, 1)]


POINT_MASSES = KINDS | {"few tokens": FEW_TOKENS, "fp8": Kind(eagle, options={"draft_lm_head": "fp8"})}


@pytest.mark.filterwarnings("ignore:draft_lm_head=fp8")
@pytest.mark.parametrize(("change", "params"), [(unchanged, {}), (with_all, ALL)])
@pytest.mark.parametrize("kind", POINT_MASSES)
def test_every_sequence_has_exactly_the_targets_probability(kind, change, params):
    engine = POINT_MASSES[kind].engine(*enumerated(), max_batch_size=ROWS)
    found = [output.stats for output in check_every_sequence(engine, change, **params)]
    drafted = sum(sum(each.drafted_per_depth[:1]) for each in found)
    accepted = sum(sum(each.accepted_per_depth[:1]) for each in found)
    assert 0.1 < accepted / drafted < 0.7, "both acceptance and rejection must be common"
    plain = sum(each.calls for each in found) - drafted
    assert not POINT_MASSES[kind].is_moody or plain > len(found) / 10, "rounds without drafts must be common"


def one_number(tree, tokens, logits, settings, seeds, lengths):
    """Broken: all nodes use the root's random number."""
    draws = sampling.uniform(seeds, lengths, 1).expand_as(tokens)
    return sampling.verify_chosen(tree, tokens, sampling.sample(sampling.probabilities(logits, settings), draws))


@pytest.mark.parametrize(
    ("module", "name", "mutant"),
    [
        (verification, "verify_sampled", one_number),
        # drafts are not in the answer
        (adjustments, "_on_paths", lambda tokens, *_: torch.zeros(*tokens.shape, TINIEST["vocab_size"])),
    ],
)
@pytest.mark.parametrize("kind", ["eagle", "lookahead", "retrieval"])
def test_the_exact_test_can_tell(kind, module, name, mutant, monkeypatch):
    engine = POINT_MASSES[kind].engine(*enumerated(), max_batch_size=ROWS)
    monkeypatch.setattr(module, name, mutant)
    with pytest.raises(AssertionError):
        check_every_sequence(engine, with_all, **ALL)
