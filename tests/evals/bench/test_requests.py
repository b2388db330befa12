"""Prompts of a given length, arrival times, and room for them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats

from eagle_train.errors import UserError
from eagle_train.inference import Eagle, Engine, Requests, SamplingParams
from eagle_train.inference.cache.block_pool import blocks_for
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.drafters.ngram import Ngram
from eagle_train.inference.drafters.suffix import Suffix
from eagle_train.inference.lookup.ngrams import NgramOptions
from eagle_train.inference.lookup.suffixes import SuffixOptions
from eagle_train.models.loading import TargetConfig, load_target
from evals.bench.questions import Question, read_questions
from evals.bench.requests import PromptSource, arrival_times, chat_tokens, prompt_hash, room_for
from examples.own_drafter import LastPlace
from tests.support.eval_inputs import make_home
from tests.support.inside import scheduler_of
from tests.support.tiny import random_tokens, shared_target, tiny_draft


def test_arrivals_are_a_poisson_process_of_the_rate():
    times = torch.tensor(arrival_times(4000, 5.0, seed=1), dtype=torch.float64)
    gaps = torch.diff(times, prepend=times.new_zeros(1))
    assert times[-1].item() == pytest.approx(4000 / 5, rel=0.05)
    assert stats.kstest(gaps.numpy(), "expon", args=(0, 1 / 5)).pvalue > 0.01
    assert arrival_times(9, 5.0, seed=1) == times[:9].tolist() != arrival_times(9, 5.0, seed=2)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("latency"))


@pytest.fixture(scope="module")
def prompts(home) -> PromptSource:
    target = load_target(TargetConfig(str(home / "target")), "cpu")
    return PromptSource(Requests(target), read_questions(str(home / "questions.jsonl")), SamplingParams(max_tokens=9))


@pytest.mark.parametrize("length", [1, 5, 20, 100, 200])
def test_contexts_are_exact(prompts, length):
    batches = prompts.batches(2, 2, length)
    assert [[len(each.prompt) for each in batch] for batch in batches] == [[length] * 2] * 2
    texts = [tokens for _, tokens in prompts.texts]
    first, joined = batches[0][0].prompt, texts[1] + texts[2] + texts[0]
    assert first[-min(length, len(joined)) :] == joined[-length:]
    assert [each.params.seed for batch in batches for each in batch] == [0, 1, 2, 3]


def test_a_prompts_hash_is_that_of_what_was_asked(prompts):
    """Of the chat up to its turn, with the template, whatever the target answered before."""
    question = Question(1, "a", None, [{"role": "user", "content": "h"}], ["b", "c", "d"])

    def hashes(**changes) -> list[str]:
        changed = replace(question, **changes)
        return [prompt_hash(Requests(prompts.target), changed, turn) for turn in range(1, len(changed.turns) + 1)]

    first, second, third = hashes()
    assert len({first, second, third}) == 3
    assert hashes(line=9, id=9, turns=["b", "c"]) == [first, second]
    assert hashes(turns=["b", "x", "d"])[0] == first
    assert not {second, third} & {*hashes(turns=["b", "x", "d"])}
    assert not {first, second, third} & {*hashes(history=[])}


def test_questions_as_they_are_are_taken_evenly_over_the_file(prompts):
    of = {tuple(tokens): question.id for question, tokens in prompts.texts}
    ids = [[of[tuple(each.prompt)] for each in batch] for batch in prompts.batches(2, 1, None)]
    assert ids == [[81], [82]]
    assert [of[tuple(batch[0].prompt)] for batch in prompts.batches(4, 1, None)] == [81, 82, 101, 81]


def test_a_prompt_that_leaves_no_room_is_refused(prompts):
    with pytest.raises(UserError, match=r"max_tokens=9: a prompt has 250 tokens, and the context of \S+ 256$"):
        prompts.batches(1, 1, 250)


@pytest.mark.parametrize(
    ("make", "tree"),
    [
        (lambda target: Eagle(tiny_draft(target), target), "d3_bf2"),
        (lambda target: LastPlace(1), "d2_bf4"),
        (lambda target: Ngram(NgramOptions(max_draft_len=32)), "chain3"),
        (lambda target: Suffix(SuffixOptions(max_nodes=64)), "chain3"),
    ],
)
def test_room_is_for_what_the_drafter_proposes(make, tree):
    """As much as the engine asks for, where drafters have trees of their own."""
    (prompt,), target = random_tokens(32), shared_target()
    drafter = make(target)
    room = room_for(1, 40, tree, drafter)
    engine = Engine(target, drafter, tree, max_batch_size=1, kv_tokens=room)
    assert room == (blocks_for(40 + scheduler_of(engine).ahead) + 1) * BLOCK
    (output,) = engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(output.token_ids) == 8


def test_a_variable_that_the_template_does_not_read_is_told_by_its_key(prompts):
    question = Question(1, 1, None, [], ["a"], variables={"enable_thinking": False}, key="tasks.own")
    with pytest.raises(UserError, match=r"^tasks\.own\.thinking=false: the chat template of .* reads no "):
        chat_tokens(Requests(prompts.target), question, [{"role": "user", "content": "a"}], "question 1")
