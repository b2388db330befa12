"""A smaller model that drafts: the target's own tokens, and what it keeps of a sequence is lost nowhere."""

from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tokenizers import AddedToken, normalizers

from eagle_train import generate
from eagle_train.errors import UserError
from eagle_train.inference import DraftModel, Engine, SamplingParams, dynamic, parts
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.drafters.draft_model import make_draft_model
from eagle_train.inference.drafters.drafters import Drafters
from eagle_train.inference.drafters.same_tokenizer import check_same_tokenizer
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.models.target import Target
from tests.support.command_line import call, save_target
from tests.support.drafters import FAMILIES as USUAL
from tests.support.drafters import close_to
from tests.support.graph_recorder import recorded
from tests.support.inside import runner_of, scheduler_of
from tests.support.reference_answers import GREEDY, LENGTH, PROMPTS, answers, cut, token_ids
from tests.support.tiny import FAMILIES, LAYERED, shared_target, tiny_model, tiny_tokenizer


@cache
def near(family: str) -> Target:
    return close_to(shared_target(family))


def engine_of(family: str, tree: str, draft: Target | None = None, **options) -> Engine:
    target = shared_target(family)
    return Engine(target, DraftModel(draft or near(family), target), tree, **options)


@cache
def rounds(family: str, tree: str) -> list[list[int]]:
    """The numbers of tokens in the rounds of each prompt, decoded alone."""
    engine = engine_of(family, tree, max_batch_size=1)
    return [engine.generate([prompt], GREEDY)[0].rounds for prompt in PROMPTS]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_dynamic_trees_grow_by_its_probabilities(family):
    """A batch has the rounds of each request alone, and the target as its own draft is right at least once a round."""
    tree = dynamic(6, 3, 2)
    outputs = engine_of(family, tree, max_batch_size=3).generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == cut(answers(family))
    alone = engine_of(family, tree, max_batch_size=1)
    assert [alone.generate([prompt], GREEDY)[0].rounds for prompt in PROMPTS] == [output.rounds for output in outputs]
    same = engine_of(family, tree, shared_target(family)).generate(PROMPTS, GREEDY)
    assert all(min(output.rounds[:-1]) >= 2 for output in same)


@pytest.mark.parametrize("family", [*sorted({*FAMILIES} - {*USUAL}), *LAYERED])
def test_greedy_tokens_are_the_targets_own(family):
    outputs = engine_of(family, "n8", max_batch_size=2).generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == cut(answers(family))
    counts = [count for each in rounds(family, "n8") for count in each]
    assert 1.2 < sum(counts) / len(counts) < 3.9, "both acceptance and rejection must be common"


@pytest.mark.parametrize("draft", ["gemma2", "llama4"])
def test_another_family_drafts(draft):
    outputs = engine_of("llama", "d3_bf2", shared_target(draft)).generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == cut(answers("llama"))


SWITCHES = [
    {},
    {"overlap": True},
    {"prefill_tokens": 7},
    {"kv_tokens": 4 * BLOCK},
    {"prefix_cache": True},
    {"prefix_cache": True, "host_kv_tokens": 30 * BLOCK, "kv_tokens": 4 * BLOCK, "overlap": True},
]


@pytest.mark.parametrize(("family", "graphs"), [("llama", True), ("gemma2", False)])
@pytest.mark.parametrize(("options", "odd"), [(options, place % 2) for place, options in enumerate(SWITCHES)])
def test_rows_have_the_rounds_that_each_has_alone(family, options, odd, graphs):
    """What the draft model keeps of a sequence is the same after preemption, in found prefixes and in recordings."""
    tree = "n8" if graphs ^ odd else "chain3"  # each with every switch, of one of the families
    engine = engine_of(family, tree, **{"max_batch_size": 3} | options)
    if graphs:
        recorded(engine)
    preempted, preempt = [], scheduler_of(engine).preempt
    scheduler_of(engine).preempt = lambda sequence: preempted.append(sequence) or preempt(sequence)
    for _ in range(2):  # kept beginnings are found by the second
        outputs = engine.generate(PROMPTS, GREEDY)
        assert token_ids(outputs) == cut(answers(family))
        assert [output.rounds for output in outputs] == rounds(family, tree)
    assert bool(preempted) == ("kv_tokens" in options)
    assert any(output.stats.cached_tokens for output in outputs) == ("prefix_cache" in options)
    graphs_made = runner_of(engine).graphs
    assert (graphs_made is not None and graphs_made.drafting.record.replays > 0) == graphs


def test_the_target_drafts_for_itself_and_all_is_accepted():
    engine = engine_of("llama", "chain3", shared_target("llama"))
    for output in engine.generate(PROMPTS, SamplingParams(max_tokens=21, ignore_eos=True)):
        assert output.rounds == [4] * 5


def test_after_rounds_without_drafts_it_catches_up():
    """A batch that is too large for drafts, then one row alone: its drafts are those of the whole text."""
    target = shared_target("llama")
    engine = Engine(target, DraftModel(target, target), {1: "chain3", 8: "chain0"}, max_batch_size=5)
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (24, 6, 6, 6, 6)]
    first = engine.generate(PROMPTS, params)[0]
    assert first.token_ids == answers("llama")[0][:24]
    assert set(first.rounds[5:-1]) == {4}


def test_compiled_by_torchs_own_compiler_it_is_the_same():
    """Of one layer, and one row after the other: the compiler takes many seconds for each graph."""
    target = Target(tiny_model(num_hidden_layers=1), name="shallow")
    plain, compiled = (
        Engine(target, DraftModel(close_to(target), target), "n8", max_batch_size=1, compile=is_on)
        for is_on in (False, True)
    )
    ours, theirs = compiled.generate(PROMPTS, GREEDY), plain.generate(PROMPTS, GREEDY)
    assert token_ids(ours) == token_ids(theirs)
    assert [output.rounds for output in ours] == [output.rounds for output in theirs]
    assert max(max(output.rounds) for output in ours) > 1, "some drafts must be accepted"


def test_a_context_that_is_shorter_than_the_targets():
    """Texts beyond it: positions stay at its last one."""
    target, seen = shared_target("llama"), []
    short = Target(tiny_model(max_position_embeddings=20), name="short")
    hidden_states = short.hidden_states
    short.hidden_states = lambda tokens, positions, attend: (
        seen.append(int(positions.max())) or hidden_states(tokens, positions, attend)
    )
    outputs = Engine(target, DraftModel(short, target), "d3_bf2").generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == cut(answers("llama"))
    assert max(seen) == 19


# --- vocabularies


def padded(vocab_size: int) -> Target:
    """The shared Llama with embeddings and logits for other numbers of tokens; those that are new are the likeliest."""
    target = shared_target("llama")
    model, known = tiny_model(vocab_size=vocab_size), min(96, vocab_size)
    with torch.no_grad():
        for (name, own), (_, theirs) in zip(model.named_parameters(), target.model.named_parameters(), strict=True):
            own[:known] = theirs[:known] if own.ndim > 1 or own.shape == theirs.shape else theirs
            if name == "lm_head.weight":
                own[known:] = 50 * own[: max(0, vocab_size - known)].abs()
    return Target(model, tiny_tokenizer(), f"padded-{vocab_size}")


@pytest.mark.parametrize("mode", ["greedy", "multinomial", "multinomial_without_replacement"])
@pytest.mark.parametrize("sizes", [(96, 128), (128, 96)])
def test_a_padded_vocabulary_is_fine_and_padded_ids_are_never_proposed(sizes, mode):
    target, draft = (padded(size) for size in sizes)
    drafter, proposed = DraftModel(draft, target), []
    own = drafter.children

    def noting(*given):
        tokens, q = own(*given)
        proposed.append(int(tokens.max()))
        assert q is None or (q.shape[-1] == sizes[0] and not q[..., 96:].any())
        return tokens, q

    drafter.children = noting
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=0, ignore_eos=True)
    Engine(target, drafter, "d3_bf2", drafting=mode).generate(PROMPTS, params)  # commits ids beyond the draft's, too
    assert max(proposed) < 96


def test_another_tokenizer_is_told_by_what_differs_first():
    place, own = "drafter.path=x", tiny_tokenizer()
    check_same_tokenizer(own, tiny_tokenizer(), place)
    begin = r"^drafter\.path=x: another tokenizer than the target's: "
    longer = tiny_tokenizer()
    longer.add_tokens(["one"])
    with pytest.raises(UserError, match=begin + r"token 96 is unknown here and 'one' in the target's$"):
        check_same_tokenizer(own, longer, place)
    with pytest.raises(UserError, match=begin + r"token 96 is 'one' here and unknown in the target's$"):
        check_same_tokenizer(longer, own, place)
    special = tiny_tokenizer()
    special.add_tokens([AddedToken("a", special=True)], special_tokens=True)
    with pytest.raises(UserError, match=begin + r"token 67, 'a', is special in the target's alone$"):
        check_same_tokenizer(own, special, place)
    merging = tiny_tokenizer()
    merging.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(UserError, match=begin + r"\"The quick.*\" is \[54, .* here and \[86, .* in the target's$"):
        check_same_tokenizer(own, merging, place)


def test_two_models_with_one_tokenizer_between_them_are_refused():
    bare, whole = shared_target("llama"), Target(tiny_model(), tiny_tokenizer(), "whole")
    with pytest.raises(UserError, match=r"^drafter\.path=tiny-llama: it has no tokenizer, and both must have the same"):
        DraftModel(bare, whole)
    with pytest.raises(UserError, match=r"^drafter\.path=whole: the target tiny-llama has no tokenizer, and both must"):
        DraftModel(whole, bare)


# --- by name


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def test_by_name(saved, capsys):
    given = [f"target={saved}", "prompt=abc", f"max_tokens={LENGTH}", "device=cpu", "color=never"]
    assert call(generate.main, *given) == 0
    plain = capsys.readouterr().out
    assert call(generate.main, *given, "drafter=draft_model", f"drafter.path={saved}", "tree=chain3") == 0
    out, err = capsys.readouterr()
    assert out.replace("[", "").replace("]", "") == plain.replace("[", "").replace("]", "")
    assert "TPC 3.75" in err or "TPC 4.00" in err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "drafter.path is needed"),
        (["drafter.path=nowhere"], "drafter.path=nowhere: no such directory; give one, or a hub id (USER/NAME)"),
        (["drafter.path=SAVED", "drafter.dtype=int3"], "drafter.dtype=int3: must be one of auto, float32, bfloat16"),
        (["drafter.path=SAVED", "drafter.size=3"], "drafter.size"),
        (["drafter.path=EMPTY"], "drafter.path=EMPTY: "),
    ],
)
def test_mistakes_are_one_line(saved, tmp_path, capsys, overrides, said):
    given = [each.replace("SAVED", str(saved)).replace("EMPTY", str(tmp_path)) for each in overrides]
    assert call(generate.main, f"target={saved}", "prompt=abc", "device=cpu", "drafter=draft_model", *given) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ")
    assert said.replace("EMPTY", str(tmp_path)) in lines[-1]


def test_a_draft_beside_it_is_refused(saved):
    with pytest.raises(UserError, match=r"^draft: drafter=draft_model drafts with drafter\.path=; leave draft= out$"):
        make_draft_model(shared_target("llama"), object(), str(saved))


@pytest.mark.parametrize(("draft", "expected"), [("llama", True), ("qwen3_moe", False)])
def test_experts_of_the_draft_model_prevent_recordings(draft, expected):
    """As those of the target do, unless recordings are asked for."""
    target = shared_target("llama")
    drafters = Drafters({"own": DraftModel(shared_target(draft), target)}, Ranks(), 32)
    with patch.object(Target, "device", torch.device("cuda")):
        assert parts._uses_graphs(None, target, drafters) is expected


def test_one_that_is_offloaded_has_the_host_wait():
    with patch.object(Target, "is_offloaded", True):
        assert DraftModel(shared_target("llama"), shared_target("llama")).needs.waits
