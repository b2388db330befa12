"""Mistakes of a user's drafter: they stay with their request, which goes on without drafts after one warning."""

import gc
import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eagle_train.errors import UserError
from eagle_train.inference import Engine, OpenTree, SamplingParams
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.decode.row_trees import RowTrees
from eagle_train.inference.drafters.drafter import Drafted, Drafter, DraftRound, Needs, Pending, RowText
from eagle_train.inference.drafters.text_drafter import TextDrafter, TextTree
from eagle_train.models.target import Target
from tests.support.graph_recorder import recorded
from tests.support.inside import pool_of
from tests.support.prompt_lookup import PromptLookup, Unread
from tests.support.reference_answers import GREEDY, PROMPTS, answers, cut, token_ids
from tests.support.tiny import random_tokens, repeating_target, shared_target, tiny_model, tiny_tokenizer


class Wrong(Drafter):
    """Proposes what `make` makes of right tokens int64 [A, N], and rewinds to `left` of what was committed."""

    def __init__(self, make: Callable[[torch.Tensor], Any], left: Callable[[Any], Any] = lambda pending: pending):
        self.make, self.left = make, left

    def propose(self, round: DraftRound) -> Drafted:
        made = self.make(round.pending.last.repeat(1, round.plan.tree.num_nodes))
        return Drafted(made) if isinstance(made, torch.Tensor) else made

    def rewind(self, round, drafted, outcome):
        return self.left(outcome.pending)


class Open(Wrong):
    """Of trees that differ by row."""

    needs = Needs(tree=OpenTree(7, 3), by_row=True)


class Recordable(Wrong):
    needs = Needs(waits=False)


def decoded(drafter: Drafter, params: SamplingParams = GREEDY, **options: Any) -> tuple[list[list[int]], list[str]]:
    """The answers, and the warnings that came with them."""
    engine = Engine(shared_target("llama"), drafter, "d2_bf2", max_batch_size=2, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = token_ids(engine.generate(PROMPTS, params))
    return found, [str(each.message) for each in said]


@pytest.mark.parametrize(
    "make",
    [
        lambda right: right.fill_(7),
        lambda right: right.new_full((), 7).expand_as(right),
        lambda right: Drafted(right, computed=object()),
    ],
)
def test_another_token_at_the_root_or_a_computed_forward_changes_no_answer(make):
    assert decoded(Wrong(make)) == (cut(answers("llama")), [])


def test_a_tensor_that_the_drafter_keeps_is_not_written_to():
    kept = torch.full((2, 7), 7)
    decoded(Wrong(lambda right: kept[: len(right)]))
    assert (kept == 7).all()


def trees(*parents: int) -> Callable[[torch.Tensor], Drafted]:
    """Each row the tree with these parents."""

    def make(right: torch.Tensor) -> Drafted:
        table = torch.tensor(parents).repeat(len(right), 1)
        return Drafted(right, trees=RowTrees(table, torch.ones_like(table, dtype=torch.bool), 3))

    return make


def failing(right: torch.Tensor) -> Drafted:
    raise RuntimeError("two words\nand a second line")


def told(reason: str, name: str = "wrong") -> list[str]:
    return [f"drafter {name}: {reason}; request {index} goes on without drafts" for index in range(len(PROMPTS))]


WRONG_VALUES = (
    "it proposed tokens outside the vocabulary, probabilities that are NaN, negative or not 1 in sum, or no tree"
)
FAULTS = "it must be a mapping from rows, 0 to 0, to reasons"
MISTAKES = [
    (lambda right: None, "drafter Wrong: propose returned NoneType; it must return a Drafted"),
    (lambda right: (right, None), "drafter Wrong: propose returned tuple; it must return a Drafted"),
    (lambda right: Drafted(right.tolist()), "drafter Wrong: propose gave tokens as list; it must be a tensor [1, 7]"),
    (lambda right: right[:, :3], "drafter Wrong: propose gave tokens of shape [1, 3]; it must be [1, 7]"),
    (lambda right: right[0], "drafter Wrong: propose gave tokens of shape [7]; it must be [1, 7]"),
    (lambda right: right.to("meta"), "drafter Wrong: propose gave tokens on meta; it must be on cpu"),
    (lambda right: right.float(), "drafter Wrong: propose gave tokens of torch.float32; they must be torch.int64"),
    (
        lambda right: Drafted(right, torch.zeros(len(right), 7, 3)),
        "drafter Wrong: propose gave q of shape [1, 7, 3]; it must be [1, 7, 96]",
    ),
    (
        trees(0, 0, 0, 1, 1, 2, 2),
        "drafter Wrong: propose must give trees if Needs.by_row is set or the tree is dynamic, and not else",
    ),
    (
        lambda right: Drafted(right, torch.ones(len(right), 7, 96, dtype=torch.long)),
        "drafter Wrong: propose gave q of torch.int64; it must be a floating type",
    ),
    (
        lambda right: Drafted(right, faults={len(right): "a"}),
        f"drafter Wrong: propose gave faults={{1: 'a'}}; {FAULTS}",
    ),
    (lambda right: Drafted(right, faults={-1: "a"}), f"drafter Wrong: propose gave faults={{-1: 'a'}}; {FAULTS}"),
    (lambda right: Drafted(right, faults=["a"]), f"drafter Wrong: propose gave faults=['a']; {FAULTS}"),
    (failing, "two words"),
    (lambda right: right + 96, WRONG_VALUES),
    (lambda right: right * 0 - 1, WRONG_VALUES),
    (lambda right: Drafted(right, torch.full((len(right), 7, 96), torch.nan)), WRONG_VALUES),
    (lambda right: Drafted(right, torch.full((len(right), 7, 96), -1.0)), WRONG_VALUES),
    (lambda right: Drafted(right, torch.full((len(right), 7, 96), 0.5)), WRONG_VALUES),
    (lambda right: Drafted(right, torch.full((len(right), 7, 96), 0.0101)), WRONG_VALUES),
]


@pytest.mark.parametrize(("make", "reason"), MISTAKES)
def test_what_is_no_draft_is_one_warning_of_each_request(make, reason):
    found, said = decoded(Wrong(make))
    assert found == cut(answers("llama"))
    assert sorted(said) == sorted(told(reason))


@pytest.mark.parametrize(
    "parents",
    [(0, 2, 1, 1, 1, 1, 1), (0, 1, 0, 0, 0, 0, 0), (0, -1, 0, 0, 0, 0, 0), (0, 9, 0, 0, 0, 0, 0), range(-1, 6)],
)
def test_what_is_no_tree_is_one_warning_of_each_request(parents):
    """Cycles, nodes that are none, and what is deeper than it may be."""
    found, said = decoded(Open(trees(*parents)))
    assert found == cut(answers("llama"))
    assert sorted(said) == sorted(told(WRONG_VALUES, "open"))
    assert decoded(Open(trees(0, 0, 0, 1, 1, 2, 2))) == (cut(answers("llama")), [])


@pytest.mark.parametrize("change", [("trees.parents", torch.float32), ("trees.real", torch.int64)])
def test_trees_of_another_type_are_one_warning_of_each_request(change):
    name, dtype = change

    def make(right: torch.Tensor) -> Drafted:
        drafted = trees(0, 0, 0, 1, 1, 2, 2)(right)
        field = name.removeprefix("trees.")
        setattr(drafted.trees, field, getattr(drafted.trees, field).to(dtype))
        return drafted

    right = torch.int64 if name == "trees.parents" else torch.bool
    found, said = decoded(Open(make))
    assert found == cut(answers("llama"))
    assert sorted(said) == sorted(told(f"drafter Open: propose gave {name} of {dtype}; they must be {right}", "open"))


def test_other_trees_are_one_warning_of_each_request():
    found, said = decoded(Open(lambda right: Drafted(right, trees=[[0] * 7] * len(right))))
    assert found == cut(answers("llama"))
    assert sorted(said) == sorted(told("drafter Open: propose gave trees as list; they must be RowTrees", "open"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_probabilities_are_right_as_far_as_their_type_can_say(dtype):
    """And where leaves have none."""

    def make(right: torch.Tensor) -> Drafted:
        q = (9 * torch.rand(*right.shape, 96)).softmax(-1)
        q[:, 0, 2:], q[:, 0, :2] = 0, torch.tensor([0.6, 0.4])
        q[:, 3:] = 0
        return Drafted(right, q.to(dtype))

    assert decoded(Wrong(make)) == (cut(answers("llama")), [])


@pytest.mark.parametrize("wrong", [torch.nan, 1.0])
def test_some_wrong_probabilities_leave_a_seed_its_tokens(wrong):
    """A row with one NaN in q, or a sum above 1, is verified without q."""

    def some(right: torch.Tensor) -> Drafted:
        q = torch.rand(*right.shape, 96).softmax(-1)
        q[..., 5] = wrong
        return Drafted(right, q)

    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    plain = token_ids(Engine(shared_target("llama")).generate(PROMPTS, params))
    found, said = decoded(Wrong(some), params, drafting="multinomial")
    assert found == plain
    assert sorted(said) == sorted(told(WRONG_VALUES))


@pytest.mark.parametrize(
    ("left", "reason"),
    [
        (lambda pending: None, "returned NoneType; it must return the Pending it was given, or the newest of it"),
        (
            lambda pending: replace(pending, tokens=pending.tokens[0]),
            "gave no tokens; it must return the Pending it was given, or the newest of it",
        ),
        (lambda pending: replace(pending, counts=[1]), "gave counts as list; it must be a tensor [1]"),
        (lambda pending: replace(pending, counts=pending.counts[:0]), "gave counts of shape [0]; it must be [1]"),
        (
            lambda pending: replace(pending, counts=pending.counts.float()),
            "gave counts of torch.float32; they must be torch.int64",
        ),
        (lambda pending: 1 / 0, None),
    ],
)
def test_a_rewind_that_returns_no_pending_is_one_warning_of_each_request(left, reason):
    found, said = decoded(Wrong(lambda right: right, left=left))
    assert found == cut(answers("llama"))
    assert sorted(said) == sorted(told("division by zero" if reason is None else f"drafter Wrong: rewind {reason}"))


class Rewinding(PromptLookup):
    """Right at times, and rewinds to what `left` makes of what it was given and of what was committed."""

    def __init__(self, left: Callable[[Pending, Pending], Pending]):
        super().__init__()
        self.left = left

    def rewind(self, round, drafted, outcome):
        return self.left(round.pending, outcome.pending)


@pytest.mark.parametrize("how", ["alone", "beside another", "recorded"])
@pytest.mark.parametrize(
    "left",
    [
        lambda old, new: old,
        lambda old, new: replace(new, tokens=new.tokens + 1),
        lambda old, new: replace(new, hidden=new.hidden * torch.nan, lengths=new.lengths - 3),
        lambda old, new: replace(new, counts=new.counts * 0 - 1),
        lambda old, new: replace(new, counts=new.counts + 9),
        lambda old, new: replace(new, tokens=new.tokens[:, :1]),
        lambda old, new: replace(new, tokens=new.tokens.repeat(1, 9)),
    ],
    ids=["old", "tokens", "states", "none", "many", "narrow", "wide"],
)
def test_no_rewind_changes_an_answer(left, how):
    target, params = repeating_target(), replace(GREEDY, max_tokens=24)
    drafter = {"a": Rewinding(left), "b": PromptLookup()} if how == "beside another" else Rewinding(left)
    engine = Engine(target, drafter, "chain3", max_batch_size=3)
    if how == "recorded":
        recorded(engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = engine.generate(PROMPTS, params)
    assert token_ids(outputs) == token_ids(Engine(target).generate(PROMPTS, params))
    assert max(max(output.rounds) for output in outputs) > 1


@pytest.mark.parametrize(
    ("make", "left", "said"),
    [
        (lambda right: right.float(), lambda pending: pending, r"propose gave tokens of torch\.float32; they must be"),
        (lambda right: right, lambda pending: None, r"rewind returned NoneType; it must return the Pending"),
    ],
)
def test_what_is_recorded_is_checked_before_any_request(make, left, said):
    with pytest.raises(UserError, match=f"^drafter Recordable: {said}"):
        recorded(Engine(shared_target("llama"), Recordable(make, left), "d2_bf2"))


class Picky(Drafter):
    """In one of its methods it raises where a row's pending token is the second one of the first answer."""

    def __init__(self, method: str):
        self.method = method

    def look(self, method: str, round: DraftRound) -> None:
        if method == self.method and (round.pending.last == answers("llama")[0][1]).any():
            raise ValueError("not this one")

    def propose(self, round: DraftRound) -> Drafted:
        self.look("propose", round)
        return Drafted(round.pending.last.repeat(1, round.plan.tree.num_nodes))

    def rewind(self, round, drafted, outcome):
        assert len(round.pending.last) == len(drafted.tokens) == len(outcome.node) == len(outcome.pending.tokens)
        self.look("rewind", round)
        return super().rewind(round, drafted, outcome)


@pytest.mark.parametrize("method", ["propose", "rewind"])
def test_a_batch_does_not_notice_the_fault_of_one_row(method):
    wrong = answers("llama")[0][1]
    having = {index for index, answer in enumerate(cut(answers("llama"))) if wrong in answer[:-1]}
    assert 0 in having
    assert len(having) < len(PROMPTS)
    engine = Engine(shared_target("llama"), Picky(method), "chain2", max_batch_size=len(PROMPTS))
    with pytest.warns(UserWarning, match=r"^drafter picky: not this one; request \d goes on without drafts$") as said:
        outputs = engine.generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == cut(answers("llama"))
    assert {int(re.search(r"request (\d)", str(each.message))[1]) for each in said} <= having
    for index, output in enumerate(outputs):
        drafted = (output.stats.drafted_per_depth or [0])[0]
        assert drafted == len(output.rounds) if index not in having else drafted <= len(output.rounds)
    most = [1, 1] if method == "propose" else [2, 2]
    assert outputs[0].stats.drafted_per_depth in ([], [1, 1], most)  # it is at fault in its first or second round


class Asks(Drafter):
    """Asks the grammars about one draft of a batch, and proposes another, or raises and is asked again."""

    def __init__(self, raises: bool):
        self.raises, self.met = raises, 0

    def propose(self, round: DraftRound) -> Drafted:
        guidance, drafts = round.choice.guidance, round.pending.last.repeat(1, 3)
        likely = guidance.allowed([0])[:, 0].byte()
        if len(drafts) > 1:
            drafts[:, 1:] = likely.argmax(-1, keepdim=True)  # the first token that is allowed
            guidance.set_tokens(drafts)
            guidance.allowed([0, 1, 2])
            self.met += 1
            if self.raises:
                raise RuntimeError("out of order")
        drafts[:, 1:] = likely.shape[1] - 1 - likely.flip(1).argmax(-1, keepdim=True)  # the last one
        return Drafted(drafts)


@pytest.mark.parametrize("raises", [False, True])
def test_what_grammars_said_of_other_drafts_changes_no_answer(raises):
    target = Target(tiny_model("llama"), tiny_tokenizer(), name="tiny-llama")
    drafter, grammar = Asks(raises), {"regex": "(ab|cd|aac){12}"}
    params = [replace(GREEDY, temperature=1.0, seed=row, grammar=grammar) for row in range(4)]
    outputs = Engine(target, drafter, "chain2").generate(PROMPTS[:4], params)
    assert token_ids(outputs) == token_ids(Engine(target).generate(PROMPTS[:4], params))
    assert drafter.met > 3
    assert max(max(output.rounds) for output in outputs) > 1, "some drafts must be accepted"


class Once(Drafter):
    """Drafts the pending token, but in the first round of the shortest prompt what is no draft for it."""

    def __init__(self, how: str):
        self.how = how
        self.needs = Needs(waits=how != "recorded")

    def propose(self, round: DraftRound) -> Drafted:
        tokens = round.pending.last.repeat(1, round.plan.tree.num_nodes)
        q, faulty = None, round.prefix.lengths == len(PROMPTS[0])
        if self.how == "faults" and bool(faulty.any()):
            return Drafted(tokens, faults={faulty.tolist().index(True): "late"})
        if self.how == "raises" and bool(faulty.any()):
            raise ValueError("not this one")
        if self.how == "q":
            q = F.one_hot(tokens, 96).float().masked_fill(faulty[:, None, None], torch.nan)
        else:
            tokens[:, 1:] = tokens[:, 1:].masked_fill(faulty[:, None], -1)
        return Drafted(tokens, q)


@pytest.mark.parametrize("tree", ["chain3", "d2_bf2"])
@pytest.mark.parametrize(
    ("how", "drafting", "temperature"),
    [
        *((how, "greedy", 0.0) for how in ("tokens", "recorded", "raises", "faults", "q")),
        *(("q", drafting, 0.3) for drafting in ("greedy", "multinomial")),
        ("q", "multinomial", 0.0),
    ],
)
def test_of_a_row_that_is_at_fault_nothing_is_accepted(tree, how, drafting, temperature):
    """In that round too, in which its nodes hold its pending token, though that would be right; where q is given and
    nothing is drawn, too."""
    target = Target(tiny_model("gemma2", tie_word_embeddings=True), name="repeats itself")
    params = replace(GREEDY, temperature=temperature)
    engine = Engine(target, Once(how), tree, max_batch_size=3, drafting=drafting)
    if how == "recorded":
        recorded(engine)
    with pytest.warns(UserWarning, match="request 0 goes on without drafts"):
        outputs = engine.generate(PROMPTS[:3], params)
    plain = Engine(target).generate(PROMPTS[:1], params)[0]
    assert (outputs[0].token_ids, outputs[0].rounds) == (plain.token_ids, plain.rounds)
    assert max(outputs[1].rounds) > 1


@pytest.mark.parametrize("options", [{}, {"prefill_tokens": 7, "prefix_cache": True, "overlap": True}])
@pytest.mark.parametrize("others", [[], ["other"]])
def test_a_prompt_that_its_drafter_cannot_read_goes_on_without(options, others):
    """Those that are prefilled with it have the rounds that they have without it."""
    target, prompts = repeating_target(), random_tokens(9, 12, 10, 11, vocabulary=90)
    prompts[2][4] = 93
    params = SamplingParams(max_tokens=24, ignore_eos=True, drafter="unread")
    drafters = {"unread": Unread(93)} | {name: PromptLookup() for name in others}
    engine = Engine(target, drafters, "chain3", max_batch_size=4, **options)
    with pytest.warns(UserWarning, match="cannot") as said:
        outputs = engine.generate(prompts, params)
    assert [str(each.message) for each in said] == [
        "drafter unread: cannot read this; request 2 goes on without drafts"
    ]
    assert token_ids(outputs) == token_ids(Engine(target).generate(prompts, replace(params, drafter=None)))
    alone = Engine(target, {"unread": PromptLookup()}, "chain3")
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert output.rounds == ([1] * 23 if index == 2 else alone.generate([prompt], params)[0].rounds)
    assert pool_of(engine).available == pool_of(engine).total


def test_blocks_that_a_drafter_could_not_read_are_not_found_by_it():
    """The one before them is."""
    (prompt,) = random_tokens(3 * BLOCK + 2, vocabulary=90)
    prompt[BLOCK + 4] = 93
    engine = Engine(repeating_target(), Unread(93), "chain3", prefix_cache=True, prefill_tokens=BLOCK)
    cached = []
    for _ in range(2):
        with pytest.warns(UserWarning, match="^drafter unread: cannot read this"):
            (output,) = engine.generate([prompt], GREEDY)
        cached.append(output.stats.cached_tokens)
    assert cached == [0, BLOCK]


class Texts(TextDrafter):
    """Drafts what `make` makes of a text."""

    timeout_s = 0.05

    def __init__(self, make: Callable[[RowText], Any]):
        self.make, self.left = make, []

    def draft(self, text: RowText, most: int) -> Any:
        return self.make(text)

    def leave(self, key: int) -> None:
        self.left.append(key)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda text: None, "it drafted None; it must be a list of token ids or a TextTree"),
        (lambda text: [3, 96], "it drafted the token 96; tokens must be from 0 to 95"),
        (lambda text: [-1], "it drafted the token -1; tokens must be from 0 to 95"),
        (lambda text: ["a"], "it drafted the token 'a'; tokens must be from 0 to 95"),
        (lambda text: TextTree([3, 4], [0]), "2 tokens with 1 parents"),
        (lambda text: TextTree([3, 4], [0, 2]), "node 2 has the parent 2; it must be a node from 0 to 1"),
        (lambda text: 1 / 0, "division by zero"),
    ],
)
def test_a_text_drafters_mistake_is_one_warning_of_its_request(make, reason):
    drafter = Texts(lambda text: make(text) if text.prompt == PROMPTS[1] and len(text.answer) > 2 else [5, 6, 7])
    found, said = decoded(drafter)
    assert found == cut(answers("llama"))
    assert said == [f"drafter texts: {reason}; request 1 goes on without drafts"]
    assert len(drafter.left) == len(set(drafter.left)) == len(PROMPTS)


@pytest.mark.parametrize("first", [[], [3]])
def test_drafts_deeper_than_their_tree_are_one_warning_of_each_request(first):
    """Chains, and trees with a wrong node first."""

    def make(text: RowText) -> TextTree:
        right = answers("llama")[PROMPTS.index(text.prompt)][len(text.answer) :][:6]
        parents = [*(0 for _ in first), 0, *range(len(first) + 1, len(first) + len(right))]
        return TextTree([*first, *right], parents)

    drafter = Texts(make)
    drafter.needs, drafter.timeout_s = replace(Texts.needs, tree=OpenTree(9, 2)), None
    found, said = decoded(drafter)
    assert found == cut(answers("llama"))
    reason = "drafter texts: it drafted 6 levels; its tree has 2 (Needs.tree)"
    assert sorted(said) == [f"{reason}; request {row} goes on without drafts" for row in range(len(PROMPTS))]


def test_a_draft_that_is_late_is_a_fault_of_its_request():
    def slow(text: RowText) -> list[int]:
        time.sleep(1.0 if text.prompt == PROMPTS[1] else 0)
        return [5, 6]

    found, said = decoded(Texts(slow))
    assert found == cut(answers("llama"))
    assert said == ["drafter texts: it took longer than 0.05 seconds; request 1 goes on without drafts"]


def test_while_three_late_drafts_run_a_drafter_is_not_asked():
    """It is again when they have returned."""
    asked, go_on = list[threading.Thread](), threading.Event()

    def hanging(text: RowText) -> list[int]:
        asked.append(threading.current_thread())
        go_on.wait(30)
        return []

    drafter = Texts(hanging)
    found, said = decoded(drafter)
    assert found == cut(answers("llama"))
    assert len(asked) == 3
    assert len(said) == len(PROMPTS)
    assert sum("3 late calls still run, and it is not asked while they do" in each for each in said) == len(PROMPTS) - 3
    go_on.set()
    for thread in asked:
        thread.join(5)
    assert decoded(drafter) == (cut(answers("llama")), [])
    assert len(asked) > 3


def test_faults_leak_nothing():
    """Neither blocks nor requests."""
    engine = Engine(shared_target("llama"), Texts(lambda text: 1 / 0), "chain2", max_batch_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        requests = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
        gone = [weakref.ref(request) for request in requests]
        while engine.has_unfinished:
            engine.step()
    assert pool_of(engine).available == pool_of(engine).total
    del requests
    gc.collect()
    assert not [each for each in gone if each() is not None]
