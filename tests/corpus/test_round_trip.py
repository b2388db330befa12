"""What a template loses is refused, also where the text stands elsewhere by chance; markers hold what is written."""

import json

import pytest

from eagle_train.corpus import round_trip
from eagle_train.corpus.render import ChatRenderer
from eagle_train.errors import UserError
from tests.support import chat_templates
from tests.support.chat_templates import CONVERSATIONS, TOOLS, said, user
from tests.support.renderers import renderer_of, supervised_texts, to_conversation


def with_template(template: str, name: str = "chatml", **kwargs) -> ChatRenderer:
    return ChatRenderer(chat_templates.tokenizer_of(name, template=template), **kwargs)


@pytest.mark.parametrize("supervise", ["assistant", "last", "all"])
@pytest.mark.parametrize(("lost", "message"), [("user", "content of turn 1"), ("system", "content of turn 1")])
def test_a_lost_text_that_stands_elsewhere_is_refused(supervise, lost, message):
    """ "a" is a letter of the header's "assistant"."""
    template = chat_templates.source("chatml").replace("m.content", f"(m.content if m.role != '{lost}' else '')")
    renderer = with_template(template, supervise=supervise)
    messages = [{"role": "system", "content": "a"}] if lost == "system" else []
    with pytest.raises(UserError, match=rf"{message} \({lost}\), 'a', is not in"):
        renderer([*messages, user("a"), said("s")])


def test_a_lost_answer_that_stands_in_its_end_is_refused():
    template = chat_templates.source("chatml").replace("m.content", "(m.content if m.role != 'assistant' else '')")
    with pytest.raises(UserError, match="content of turn 2"):
        with_template(template)([user("q"), said("im")])


def test_a_lost_tool_and_a_lost_argument_that_stand_elsewhere_are_refused():
    with pytest.raises(UserError, match=r"does not render the row's tools \(get\)"):
        renderer_of("chatml")(to_conversation({"messages": [user("I get it"), said("a")], "tools": TOOLS}))
    arguments = "call.arguments if call.arguments is string else call.arguments | tojson"
    template = chat_templates.source("qwen3").replace(arguments, "'{}'")
    row = to_conversation(CONVERSATIONS["tools"])
    row.messages[1]["tool_calls"] = [{"function": {"name": "get", "arguments": {"e": "t"}}, "type": "function"}]
    with pytest.raises(UserError, match="the call of get in turn 2 is not in the rendering"):
        with_template(template, "qwen3")(row)


@pytest.mark.parametrize(("one", "other"), [({"x": 10}, {"x": 1}), ({"x": True}, {"x": True}), ({}, {})])
def test_a_lost_call_of_a_function_that_is_called_twice_is_refused(one, other):
    """gpt-oss renders the first call alone, and another's arguments may stand in it."""
    template = chat_templates.source("qwen3").replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    calls = [{"type": "function", "function": {"name": "get", "arguments": each}} for each in (one, other)]
    row = to_conversation({"messages": [user("q"), said("I get it", tool_calls=calls), said("a")], "tools": TOOLS})
    learnt = supervised_texts(renderer := renderer_of("qwen3"), renderer(row))
    assert learnt[0].count("<tool_call>") == 2
    with pytest.raises(UserError, match="1 of the 2 calls of get in turn 2 are not in the rendering"):
        with_template(template, "qwen3")(row)


IDS = (  # Kimi's way: of a call the id and the arguments, of a result the id
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}{{ m.tool_call_id }}\n{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("arguments", [{}, {"x": 1}])
@pytest.mark.parametrize("supervise", ["assistant", "last"])
def test_a_name_that_is_rendered_within_a_calls_id_is_there(arguments, supervise):
    renderer = with_template(IDS, supervise=supervise)
    for name, id in (("get", "functions.get:0"), ("get_all", "get_all")):
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        result = {"role": "tool", "tool_call_id": id, "content": "42"}
        documents = renderer([user("q"), said("", tool_calls=[call]), result, said("a")])
        written = [f"{id} {json.dumps(arguments)}<|im_end|>", "a<|im_end|>"]
        assert supervised_texts(renderer, documents) == written[-1 if supervise == "last" else 0 :]
    assert not renderer.notes
    if not arguments:
        call["id"] = "forget_all"  # a part of a word is there by chance
        with pytest.raises(UserError, match="the call of get_all in turn 2"):
            renderer([user("q"), said("", tool_calls=[call]), result, said("a")])


@pytest.mark.parametrize(
    "content",
    [
        "m.content if m.role == 'assistant' or m.content.startswith('keep:') else ''",
        "m.content if m.role == 'assistant' or m.content.startswith('keep:') else raise_exception('no')",
    ],
)
def test_a_template_that_looks_at_values_takes_the_rows_that_it_keeps(content):
    renderer = with_template(chat_templates.source("chatml").replace("m.content", f"({content})"))
    assert supervised_texts(renderer, renderer([user("keep: e"), said("a")])) == ["a<|im_end|>"]


def test_rows_of_a_known_shape_are_rendered_no_more_often(monkeypatch):
    renderer, times = renderer_of("qwen3"), []
    rendered = renderer.template.rendered
    monkeypatch.setattr(renderer.template, "rendered", lambda *a, **k: times.append(1) or rendered(*a, **k))
    counts = []
    for ids in ("a1", "b2", "c3"):
        if ids == "c3":
            monkeypatch.setattr(renderer.finder.round_trip, "check", lambda *_: None)
        call = {"id": ids, "type": "function", "function": {"name": f"get{ids}", "arguments": {"x": 1}}}
        result = {"role": "tool", "tool_call_id": ids, "content": ids}
        renderer(to_conversation({"messages": [user(ids), said("", tool_calls=[call]), result, said(ids)]}))
        counts.append(len(times))
        times.clear()
    assert counts[0] > counts[1] == counts[2]


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(round_trip, "MOST", 2)
    renderer = renderer_of("chatml")
    for turns in range(1, 5):
        renderer([user("q"), said("a")] * turns)
        assert len(renderer.finder.round_trip.known) <= 2


MARKED = "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"


@pytest.mark.parametrize(
    ("before", "prompt"),
    [
        ("{% generation %}{{ '<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n"),
        ("{{ '<|im_start|>assistant' }}{% generation %}{{ '\\n' }}", "<|im_start|>assistant\\n"),
        ("{% generation %}{{ '<|im_start|>assistant\\n' }}", ""),
    ],
)
def test_markers_around_the_header_do_not_make_it_the_models(before, prompt):
    template = (
        MARKED + before + "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
        "{%- else -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif -%}{%- endfor -%}"
    )
    if prompt:
        template += "{%- if add_generation_prompt -%}{{ '" + prompt + "' }}{%- endif -%}"
    renderer = with_template(template)
    documents = renderer(to_conversation(CONVERSATIONS["several"]))
    assert supervised_texts(renderer, documents) == ["a1<|im_end|>", "a2<|im_end|>"]


def test_markers_around_the_whole_conversation_supervise_answers_alone():
    template = "{% generation %}" + chat_templates.source("chatml") + "{% endgeneration %}"
    for supervise, right in (("assistant", ["a1<|im_end|>", "a2<|im_end|>"]), ("last", ["a2<|im_end|>"])):
        renderer = with_template(template, supervise=supervise)
        assert supervised_texts(renderer, renderer(to_conversation(CONVERSATIONS["several"]))) == right


CLOSED = (  # its generation prompt has a block that its rendering of an answer has not
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% if closed %}\n</think>\n\n{% endif %}{% endif %}"
)


def test_markers_behind_another_generation_prompt_hold_the_same_text():
    """Contents alone, and the reasoning that the prompt began."""
    renderer = with_template(CLOSED, "qwen3", template_kwargs={"closed": True})
    assert supervised_texts(renderer, renderer(to_conversation(CONVERSATIONS["several"]))) == ["a1", "a2"]
    assert any("markers leave out '<|im_end|>'" in note for note in renderer.notes)
    renderer = with_template(CLOSED, "qwen3")
    assert supervised_texts(renderer, renderer([user("q"), said("a", reasoning_content="hm")])) == ["hm\n</think>\n\na"]
