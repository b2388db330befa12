"""tree=dynamic: the draft's most probable nodes, against plain recursion over whole texts; and the engine with it."""

import heapq

import pytest
import torch

from eagle_train.drafts import shift_hidden
from eagle_train.errors import OptionError, UserError
from eagle_train.inference import Eagle, Engine, SamplingParams, TextDrafter
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.decode.named_trees import load_tree
from eagle_train.inference.decode.row_trees import DynamicTree, dynamic
from eagle_train.inference.drafters.drafter import Needs
from eagle_train.inference.drafters.ngram import Ngram
from eagle_train.inference.lookup.ngrams import NgramOptions
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from tests.support.inside import drafter_of
from tests.support.reference_answers import GREEDY, PROMPTS, answers, cut, token_ids
from tests.support.tiny import shared_target, tiny_draft

NODES, DEPTH, TOP_K = 7, 3, 3
SMALL = dynamic(NODES, DEPTH, TOP_K)
FAMILIES = ["llama", "gemma2", "qwen3_moe"]


def next_logs(drafter: Eagle, text: list[int], drafted: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft's log-probabilities [V] and states [H] after a text and drafted tokens, token by token: the state above
    a drafted one is the draft's own."""
    target: Target = drafter.target
    whole = torch.tensor([text + drafted])
    places = torch.arange(whole.shape[1])[None]
    hidden = target.hidden_states(whole[:, : len(text)], places[:, : len(text)], packed_attention([[len(text)]]))
    above = shift_hidden(hidden, places[:, : len(text)])
    for count in range(len(drafted) + 1):
        length = len(text) + count
        attend = packed_attention([[length]])
        states = drafter.draft(target.embed(whole[:, :length]), above, places[:, :length], attend)
        above = torch.cat((above, states[:, -1:]), 1)
    return drafter.head.lm_head(states[0, -1]).float().log_softmax(-1), states[0, -1]


def twin(drafter: Eagle, text: list[int], tree: DynamicTree) -> set[tuple[int, ...]]:
    """The paths of the tree's nodes, by EAGLE-2's words."""
    seen: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(tree.max_depth):
        level = []
        for log, path in frontier:
            best = next_logs(drafter, text, list(path))[0].topk(tree.top_k)
            level += [(log + own, (*path, token)) for own, token in zip(*(x.tolist() for x in best), strict=True)]
        seen += level
        frontier = heapq.nlargest(tree.top_k, level)
    return {path for _, path in heapq.nlargest(tree.num_nodes - 1, seen)}


def paths_of(tokens: torch.Tensor, parents: torch.Tensor) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:].tolist(), parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


@torch.no_grad()
@pytest.mark.parametrize("alignment", ["accepted", "last"])
@pytest.mark.parametrize("tree", [SMALL, dynamic(4, 4, 2), dynamic(3, 1, 3), dynamic(5, 5, 1)], ids=str)
def test_the_trees_are_the_most_probable_nodes(tree, alignment):
    """In every first round, of each row."""
    target = shared_target("llama")
    engine = Engine(target, Eagle(tiny_draft(target), target, alignment), tree, max_batch_size=5)
    drafter, rounds = drafter_of(engine), []
    propose = drafter.propose
    drafter.propose = lambda round: rounds.append((round, propose(round))) or rounds[-1][1]
    engine.generate(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True))
    round, drafted = rounds[0]
    assert drafted.tokens.shape == (5, tree.num_nodes)
    for row in range(5):
        text = PROMPTS[row] + [int(round.pending.last[row])]
        assert paths_of(drafted.tokens[row], drafted.trees.parents[row]) == twin(drafter, text, tree)
    assert len({tuple(row) for row in drafted.trees.parents.tolist()}) > 1 or tree.top_k == 1 or tree.max_depth == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [{"overlap": True}, {"kv_tokens": 6 * BLOCK, "prefill_tokens": 7, "prefix_cache": True}],
)
def test_a_draft_that_reads_last_tokens_alone(family, options):
    """Of the other alignment test_every_drafter.py has the proof."""
    target = shared_target(family)
    engine = Engine(target, Eagle(tiny_draft(target), target, "last"), SMALL, **{"max_batch_size": 3} | options)
    for _ in range(2):
        outputs = engine.generate(PROMPTS, GREEDY)
        assert token_ids(outputs) == cut(answers(family))
    if "kv_tokens" not in options:
        alone = Engine(target, Eagle(tiny_draft(target), target, "last"), SMALL)
        assert [alone.generate([prompt], GREEDY)[0].rounds for prompt in PROMPTS] == [x.rounds for x in outputs]


@pytest.mark.parametrize("alignment", ["accepted", "last"])
def test_a_draft_that_is_right_is_accepted_to_the_end(alignment, monkeypatch):
    """With the target's own next tokens as the most probable ones: all levels, and so the keys and values that stay."""
    target = shared_target("llama")
    engine = Engine(target, Eagle(tiny_draft(target), target, alignment), dynamic(6, 3, 2), max_batch_size=1)
    drafter, answer = drafter_of(engine), answers("llama")[0]
    place = {"at": 0}

    def best(hidden: torch.Tensor, count: int, allowed: None) -> tuple[torch.Tensor, torch.Tensor]:
        place["at"] += 1
        right = answer[place["base"] + place["at"]] if place["base"] + place["at"] < len(answer) else 0
        tokens = torch.tensor([right, (right + 1) % 96]).expand(1, hidden.shape[1], 2)
        return tokens, torch.tensor([-0.1, -2.0]).expand(1, hidden.shape[1], 2)

    propose = drafter.propose

    def at(round):
        place["base"], place["at"] = int(round.prefix.longest) - len(PROMPTS[0]), 0
        return propose(round)

    monkeypatch.setattr(drafter, "best", best)
    monkeypatch.setattr(drafter, "propose", at)
    (output,) = engine.generate(PROMPTS[:1], GREEDY)
    assert output.token_ids == cut(answers("llama"))[0]
    assert set(output.rounds[:-1]) == {4}


def test_with_a_gate_and_with_others():
    target = shared_target("llama")
    gated = Engine(target, tiny_draft(target), SMALL, gate=True)
    assert token_ids(gated.generate(PROMPTS, GREEDY)) == cut(answers("llama"))
    drafters = {name: Eagle(tiny_draft(target), target) for name in ("a", "b")}
    params = [SamplingParams(max_tokens=16, ignore_eos=True, drafter=name) for name in ("a", "b", "none", "a", None)]
    assert token_ids(Engine(target, drafters, SMALL).generate(PROMPTS, params)) == cut(answers("llama"))


class Checked(Eagle):
    needs = Needs(grows=True)


def test_a_drafter_of_anyones_own_may_grow_one(recwarn):
    target, rounds = shared_target("llama"), []
    for kind in (Checked, Eagle):
        outputs = Engine(target, kind(tiny_draft(target), target), SMALL, max_batch_size=3).generate(PROMPTS, GREEDY)
        assert token_ids(outputs) == cut(answers("llama"))
        rounds.append([output.rounds for output in outputs])
    assert rounds[0] == rounds[1]
    assert not [each for each in recwarn if "drafter" in str(each.message)]


class Texts(TextDrafter):
    def draft(self, text, most):
        return []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0, 1, 1), "tree.nodes is 0; it must be a whole number, at least 1"),
        ((4, 5, 1), "tree.depth is 5; it must be at most tree.nodes, 4"),
        ((9, 2, 2), "tree.nodes is 9; depth=2 and top_k=2 see 6 nodes at most"),
    ],
)
def test_what_is_no_dynamic_tree_is_one_line(given, said):
    with pytest.raises(UserError, match=f"^{said}$"):
        dynamic(*given)


def test_who_cannot_grow_one_is_told():
    target = shared_target("llama")
    assert load_tree("dynamic") == dynamic(8, 5, 4)
    with pytest.raises(UserError, match=r"^tree=dynamic: Texts has no probabilities by which a tree could grow"):
        Engine(target, Texts(), "dynamic")
    with pytest.raises(UserError, match=r"^tree=dynamic: Ngram has no probabilities by which a tree could grow"):
        Engine(target, Ngram(NgramOptions()), "dynamic")
    with pytest.raises(OptionError, match=r"^drafting=multinomial: trees that differ by row are not drawn; use"):
        Engine(target, tiny_draft(target), "dynamic", drafting="multinomial")
