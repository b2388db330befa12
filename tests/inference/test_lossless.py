"""Speculation changes no distribution: the engine's sampled tokens against the target's exact probabilities.

With a vocabulary of 16 all sequences of four tokens are enumerated; the model's own forward in float64 gives their
exact probabilities, and Pearson's chi-square test compares the engine's samples with them. DESIGN section 3.7.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
from scipy import stats

from eagle_train.inference import Drafter, DraftModel, Engine, LayerSkip, SamplingParams
from eagle_train.inference.decode import adjustments, sampling, verification
from eagle_train.models.draft import Draft
from eagle_train.models.target import Target
from tests.support.tiny import tiny_model, trained_draft

VOCABULARY = 16
PROMPT = [7, 1]
ROWS = 1024  # requests in a batch
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@dataclass(frozen=True)
class Toy:
    """A target, and a draft that agrees with it at times."""

    target: Target
    draft: Draft | Drafter

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
    "logit_bias": {3: 0.8, 9: -1.5},
    "repetition_penalty": 1.5,
    "presence_penalty": 1.2,
    "frequency_penalty": -0.7,
    "min_p": 0.02,
}


def changed(logits: torch.Tensor) -> torch.Tensor:
    """p(token n | tokens before) with CHANGES, for logits [V, ..., V] (n + 1 axes), from their definitions."""
    flat = logits.reshape(-1, VOCABULARY).clone()
    for number, row in enumerate(flat):
        answer = [number // VOCABULARY**place % VOCABULARY for place in range(logits.ndim - 1)]
        for token, bias in CHANGES["logit_bias"].items():
            row[token] += bias
        for token in {*PROMPT, *answer}:
            row[token] = row[token] * 1.5 if row[token] < 0 else row[token] / 1.5
        for token in set(answer):
            row[token] -= 1.2 - 0.7 * answer.count(token)
    p = flat.softmax(-1)
    p *= p >= CHANGES["min_p"] * p.amax(-1, keepdim=True)
    return (p / p.sum(-1, keepdim=True)).view_as(logits)


def nucleus(p: torch.Tensor, top_p: float) -> torch.Tensor:
    """p restricted to the fewest tokens that hold `top_p` of its mass."""
    ordered, index = p.sort(descending=True)
    kept = ordered * (ordered.cumsum(-1) - ordered < top_p)
    return torch.zeros_like(p).scatter(-1, index, kept / kept.sum(-1, keepdim=True))


@pytest.fixture(scope="module")
def toy() -> Toy:
    target = Target(tiny_model(std=0.4, **SIZES))
    return Toy(target, trained_draft(target, steps=60))


def sampled(
    toy: Toy, count: int, num_tokens: int, tree: str, top_p: float, is_changed: bool, **options: str
) -> torch.Tensor:
    """Counts [V, V, V] of the last three of `num_tokens` tokens, of `count` requests."""
    changes = CHANGES if is_changed else {}
    engine = Engine(toy.target, toy.draft, tree, max_batch_size=ROWS, **options)
    counts = torch.zeros(VOCABULARY**3, dtype=torch.int64)
    accepted = drafted = 0
    for start in range(0, count, ROWS):
        given = {"temperature": 1.0, "top_p": top_p, "max_tokens": num_tokens, "ignore_eos": True} | changes
        params = SamplingParams(seed=start, **given)
        outputs = engine.generate([PROMPT] * min(ROWS, count - start), params)
        tokens = torch.tensor([output.token_ids[-3:] for output in outputs])
        counts += (tokens * torch.tensor([VOCABULARY**2, VOCABULARY, 1])).sum(-1).bincount(minlength=len(counts))
        accepted += sum(output.stats.accepted_per_depth[0] for output in outputs)
        drafted += sum(output.stats.drafted_per_depth[0] for output in outputs)
    assert counts.sum() == count
    assert 0.2 < accepted / drafted < 0.8, "both acceptance and rejection must be common"
    return counts.view([VOCABULARY] * 3)


def p_value(
    toy: Toy, count: int, num_tokens: int, tree: str, top_p: float = 1.0, is_changed: bool = False, **options: str
) -> float:
    """Of the chi-square test; cells with an expected count below 5 are merged. `options`: the engine's."""
    observed = sampled(toy, count, num_tokens, tree, top_p, is_changed, **options).double()
    expected = toy.joint(num_tokens, top_p, is_changed) * count
    assert not observed[expected == 0].any(), "a token was sampled that top-p or min-p excludes"
    often, rare = expected >= 5, (expected > 0) & (expected < 5)
    assert often.sum() > 50, "too few cells to tell anything"
    cells = [torch.cat((x[often], x[rare].sum(0, keepdim=True)[: rare.sum()])) for x in (observed, expected)]
    return stats.chisquare(*(x.numpy() for x in cells)).pvalue


@pytest.mark.parametrize("tree", ["chain3", "d3_bf2"])
def test_three_tokens_have_the_targets_joint_distribution(toy, tree):
    """The prefill's token and two of decoding."""
    assert p_value(toy, 30_000, 3, tree) > 1e-3


@pytest.mark.parametrize("tree", ["chain3", "d3_bf2"])
def test_with_top_p(toy, tree):
    """From here on all three are of decoding, those of a whole chain."""
    assert p_value(toy, 20_000, 4, tree, top_p=0.8) > 1e-3


@pytest.mark.parametrize("drafting", ["multinomial", "multinomial_without_replacement"])
def test_with_children_drawn_at_random(toy, drafting):
    assert p_value(toy, 10_000, 4, "d3_bf2", drafting=drafting) > 1e-3


@pytest.mark.parametrize("drafting", ["greedy", "multinomial", "multinomial_without_replacement"])
def test_with_a_draft_of_few_tokens(toy, drafting):
    few = sorted(toy.conditionals[0].topk(9).indices.tolist())
    draft = Draft(replace(toy.draft.config, vocab_size=len(few), vocabulary=few))
    draft.load_state_dict(toy.draft.state_dict())
    assert p_value(replace(toy, draft=draft), 10_000, 4, "d3_bf2", drafting=drafting) > 1e-3


@pytest.mark.parametrize("drafting", ["greedy", "multinomial", "multinomial_without_replacement"])
def test_with_another_model_that_drafts(toy, drafting):
    """Which is much like the target."""
    model, generator = tiny_model(std=0.4, **SIZES), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    draft = DraftModel(Target(model), toy.target)
    assert p_value(replace(toy, draft=draft), 10_000, 4, "d3_bf2", drafting=drafting) > 1e-3


@pytest.mark.parametrize("drafting", ["greedy", "multinomial", "multinomial_without_replacement"])
def test_with_drafts_of_some_of_its_own_layers(toy, drafting):
    skip = replace(toy, draft=LayerSkip(toy.target, [1]))
    assert p_value(skip, 10_000, 4, "d3_bf2", drafting=drafting) > 1e-3


@pytest.mark.filterwarnings("ignore:draft_lm_head=fp8")
@pytest.mark.parametrize("drafting", ["greedy", "multinomial", "multinomial_without_replacement"])
def test_with_drafts_of_an_lm_head_in_fp8(toy, drafting):
    """The q of drawn drafts is that head's."""
    assert p_value(toy, 10_000, 4, "d3_bf2", drafting=drafting, draft_lm_head="fp8") > 1e-3


@pytest.mark.parametrize("tree", ["chain3", "d3_bf2"])
@pytest.mark.parametrize("drafting", ["greedy", "multinomial", "multinomial_without_replacement"])
def test_with_penalties_biases_and_min_p(toy, tree, drafting):
    assert p_value(toy, 10_000, 4, tree, is_changed=True, drafting=drafting) > 1e-3


def test_the_test_can_tell_what_is_counted(toy, monkeypatch):
    """Broken: drafted tokens are not part of the answer."""
    monkeypatch.setattr(adjustments, "_on_paths", lambda tokens, *_: torch.zeros(*tokens.shape, VOCABULARY))
    assert p_value(toy, 10_000, 4, "chain3", is_changed=True) < 1e-9


def one_number(tree, tokens, logits, settings, seeds, lengths):
    """Broken: all nodes use the root's random number."""
    draws = sampling.uniform(seeds, lengths, 1).expand_as(tokens)
    return sampling.verify_chosen(tree, tokens, sampling.sample(sampling.probabilities(logits, settings), draws))


def no_residual_update(tree, tokens, logits, settings, draws, q, replacement):
    """Broken: after a rejection the token is drawn from the target's distribution, not from the residual."""
    found = sampling.verify_drawn(tree, tokens, logits, settings, draws, q, replacement)
    last = sampling.probabilities(logits, settings)[torch.arange(len(tokens)), found.node]
    return found._replace(next_token=sampling.sample(last, draws[:, 0]))


@pytest.mark.parametrize(
    ("verifier", "mutant", "tree", "drafting"),
    [("verify_sampled", one_number, "chain3", "greedy"), ("verify_drawn", no_residual_update, "d3_bf2", "multinomial")],
)
def test_the_test_can_tell(toy, verifier, mutant, tree, drafting, monkeypatch):
    """Broken verification is detected with a tenth of the samples."""
    monkeypatch.setattr(verification, verifier, mutant)
    assert p_value(toy, 10_000, 4, tree, drafting=drafting) < 1e-9
