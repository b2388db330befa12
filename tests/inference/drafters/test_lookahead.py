"""inference/drafters/lookahead.py: its tree is the window's mask, its rounds are those of the published algorithm, and
tokens stay the target's own.
"""

import dataclasses
import random
import re
import zlib
from array import array
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from eagle_train import generate
from eagle_train.errors import UserError
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.drafters.drafter import RowText
from eagle_train.inference.drafters.lookahead import Lookahead, LookaheadOptions, make_lookahead
from eagle_train.inference.drafters.ngram import Ngram
from eagle_train.inference.lookup.ngrams import NgramOptions
from eagle_train.ops.attention import packed_attention
from eagle_train.settings import CONF_DIR
from tests.support.command_line import call, save_target
from tests.support.drafters import FAMILIES
from tests.support.inside import scheduler_of
from tests.support.reference_answers import GREEDY as SHORT
from tests.support.reference_answers import PROMPTS, answers, cut, token_ids
from tests.support.tiny import (
    continued,
    random_tokens,
    repeating_target,
    shared_target,
    tiny_draft,
)

SMALL = LookaheadOptions(4, 4, 3)
LONG = 60
GREEDY = SamplingParams(max_tokens=LONG, ignore_eos=True)
STEMS = random_tokens(35, 18, seed=3)
TEXTS = [stem + tail for stem in STEMS for tail in random_tokens(2, 5, seed=4)]
SIZES = [dataclasses.astuple(SMALL), (4, 4, 3, False), (2, 3, 0, True), (3, 3, 2, True), (2, 5, 1, False)]


@cache
def truth() -> list[list[int]]:
    """What transformers goes on with, and as much more as a round may look ahead."""
    return [continued(repeating_target(), prompt, LONG + 12) for prompt in TEXTS]


def all_rounds(outputs) -> list[int]:
    return list(chain.from_iterable(output.rounds for output in outputs))


# --- the tree


@pytest.mark.parametrize(
    ("window", "ngram", "guesses"), [(2, 3, 0), (2, 3, 1), (4, 4, 3), (5, 3, 0), (3, 6, 2), (7, 5, 7)]
)
def test_the_tree_lets_each_token_see_what_the_windows_mask_does(window, ngram, guesses):
    drafter = Lookahead(LookaheadOptions(window, ngram, guesses))
    tree, cells = drafter.needs.tree, (ngram - 1) * window
    assert tree.num_nodes == cells + guesses * (ngram - 1) == drafter.options.num_nodes
    order = drafter._in_order(range(tree.num_nodes))  # by node: the place of its token
    for node, place in enumerate(order):
        if place < cells:
            row, column = divmod(place, window)
            depth = row + column
            seen = set(range(column + 1)) | {above * window + column for above in range(row + 1)}
        else:
            first = place - (place - cells) % (ngram - 1)
            seen, depth = {0, *range(first, place + 1)}, place - first + 1
        assert {order[other] for other in tree.ancestors[node].nonzero().flatten().tolist()} == seen
        assert tree.depth[node] == depth
    assert [order[node] for node in drafter._last_row] == list(range(cells - window, cells))


# --- the algorithm


@cache
def after(text: tuple[int, ...]) -> int:
    """The target's most likely token after a text."""
    places, attend = torch.arange(len(text))[None], packed_attention([[len(text)]])
    states = repeating_target().states(())(torch.tensor([text]), places, attend)
    return int(repeating_target().lm_head(states[0, -1]).argmax())


class Twin:
    """Lookahead decoding of one prompt, written as the paper has it: the window as lists, one forward for each cell."""

    def __init__(self, options: LookaheadOptions, prompt: list[int], answer: list[int]):
        self.options, self.prompt, self.answer = options, prompt, answer
        width, rows = options.window, options.ngram - 1
        drawn = random.Random(zlib.crc32(array("q", prompt))).choices(prompt, k=width * rows)
        # The first row has no cell for the pending token.
        self.past = [drawn[1:width], *(drawn[row * width : (row + 1) * width] for row in range(1, rows))]
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        self.steps = 0

    def keep(self, ngram: list[int]) -> None:
        kept, tail = self.pool.setdefault(ngram[0], []), tuple(ngram[1:])
        if tail in kept:
            kept.remove(tail)
        elif len(kept) == self.options.guesses:
            kept[:1] = []
        if self.options.guesses:
            kept.append(tail)

    def keep_text(self, text: list[int], first: int) -> None:
        """The n-grams of the text that end at the token `first` or later."""
        size = self.options.ngram
        for end in range(max(first + 1, size), len(text) + 1):
            if self.options.pool_from_prompt:
                self.keep(text[end - size : end])

    def step(self, pending: int, text: list[int]) -> None:
        """A forward of the window behind the text, whose last token is pending."""
        newest = []
        for column in range(self.options.window):
            column_below = [row[column] for row in self.past[1:]]
            newest.append(after((*text, *self.past[0][:column], *column_below)))
        if self.steps >= self.options.ngram - 2:
            for column, token in enumerate(newest):
                first = pending if column == 0 else self.past[0][column - 1]
                self.keep([first, *(row[column] for row in self.past[1:]), token])
        self.past = [self.past[1][1:], *self.past[2:], newest]
        self.steps += 1

    def drafts(self, pending: int) -> list[list[int]]:
        """All chains that are verified."""
        width = range(self.options.window)
        window = [self.past[0][:column] + [row[column] for row in self.past[1:]] for column in width]
        guesses = list(map(list, self.pool.get(pending, [])))
        empty = [[pending] * (self.options.ngram - 1)] * (self.options.guesses - len(guesses))
        return [*window, *guesses, *empty]

    def rounds(self, most: int) -> list[int]:
        counts, known = [], 1
        self.keep_text([*self.prompt, self.answer[0]], 0)
        while known < most:
            text, rest = self.prompt + self.answer[:known], self.answer[known:]
            drafts = self.drafts(text[-1])
            matches = [sum(draft[:n] == rest[:n] for n in range(1, len(draft) + 1)) for draft in drafts]
            self.step(text[-1], text)
            new = max(matches) + 1
            self.keep_text(text + rest[:new], len(text))
            counts.append(min(new, most - known))
            known += new
        return counts


@cache
def by_hand(size: tuple) -> list[list[int]]:
    options = LookaheadOptions(*size)
    return [Twin(options, prompt, answer).rounds(LONG) for prompt, answer in zip(TEXTS, truth(), strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_tokens": 9 * BLOCK, "prefill_tokens": 7},
        {"prefix_cache": True, "host_kv_tokens": 30 * BLOCK, "kv_tokens": 9 * BLOCK, "overlap": True},
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_rounds_are_those_of_the_published_algorithm(size, options):
    """Whoever is in the batch, also after a preemption; and nothing is left of requests."""
    drafter = Lookahead(LookaheadOptions(*size))
    engine = Engine(repeating_target(), drafter, "chain3", **{"max_batch_size": 4} | options)
    preempted, preempt = [], scheduler_of(engine).preempt
    scheduler_of(engine).preempt = lambda sequence: preempted.append(sequence) or preempt(sequence)
    for _ in range(2):  # kept beginnings are found by the second
        outputs = engine.generate(TEXTS, GREEDY)
        assert token_ids(outputs) == cut(truth(), LONG)
        assert [output.rounds for output in outputs] == by_hand(size)
        assert len(drafter) == 0
    assert bool(preempted) == ("kv_tokens" in options)
    assert any(output.stats.cached_tokens for output in outputs) == ("prefix_cache" in options)


def test_a_window_alone_is_accepted_too():
    assert max(chain.from_iterable(by_hand((2, 3, 0, True)))) > 1


def test_the_window_is_the_same_again_and_depends_on_the_prompt():
    drafter = Lookahead(SMALL)
    first, again, other = (
        drafter._drafts(RowText(key, prompt, [9])) for key, prompt in enumerate((TEXTS[0], list(TEXTS[0]), TEXTS[1]))
    )
    assert first == again != other
    assert set(first) <= {9, *TEXTS[0]}


def test_ngrams_are_kept_once_their_tokens_are_the_targets():
    """Two rows of the window begin with drawn tokens below its first row; n-grams with these are not kept."""
    drafter, text = Lookahead(LookaheadOptions(2, 4, 2, pool_from_prompt=False)), RowText(0, [5, 6, 7], [9])
    kept = []
    for newest in ([20, 21], [30, 31], [40, 41], [50, 51]):
        kept.append(drafter._drafts(text)[6:])
        drafter._requests[0].step(newest)
    assert kept == [[9] * 6, [9] * 6, [9] * 6, [20, 30, 40, 9, 9, 9]]
    assert drafter._drafts(text) == [9, 31, 40, 41, 50, 51, 20, 30, 40, 30, 40, 50]


# --- tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_and_tree_at_once_give_the_same(family):
    """Under one mask."""
    engine = Engine(shared_target(family), Lookahead(SMALL), "chain3", max_batch_size=3, tree_attention="joint")
    assert token_ids(engine.generate(PROMPTS, SHORT)) == cut(answers(family))


@pytest.mark.parametrize("own", [False, True])
def test_what_is_drafted_is_accepted(own):
    options = LookaheadOptions(pool_from_prompt=own)
    outputs = Engine(repeating_target(), Lookahead(options), "chain3", max_batch_size=4).generate(TEXTS, GREEDY)
    counts = all_rounds(outputs)
    assert sum(counts) / len(counts) > 1.2
    assert max(counts) > 2
    window_alone = Lookahead(dataclasses.replace(options, guesses=0))
    rounds = all_rounds(Engine(repeating_target(), window_alone, "chain3", max_batch_size=4).generate(TEXTS, GREEDY))
    assert len(counts) < 0.8 * len(rounds)


def test_the_mode_of_drawn_drafts_changes_nothing():
    """Its drafts are point masses then, too: the tokens are those of plain decoding, one for one."""
    params = [SamplingParams(1.0, top_k=3, max_tokens=20, seed=seed, ignore_eos=True) for seed in range(60)]
    prompts = [TEXTS[seed % len(TEXTS)] for seed in range(60)]
    plain = Engine(repeating_target(), None, max_batch_size=8).generate(prompts, params)
    options = {"max_batch_size": 8, "drafting": "multinomial"}
    outputs = Engine(repeating_target(), Lookahead(SMALL), "chain3", **options).generate(prompts, params)
    assert token_ids(outputs) == token_ids(plain)
    assert max(all_rounds(outputs)) > 1


def test_beside_another_drafter_each_has_its_own_rounds():
    drafters = {"lookahead": Lookahead(SMALL), "ngram": Ngram(NgramOptions(3, 3))}
    names = ["lookahead", "ngram", "none", "lookahead"]
    params = [dataclasses.replace(GREEDY, drafter=name) for name in names]
    outputs = Engine(repeating_target(), drafters, "chain3", max_batch_size=4).generate(TEXTS, params)
    assert token_ids(outputs) == cut(truth(), LONG)
    assert [outputs[row].rounds for row in (0, 3)] == [by_hand(dataclasses.astuple(SMALL))[row] for row in (0, 3)]


def test_what_it_keeps_of_a_request_leaves_with_it():
    drafter = Lookahead(SMALL)
    engine = Engine(repeating_target(), drafter, "chain3", max_batch_size=2)
    requests = [engine.add(prompt, GREEDY) for prompt in TEXTS[:3]]
    while not all(len(request.generated) > 4 for request in requests[:2]):
        engine.step()
    assert len(drafter) == 2
    engine.cancel(requests[0])
    while engine.has_unfinished:
        engine.step()
    assert len(drafter) == 0


# --- options and the command


def test_commands_have_the_same_defaults():
    written = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "drafter" / "lookahead.yaml"))
    del written["_target_"]
    assert written == dataclasses.asdict(LookaheadOptions())


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def test_a_command_has_it_by_name(saved, capsys):
    given = [f"target={saved}", "prompt=abababab", "max_tokens=12", "device=cpu", "color=never"]
    assert call(generate.main, *given) == 0
    plain = capsys.readouterr().out
    drafter = ["drafter=lookahead", "drafter.window=3", "drafter.ngram=3", "drafter.guesses=2"]
    assert call(generate.main, *given, "color=always", *drafter) == 0
    out, err = capsys.readouterr()
    marked = re.sub("\x1b" + r"\[\d*m", "", out)
    assert re.sub(r"[\[\]]", "", marked) == re.sub(r"[\[\]]", "", plain)
    assert "TPC" in err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["window=1"], "drafter.window=1: must be a whole number, at least 2"),
        (["ngram=2"], "drafter.ngram=2: must be a whole number, at least 3"),
        (["guesses=-1"], "drafter.guesses=-1: must be a whole number, at least 0"),
        (["window=2.5"], "drafter.window=2.5: must be a whole number, at least 2"),
        (["pool_from_prompt=3"], "drafter.pool_from_prompt=3: must be true or false"),
        (
            ["window=250"],
            "drafter.window=250: with drafter.guesses=7 and drafter.ngram=5 the tree has 1028 nodes; at most 1024 are",
        ),
    ],
)
def test_a_mistake_is_one_line(saved, capsys, given, said):
    options = [f"drafter.{each}" for each in given]
    assert call(generate.main, f"target={saved}", "prompt=abc", "device=cpu", "drafter=lookahead", *options) == 2
    assert f"error: {said}" in capsys.readouterr().err


def test_the_largest_tree_is_the_engines():
    assert LookaheadOptions(256, 5, 0).num_nodes == 1024
    with pytest.raises(UserError, match=r"^window=256: "):
        LookaheadOptions(256, 5, 1)


def test_a_draft_beside_it_is_refused():
    with pytest.raises(UserError, match=re.escape("drafter=lookahead has no model; leave draft= out")):
        make_lookahead(repeating_target(), tiny_draft(repeating_target()))
