"""The engine gives the target's own tokens, whatever is drafted, whatever the batch, however deep drafts are
accepted.
"""

import random
import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from eagle_train.artifacts.format import save_draft
from eagle_train.drafts import Draft
from eagle_train.errors import OptionError, UserError
from eagle_train.inference import Engine, Requests, SamplingParams, parts
from eagle_train.inference.compiling import compile_verification
from eagle_train.inference.decode.tree import chain, full
from eagle_train.inference.decode.verification import Verification
from eagle_train.inference.drafters.drafter import MAX_PENDING
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.models import loading
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Target
from eagle_train.ops import threads
from eagle_train.ops.linear import Linear, fp16_copy_of
from tests.support.inside import drafter_of, runner_of
from tests.support.reference_answers import GREEDY, LENGTH, PROMPTS, TREES, answers, cut, guide, token_ids
from tests.support.tiny import (
    FAMILIES,
    LAYERED,
    continued,
    random_tokens,
    shared_target,
    tiny_draft,
    tiny_target,
    trained_draft,
)

BUNDLED = Path(__file__).parents[2] / "data" / "tiny_target"
MODES = ["greedy", "multinomial", "multinomial_without_replacement"]


@pytest.fixture(scope="module")
def trained() -> Draft:
    return trained_draft(shared_target())


# --- which targets


@pytest.mark.parametrize("family", ["phi3", "dynamic"])
def test_where_rope_changes_with_the_text_tokens_do_not_hang_on_neighbours(family):
    """A text that fills the context, drafts and padding beyond it, chunks: each row as transformers decodes it
    alone."""
    target, prompts = tiny_target(family), random_tokens(7, 40, 30)
    draft = tiny_draft(target)
    wanted = [continued(target, prompt, min(24, 48 - len(prompt))) for prompt in prompts]
    for options in ({}, {"draft": draft}, {"draft": draft, "tree": "d3_bf2", "prefill_tokens": 36}):
        assert (
            token_ids(Engine(target, **options).generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True)))
            == wanted
        )
    with pytest.raises(UserError, match=r"has 48 tokens: the context of .* holds 48 \(beyond, one text's RoPE would"):
        Engine(target).generate(random_tokens(48))


# --- temperature 0 against transformers


@pytest.mark.parametrize("family", [*FAMILIES, *LAYERED])
def test_greedy_tokens_are_transformers_own(family):
    """A ragged batch in two rows, so that rows are freed, reused and moved; one row; and without a draft. With other
    trees: below, and in test_every_switch.py."""
    target, wanted = shared_target(family), cut(answers(family))
    assert any(len(set(tokens)) > 5 for tokens in wanted), "the answers must not be all the same"
    engine = Engine(target, tiny_draft(target), "n8", max_batch_size=2)
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == wanted
    assert token_ids(engine.generate(PROMPTS[2:3], GREEDY)) == wanted[2:3]
    assert token_ids(Engine(target, max_batch_size=3).generate(PROMPTS, GREEDY)) == wanted


def test_layers_that_are_given_keys_keep_none():
    """Gemma 4: layers 0 and 2 have heads of width 8, 1 and 3 of 16, and the last two layers share the keys and
    values of 2 and 3."""
    cache = runner_of(Engine(shared_target("gemma4"))).cache
    assert cache.given == {4: 2, 5: 3}
    assert sorted((len(memory), *memory.shape[2:]) for memory in cache.memory) == [(4, 2, 8), (4, 2, 16)]
    cache = runner_of(Engine(shared_target("deepseek_v3"))).cache
    assert sorted((len(memory), *memory.shape[2:]) for memory in cache.memory) == [(3, 4, 8), (3, 4, 16)]


@pytest.mark.skipif(not BUNDLED.is_dir(), reason="data/tiny_target is not there yet")
def test_greedy_tokens_on_the_bundled_target():
    target = load_target(TargetConfig(str(BUNDLED), "float32"), "cpu")
    questions = [
        "Write json.dumps.",
        "What does os.path.join do?",
        "Sort a list.",
        "Implement textwrap.dedent in Python.",
    ]
    chats = [[{"role": "user", "content": question}] for question in questions]
    truth = [continued(target, Requests(target).tokens_of(chat, ""), 44) for chat in chats]
    params, rng = SamplingParams(max_tokens=40, ignore_eos=True), random.Random(0)
    assert token_ids(Engine(target).generate(chats[:1], params)) == cut(truth[:1], 40)
    for tree in ("chain3", "d3_bf2"):
        for count in (1, 4):
            engine = Engine(target, tiny_draft(target, num_layers=1), tree, max_batch_size=3)
            guide(engine, truth, lambda _: rng.randint(0, 3))
            assert token_ids(engine.generate(chats[:count], params)) == cut(truth[:count], 40)


# --- every way of acceptance


# Each pair of a family, a tree and a number of rows.
MIXED = [
    (family, tree, (1, 3, 5)[(row + place) % 3])
    for row, family in enumerate(("llama", "gemma2", "gpt_oss", "llama4"))
    for place, tree in enumerate(TREES)
]


@pytest.mark.parametrize(("family", "tree", "rows"), MIXED)
def test_any_mix_of_accepted_lengths_gives_the_targets_tokens(family, tree, rows):
    rng, target = random.Random(rows), shared_target(family)
    engine = Engine(target, tiny_draft(target, num_layers=1), tree, max_batch_size=rows)
    guide(engine, answers(family), lambda _: rng.randint(0, 3))
    outputs = engine.generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == cut(answers(family))
    assert {n for output in outputs for n in output.rounds} >= {1, 2, 3, 4}


def test_rows_that_leave_together():
    """Several rows at the front finish in one round, and others are moved into their places."""
    target, wanted = shared_target(), answers("llama")
    engine = Engine(target, tiny_draft(target, num_layers=1), max_batch_size=10)
    guide(engine, wanted * 2, lambda sequence: sequence.index % 4)
    limits = [4, 4, 4, 20, 4, 17, 20, 4, 20, 20]
    params = [SamplingParams(max_tokens=limit, ignore_eos=True) for limit in limits]
    outputs = engine.generate(PROMPTS * 2, params)
    assert token_ids(outputs) == [tokens[:limit] for tokens, limit in zip(wanted * 2, limits, strict=True)]


def test_a_chain_of_three_has_at_most_four_tokens_per_call():
    target = shared_target()
    engine = Engine(target, tiny_draft(target), "chain3")
    guide(engine, answers("llama"), lambda _: 3)
    for output in engine.generate(PROMPTS, SamplingParams(max_tokens=21, ignore_eos=True)):
        assert output.stats.tpc == 4.0
        assert output.rounds == [4] * 5
        assert output.stats.accepted_per_depth == output.stats.drafted_per_depth == [5, 5, 5]


def test_dispatch_changes_the_tree_with_the_batch():
    """Five rows do not speculate, up to three have a chain, and one alone a tree."""
    target, wanted = shared_target(), answers("llama")
    rng = random.Random(0)
    table = {1: full(3, 2), 3: "chain3", 8: chain(0)}
    engine = Engine(target, tiny_draft(target), table)
    guide(engine, wanted, lambda _: rng.randint(0, 3))
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 6, 11, 15, 20)]
    outputs = engine.generate(PROMPTS, params)
    assert token_ids(outputs) == [tokens[: p.max_tokens] for tokens, p in zip(wanted, params, strict=True)]
    assert outputs[0].rounds == [1, 1, 1], "no speculation while all five are there"
    assert max(outputs[-1].rounds) > 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("alignment", ["accepted", "last"])
@pytest.mark.parametrize("together", [2, 20, 45])
def test_a_draft_catches_up(monkeypatch, trained, alignment, together, overlap):
    """It processes nothing while two rows do not speculate, and then proposes what it would have otherwise."""
    target = shared_target()
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=n) for n in (together, 64)]

    def run(most: int):
        drafter, shapes, states = Eagle(trained, target, alignment), [], []
        forward, children = drafter.run_forward_at, drafter.children
        drafter.run_forward_at = lambda tokens, *given: (shapes.append(tokens.shape), forward(tokens, *given))[1]
        drafter.children = lambda hidden, *given: (states.append(hidden), children(hidden, *given))[1]
        monkeypatch.setattr("eagle_train.inference.runner.MAX_PENDING", most)
        engine = Engine(target, drafter, {1: "chain3", 2: chain(0)}, overlap=overlap)
        return engine.generate(PROMPTS[:2], params)[1], torch.cat(states), shapes

    (along, wanted, _), (later, states, shapes) = run(0), run(MAX_PENDING)
    assert later.token_ids == along.token_ids
    assert later.rounds == along.rounds
    torch.testing.assert_close(states, wanted)
    pairs = [shape for shape in shapes if shape[0] == 2]
    assert pairs == [(2, MAX_PENDING)] * (together // MAX_PENDING), "in between, and never for one token"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("waited", [1, 12, 31, 40])
def test_one_is_left_of_a_batch_that_did_not_speculate(waited, overlap):
    """The other rows leave when their drafter is far behind; the remaining row is not, and continues with its own
    tokens, as do new ones."""
    target = shared_target()
    prompts, table = random_tokens(12, 3, 5), {1: "chain3", 2: chain(0)}
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (waited + 2, waited + 5, 30)]
    truth = [continued(target, prompt, p.max_tokens) for prompt, p in zip(prompts, params, strict=True)]
    engine = Engine(target, tiny_draft(target), table, max_batch_size=2, overlap=overlap)
    guide(engine, truth, lambda _: 2)
    assert token_ids(engine.generate(prompts, params)) == truth
    first, other = engine.add(prompts[0], params[2]), engine.add(prompts[1], params[2])
    while len(first.generated) < min(waited, 25):
        engine.step()
    engine.cancel(first)
    last = engine.add(prompts[2], params[2])
    engine.step()
    engine.cancel(other)
    while engine.has_unfinished:
        engine.step()
    assert last.generated == truth[2]


# --- sampling


@pytest.mark.parametrize("tree", ["chain3", "n8"])
@pytest.mark.parametrize("mode", MODES)
def test_sampled_tokens_do_not_depend_on_the_batch(mode, tree, trained):
    """Alone, in a full batch, and in one where rows join and leave beside greedy ones."""
    target = shared_target()
    params = [
        SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=s, ignore_eos=True, max_tokens=16)
        for s in (3, 4, 5, 6, 7)
    ]
    engine = Engine(target, trained, tree, drafting=mode)
    together = engine.generate(PROMPTS, params)
    alone = [engine.generate([prompt], p)[0] for prompt, p in zip(PROMPTS, params, strict=True)]
    assert token_ids(alone) == token_ids(together)
    others = [SamplingParams(max_tokens=3 + i) for i in range(5)]
    mixed = Engine(target, trained, tree, drafting=mode, max_batch_size=3).generate(
        [prompt for pair in zip(PROMPTS, PROMPTS, strict=True) for prompt in pair],
        [p for pair in zip(others, params, strict=True) for p in pair],
    )
    assert token_ids(mixed[1::2]) == token_ids(together)
    assert any(max(output.rounds) > 1 for output in together), "some drafts must be accepted"


@pytest.mark.parametrize("alignment", ["accepted", "last"])
@pytest.mark.parametrize("tree", ["chain3", "n8", {1: "d3_bf2", 2: "n8", 3: "chain3"}], ids=["chain", "tree", "table"])
def test_a_seeds_tokens_are_those_without_drafts(tree, alignment, trained):
    """Greedy drafts preserve more than the distribution: a token depends on its prefix, seed and position alone."""
    target = shared_target()
    settings = [(1.0, 0, 1.0), (0.7, 0, 0.9), (1.3, 20, 1.0), (0.0, 0, 1.0), (0.9, 10, 0.8)]
    params = [
        SamplingParams(temperature, top_p, top_k, max_tokens=24, seed=seed, ignore_eos=True)
        for seed, (temperature, top_k, top_p) in enumerate(settings)
    ]
    plain = token_ids(Engine(target).generate(PROMPTS, params))
    assert len({tuple(tokens) for tokens in plain}) == len(plain)
    outputs = Engine(target, Eagle(trained, target, alignment), tree).generate(PROMPTS, params)
    assert token_ids(outputs) == plain
    assert any(max(output.rounds) > 1 for output in outputs), "some drafts must be accepted"


@pytest.mark.parametrize(("tree", "drafting"), [("n8", "greedy"), (chain(0), "multinomial")], ids=["unasked", "none"])
def test_what_is_drawn_unasked_or_not_at_all_leaves_a_seed_its_tokens(tree, drafting, trained):
    """A drafter that returns q although greedy drafts are asked for; and one that drafts nothing."""
    target = shared_target()
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=LENGTH, ignore_eos=True)
    engine = Engine(target, trained, tree, drafting=drafting)
    propose = drafter_of(engine).propose

    def drawn(*given):
        drafted = propose(*given)
        return drafted._replace(q=torch.rand(*drafted.tokens.shape, len(target.lm_head.weight)).softmax(-1))

    drafter_of(engine).propose = drawn
    assert token_ids(engine.generate(PROMPTS, params)) == token_ids(Engine(target).generate(PROMPTS, params))


def test_seeds():
    """With one set of parameters for all, request i has the seed + i."""
    target = shared_target()
    engine = Engine(target)
    params = SamplingParams(temperature=1.0, seed=10, max_tokens=12, ignore_eos=True)
    together = token_ids(engine.generate([PROMPTS[0]] * 4, params))
    assert all(len({tokens[place] for tokens in together}) > 1 for place in (0, 1)), "prefill's and decoding's token"
    assert token_ids(engine.generate([PROMPTS[0]] * 4, params)) == together
    for i, tokens in enumerate(together):
        own = SamplingParams(temperature=1.0, seed=10 + i, max_tokens=12, ignore_eos=True)
        assert token_ids(engine.generate([PROMPTS[0]], [own])) == [tokens]


@pytest.mark.parametrize("mode", MODES)
def test_top_k_of_one_is_greedy(mode, trained):
    params = SamplingParams(temperature=1.0, top_k=1, max_tokens=LENGTH, ignore_eos=True)
    assert token_ids(Engine(shared_target(), trained, "n8", drafting=mode).generate(PROMPTS, params)) == cut(
        answers("llama")
    )


@pytest.mark.parametrize("drafting", ["greedy", "multinomial"])
def test_verification_is_compiled_for_one_and_for_many_rows_only(drafting, trained, monkeypatch):
    """Paper section 3.2: two compilations, two more for top-p and top-k and two for min-p, all before the first
    request. Greedy drafts' serve any tree, drawn drafts' have their own for each."""
    counter, compiled = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", partial(compiled, backend=counter))
    monkeypatch.setattr(threads, "LEAST_ELEMENTS", 0)  # what is compiled is so for one number of threads
    params = [
        SamplingParams(1.0, top_p, min_p=min_p, seed=s, ignore_eos=True, max_tokens=4 + 3 * s)
        for s, (top_p, min_p) in enumerate(((1.0, 0.0), (0.9, 0.0), (1.0, 0.0), (0.9, 0.0), (1.0, 0.1)))
    ]
    for tree, number in (("chain3", 6), ("n8", 6 if drafting == "greedy" else 12)):
        plain = Engine(shared_target(), trained, tree, drafting=drafting).generate(PROMPTS, params)
        engine = Engine(shared_target(), trained, tree, drafting=drafting, compile_sampling=True, max_batch_size=5)
        assert counter.frame_count == number
        for rows in (4, 2, 5, 1):  # at first as many as chain3 has nodes, then as many as n8's root has children
            assert token_ids(engine.generate(PROMPTS[:rows], params[:rows])) == token_ids(plain[:rows])
        assert counter.frame_count == number


@pytest.mark.parametrize("asked", [None, True])
def test_verification_that_cannot_be_compiled_stops_only_who_asked_for_it(asked, trained, monkeypatch):
    def fails(self: Verification, *_: object) -> list[Callable[[], None]]:
        raise OptionError("compile=True: torch.compile fails: no compiler")

    monkeypatch.setattr(Verification, "compile", fails)
    engine = Engine(shared_target(), trained)
    runner, before = runner_of(engine), runner_of(engine).verification
    runner.config = replace(engine.config, compile_sampling=asked)
    if asked:
        with pytest.raises(OptionError, match="no compiler"):
            compile_verification(runner, [])
        return
    with pytest.warns(UserWarning, match="no compiler; rounds above temperature 0 are verified without"):
        compile_verification(runner, [])
    assert runner.verification is not before


@pytest.mark.parametrize("compile", [False, True])
def test_weights_of_a_bf16_checkpoint(compile, graphs):
    """Target and draft use packed weights (ops/linear.py), and the tokens are those of transformers. Compiled, they
    have one layer and one tree, and no C++: that is test_linear.py's."""
    layers, trees = (1, ("n8",)) if compile else (3, ("chain3", "n8"))
    target = tiny_target("llama", dtype=torch.bfloat16, num_hidden_layers=layers)
    target = Target(target.model.float())
    draft = tiny_draft(target, num_layers=min(layers, 2)).bfloat16().float()
    truth = [continued(target, prompt, LENGTH) for prompt in PROMPTS[:3]]
    for tree in trees:
        engine = Engine(target, draft, tree, compile=compile, max_batch_size=3)
        linears = [
            m for model in (target.model, drafter_of(engine).draft) for m in model.modules() if type(m) is Linear
        ]
        weights = [target.lm_head.weight, *(each.weight for each in linears)]
        if torch.backends.quantized.engine in ("x86", "fbgemm"):
            assert all(fp16_copy_of(weight) is not None for weight in weights)
        assert token_ids(engine.generate(PROMPTS[:3], GREEDY)) == cut(truth)
        assert token_ids(engine.generate(PROMPTS[:1], GREEDY)) == cut(truth[:1])
        assert bool(graphs) == compile


# --- objects and paths


def test_a_target_need_not_say_how_wide_a_dense_layer_is():
    """Solar Open's config does not; a draft has its own width."""
    target = tiny_target()
    draft = tiny_draft(target)
    object.__setattr__(target.config, "intermediate_size", None)  # its class checks types
    outputs = Engine(target, draft, "chain2").generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == cut(answers("llama"))


def test_takes_paths_as_well_as_objects(tmp_path):
    target = shared_target()
    target.model.save_pretrained(tmp_path / "target")
    save_draft(tiny_draft(target), tmp_path / "draft", target.identity, dtype=torch.float32)
    for kind in (str, Path):
        engine = Engine(kind(tmp_path / "target"), kind(tmp_path / "draft"), max_batch_size=2)
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama"))
    other = tiny_target("llama", seed=1)
    with pytest.raises(UserError, match="made for target tiny-llama"):
        Engine(other, str(tmp_path / "draft"))


def test_a_draft_that_is_given_stays_as_it_is():
    draft = tiny_draft(shared_target()).double().train().requires_grad_(True)
    Engine(shared_target(), draft).generate(PROMPTS[:1], GREEDY)
    assert draft.training
    assert all(parameter.dtype == torch.float64 and parameter.requires_grad for parameter in draft.parameters())


@pytest.mark.parametrize("tree", [None, "chain3", "d3_bf2"])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_ends_where_the_target_computes_nan(tree, overlap, trained):
    """After a token whose embedding is infinite, or where one is drafted; other answers do not change."""
    known = cut(answers("llama"))
    token = known[1][LENGTH // 2]
    target = tiny_target("llama")
    with torch.no_grad():
        target.model.get_input_embeddings().weight[token] = torch.inf
    engine = Engine(target, trained if tree else None, tree or "chain3", overlap=overlap)
    outputs = engine.generate([*PROMPTS, [5, token]], GREEDY)
    for tokens, output in zip([*known, []], outputs, strict=True):
        whole = token not in tokens[:-1] and tokens != []
        kept = tokens if whole else tokens[: tokens.index(token) + 1] if tokens else []
        assert output.token_ids == kept or (tree and output.token_ids == kept[: len(output.token_ids)])
        assert (output.finish_reason == "overflow") == (not whole or output.token_ids != kept)
    assert {output.finish_reason for output in outputs} == {"length", "overflow"}


def test_one_text_is_no_list_of_prompts():
    with pytest.raises(UserError, match=r"^prompts: must be a list of prompts$"):
        Engine(shared_target()).generate("hello")


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*FAMILIES, *LAYERED])
def test_gpu_gives_the_same_tokens(family):
    model = shared_target(family).model
    on_gpu = Target(type(model)(model.config).cuda())
    on_gpu.model.load_state_dict(model.state_dict())
    for tree in TREES:
        engine = Engine(on_gpu, tiny_draft(shared_target(family)), tree, max_batch_size=2)
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers(family))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0: must be at least 1, a whole number"),
        ({"max_batch_size": "3"}, "max_batch_size='3': must be at least 1, a whole number"),
        ({"max_batch_size": None}, "max_batch_size=None: must be at least 1, a whole number"),
        ({"kv_tokens": 64.0}, "kv_tokens=64.0: must be at least 1, a whole number, or None"),
        ({"prefill_tokens": 0}, "prefill_tokens=0: must be at least 1, a whole number, or None"),
        ({"prefill_tokens": -3}, "prefill_tokens=-3: must be at least 1, a whole number, or None"),
        ({"host_kv_tokens": -1}, "host_kv_tokens=-1: must be at least 0, a whole number"),
        ({"host_kv_tokens": 64}, "host_kv_tokens=64: needs prefix_cache=True"),
        ({"host_kv_tokens": 3, "prefix_cache": True}, "host_kv_tokens=3: must be 0 (none) or at least 16, one block"),
        ({"prefix_cache": "no"}, "prefix_cache='no': must be True or False"),
        ({"compile": None}, "compile=None: must be True or False"),
        ({"overlap": 1}, "overlap=1: must be True or False, or None"),
        ({"graphs": "yes"}, "graphs='yes': must be True or False, or None"),
        ({"drafting": "best"}, "drafting='best': must be one of greedy, multinomial, multinomial_without_replacement"),
        ({"draft_lm_head": "int8"}, "draft_lm_head='int8': must be one of target, fp8, int4"),
        ({"draft": 42}, "draft=42: must be None, an artifact's directory, a Draft or a Drafter"),
        ({"target": 42}, "target=42: must be a directory, a hub id, a TargetConfig or a Target"),
        ({"target": "x", "device": "gpu"}, "device='gpu': must be auto, cpu, cuda or cuda:N"),
        ({"target": "x", "device": "cuda:99"}, "device=cuda:99: no such GPU is visible; use device=cpu"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        Engine(**{"target": shared_target(), **options})


@pytest.mark.parametrize("load", [Engine, lambda path: load_target(TargetConfig(path))], ids=["Engine", "load_target"])
@pytest.mark.parametrize("gpu", [False, True])
def test_a_target_is_loaded_on_the_gpu_if_there_is_one(load, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    check = Mock(side_effect=UserError("seen"))  # before a weight is read
    monkeypatch.setattr(loading, "check_target", check)
    with pytest.raises(UserError, match="seen"):
        load(str(BUNDLED))
    assert check.call_args.args[2].type == ("cuda" if gpu else "cpu")


def test_a_target_is_loaded_with_its_gpu_the_current_one(monkeypatch):
    """Loading checks it by a forward, whose kernels start there."""
    entered = []

    @contextmanager
    def current(device):
        entered.append(device)
        yield
        entered.append(None)

    def load(config, device):
        assert entered == [torch.device("cuda:1")]
        raise UserError("seen")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(parts, "current", current)
    monkeypatch.setattr(parts, "load_target", load)
    with pytest.raises(UserError, match="seen"):
        Engine(str(BUNDLED), device="cuda:1")


def test_parameters_that_are_none():
    engine = Engine(shared_target())
    with pytest.raises(UserError, match=r"^params=\{'temperature': 1\}: must be SamplingParams$"):
        engine.add(PROMPTS[0], {"temperature": 1})
    assert not engine.has_unfinished


def test_a_draft_of_another_width():
    wide = tiny_draft(tiny_target("llama", hidden_size=64))
    with pytest.raises(UserError, match=r"^draft.hidden_size=64: must be the target's, 32$"):
        Engine(shared_target(), wide)


def test_two_engines_have_a_drafter_each():
    """A shared one would write into the other engine's blocks."""
    drafter = Eagle(tiny_draft(shared_target()), shared_target())
    message = "draft: this drafter belongs to another engine; make one for each engine$"
    first = Engine(shared_target(), drafter)
    Engine(shared_target(), drafter, kv_tokens=160)
    with pytest.raises(UserError, match=f"^{message}"):
        first.generate(PROMPTS[:1], GREEDY)
    with pytest.raises(UserError, match=f"^{message}"):
        Engine(shared_target(), drafter, kv_tokens=160)
