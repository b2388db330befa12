"""Drafters without a model, by n-grams and by suffixes: the target's own tokens, from drafts that are accepted."""

import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from eagle_train import generate
from eagle_train.errors import UserError
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.drafters.drafter import RowText
from eagle_train.inference.drafters.ngram import Ngram, make_ngram
from eagle_train.inference.drafters.suffix import Suffix, make_suffix
from eagle_train.inference.lookup.ngrams import NgramOptions
from eagle_train.inference.lookup.suffixes import SuffixOptions
from eagle_train.settings import CONF_DIR
from tests.support.command_line import call, save_target
from tests.support.inside import scheduler_of
from tests.support.reference_answers import token_ids
from tests.support.tiny import (
    continued,
    random_tokens,
    repeating_target,
    tiny_draft,
)

LONG = 60
GREEDY = SamplingParams(max_tokens=LONG, ignore_eos=True)
STEMS = random_tokens(35, 18, seed=3)
TEXTS = [stem + tail for stem in STEMS for tail in random_tokens(2, 5, seed=4)]
KINDS = ["ngram", "newest", "largest", "suffix", "narrow"]
PUBLIC = ["public", "pool"]
FAMILIES = ["llama", "gemma2", "gpt_oss", "llama4", "qwen3_moe"]


def drafter(kind: str) -> Ngram | Suffix:
    """By its own text alone, but for PUBLIC."""
    if kind in ("suffix", "narrow", "pool"):
        pool = 200 if kind == "pool" else 0
        options = SuffixOptions(max_spec_offset=1.0, pool_tokens=pool, max_nodes=3 if kind == "narrow" else 16)
        return Suffix(options)
    public, oldest, keep_all = kind == "public", kind != "newest", kind != "largest"
    return Ngram(NgramOptions(3, 3, public, keep_all, oldest, 200))


def requests_in(drafter: Ngram | Suffix) -> int:
    return len(drafter.pools if isinstance(drafter, Ngram) else drafter.lookup)


@cache
def truth() -> list[list[int]]:
    return [continued(repeating_target(), prompt, LONG) for prompt in TEXTS]


def rounds_by_hand(kind: str, prompt: list[int], answer: list[int]) -> list[int]:
    """The number of tokens of each round, from the drafts after each beginning of the answer."""
    alone, counts, known = drafter(kind), [], 1
    while known < len(answer):
        most = alone.needs.tree.num_nodes - 1
        drafted = alone.draft(RowText(0, prompt, answer[:known]), most)
        tokens, parents = (drafted, list(range(len(drafted)))) if isinstance(drafted, list) else drafted
        paths: list[list[int]] = [[]]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*paths[parent], token])
        rest = answer[known:]
        accepted = max(len(path) for path in paths if path == rest[: len(path)])
        counts.append(min(accepted + 1, len(rest)))
        known += counts[-1]
    return counts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_tokens": 14 * BLOCK, "prefill_tokens": 7},
        {"prefix_cache": True, "host_kv_tokens": 30 * BLOCK, "kv_tokens": 14 * BLOCK, "overlap": True},
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_text_alone(kind, options):
    """Round by round, whoever is in the batch, also after a preemption; and nothing is left of requests."""
    drafts = drafter(kind)
    engine = Engine(repeating_target(), drafts, "chain3", **{"max_batch_size": 4} | options)
    preempted, preempt = [], scheduler_of(engine).preempt
    scheduler_of(engine).preempt = lambda sequence: preempted.append(sequence) or preempt(sequence)
    by_hand = [rounds_by_hand(kind, prompt, answer) for prompt, answer in zip(TEXTS, truth(), strict=True)]
    for _ in range(2):  # kept beginnings are found by the second
        outputs = engine.generate(TEXTS, GREEDY)
        assert token_ids(outputs) == truth()
        assert [output.rounds for output in outputs] == by_hand
        assert requests_in(drafts) == 0
    assert bool(preempted) == ("kv_tokens" in options)
    assert any(output.stats.cached_tokens for output in outputs) == ("prefix_cache" in options)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drafted_is_accepted(kind):
    outputs = Engine(repeating_target(), drafter(kind), "chain3", max_batch_size=4).generate(TEXTS, GREEDY)
    counts = [count for output in outputs for count in output.rounds]
    assert sum(counts) / len(counts) > 1.4
    assert max(counts) > 2


@pytest.mark.parametrize("kind", PUBLIC)
def test_what_others_were_told_is_accepted(kind):
    """An answer that another request had is drafted from its first tokens on."""
    drafts = drafter(kind)
    engine = Engine(repeating_target(), drafts, "chain3", max_batch_size=1)
    first, second = (engine.generate(TEXTS[:1], GREEDY)[0] for _ in range(2))
    assert first.token_ids == second.token_ids == truth()[0]
    assert len(second.rounds) < len(first.rounds)
    assert requests_in(drafts) == 0


@pytest.mark.parametrize("kind", PUBLIC)
def test_a_shared_pool_has_the_whole_of_an_answer(kind):
    """Its last round too, after which nothing is drafted: of three tokens two."""
    own, prompt, params = drafter(kind), [3, 4, 5], dataclasses.replace(GREEDY, max_tokens=3)
    engine = Engine(repeating_target(), own)
    for count in (1, 2):
        (output,) = engine.generate([prompt], params)
        kept = own.pools.tokens if isinstance(own, Ngram) else own.lookup._pool.tokens
        assert kept == count * (len(output.token_ids) + len(prompt) * isinstance(own, Ngram))
    assert output.rounds == [2]
    assert not own._texts


def test_a_private_pool_leaves_with_its_request():
    drafts = drafter("ngram")
    engine = Engine(repeating_target(), drafts, "chain3", max_batch_size=2)
    requests = [engine.add(prompt, GREEDY) for prompt in TEXTS[:3]]
    while not all(len(request.generated) > 4 for request in requests[:2]):
        engine.step()
    assert requests_in(drafts) == 2
    engine.cancel(requests[0])
    while engine.has_unfinished:
        engine.step()
    assert (requests_in(drafts), drafts.pools.tokens) == (0, 0)


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_a_draft_has_as_many_tokens_as_the_option_says(kind):
    """And not as many as the engine's tree has."""
    drafts = Ngram(NgramOptions(6)) if kind == "ngram" else Suffix(SuffixOptions(max_nodes=6, max_spec_offset=6))
    engine = Engine(repeating_target(), drafts, "chain1", max_batch_size=4)
    assert max(count for output in engine.generate(TEXTS, GREEDY) for count in output.rounds) == 7


@pytest.mark.parametrize(("name", "options"), [("ngram", NgramOptions()), ("suffix", SuffixOptions())])
def test_commands_have_the_same_defaults(name, options):
    written = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "drafter" / f"{name}.yaml"))
    del written["_target_"]
    assert written == dataclasses.asdict(options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("drafter", ["ngram drafter.max_draft_len=2", "suffix drafter.max_nodes=3"])
def test_a_command_has_it_by_name(saved, capsys, drafter):
    given = [f"target={saved}", "prompt=abababab", "max_tokens=12", "device=cpu", "color=never"]
    assert call(generate.main, *given) == 0
    plain = capsys.readouterr().out
    assert call(generate.main, *given, "color=always", *f"drafter={drafter}".split()) == 0
    out, err = capsys.readouterr()
    marked = re.sub("\x1b" + r"\[\d*m", "", out)
    assert re.sub(r"[\[\]]", "", marked) == re.sub(r"[\[\]]", "", plain)
    assert "TPC" in err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["drafter=ngram", "drafter.max_draft_len=0"], "drafter.max_draft_len=0: must be a whole number above 0"),
        (["drafter=ngram", "drafter.max_draft_len=1024"], "drafter.max_draft_len=1024: must be below 1024"),
        (["drafter=suffix", "drafter.max_nodes=2000"], "drafter.max_nodes=2000: must be below 1024"),
        (["drafter=suffix", "drafter.min_probability=2"], "drafter.min_probability=2: must be a number from 0 to 1"),
        (["drafter=ngram", "engine.drafting=multinomial"], "engine.drafting=multinomial: trees that differ by row"),
    ],
)
def test_a_mistake_is_one_line(saved, capsys, given, said):
    assert call(generate.main, f"target={saved}", "prompt=abc", "device=cpu", *given) == 2
    assert f"error: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("make", [make_ngram, make_suffix])
def test_a_draft_beside_it_is_refused(make):
    loaded = repeating_target()
    with pytest.raises(UserError, match=re.escape("has no model; leave draft= out")):
        make(loaded, tiny_draft(loaded))
