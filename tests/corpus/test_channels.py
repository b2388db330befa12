"""Harmony's messages in channels: what they become is what the same turns are with reasoning and calls as fields."""

import pytest

from eagle_train.corpus.conversations import to_messages
from eagle_train.errors import UserError
from tests.support.chat_templates import TOOLS, user
from tests.support.renderers import renderer_of, supervised_texts, to_conversation


def part(channel: str, content: object, **fields: object) -> dict:
    return {"role": "assistant", "channel": channel, "content": content, **fields}


CALLED = part("commentary", '{"x": 1}', recipient="functions.get", content_type="json")
RESULT = {"role": "tool", "name": "functions.get", "content": "42"}


def turns_of(*messages: dict) -> list[dict]:
    return to_messages({"messages": [user("q"), *messages]}, "messages", {})[1:]


def test_channels_are_the_fields_of_one_turn():
    text = [{"type": "text", "text": "r1"}]
    first, result, last = turns_of(part("analysis", text), CALLED, RESULT, part("analysis", "r2"), part("final", "a"))
    call = {"type": "function", "function": {"name": "get", "arguments": {"x": 1}}}
    assert first == {"role": "assistant", "content": "", "reasoning_content": "r1", "tool_calls": [call]}
    assert result == {"role": "tool", "name": "get", "content": "42"}
    assert last == {"role": "assistant", "content": "a", "reasoning_content": "r2"}
    assert [len(each.get("tool_calls", [])) for each in turns_of(CALLED, CALLED, part("final", "a"))] == [2, 0]
    assert [each["content"] for each in turns_of(part("final", "a"), part("final", "b"))] == ["a", "b"]
    assert turns_of(part("analysis", "r", weight=0), part("final", "a", weight=0))[0]["weight"] == 0
    shared = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "channel": "final"}]
    assert to_messages({"conversations": shared}, "sharegpt", {}) == [user("q"), {"role": "assistant", "content": "a"}]


def test_what_is_learnt_of_channels_is_what_the_model_writes():
    renderer = renderer_of("gpt_oss")
    row = {"messages": [user("q"), CALLED, RESULT, part("analysis", "r"), part("final", "a")], "tools": TOOLS}
    assert supervised_texts(renderer, renderer(to_conversation(row))) == [
        ' to=functions.get<|channel|>commentary json<|message|>{"x": 1}<|call|>',
        "<|channel|>analysis<|message|>r<|end|><|start|>assistant<|channel|>final<|message|>a<|return|>",
    ]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([part("slack", "a")], "a turn's channel must be analysis, commentary or final, not 'slack'"),
        ([part("commentary", "a"), CALLED], "text in the channel commentary"),
        ([part("commentary", "ls", recipient="python")], "recipient must be functions.NAME, or none, not 'python'"),
        ([part("analysis", "r"), user("q")], "a turn has the channel analysis alone"),
        ([part("analysis", "r"), part("analysis", "r"), part("final", "a")], "two messages in the channel analysis"),
        ([part("analysis", "r", weight=0), part("final", "a")], "have different weights"),
    ],
)
def test_channels_without_a_place_are_refused(messages, told):
    with pytest.raises(UserError, match=told):
        turns_of(*messages)
