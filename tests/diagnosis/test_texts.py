"""Which rows are asked and what is told of the others, and where the target's states are kept."""

import json
from pathlib import Path

import pytest
import torch

from eagle_train.corpus.source import DataConfig
from eagle_train.diagnosis.learning import off_policy
from eagle_train.diagnosis.texts import Question, Text, read_by_target, read_questions
from eagle_train.errors import UserError
from eagle_train.inference import Requests
from tests.support.tiny import CHAT_TEMPLATE, random_tokens, tiny_target, tiny_tokenizer

USER_FIRST = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('a user speaks first') }}{% endif %}"
NO_Z = "{% if messages[-1]['content'] == 'z' %}{{ raise_exception('no z') }}{% endif %}"


def asked(
    place: Path, rows: list[str], malformed: str = "refuse", limit: int = 4, before: str = "", date: str | None = None
) -> list[Question]:
    """`rows`: a letter for each turn of a conversation, `s` the system's, `u` and `v` the user's, else the answer.
    `before`: what the template begins with."""
    roles = {"s": "system", "u": "user", "v": "user"}
    every = [[{"role": roles.get(turn, "assistant"), "content": turn} for turn in row] for row in rows]
    path = place / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in every))
    data = DataConfig(str(path), columns={"messages": "messages"}, malformed=malformed, date=date)
    target = tiny_target(tokenizer=tiny_tokenizer())
    target.tokenizer.chat_template = before + USER_FIRST + NO_Z + CHAT_TEMPLATE
    return read_questions(data, limit, Requests(target), 8)


def test_a_row_that_the_template_refuses_is_left_out_where_malformed_ones_are(tmp_path):
    found = asked(tmp_path, ["ub", "sub", "vb", "av", "u"], "skip")
    assert [each.place.rpartition(":")[2] for each in found] == ["1", "3", "5"]
    said = r"^.*rows\.jsonl:2: .*a user speaks first; data\.malformed=skip leaves such rows out$"
    with pytest.raises(UserError, match=said):
        asked(tmp_path, ["ub", "sub", "vb"])


def test_why_no_row_is_left_is_told(tmp_path):
    said = r"fewer than two rows hold a prompt of less than \d+ tokens; 2 rows were left out, the first: .*:1: .*first$"
    with pytest.raises(UserError, match=said):
        asked(tmp_path, ["sub", "sv", "ub"], "skip")


def test_why_the_datas_answers_are_not_compared_is_told(tmp_path):
    found = asked(tmp_path, ["uz", "vz"])
    assert [each.given for each in found] == [None, None]
    reasons = [each.refused for each in found]
    assert all(reason is not None and reason.endswith("no z") for reason in reasons)
    learnt = off_policy(None, None, None, [], 3, 0, reasons[0])  # type: ignore[arg-type]
    told = learnt.not_checked[0].reason
    assert told == f"none of the data's answers after these prompts can be learnt from: {reasons[0]}"
    (without, _) = asked(tmp_path, ["u", "v"])
    assert (without.given, without.refused) == (None, None)


def test_prompts_and_the_datas_answers_are_of_the_day_that_is_given(tmp_path):
    found = asked(tmp_path, ["ub", "vb"], before="{{ strftime_now('%Y') }}", date="2001-02-03")
    tokenizer = tiny_tokenizer()
    assert [tokenizer.decode(each.prompt) for each in found] == ["2001u:u;a:", "2001u:v;a:"]
    assert [tokenizer.decode(each.given) for each in found] == ["b;", "b;"]


def test_states_are_kept_on_the_host_in_the_targets_dtype():
    """In fp32 on the device they are there while a draft is unrolled on them, however many texts there are."""
    target = tiny_target(dtype=torch.bfloat16)
    texts = [Text(number, [5, *tokens], [7, 8]) for number, tokens in enumerate(random_tokens(5, 9))]
    (part,) = read_by_target(target, texts, (1,))
    kept = [part.states.hidden, *part.states.layers.values()]
    assert {(each.device.type, each.dtype) for each in kept} == {("cpu", torch.bfloat16)}
    rows = part.rows()
    given = [rows.states.hidden, *rows.states.layers.values()]
    for one, other in zip(kept, given, strict=True):
        assert other.dtype == torch.float32
        assert torch.equal(one.float(), other)
    assert rows.embeddings.dtype == torch.float32
    assert rows.states.hidden is not part.rows().states.hidden
