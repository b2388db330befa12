"""Guided decoding: every answer matches its grammar, and is that of plain decoding with masked logits. Paper section
3.4.

Each grammar has a twin: the same language as a Python regular expression, which also recognises prefixes. So nothing
here is compared with the library that makes the masks.
"""

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import regex
import torch
from scipy import stats
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_train.drafts import Draft, EagleDraft
from eagle_train.errors import UserError
from eagle_train.inference import Engine, Requests, SamplingParams
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.decode.row_trees import DynamicTree
from eagle_train.inference.decode.tree import chain
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.inference.grammar import guided
from eagle_train.inference.grammar.guided import Guidance
from eagle_train.inference.requests.scheduler import Scheduler
from eagle_train.inference.requests.sequence import Output
from eagle_train.inference.runner import Runner
from eagle_train.models.target import Target
from tests.support.graph_recorder import no_values
from tests.support.inside import active_in, inside, runner_of
from tests.support.reference_answers import LENGTH, PROMPTS, TREES, answers, cut, fail_at, guide, token_ids
from tests.support.tiny import CHARACTERS, tiny_model, tiny_target, tiny_tokenizer, trained_draft

MODES = ["greedy", "multinomial", "multinomial_without_replacement"]
EOS = 2
LONG = 32  # tokens of an answer
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
        "tag": {"enum": ["a", "bb"]},
    },
    "required": ["n", "ok"],
}
LANGUAGES = {  # the tiny target has no white space
    "json_schema": (SCHEMA, r'\{"n":([0-9]|[1-9][0-9]),"ok":(true|false)(,"tag":("a"|"bb"))?\}'),
    "regex": (r"[A-Z]{2,5}(-[0-9]{1,3})*", r"[A-Z]{2,5}(-[0-9]{1,3})*"),
    "choice": (["yes", "no", "yes!", 'a"\\b', "<s>"], r'yes!?|no|a"\\b|<s>'),
    "ebnf": ('root ::= item (";" item){0,3}\nitem ::= "(" item ")" | [x-z]', r"(\((?1)\)|[x-z])(;(?1)){0,3}"),
}
KINDS = list(LANGUAGES)


@cache
def target(**changes) -> Target:
    """The tiny Llama of the other tests, with a token for each character."""
    return tiny_target("llama", tiny_tokenizer(), **changes)


@pytest.fixture(scope="module")
def trained() -> Draft:
    return trained_draft(target())


def grammar_of(kind: str) -> dict:
    return {kind: LANGUAGES[kind][0]}


def begins(kind: str, text: str) -> bool:
    return regex.fullmatch(LANGUAGES[kind][1], text, partial=True) is not None


def obeys(kind: str, text: str) -> bool:
    return regex.fullmatch(LANGUAGES[kind][1], text) is not None


@cache
def may_follow(kind: str, text: str) -> list[int]:
    """The tokens that the twin allows after a text, one by one."""
    letters = [token for token, letter in enumerate(CHARACTERS, start=3) if begins(kind, text + letter)]
    return letters + [EOS] * obeys(kind, text)


@cache
def truth(kind: str, prompt: tuple[int, ...], length: int = LONG) -> list[int]:
    """transformers' most likely tokens among those that the twin allows."""
    tokens, model = [], tiny_model()
    while len(tokens) < length and tokens[-1:] != [EOS]:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1]
        allowed = may_follow(kind, "".join(CHARACTERS[token - 3] for token in tokens))
        tokens.append(max(allowed, key=lambda token: float(logits[token])))
    return tokens


def mixed(temperature: float = 0.0) -> tuple[list, list[SamplingParams], list[str | None]]:
    """Each prompt with each kind of grammar, and without one."""
    kinds = [kind for _ in PROMPTS for kind in [*KINDS, None]]
    prompts = [prompt for prompt in PROMPTS for _ in [*KINDS, None]]
    params = [
        SamplingParams(temperature, max_tokens=LENGTH, seed=seed, ignore_eos=True)
        if kind is None
        else SamplingParams(temperature, max_tokens=LONG, seed=seed, grammar=grammar_of(kind))
        for seed, kind in enumerate(kinds)
    ]
    return prompts, params, kinds


def check_obeys(kind: str, output: Output) -> None:
    if output.finish_reason == "stop":
        assert output.token_ids[-1] == EOS
        assert obeys(kind, output.text)
    else:
        assert (output.finish_reason, len(output.token_ids)) == ("length", LONG)
        assert begins(kind, output.text)


# --- temperature 0 against transformers, masked token by token


@pytest.mark.parametrize("tree", [None, *TREES])
@pytest.mark.parametrize("settings", [{}, {"kv_tokens": 5 * BLOCK, "prefill_tokens": 3}], ids=["roomy", "tight"])
def test_greedy_tokens_are_the_most_likely_allowed(tree, settings, trained):
    """Guided and unguided requests in one batch, with rows that join and leave, preemption and chunked prefill."""
    prompts, params, kinds = mixed()
    plain = dict(zip(map(tuple, PROMPTS), cut(answers("llama")), strict=True))
    engine = Engine(target(), trained if tree else None, tree or "chain3", max_batch_size=4, **settings)
    outputs = engine.generate(prompts, params)
    for prompt, kind, output in zip(prompts, kinds, outputs, strict=True):
        assert output.token_ids == (truth(kind, tuple(prompt)) if kind else plain[tuple(prompt)])
    ends = Counter(output.finish_reason for output, kind in zip(outputs, kinds, strict=True) if kind)
    assert min(ends["stop"], ends["length"]) > 0
    assert (max(max(output.rounds, default=0) for output in outputs) > 1) == (tree is not None)


@pytest.mark.parametrize("kv_tokens", [None, 5 * BLOCK], ids=["roomy", "tight"])
@pytest.mark.parametrize("cancelling", [False, True], ids=["kept", "cancelled"])
def test_drafts_that_hold_to_any_depth(cancelling, kv_tokens, trained):
    """Rejected tokens, also forbidden ones, leave no trace in a matcher; nor do cancellation and preemption."""
    prompts, params, kinds = mixed()
    plain = dict(zip(map(tuple, PROMPTS), answers("llama"), strict=True))
    wanted = [truth(k, tuple(p)) if k else plain[tuple(p)][:LENGTH] for k, p in zip(kinds, prompts, strict=True)]
    rng = random.Random(1)
    engine = Engine(target(), trained, "d3_bf2", max_batch_size=4, kv_tokens=kv_tokens, prefill_tokens=6)
    guide(engine, [tokens + [0] * 4 for tokens in wanted], lambda _: rng.randint(0, 3))
    requests = [engine.add(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    while engine.has_unfinished:
        if cancelling and rng.random() < 0.3:
            engine.cancel(rng.choice(requests))
        engine.step()
    reasons = Counter(request.finish_reason for request in requests)
    for request, tokens in zip(requests, wanted, strict=True):
        assert request.generated == (
            tokens[: len(request.generated)] if request.finish_reason == "cancelled" else tokens
        )
    assert reasons["stop"] > 3
    assert (reasons["cancelled"] > 2) == cancelling


# --- sampled


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("mode", MODES)
def test_sampled_tokens_obey_whatever_the_company(mode, tree, trained):
    """They are those of a request alone; requests without a grammar are not affected by others'."""
    prompts, params, kinds = (each[::2] for each in mixed(1.0))
    tight = Engine(target(), trained, tree, max_batch_size=5, drafting=mode, kv_tokens=6 * BLOCK, prefill_tokens=7)
    outputs = tight.generate(prompts, params)
    alone = Engine(target(), trained, tree, drafting=mode)
    for prompt, own, output in list(zip(prompts, params, outputs, strict=True))[::4]:
        assert alone.generate([prompt], [own])[0].token_ids == output.token_ids
    for kind, output in zip(kinds, outputs, strict=True):
        if kind:
            check_obeys(kind, output)
    assert len({output.text for output in outputs}) > 8


def test_another_ranks_drafts_obey_their_grammar(trained):
    """This rank's own drafts, over which its matchers have walked, are replaced by those of the first rank."""
    params = SamplingParams(1.0, max_tokens=LONG, grammar={"regex": "(ab|ba|aab|bba)(cd|ce|dc){1,4}x"})
    engine, rng = Engine(target(), trained, "chain3"), random.Random(0)
    letters = target().tokenizer.convert_tokens_to_ids(["a", "b"])
    alone = engine.generate(PROMPTS, params)

    def agreed(drafts):
        if drafts is not None:
            drafts[:, 1:] = torch.tensor([[rng.choice(letters) for _ in range(3)] for _ in drafts])
        return drafts

    runner_of(engine).ranks.size, runner_of(engine).ranks.agreed = 2, agreed
    outputs = engine.generate(PROMPTS * 4, [replace(params, seed=seed % len(PROMPTS)) for seed in range(20)])
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert any(max(output.rounds) > 1 for output in outputs)
    assert all(regex.fullmatch("(ab|ba|aab|bba)(cd|ce|dc){1,4}x", output.text) for output in (*alone, *outputs))


def proposals(engine: Engine) -> list[tuple[str, list[str]]]:
    """Runs the waiting requests. Returns, by round, each row's text before it and the letters of the proposed chain."""
    found, draft, tokenizer = [], runner_of(engine).draft, engine.target.tokenizer

    def seeing(inputs):
        drafted = draft(inputs)
        for sequence, row in zip(active_in(engine), drafted[0][:, 1:].tolist(), strict=True):
            found.append(
                (inside(engine).requests.texts.decode(sequence.generated), tokenizer.convert_ids_to_tokens(row))
            )
        return drafted

    runner_of(engine).draft = seeing
    while engine.has_unfinished:
        engine.step()
    return found


@pytest.mark.parametrize("tree", TREES)
def test_the_grammar_is_walked_while_the_target_runs(tree, trained, monkeypatch):
    """Validation is launched before the host knows what was drafted last, and the walk begins behind it."""
    engine, events = Engine(target(), trained, tree), []
    validate, walk = runner_of(engine).validate, Guidance._walk

    def validating(*given):
        with no_values():
            found = validate(*given)
        events.append("validated")
        return found

    def walking(guidance, nodes):
        events.append(max(nodes))
        walk(guidance, nodes)

    monkeypatch.setattr(Guidance, "_walk", walking)
    runner_of(engine).validate = validating
    engine.generate(PROMPTS[:2], SamplingParams(max_tokens=8, grammar=grammar_of("regex")))
    last = engine.dispatcher.largest.num_nodes - 1
    after = [then for before, then in pairwise(events) if before == "validated"]
    assert set(after) == {last}  # which no drafting has asked for


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_proposals_obey(kind, mode, trained):
    """Rows at temperature 0 and above it."""
    engine = Engine(target(), trained, "chain3", drafting=mode)
    for row, prompt in enumerate(PROMPTS * 2):
        engine.add(prompt, SamplingParams(float(row % 2), max_tokens=LONG, grammar=grammar_of(kind)))
    rounds = proposals(engine)
    assert len(rounds) >= 2 * len(PROMPTS)
    for text, proposed in rounds:
        for letter in proposed:
            if letter == "</s>":
                assert obeys(kind, text)
                break
            text += letter
            assert begins(kind, text)


def grown(pattern: str, temperature: float, draft: Draft) -> list[list[tuple[int, bool]]]:
    """By round and row, each node's depth, and whether the text down to it may begin an answer."""
    engine = Engine(target(), draft, DynamicTree(13, 4, 3), max_batch_size=4)
    for row, prompt in enumerate(PROMPTS):
        engine.add(prompt, SamplingParams(temperature, max_tokens=9, seed=row, grammar={"regex": pattern}))
    propose, found, names = runner_of(engine).draft, [], engine.target.tokenizer.convert_ids_to_tokens

    def seeing(inputs):
        drafted = propose(inputs)
        given = zip(active_in(engine), drafted.tokens.tolist(), drafted.tree.parents.tolist(), strict=True)
        for sequence, tokens, parents in given:
            texts = [inside(engine).requests.texts.decode(sequence.generated)]
            for token, parent in zip(tokens[1:], parents[1:], strict=True):
                texts.append(texts[parent] + names(token))
            right = [regex.fullmatch(pattern, text, partial=True) is not None for text in texts]
            found.append([(len(text) - len(texts[0]), is_right) for text, is_right in zip(texts, right, strict=True)])
        return drafted

    runner_of(engine).draft = seeing
    while engine.has_unfinished:
        engine.step()
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_that_grow_obey(temperature, trained):
    """What may follow depends on the node above. A path with one way to go on is as likely as its beginning."""
    trees = grown("(a[0-9]|b[c-h]|[c-h][X-Z]){9}", temperature, trained)
    assert all(is_right for tree in trees for _, is_right in tree)
    assert {depth for tree in trees for depth, _ in tree} >= {0, 1, 2, 3}
    for tree in grown("(a0Z1|b9Y8|c5X4){9}", temperature, trained):
        assert (4, True) in tree


def test_a_tree_grows_where_the_draft_knows_what_may_follow(trained):
    """A draft without numbers knows nothing that may follow an a: what it proposes there takes no other's place."""
    known = [EOS, *(token for token, letter in enumerate(CHARACTERS, start=3) if not letter.isdigit())]
    little = EagleDraft(replace(trained.config, vocab_size=len(known), vocabulary=known))
    little.load_state_dict(trained.state_dict())
    trees = grown("(a[0-9]|b[c-h]){9}", 0.0, little)
    counts = [sum(is_right for _, is_right in tree[1:]) for tree in trees]
    assert {count for count in counts if count > 0} == {11, 12}  # 0: behind an a


# --- the distribution, against exact enumeration

LETTERS = "abcdefghijklm"
PROMPT = [7, 1]
COUNT = 1500  # of requests, in one batch: 52 cells of 5 or more, and 1e-40 for what is wrong
TOY = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PATTERN = "[a-h](([b-j][a-e]?|[k-m])([c-i]|[a-c][d-m]))?|[i-m][d-k]*"


@pytest.fixture(scope="module")
def toy() -> tuple[Target, Draft, torch.Tensor]:
    """A target with 16 tokens, a draft for it, and the probability of any four tokens, summed over the first."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    small = Target(tiny_model(std=0.4, **TOY), PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special))
    return small, trained_draft(small, steps=60), joint(tiny_model(std=0.4, **TOY).double())


def joint(model) -> torch.Tensor:
    """float64 [16, 16, 16]; an answer that has ended is continued with end tokens."""
    mass, histories = torch.zeros([16] * 4, dtype=torch.float64), {(): 1.0}
    for _ in range(4):
        open_ones = [history for history in histories if history[-1:] != (EOS,)]
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *history] for history in open_ones])).logits[:, -1]
        for history, row in zip(open_ones, logits, strict=True):
            text = "".join(LETTERS[token - 3] for token in history)
            allowed = [t for t, x in enumerate(LETTERS, 3) if regex.fullmatch(PATTERN, text + x, partial=True)]
            allowed += [EOS] * (regex.fullmatch(PATTERN, text) is not None)
            weight = histories.pop(history)
            for token, share in zip(allowed, row[allowed].softmax(-1).tolist(), strict=True):
                histories[(*history, token)] = weight * share
    for history, weight in histories.items():
        mass[tuple([*history, EOS, EOS, EOS][:4])] += weight
    return mass.sum(0)


def p_value(toy, tree: str | DynamicTree, drafting: str = "greedy") -> float:
    """Of the chi-square test on the last three of four tokens; cells with an expected count below 5 are merged."""
    small, draft, probability = toy
    engine = Engine(small, draft, tree, max_batch_size=COUNT, drafting=drafting)
    params = SamplingParams(temperature=1.0, max_tokens=4, seed=10**6, grammar={"regex": PATTERN})
    outputs = engine.generate([PROMPT] * COUNT, params)
    tokens = torch.tensor([[*output.token_ids, EOS, EOS, EOS][1:4] for output in outputs])
    counts = (tokens * torch.tensor([256, 16, 1])).sum(-1).bincount(minlength=16**3)
    assert len({kept for output in outputs for kept in output.rounds}) > 1, "both acceptance and rejection"
    observed, expected = counts.view(16, 16, 16).double(), probability * COUNT
    assert not observed[expected == 0].any(), "tokens that the grammar forbids"
    often, rare = expected >= 5, (expected > 0) & (expected < 5)
    assert often.sum() > 50
    cells = [torch.cat((x[often], x[rare].sum(0, keepdim=True)[: rare.sum()])) for x in (observed, expected)]
    return stats.chisquare(*(x.numpy() for x in cells)).pvalue


@pytest.mark.parametrize("tree", ["chain3", "d3_bf2"])
@pytest.mark.parametrize("drafting", MODES)
def test_the_distribution_is_the_targets_restricted(toy, drafting, tree):
    assert p_value(toy, tree, drafting) > 1e-3


def test_nor_does_a_tree_that_grows_change_it(toy):
    assert p_value(toy, DynamicTree(7, 3, 2)) > 1e-3


@pytest.mark.parametrize("drafting", MODES)
def test_with_a_draft_of_few_tokens(toy, drafting, capfd):
    """Where the grammar allows none of the draft's tokens, it proposes what will be rejected."""
    small, draft, probability = toy
    few = [EOS, 3, 5, 8, 9, 12]
    little = EagleDraft(replace(draft.config, vocab_size=len(few), vocabulary=few))
    little.load_state_dict(draft.state_dict())
    assert p_value((small, little, probability), "d3_bf2", drafting) > 1e-3
    assert capfd.readouterr() == ("", "")


def test_the_test_can_tell(toy, monkeypatch):
    """Broken: drafts are drawn under the grammar, but q is that without it."""
    children = Eagle.children

    def half_told(self, hidden, level, choice):
        return children(self, hidden, level, choice)[0], children(self, hidden, level, replace(choice, guidance=None))[
            1
        ]

    monkeypatch.setattr(Eagle, "children", half_told)
    assert p_value(toy, "chain3", "multinomial") < 1e-6


# --- what a request may ask for beside a grammar


def answer(grammar: dict, params: SamplingParams | None = None, **changes) -> Output:
    params = replace(params or SamplingParams(max_tokens=LENGTH), grammar=grammar)
    return Engine(target(**changes)).generate([PROMPTS[0]], params)[0]


def test_special_tokens_are_no_text():
    """`<s>` is spelt out, although there is a token of this name, which has no text."""
    output = answer({"choice": ["<s>"]})
    assert output.text == "<s>"
    assert output.token_ids == [*(3 + CHARACTERS.index(letter) for letter in "<s>"), EOS]


def test_special_tokens_are_never_allowed():
    """However likely they are: at a high temperature every allowed token occurs at times."""
    for seed in range(20):
        output = answer({"regex": "(<s>|<pad>|</s>){4}"}, SamplingParams(temperature=100.0, max_tokens=60, seed=seed))
        assert regex.fullmatch("(<s>|<pad>|</s>){4}", output.text)
        assert min(output.token_ids[:-1]) > EOS


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_lm_head_wider_than_the_tokenizer(temperature):
    """In the tiny model padding tokens of the vocabulary are as likely as any."""
    for seed in range(8):
        output = answer({"regex": "[!-~]{12}"}, SamplingParams(temperature, seed=seed), vocab_size=131)
        assert regex.fullmatch("[!-~]{12}", output.text)


def test_ignoring_the_end_the_longest_answer_is_given():
    for seed in range(5):
        params = SamplingParams(temperature=1.0, seed=seed, ignore_eos=True)
        assert len(answer({"regex": "a{0,6}"}, params).token_ids) == 7
    output = answer({"regex": "a+"}, SamplingParams(max_tokens=9, ignore_eos=True))
    assert (output.text, output.finish_reason) == ("a" * 9, "length")


def test_stop_strings_stop_tokens_and_length():
    a = 3 + CHARACTERS.index("a")
    assert answer({"regex": "aab"}, SamplingParams(stop="ab")).text == "a"
    output = answer({"regex": "baab"}, SamplingParams(stop_token_ids=(a,)))
    assert (output.text, output.finish_reason) == ("ba", "stop")
    output = answer({"regex": "b"}, SamplingParams(stop_token_ids=(a,)))
    assert (output.text, output.finish_reason) == ("b", "stop")
    output = answer({"regex": "baab"}, SamplingParams(max_tokens=3))
    assert (output.text, output.finish_reason) == ("baa", "length")


def test_an_answer_without_tokens_for_it_ends():
    output = answer({"choice": ["aé"]})
    assert (output.text, output.finish_reason) == ("a", "dead_end")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", TREES)
def test_where_nothing_is_allowed_the_end_is(temperature, tree, trained):
    """Also below drafted nodes; no row's probabilities become NaN."""
    for texts in (["aé"], ["abé", "abcdé"]):
        params = SamplingParams(temperature, max_tokens=9, grammar={"choice": texts})
        for output in Engine(target(), trained, tree).generate(PROMPTS, params):
            assert output.text in {text[:-1] for text in texts}
            assert (output.token_ids[-1], output.finish_reason) == (EOS, "dead_end")
    guidance = Guidance(*nothing_allowed())
    assert guidance.allowed([0]).nonzero()[:, 2].tolist() == [EOS]


def nothing_allowed() -> tuple:
    """Arguments of Guidance for a row whose grammar allows only tokens that the target does not have."""
    guide = Requests(target()).guide
    matcher = guide.matcher({"choice": ["aé"]})
    assert matcher.accept(3 + CHARACTERS.index("a"))
    return guide, chain(0), [matcher]


@pytest.mark.parametrize("owner", [Runner, Guidance])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_a_round_that_failed_on_its_way_through_a_grammar(trained, monkeypatch, owner, call):
    """After drafting, or after the logits: the next round starts from the state in which the failed one did."""
    fail_at(monkeypatch, owner, "validate" if owner is Runner else "rewind", call)
    engine = Engine(target(), trained, "d3_bf2", max_batch_size=4)
    params = [SamplingParams(max_tokens=LONG, grammar=grammar_of(kind)) for kind in KINDS]
    requests = [engine.add(PROMPTS[0], own) for own in params]
    failed = 0
    while engine.has_unfinished:
        try:
            engine.step()
        except MemoryError:
            failed += 1
    assert failed == 1
    for request, kind in zip(requests, KINDS, strict=True):
        assert request.generated == truth(kind, tuple(PROMPTS[0]))


def test_a_grammar_that_counts_when_blocks_are_given_up(trained, monkeypatch):
    """A preempted sequence is recomputed by the models, but its matcher must not advance again, or the answer would
    end too early."""
    preempted, preempt = [], Scheduler.preempt

    def seeing(self, sequence):
        preempted.append(len(sequence.generated))
        preempt(self, sequence)

    monkeypatch.setattr(Scheduler, "preempt", seeing)
    params = SamplingParams(max_tokens=40, grammar={"regex": "[!-~]{30}"})
    outputs = Engine(target(), trained, "d3_bf2", kv_tokens=6 * BLOCK).generate(PROMPTS, params)
    assert max(preempted, default=0) > 1
    for output in outputs:
        assert (len(output.text), output.token_ids[30:], output.finish_reason) == (30, [EOS], "stop")
    assert token_ids(outputs) == token_ids(Engine(target()).generate(PROMPTS, params))


def test_a_dot_is_no_line_end():
    engine = Engine(target())
    for pattern, text, right in (
        ("a.b", "a\nb", False),
        ("a.b", "axb", True),
        (r"a\.[.]", "a..", True),
        (r"a\.", "ax", False),
        (r"^(?:[^^$]|\$)$", "$", True),
    ):
        state = inside(engine).requests.guide.matcher({"regex": pattern}).state
        assert (state.accept_string(text) and state.is_completed()) == right


def test_any_json():
    state = Requests(target()).guide.matcher({"json_schema": True}).state
    assert state.accept_string('{"a": [1, "x", null, {"b": 2.5e3}]}')
    assert state.is_completed()


# --- users' mistakes


def nested(depth: int) -> dict:
    """A schema in a schema, and so on."""
    schema: dict = {}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return schema


BAD = [
    ("json", "grammar='json': must be a mapping with one of the keys json_schema, regex, choice, ebnf"),
    ({}, "grammar={}: must be a mapping with one of the keys"),
    ({"regex": "a", "ebnf": "b"}, "must be a mapping with one of the keys"),
    ({"xml": "a"}, "must be a mapping with one of the keys"),
    ({5: "a"}, "must be a mapping with one of the keys"),
    ({"regex": 5}, "grammar.regex=5: must be a text"),
    ({"ebnf": None}, "grammar.ebnf=None: must be a text"),
    ({"choice": []}, r"grammar.choice=\[\]: must be a list of texts, at least one"),
    ({"choice": "ab"}, "must be a list of texts"),
    ({"choice": ["a", 1]}, "must be a list of texts"),
    ({"json_schema": 5}, "must be a schema, as a mapping or as JSON"),
    ({"json_schema": [[[[1, 2], "\n"]]] * 99}, "must be a schema, as a mapping or as JSON"),
    ({"json_schema": nested(100_000)}, "is deeper than can be read"),
    ({"json_schema": {"type": "object", "properties": dict.fromkeys(map(str, range(501)), True)}}, "501 properties"),
    ({"regex": "(a"}, r"grammar.regex='\(a': .*not closed"),
    ({"regex": "a{3,1}"}, "Lower bound is larger"),
    ({"regex": "a(?=b)"}, "Lookahead"),
    ({"regex": "a^b"}, r"\^ and \$ may stand at the ends only"),
    ({"regex": "$a"}, r"\^ and \$ may stand at the ends only"),
    ({"regex": r"\Aab\Z"}, r"\\A is no escape that is known"),
    ({"regex": r"[a\h]"}, r"\\h is no escape that is known"),
    ({"regex": r"[\1]"}, r"\\1 is no escape that is known"),
    ({"regex": r"a\012"}, r"\\01 is no escape that is known"),
    ({"regex": "[^]a]"}, r"a class that begins with \]"),
    ({"json_schema": {"type": "string", "pattern": r"\A[a-c]+\Z"}}, r"\\A is no escape that is known"),
    ({"regex": "\ud800"}, "surrogates"),
    ({"regex": r"[^\s\S]"}, "matches no text"),
    ({"choice": ["é"]}, "the target has no tokens with which to answer so"),
    ({"ebnf": "root ::= ("}, "line 1: an element is missing"),
    ({"ebnf": 'a ::= "b"'}, "root"),
    ({"json_schema": '{"type":'}, "grammar.json_schema"),
    ({"json_schema": {"type": "foo"}}, "foo"),
    ({"json_schema": {"type": {1}}}, r"\{1\} is nothing that JSON has"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "#: uniqueItems cannot be guaranteed for type 'array'"),
    ({"json_schema": {"properties": {"a": {"minimum": 5}}}}, "#: properties cannot be guaranteed for type None"),
    ({"json_schema": {"anyOf": [{"type": "string", "pattern": "a", "minLength": 3}]}}, "#/anyOf/0: minLength, pattern"),
    ({"json_schema": {"allOf": [{"type": "integer"}, {"const": 5}]}}, "allOf cannot be guaranteed for more than one"),
    ({"json_schema": {"enum": [True], "type": "integer"}}, "#: no value of enum or const is of type 'integer'"),
    ({"json_schema": {"$ref": "other.json"}}, r"\$ref 'other.json' must begin with #/"),
    ({"json_schema": '{"items":' * 50 + "{}" + "}" * 50}, "deeper than 32 schemas|items cannot be guaranteed"),
    ({"json_schema": '{"anyOf":[' * 50000 + "{}" + "]}" * 50000}, "is deeper than can be read"),
]


@pytest.mark.parametrize(("grammar", "said"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_grammars_are_one_line(grammar, said):
    """They are refused before anything runs; running requests go on."""
    engine = Engine(target())
    request = engine.add(PROMPTS[0], SamplingParams(max_tokens=6, grammar=grammar_of("regex")))
    engine.step()
    with pytest.raises(UserError, match=f"^(?=grammar).*{said}") as error:
        engine.add(PROMPTS[1], SamplingParams(grammar=grammar))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    while engine.has_unfinished:
        engine.step()
    assert request.generated == truth("regex", tuple(PROMPTS[0]))[:6]


def test_what_a_grammar_needs(monkeypatch):
    params = SamplingParams(grammar={"regex": "a"})
    with pytest.raises(UserError, match=r"^grammar: needs a tokenizer, and the target has none$"):
        Engine(tiny_target("llama")).generate([[5]], params)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"^grammar: needs a stop token, and .* no eos_token_id$"):
        Engine(tiny_target("llama", tokenizer, eos_token_id=None)).generate([[5]], params)
    monkeypatch.setattr(guided, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^grammar: needs xgrammar; pip install 'eagle-train\[guided\]'$"):
        Engine(target()).generate([[5]], params)


def test_token_ids_are_counted_as_ever(trained):
    """An unguided request of the same engine has the same statistics."""
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    alone = Engine(target(), trained).generate(PROMPTS, params)
    beside = Engine(target(), trained).generate(
        [*PROMPTS, PROMPTS[0]], [params] * 5 + [SamplingParams(grammar=grammar_of("choice"))]
    )
    assert token_ids(alone) == token_ids(beside[:5])
    assert [output.rounds for output in alone] == [output.rounds for output in beside[:5]]
