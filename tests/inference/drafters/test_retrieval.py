"""inference/drafters/retrieval.py: drafts out of an index, whatever it holds, leave the answers as they are."""

import re
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from eagle_train import generate
from eagle_train.errors import UserError
from eagle_train.inference import Engine
from eagle_train.inference.drafters.drafter import RowText
from eagle_train.inference.drafters.retrieval import Retrieval, make_retrieval
from eagle_train.inference.drafters.text_drafter import TextTree
from eagle_train.inference.lookup.datastore import Datastore
from eagle_train.models.loading import TargetConfig, load_tokenizer
from tests.support.command_line import call
from tests.support.datastores import write_datastore
from tests.support.reference_answers import GREEDY, PROMPTS, answers, cut, token_ids
from tests.support.tiny import random_tokens, shared_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def store_of(folder):
    """An index by family: half of its documents hold the answers behind their prompts, half begin like them."""

    @cache
    def made(family: str) -> Datastore:
        right = [prompt + answer for prompt, answer in zip(PROMPTS, answers(family), strict=True)]
        wrong = [document[:-9] + list(range(9)) for document in right]
        return Datastore.open(write_datastore(folder / family, [*wrong, *right, *random_tokens(90, 50)]))

    return made


def mean_round(outputs) -> float:
    counts = list(chain.from_iterable(output.rounds for output in outputs))
    return sum(counts) / len(counts)


@pytest.mark.parametrize("tree", ["chain3", "d2_bf2"])
def test_answers_come_in_fewer_rounds(store_of, tree):
    outputs = Engine(shared_target("llama"), Retrieval(store_of("llama")), tree).generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == cut(answers("llama"))
    assert mean_round(outputs) > 1.3


def test_texts_that_the_answers_do_not_follow_cost_no_answer(tmp_path):
    others = random_tokens(200, 200, seed=9)
    store = Datastore.open(write_datastore(tmp_path / "store", others))
    drafter = Retrieval(store, least_match=1)
    assert any(drafter.draft(RowText(0, prompt, [prompt[0]]), 8).tokens for prompt in PROMPTS)
    outputs = Engine(shared_target("llama"), drafter, "d2_bf2").generate(PROMPTS, GREEDY)
    assert token_ids(outputs) == cut(answers("llama"))


def test_the_end_of_prompt_and_answer_together_is_looked_up(tmp_path):
    store = Datastore.open(write_datastore(tmp_path / "store", [[1, 2, 3, 4, 5, 6, 7], [9, 4, 8], [3, 9]]))

    def drafted(prompt: list[int], answer: list[int], **options: int) -> list[int]:
        return Retrieval(store, **options).draft(RowText(0, prompt, answer), 9).tokens

    assert drafted([1, 2, 3], [4]) == [5, 6, 7]
    assert drafted([0, 3], [4], max_match=2) == [5, 6, 7]
    assert drafted([3], [4], max_match=1, least_match=1)[:2] == [5, 8]  # of both places
    assert drafted([1, 2], [3, 4, 5]) == [6, 7]
    assert drafted([2], [3, 4], max_match=2, depth=1) == [5]
    assert drafted([8], [4]) == []  # one token alone is known
    assert Retrieval(store).draft(RowText(0, [1, 2, 3], [4]), 2).tokens == [5, 6]
    long = list(range(30, 50))
    store = Datastore.open(write_datastore(tmp_path / "long", [long, [*range(35, 41), 0]]))
    assert drafted(long[:10], [40]) == long[11:]  # not what follows the last six tokens, too


def test_the_draft_is_a_tree(tmp_path):
    documents = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]]
    store = Datastore.open(write_datastore(tmp_path / "store", documents))
    assert Retrieval(store).draft(RowText(0, [1], [2]), 9) == TextTree([3, 6, 4, 5, 7], [0, 0, 1, 1, 2])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"datastore": "nowhere"}, r"drafter\.datastore=nowhere: no such directory; give what eagle-datastore wrote"),
        ({"max_match": 33}, "drafter.max_match=33: must be a whole number, from 1 to 32"),
        ({"max_match": 3, "least_match": 4}, "drafter.least_match=4: must be a whole number, from 1 to 3"),
        ({"least_match": 0}, "drafter.least_match=0: must be a whole number, from 1 to 16"),
        ({"max_hits": 0}, "drafter.max_hits=0: must be a whole number, at least 1"),
        ({"depth": 1.5}, r"drafter\.depth=1\.5: must be a whole number, at least 1"),
        ({"draft": "given"}, "drafter=retrieval: reads no draft; leave draft= out"),
    ],
)
def test_mistakes_are_one_line(store_of, options, told):
    given = {"draft": None, "datastore": str(store_of("llama").folder)} | options
    with pytest.raises(UserError, match=f"^{told}"):
        make_retrieval(shared_target("llama"), **given)


def test_a_command_drafts_out_of_an_index(tiny_checkpoint, tmp_path, capsys):
    target = tiny_checkpoint
    vocabulary = load_tokenizer(TargetConfig(str(target))).get_vocab()
    given = [f"target={target}", "prompt=abc", "max_tokens=12", "device=cpu", "color=never"]
    drafter = ["drafter=retrieval", "drafter.least_match=1", "tree=chain3"]
    other = write_datastore(tmp_path / "other", [[1, 2]], vocabulary=9)
    assert call(generate.main, *given) == 0
    plain = capsys.readouterr().out
    assert call(generate.main, *given, *drafter) == 2
    assert "error: drafter.datastore is needed: give drafter.datastore=VALUE" in capsys.readouterr().err
    assert call(generate.main, *given, *drafter, f"drafter.datastore={other}") == 2
    assert "other: was made for another tokenizer: token 0 is 't0' there, and '" in capsys.readouterr().err
    texts = [list(range(20, 60)), [token for token in range(60) for _ in range(4)]]
    store = write_datastore(tmp_path / "store", texts, vocabulary=vocabulary)
    assert call(generate.main, *given, *drafter, f"drafter.datastore={store}") == 0
    out, err = capsys.readouterr()
    assert re.sub(r"[\[\]]", "", plain).endswith(re.sub(r"[\[\]]", "", out))  # behind what imports print
    assert "TPC" in err
