"""The target's own layers draft: its own tokens come out, and no layer computes a node twice."""

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from eagle_train import generate
from eagle_train.errors import UserError
from eagle_train.inference import DraftModel, Engine, LayerSkip, SamplingParams
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.decode.row_trees import dynamic
from eagle_train.inference.drafters.layer_skip import make_layer_skip
from eagle_train.models.target import Target
from tests.support.command_line import call, save_target
from tests.support.graph_recorder import recorded
from tests.support.inside import scheduler_of
from tests.support.reference_answers import GREEDY, PROMPTS, TREES, cut, token_ids
from tests.support.tiny import FAMILIES, continued, tiny_model, tiny_target

LENGTH = 16
SETS = [2, [0, 2], [1, 2]]


def model_of(family: str) -> PreTrainedModel:
    """Its later layers change little, so that the first ones draft well."""
    model = tiny_model(family)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            for name, weight in layer.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    weight.mul_(0.3)
    return model


@cache
def target_of(family: str) -> Target:
    return Target(model_of(family), name=family)


@cache
def answers(family: str) -> list[list[int]]:
    return [continued(target_of(family), prompt, LENGTH + 10) for prompt in PROMPTS]


@cache
def rounds(family: str, tree: str) -> list[list[int]]:
    """The numbers of tokens in the rounds of each prompt, decoded alone."""
    target = target_of(family)
    engine = Engine(target, LayerSkip(target, 2), tree, max_batch_size=1)
    return [engine.generate([prompt], GREEDY)[0].rounds for prompt in PROMPTS]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_targets_own(family):
    target, counts = target_of(family), []
    for tree in TREES if family == "llama" else ["n8"]:
        for layers in SETS:
            outputs = Engine(target, LayerSkip(target, layers), tree, max_batch_size=2).generate(PROMPTS, GREEDY)
            assert token_ids(outputs) == cut(answers(family))
        counts += [count for each in rounds(family, tree) for count in each]
    assert 1.2 < sum(counts) / len(counts) < 3.9, "both acceptance and rejection must be common"


@pytest.mark.parametrize("tree", ["chain3", "n8"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_tokens": 4 * BLOCK},
        {"tree_attention": "joint"},
    ],
)
def test_rows_have_the_rounds_that_each_has_alone(family, tree, options):
    target = target_of(family)
    engine = Engine(target, LayerSkip(target, 2), tree, **{"max_batch_size": 3} | options)
    preempted, preempt = [], scheduler_of(engine).preempt
    scheduler_of(engine).preempt = lambda sequence: preempted.append(sequence) or preempt(sequence)
    for _ in range(2):
        outputs = engine.generate(PROMPTS, GREEDY)
        assert token_ids(outputs) == cut(answers(family))
        assert [output.rounds for output in outputs] == rounds(family, tree)
    if family == "llama":
        assert bool(preempted) == ("kv_tokens" in options)


def test_with_recordings_it_drafts_without():
    target = target_of("llama")
    engine = recorded(Engine(target, LayerSkip(target, 2), "n8", max_batch_size=3))
    outputs = engine.generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == cut(answers("llama"))
    assert [output.rounds for output in outputs] == rounds("llama", "n8")


def test_all_layers_draft_what_the_target_says():
    target = target_of("llama")
    for output in Engine(target, LayerSkip(target, 3), "chain3").generate(
        PROMPTS, SamplingParams(max_tokens=21, ignore_eos=True)
    ):
        assert output.rounds == [4] * 5


@pytest.mark.parametrize("tree", [dynamic(6, 3, 2), dynamic(8, 4, 3), dynamic(3, 1, 3)], ids=str)
def test_a_dynamic_tree_is_that_of_a_model_of_these_layers(tree):
    """Which reads the tokens for itself."""
    target, small = target_of("llama"), model_of("llama")
    small.model.layers, small.config.num_hidden_layers = small.model.layers[:2], 2
    found = []
    for drafter in (LayerSkip(target, 2), DraftModel(Target(small, name="small"), target)):
        outputs = Engine(target, drafter, tree, max_batch_size=3).generate(PROMPTS, GREEDY)
        assert token_ids(outputs) == cut(answers("llama"))
        found.append([output.rounds for output in outputs])
    assert found[0] == found[1]
    assert max(max(rounds) for rounds in found[0]) > min(tree.max_depth, 3)


@pytest.mark.parametrize("layers", SETS)
def test_a_dynamic_tree_of_layers_with_windows(layers):
    target = target_of("gemma2")
    engine = Engine(target, LayerSkip(target, layers), dynamic(6, 3, 2), max_batch_size=3, overlap=True)
    assert token_ids(engine.generate(PROMPTS, GREEDY)) == cut(answers("gemma2"))


@pytest.mark.parametrize(("tree", "nodes"), [("chain3", 4), ("d2_bf2", 7), ("n8", 9)])
@pytest.mark.parametrize(("layers", "shared"), [(2, 2), (3, 3), ([0, 2], 1), ([1, 2], 0)])
def test_each_layer_computes_each_node_once(tree, nodes, layers, shared):
    """Those of the first layers that draft; the others once more, for the validation."""
    target, seen = target_of("llama"), dict.fromkeys(range(3), 0)
    engine = Engine(target, LayerSkip(target, layers), tree)
    own = target.model.model.layers
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda _, __, kwargs, out, number=number: seen.update({number: seen[number] + out[0].shape[1]}),
            with_kwargs=True,
        )
        for number, layer in enumerate(own)
    ]
    engine.add(PROMPTS[0], GREEDY)
    engine.step()
    inner = engine.dispatcher.dispatch(1).inner
    seen.update(dict.fromkeys(range(3), 0))
    engine.step()
    for hook in hooks:
        hook.remove()
    drafting = range(layers) if isinstance(layers, int) else layers
    for number in range(3):
        again = len(inner) if number in drafting and number >= shared else 0
        assert seen[number] == nodes + again


def test_beside_another_drafter_each_row_has_its_own():
    target = target_of("llama")
    drafters = {"two": LayerSkip(target, 2), "all": LayerSkip(target, 3)}
    params = [
        SamplingParams(max_tokens=16, ignore_eos=True, drafter=name) for name in ("two", "all", "none", None, "all")
    ]
    outputs = Engine(target, drafters, "n8").generate(PROMPTS, params)
    assert token_ids(outputs) == cut(answers("llama"))
    assert [outputs[row].rounds for row in (0, 3)] == [rounds("llama", "n8")[row] for row in (0, 3)]


# --- who cannot


@pytest.mark.parametrize("wrong", [0, 4, -1, True, [], [0, 3], [1, 0], [0, 0], [0, "1"], 1.5, {"a": 1}])
def test_layers_that_are_none_are_one_line(wrong):
    said = r"^drafter\.layers=.*: must be how many of the first layers, 1 to 3, or a list of layers from 0 to 2, ascend"
    with pytest.raises(UserError, match=said):
        LayerSkip(target_of("llama"), wrong)


def test_layers_that_share_keys_are_refused():
    with pytest.raises(UserError, match=r"^target tiny-gemma4: layers of this family .* in parts: some use the keys"):
        LayerSkip(tiny_target("gemma4"), 2)


def test_a_family_whose_parts_are_not_the_whole_is_refused():
    """Its last layer reads the output of the first one besides."""
    target, carried = tiny_target(), {}
    LayerSkip(target, 2)
    first, *_, last = target.model.model.layers
    first.register_forward_hook(lambda _, __, out: carried.update(first=out))
    last.register_forward_hook(lambda _, __, out: out + carried["first"])
    with pytest.raises(UserError, match=r"^target tiny-llama: layers of this family \(llama\) cannot be run in parts"):
        LayerSkip(target, 2)


# --- by name


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def test_by_name(saved, tmp_path, capsys):
    given = [f"target={saved}", "prompt=abc", "max_tokens=12", "device=cpu", "color=never"]
    assert call(generate.main, *given) == 0
    plain = capsys.readouterr().out
    (tmp_path / "found.yaml").write_text("layers: [0, 1, 2]\n")
    for layers in ("3", "[0,1,2]", str(tmp_path / "found.yaml")):
        assert call(generate.main, *given, "drafter=layer_skip", f"drafter.layers={layers}", "tree=chain3") == 0
        out, err = capsys.readouterr()
        assert out.replace("[", "").replace("]", "") == plain.replace("[", "").replace("]", "")
        assert "TPC 3.67" in err


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (None, "drafter.layers is needed"),
        ("9", "drafter.layers=9: must be how many of the first layers, 1 to 3, or"),
        ("nowhere", "drafter.layers=nowhere: no such file; give a number, a list, or a YAML with `layers`"),
        ("EMPTY", "must have the key `layers`, a list"),
    ],
)
def test_mistakes_are_one_line(saved, tmp_path, capsys, layers, said):
    (tmp_path / "empty.yaml").write_text("a: 1\n")
    given = [] if layers is None else [f"drafter.layers={layers.replace('EMPTY', str(tmp_path / 'empty.yaml'))}"]
    assert call(generate.main, f"target={saved}", "prompt=abc", "device=cpu", "drafter=layer_skip", *given) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ")
    assert said in lines[-1]


def test_a_draft_beside_it_is_refused():
    with pytest.raises(
        UserError, match=r"^draft: drafter=layer_skip drafts with the target's own layers; leave draft= "
    ):
        make_layer_skip(target_of("llama"), object(), 2)
