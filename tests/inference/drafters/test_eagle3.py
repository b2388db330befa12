"""EAGLE-3 and MTP drafts in the engine: answers stay the target's, and drafts are those that training's passes have."""

from functools import cache, partial

import pytest
import torch

from eagle_train.drafts import Eagle3Draft
from eagle_train.errors import UserError
from eagle_train.inference import Eagle, Engine, SamplingParams, dynamic
from eagle_train.models.draft_quantisation import Quant, quant_of, quantise_draft
from evals.bench.tree_search import ranks_of, tpc_of
from tests.support.tiny import (
    random_tokens,
    repeating_target,
    shared_target,
    tiny_draft,
    tiny_eagle3,
    trained_eagle3,
    trained_mtp,
)

PROMPTS = random_tokens(5, 21, 33, 9)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
FEW = {"vocab_size": 60, "vocabulary": list(range(3, 63))}
WIDER = {"layers": [1, 2], "num_layers": 2, "norm_output": True, "fc_norm": True, **FEW}
MADE = {
    "eagle3": partial(trained_eagle3, layers=[1, 2]),
    "eagle3 of few tokens": partial(trained_eagle3, **WIDER),
    "mtp": trained_mtp,
    "mtp of few tokens": partial(trained_mtp, **FEW),
}
SEVERAL = {"eagle3": MADE["eagle3"], "mtp": MADE["mtp"]}
SEVERAL |= {f"mtp, {count} modules": partial(trained_mtp, modules=count) for count in (2, 3)}


@cache
def trained(num_layers: int = 1, **kind) -> Eagle3Draft:
    return trained_eagle3(shared_target(), 100, num_layers=num_layers, **{"layers": [1, 2]} | kind)


def tokens_of(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@cache
def plain_answers() -> list[list[int]]:
    return tokens_of(Engine(shared_target()).generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("tree", ["chain3", "d2_bf3", dynamic(6, 3, 2)], ids=str)
@pytest.mark.parametrize("alignment", ["accepted", "last"])
@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_greedy_answers_are_the_targets(made, alignment, tree):
    draft = made(shared_target(), 10)
    engine = Engine(shared_target(), Eagle(draft, shared_target(), alignment), tree, max_batch_size=3)
    assert tokens_of(engine.generate(PROMPTS, GREEDY)) == plain_answers()


@pytest.mark.parametrize("first_token", ["skip", "self_fusion"])
@pytest.mark.parametrize("tree", ["chain3", "d2_bf3"])
@pytest.mark.parametrize("made", SEVERAL.values(), ids=SEVERAL)
def test_a_rounds_drafts_are_those_of_trainings_passes(made, tree, first_token):
    """Tokens per call follow from the unrolled draft's proposals, in each pass, with no engine."""
    target = repeating_target()
    draft = made(target, 100, first_token=first_token)
    engine, ranks = Engine(target, draft, tree), []
    outputs = engine.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ranks.append(ranks_of(target, draft, prompt, output.token_ids, 3, 3))
    found = sum(output.stats.tokens for output in outputs) / sum(output.stats.calls for output in outputs)
    assert found == pytest.approx(tpc_of(engine.dispatcher.dispatch(1).tree, ranks))
    assert sum(output.stats.accepted_per_depth[1] for output in outputs) > 0, "chains are drafted"


def test_drafters_of_all_kinds_side_by_side():
    target = shared_target()
    module = trained_mtp(target, 100)
    drafters = {"three": Eagle(trained(), target), "one": Eagle(tiny_draft(target), target)}
    engine = Engine(target, drafters | {"mtp": Eagle(module, target)}, "chain3", max_batch_size=4)
    params = [SamplingParams(max_tokens=24, ignore_eos=True, drafter=name) for name in ("three", "one", "none", "mtp")]
    outputs = engine.generate(PROMPTS, params)
    assert tokens_of(outputs) == plain_answers()
    for number, draft in ((0, trained()), (3, module)):
        alone = Engine(target, draft, "chain3").generate([PROMPTS[number]], GREEDY)
        assert outputs[number].stats.accepted_per_depth == alone[0].stats.accepted_per_depth


@pytest.mark.parametrize("made", SEVERAL.values(), ids=SEVERAL)
def test_prompts_in_chunks_and_prefixes_that_are_known(made):
    draft = made(shared_target(), 100)
    engine = Engine(shared_target(), draft, "chain3", prefill_tokens=16, prefix_cache=True)
    first, again = (engine.generate(PROMPTS, GREEDY) for _ in range(2))
    assert tokens_of(first) == tokens_of(again) == plain_answers()
    whole = Engine(shared_target(), draft, "chain3").generate(PROMPTS, GREEDY)
    for outputs in (first, again):
        assert [o.stats.accepted_per_depth for o in outputs] == [o.stats.accepted_per_depth for o in whole]


def test_layers_that_the_target_has_not():
    draft = tiny_eagle3(shared_target())
    draft.config.layers = [1, 9]
    with pytest.raises(UserError, match=r"layers=\[8\]: target tiny-llama has the layers 0 to 2"):
        Engine(shared_target(), draft, "chain3").generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("scheme", ["fp8"])
def test_a_quantised_draft_changes_no_answer(scheme):
    draft = quantise_draft(trained(), Quant(scheme, "all_linear"))
    assert isinstance(draft, Eagle3Draft)
    assert tokens_of(Engine(shared_target(), draft, "chain3").generate(PROMPTS, GREEDY)) == plain_answers()
    assert not torch.equal(draft.fuse(torch.ones(1, 96)), trained().fuse(torch.ones(1, 96)))
    module = quantise_draft(trained_mtp(shared_target(), 10), Quant(scheme, "all_linear"))
    assert str(quant_of(module)) == f"{scheme} (all_linear)"
    assert tokens_of(Engine(shared_target(), module, "chain3").generate(PROMPTS, GREEDY)) == plain_answers()
