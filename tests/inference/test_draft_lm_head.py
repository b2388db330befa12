"""`draft_lm_head`: drafts by an LM head in few bits. Answers stay the target's own, and nearly as much is accepted.

And drafts by the kernel that finds the most likely token without logits.
"""

import random
from functools import cache

import pytest
import torch

from eagle_train.drafts import Draft, EagleConfig, EagleDraft
from eagle_train.errors import OptionError
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.decode.sampling import DRAFT_MODES
from eagle_train.inference.drafters.drafter import Drafter
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.models.head import QuantisedLMHead
from eagle_train.models.target import Target
from eagle_train.ops import head_argmax
from tests.support.graph_recorder import recorded
from tests.support.inside import drafter_of
from tests.support.reference_answers import GREEDY, LENGTH, PROMPTS, cut, guide, token_ids
from tests.support.tiny import continued, shared_target, tiny_draft, tiny_target, trained_draft

pytestmark = pytest.mark.filterwarnings("ignore:draft_lm_head=fp8")
KINDS = ["fp8", "int4"]
FAMILIES = ["llama", "gemma2", "cohere2", "llama4"]  # with a cap, a scale, chunks


@cache
def target_of(family: str = "llama") -> Target:
    """One that INT4 has a product for."""
    return tiny_target(family, hidden_size=128)


@cache
def answers(family: str = "llama") -> list[list[int]]:
    return [continued(target_of(family), prompt, LENGTH + 10) for prompt in PROMPTS]


@cache
def trained(family: str = "llama") -> Draft:
    return trained_draft(target_of(family))


def tpc(outputs: list) -> float:
    return sum(output.stats.tokens for output in outputs) / sum(output.stats.calls for output in outputs)


TREES = ["chain3", "d3_bf2", "n8"]
# Each family with each kind of head, and each tree with each kind.
EACH = [
    (family, kind, TREES[(row + place) % 3]) for row, family in enumerate(FAMILIES) for place, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("family", "kind", "tree"), EACH)
def test_answers_are_the_targets_own(family, kind, tree):
    engine = Engine(target_of(family), trained(family), tree, draft_lm_head=kind)
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers(family))
    assert isinstance(drafter_of(engine).head.lm_head, QuantisedLMHead)
    assert type(engine.target.lm_head) is not QuantisedLMHead


@pytest.mark.parametrize("mode", DRAFT_MODES[1:])
def test_nearly_as_much_is_accepted(mode):
    params = [SamplingParams(1.0, seed=seed, max_tokens=60, ignore_eos=True) for seed in range(20)]
    target, found = tiny_target(hidden_size=128, std=0.1), {}
    draft = trained_draft(target)
    for head in ("target", *KINDS):
        engine = Engine(target, draft, "chain3", drafting=mode, draft_lm_head=head, max_batch_size=20)
        found[head] = tpc(engine.generate(PROMPTS * 4, params))
    assert found["target"] > 1.8
    for kind in KINDS:
        assert found[kind] == pytest.approx(found["target"], rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_most_drafts_are_the_same(kind):
    states = torch.randn(500, 128, generator=torch.Generator().manual_seed(0))
    likely = {}
    for head in ("target", kind):
        engine = Engine(target_of(), trained(), draft_lm_head=head)
        likely[head] = drafter_of(engine).head.lm_head(states).argmax(-1)
    assert 0.8 < (likely[kind] == likely["target"]).float().mean() < 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_has_the_tokens_of_plain_decoding_with_greedy_drafts(kind):
    params = [SamplingParams(0.7, top_p=0.9, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(len(PROMPTS))]
    plain = Engine(target_of(), draft_lm_head=kind).generate(PROMPTS, params)  # unused without a draft
    drafted = Engine(target_of(), trained(), "n8", draft_lm_head=kind).generate(PROMPTS, params)
    assert token_ids(drafted) == token_ids(plain)


@pytest.mark.parametrize(
    "options", [{"prefix_cache": True, "kv_tokens": 160}, {"overlap": True}, {"prefill_tokens": 5}]
)
@pytest.mark.parametrize("kind", KINDS)
def test_with_other_switches(kind, options):
    engine = Engine(target_of(), trained(), "d3_bf2", max_batch_size=3, draft_lm_head=kind, **options)
    for _ in range(2):
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers())


@pytest.mark.parametrize("drafting", DRAFT_MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_are_recorded_with_it(kind, drafting):
    params = SamplingParams(0.5, seed=3, max_tokens=20, ignore_eos=True)
    options = {"drafting": drafting, "draft_lm_head": kind, "max_batch_size": 3}
    eager, replayed = (Engine(target_of(), trained(), "d3_bf2", **options) for _ in range(2))
    wanted = eager.generate(PROMPTS, params)
    assert token_ids(recorded(replayed).generate(PROMPTS, params)) == token_ids(wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_forwards_are_compiled_with_it(kind, graphs):
    target, rng = tiny_target(hidden_size=128), random.Random(0)
    engine = Engine(
        target, tiny_draft(target, num_layers=1), "d3_bf2", max_batch_size=1, compile=True, draft_lm_head=kind
    )
    made = len(graphs)
    guide(engine, answers(), lambda _: rng.randint(0, 3))
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers())
    assert len(graphs) == made > 0


@pytest.mark.parametrize("mode", DRAFT_MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_of_few_tokens(kind, mode):
    """50 of them, which is no multiple of 16: only these are drafted, and the head holds no other weights."""
    few = sorted([*range(1, 94, 2), 2, 4, 6])
    draft = EagleDraft(EagleConfig.from_target(target_of().config, num_layers=1, vocab_size=50, vocabulary=few))
    draft.load_state_dict(trained().state_dict(), strict=False)
    engine = Engine(target_of(), draft.requires_grad_(False), "n8", drafting=mode, draft_lm_head=kind)
    head, seen = drafter_of(engine).head, []
    assert head.lm_head.weight.shape == (50, 128)
    assert head.lm_head.weight.is_meta
    drafter, propose = drafter_of(engine), drafter_of(engine).propose
    drafter.propose = lambda *given: (seen.append(propose(*given)), seen[-1])[1]
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers())
    assert {token for drafted in seen for token in drafted.tokens[:, 1:].flatten().tolist()} <= set(few)


def test_one_drafter_in_engines_with_different_heads():
    """Each engine sets what it drafts with."""
    drafter, heads = Eagle(trained(), target_of()), {}
    for kind in ("int4", "fp8", "target", "target"):
        Engine(target_of(), drafter, draft_lm_head=kind)
        heads.setdefault(kind, drafter.head)
        assert isinstance(drafter.head.lm_head, QuantisedLMHead) == (kind != "target")
    assert drafter.head is heads["target"]
    assert heads["int4"].lm_head.product.scheme == "int4"


def test_a_cpu_has_no_fp8_products_and_says_so(recwarn):
    Engine(target_of(), trained(), draft_lm_head="fp8")
    said = [str(warning.message) for warning in recwarn if "draft_lm_head" in str(warning.message)]
    assert said == ["draft_lm_head=fp8: this cpu has no FP8 products and widens each number; target is faster"]
    Engine(target_of(), trained(), draft_lm_head="int4")
    assert len([warning for warning in recwarn if "draft_lm_head" in str(warning.message)]) == 1


class Own(Drafter):
    """A drafter that has no LM head."""


@pytest.mark.parametrize(
    ("draft", "kind", "message"),
    [
        ("llama", "int4", "draft_lm_head=int4: the LM head has 32 inputs, no multiple of 128; use target"),
        ("own", "fp8", "draft_lm_head=fp8: Own is no EAGLE drafter of ours; use target"),
        (None, None, "draft_lm_head=None: must be one of target, fp8, int4"),
    ],
)
def test_what_cannot_be_is_one_line(draft, kind, message):
    target = shared_target("llama")
    made = {"llama": lambda: tiny_draft(target), "own": Own, None: lambda: None}[draft]()
    with pytest.raises(OptionError) as error:
        Engine(target, made, draft_lm_head=kind)
    assert str(error.value) == message


@torch.no_grad()
def test_outputs_do_not_hang_on_it_where_the_head_is_useless():
    """Every draft is wrong, and the answers are the same."""
    engine = Engine(target_of(), trained(), "chain3", draft_lm_head="int4")
    drafter_of(engine).head.lm_head.product.scales.zero_()
    outputs = engine.generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == cut(answers())
    assert tpc(outputs) < 1.2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_drafts_with_it_in_graphs(kind):
    model = target_of().model
    copied = type(model)(model.config)
    copied.load_state_dict(model.state_dict())
    target = Target(copied.bfloat16().cuda())
    eager, replayed = (
        Engine(target, trained(), "d3_bf2", max_batch_size=3, graphs=graphs, draft_lm_head=kind)
        for graphs in (False, True)
    )
    assert drafter_of(eager).head.lm_head.product.has_kernel
    wanted = token_ids(eager.generate(PROMPTS, GREEDY))
    assert token_ids(replayed.generate(PROMPTS, GREEDY)) == wanted


@pytest.mark.parametrize("linear", ["auto", "plain"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_drafts_by_the_kernel_are_those_of_logits(monkeypatch, family, linear):
    """On a GPU a head in fp32 has no such kernel, but Triton's interpreter takes it: all rounds are the same."""
    pytest.importorskip("triton", reason="it comes with torch for CUDA, and with xgrammar")
    target, params = tiny_target(family, hidden_size=128, std=0.1), SamplingParams(max_tokens=40, ignore_eos=True)
    draft = trained_draft(target)
    wanted = Engine(target, draft, "chain3").generate(PROMPTS, params)
    calls, kernel = [], head_argmax.head_argmax
    monkeypatch.setattr(head_argmax, "_runs_on", lambda device: True)
    monkeypatch.setattr(head_argmax, "pays", lambda hidden, weight, _: head_argmax.supports(hidden, weight))
    monkeypatch.setattr(head_argmax, "DTYPES", (torch.float32,))
    monkeypatch.setattr(head_argmax, "head_argmax", lambda *given: (calls.append(given), kernel(*given))[1])
    found = Engine(target, draft, "chain3", linear=linear).generate(PROMPTS, params)
    assert bool(calls) == (linear == "auto")
    assert token_ids(found) == token_ids(wanted)
    assert [output.rounds for output in found] == [output.rounds for output in wanted]
    assert tpc(found) > 1.1
