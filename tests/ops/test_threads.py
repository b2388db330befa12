"""How many threads a round gets: one where waking others costs more than they bring, and as many as before outside."""

import pytest
import torch

from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.runner import _mean_elements as mean_elements
from eagle_train.ops import threads
from eagle_train.ops.threads import LEAST_ELEMENTS, LEAST_WORK, threads_for
from tests.support.inside import runner_of
from tests.support.reference_answers import PROMPTS, answers, token_ids
from tests.support.tiny import shared_target, tiny_draft


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_little_work_has_one_thread():
    large = LEAST_ELEMENTS
    cases = [(1, 9, 1), (LEAST_WORK // 64 - 1, 64, 1), (LEAST_WORK // 64, 64, 3), (1, large - 1, 1), (1, large, 3)]
    for rows, elements, wanted in [*cases, (1, float("inf"), 3)]:
        with threads_for(rows, elements):
            assert torch.get_num_threads() == wanted
        assert torch.get_num_threads() == 3
    with pytest.raises(KeyError), threads_for(1, 1):
        raise KeyError
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("compile", [False, True])
def test_rounds_have_threads_by_their_rows(compile, graphs, monkeypatch):
    """Rows of four nodes that end one by one. What is compiled is so for one number of threads, the largest rounds'."""
    target = shared_target()
    target.compiled_forwards.clear()
    monkeypatch.setattr(threads, "LEAST_WORK", 9 * mean_elements(target))
    engine = Engine(target, tiny_draft(target), "chain3", max_batch_size=4, compile=compile)
    made, seen, validate = len(graphs), set(), runner_of(engine).validate

    def noted(inputs, drafted):
        seen.add((len(drafted.tokens), torch.get_num_threads()))
        return validate(inputs, drafted)

    runner_of(engine).validate = noted
    params = [SamplingParams(max_tokens=4 + 6 * row, ignore_eos=True) for row in range(4)]
    outputs = engine.generate(PROMPTS[:4], params)
    assert seen == {(rows, 3 if compile or rows > 2 else 1) for rows in (1, 2, 3, 4)}
    assert token_ids(outputs) == [answers("llama")[row][: 4 + 6 * row] for row in range(4)]
    assert len(graphs) == made
    assert torch.get_num_threads() == 3
