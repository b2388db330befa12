"""What an engine without recorded rounds runs at its start: whatever is made at its first call is made before requests.

Which kernels a GPU takes for few rows is found by times, for the shape of a weight and the number of rows up to a power
of two. Here the products themselves are noted, of torch.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from eagle_train.inference import Engine, SamplingParams, parts
from eagle_train.inference.decode.calibration import warm_up
from eagle_train.ops.few_rows import MOST_ROWS
from tests.support.inside import inside, runner_of
from tests.support.prompt_lookup import PromptLookup
from tests.support.reference_answers import GREEDY, PROMPTS, answers, cut, token_ids
from tests.support.tiny import random_tokens, shared_target, tiny_draft


class Products(TorchFunctionMode):
    """The shapes of weights that few rows are multiplied with, each with the number of rows up to a power of two."""

    def __init__(self):
        super().__init__()
        self.few: set[tuple] = set()

    def __torch_function__(self, function, types, given=(), named=None):
        if function is F.linear:
            rows = given[0].numel() // given[0].shape[-1]
            if 0 < rows <= MOST_ROWS:
                self.few.add((tuple(given[1].shape), 1 << (rows - 1).bit_length()))
        return function(*given, **named or {})


@pytest.mark.parametrize(
    ("tree", "most"), [(None, 3), ("chain3", 1), ("chain3", 5), ("d2_bf2", 6), ({2: "d2_bf2", 5: "chain1"}, 5)]
)
def test_no_product_of_few_rows_is_new_to_requests(tree, most):
    target = shared_target()
    given = {} if tree is None else {"draft": tiny_draft(target), "tree": tree}
    engine = Engine(target, **given, max_batch_size=most, linear="plain")
    inside(engine).memory.reserve_least()
    with Products() as known:
        warm_up(runner_of(engine), engine.dispatcher)
    with Products() as asked:
        for count in range(1, most + 1):
            lengths = range(2, 2 + 3 * count, 3)
            params = [SamplingParams(float(i % 2), max_tokens=4 + 2 * i, ignore_eos=True) for i in range(count)]
            engine.generate(random_tokens(*lengths), params)
    assert asked.few
    assert asked.few <= known.few


def test_it_changes_nothing(monkeypatch):
    monkeypatch.setattr(parts, "_has_own_kernels", lambda target: True)
    target = shared_target()
    for draft in (None, tiny_draft(target), PromptLookup()):
        engine = Engine(target, draft, "chain3", max_batch_size=2)
        assert engine.stage_times.runs == {}
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("llama"))


def test_it_is_for_gpus_whose_rounds_are_not_recorded(monkeypatch):
    asked = []
    monkeypatch.setattr(parts, "warm_up", lambda runner, dispatcher: asked.append(runner))
    Engine(shared_target())
    assert asked == []
    monkeypatch.setattr(parts, "_has_own_kernels", lambda target: True)
    engine = Engine(shared_target())
    assert asked == [runner_of(engine)]
    monkeypatch.setattr(parts, "_uses_graphs", lambda graphs, target, drafters: True)
    monkeypatch.setattr(parts, "record", lambda *given: None)
    monkeypatch.setattr(parts, "CudaGraphs", lambda device: None)
    Engine(shared_target())
    assert len(asked) == 1


def test_an_offloaded_targets_rounds_take_too_long():
    devices = [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)]
    for kind, is_offloaded, wanted in devices:
        target = SimpleNamespace(device=torch.device(kind), is_offloaded=is_offloaded)
        assert parts._has_own_kernels(target) == wanted
