"""Relaxed acceptance, which is lossy, against a plain loop; and that nobody else's answer changes."""

import pytest
import torch

from eagle_train.errors import UserError
from eagle_train.inference import Eagle, Engine, SamplingParams
from eagle_train.inference.decode.relaxed import Relaxed
from eagle_train.inference.decode.row_trees import RowTrees
from eagle_train.inference.decode.sampling import verify_chosen
from eagle_train.inference.decode.tree import full
from eagle_train.inference.drafters.drafter import RowText
from eagle_train.inference.drafters.text_drafter import TextDrafter
from eagle_train.inference.requests.sequence import Thinking
from tests.support.inside import inside
from tests.support.oracle import Oracle
from tests.support.reference_answers import PROMPTS, answers, cut, token_ids
from tests.support.tiny import CHARACTERS, shared_target, tiny_draft, tiny_target, tiny_tokenizer

END = 5
TOKEN_OF = {letter: token for token, letter in enumerate(CHARACTERS, 3)}


def deepest(parents: list[int], tokens: list[int], logits: torch.Tensor, topk: int, delta: float) -> int:
    """The deepest node whose path is accepted, by the words of the option. `logits` [N, V]."""

    def is_accepted(node: int) -> bool:
        if node == 0:
            return True
        parent = parents[node]
        probs = logits[parent].softmax(-1)
        rank = int((probs > probs[tokens[node]]).sum())
        ended, above = False, parent
        while above > 0:
            ended |= tokens[above] == END
            above = parents[above]
        ended |= tokens[0] == END
        near = not ended and rank < topk and probs[tokens[node]] > 0 and probs[tokens[node]] >= probs.max() - delta
        return is_accepted(parent) and (rank == 0 or near)

    def depth(node: int) -> int:
        return 0 if node == 0 else 1 + depth(parents[node])

    accepted = [node for node in range(len(parents)) if is_accepted(node)]
    return max(depth(node) for node in accepted)


@pytest.mark.parametrize(("topk", "delta"), [(1, 0.0), (3, 0.1), (3, 1.0), (7, 0.02), (99, 0.3)])
@pytest.mark.parametrize("by_row", [False, True])
def test_what_is_accepted(topk, delta, by_row):
    torch.manual_seed(topk)
    tree, rows, vocabulary = full(2, 2), 200, 8
    given = tree
    if by_row:
        given = RowTrees(tree.parent.repeat(rows, 1), torch.ones(rows, 7, dtype=torch.bool), 2)
    tokens, logits = torch.randint(vocabulary, (rows, 7)), torch.randn(rows, 7, vocabulary)
    logits[torch.rand_like(logits) < 0.2] = -torch.inf  # what grammars forbid
    tokens[:, 2], tokens[:, 4], tokens[:, 6] = (
        (x + 1) % vocabulary for x in (tokens[:, 1], tokens[:, 3], tokens[:, 5])
    )
    asked = [None if row % 3 == 0 else (max(1, topk // (row % 3)), delta, END) for row in range(rows)]
    relaxed, exact = Relaxed.of(asked, torch.device("cpu")), verify_chosen(tree, tokens, logits.argmax(-1))
    found = relaxed.verify(exact, given, tokens, logits)
    for row in range(rows):
        node = int(found.node[row])
        if asked[row] is None:
            assert (node, int(found.next_token[row])) == (int(exact.node[row]), int(exact.next_token[row]))
            continue
        wanted = deepest(tree.parent.tolist(), tokens[row].tolist(), logits[row], asked[row][0], delta)
        depth = int(given.depths_of(found.node)[row]) if by_row else int(tree.depth[node])
        # Of two accepted siblings a static tree goes on with the first, whose children may all be rejected.
        assert depth == wanted if by_row else depth <= wanted
        assert int(found.next_token[row]) == int(logits[row, node].argmax())
    assert (found.node != exact.node).any() or topk == 1


@pytest.mark.parametrize("other", [None, (1, 1.0, -1), (5, 1.0, -1), (64, 1.0, -1)])
def test_what_a_row_accepts_is_its_own(other):
    """Also among equals, of which `topk` alone would keep others with another row's top-k."""
    torch.manual_seed(0)
    tree, rows, vocabulary = full(1, 3), 400, 64
    tokens, logits = torch.randint(vocabulary, (rows, 4)), torch.randint(4, (rows, 4, vocabulary)).float()
    exact = verify_chosen(tree, tokens, logits.argmax(-1))
    asked = [(3, 1.0, -1)] * (rows - 1)
    found = Relaxed.of([*asked, other], torch.device("cpu")).verify(exact, tree, tokens, logits)
    for row in range(rows - 1):
        best = logits[row, 0].max()  # of 64 tokens in four classes more than three are the most likely ones
        near = [node for node in (1, 2, 3) if logits[row, 0, tokens[row, node]] == best]
        assert int(found.node[row]) == (near[0] if near else 0)


def test_no_row_that_asks_is_no_work():
    assert Relaxed.of([None, None], torch.device("cpu")) is None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["eagle", "oracle"])
def test_an_engine_accepts_more_of_who_asks_and_nobody_else_notices(kind, overlap):
    target = shared_target("llama")
    drafter = Eagle(tiny_draft(target), target) if kind == "eagle" else Oracle(answers("llama"))
    engine = Engine(target, drafter, "d2_bf2", max_batch_size=5, overlap=overlap)
    loose = SamplingParams(max_tokens=16, ignore_eos=True, relaxed_topk=96, relaxed_delta=1.0)
    exact, sampled = (SamplingParams(t, max_tokens=16, ignore_eos=True, seed=3) for t in (0.0, 1.0))
    params = [loose, exact, sampled, loose, exact]
    outputs = engine.generate(PROMPTS, params)
    plain = Engine(target).generate(PROMPTS, [exact, exact, sampled, exact, exact])
    for place in (1, 2, 4):
        assert outputs[place].token_ids == plain[place].token_ids
    assert [output.is_lossy for output in outputs] == [True, False, False, True, False]
    if kind == "eagle":  # whatever is drafted is accepted
        assert set(outputs[0].rounds[:-1]) == {3}
        assert outputs[0].token_ids != plain[0].token_ids


class Repeating(TextDrafter):
    """Drafts the same tokens again and again."""

    timeout_s = None

    def __init__(self, tokens: list[int]):
        self.tokens = tokens

    def draft(self, text: RowText, most: int) -> list[int]:
        return self.tokens


@pytest.mark.parametrize(
    "asked", [{"grammar": {"regex": "[ab]{16}"}}, {"min_tokens": 16, "stop_token_ids": (TOKEN_OF["z"],)}]
)
def test_what_is_forbidden_is_never_near(asked):
    """Of drafts `aza` the first is accepted in each round, whatever the delta."""
    target = tiny_target("llama", tiny_tokenizer())
    drafter = Repeating([TOKEN_OF[letter] for letter in "aza"])
    params = SamplingParams(max_tokens=16, relaxed_topk=96, relaxed_delta=1.0, ignore_eos=True, **asked)
    for output in Engine(target, drafter, "chain3").generate(PROMPTS, params):
        assert TOKEN_OF["z"] not in output.token_ids
        assert len(output.token_ids) == 16
        assert set(output.rounds[:-1]) == {2}


def test_who_has_no_drafter_is_not_relaxed():
    """Rows without drafts repeat their pending token in place of them, which is near enough to be accepted."""
    target = shared_target("llama")
    params = [
        SamplingParams(max_tokens=16, ignore_eos=True, relaxed_topk=96, relaxed_delta=1.0, drafter=name)
        for name in ("none", None, "none", None, "none")
    ]
    outputs = Engine(target, Eagle(tiny_draft(target), target), "d2_bf2", max_batch_size=5).generate(PROMPTS, params)
    for row in (0, 2, 4):
        assert outputs[row].token_ids == answers("llama")[row][:16]
    assert set(outputs[1].rounds[:-1]) == {3}


def test_a_delta_of_0_changes_nothing():
    target = shared_target("llama")
    params = SamplingParams(max_tokens=16, ignore_eos=True, relaxed_topk=10)
    assert token_ids(Engine(target, tiny_draft(target), "d2_bf2").generate(PROMPTS, params)) == cut(answers("llama"))


def test_thinking_is_followed():
    thinking = Thinking(7, 8)
    assert not thinking.is_open
    for token, wanted in ((7, True), (1, True), (8, False), (1, False), (7, True)):
        thinking.read(token)
        assert thinking.is_open == wanted


def test_only_while_it_thinks():
    """Answers are the target's own until it begins to think, and everything is accepted then."""
    target = shared_target("llama")
    answer = answers("llama")[0]
    place = next(i for i in range(3, 10) if answer[i] not in [*PROMPTS[0], *answer[:i]])
    begin = answer[place]
    engine = Engine(target, Eagle(tiny_draft(target), target), "chain2", max_batch_size=1)
    vars(inside(engine).requests)["thinking_ids"] = (begin, 95)
    params = SamplingParams(max_tokens=16, ignore_eos=True, relaxed_topk=96, relaxed_delta=1.0, relaxed_thinking=True)
    (output,) = engine.generate(PROMPTS[:1], params)
    assert output.token_ids[: place + 1] == answer[: place + 1]
    assert output.token_ids != answer[:16]
    assert output.rounds[-2] == 3
    assert output.rounds[0] < 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"relaxed_topk": -1}, "relaxed_topk=-1: must be 0 (off) or more, a whole number"),
        ({"relaxed_topk": 2, "relaxed_delta": 2}, "relaxed_delta=2: must be from 0 to 1"),
        ({"relaxed_delta": 0.5}, "relaxed_delta=0.5: needs relaxed_topk above 0"),
        ({"relaxed_thinking": True}, "relaxed_thinking=True: needs relaxed_topk above 0"),
        ({"relaxed_topk": 2, "temperature": 1.0}, "relaxed_topk=2: is for temperature 0, not 1.0"),
    ],
)
def test_what_it_cannot_be_is_one_line(given, said):
    with pytest.raises(UserError) as error:
        SamplingParams(**given)
    assert str(error.value) == said


def test_a_target_that_does_not_think_is_told():
    with pytest.raises(UserError, match=r"^relaxed_thinking=True: tiny-llama has no tokens <think> and </think>$"):
        Engine(shared_target("llama")).generate([[1]], SamplingParams(relaxed_topk=2, relaxed_thinking=True))
