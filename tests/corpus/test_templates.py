"""Chat templates of today's families: what is learnt of a conversation is what its model writes, behind what a server
would have been given, token for token."""

import random
import re

import pytest

from eagle_train.corpus.conversations import Conversation
from eagle_train.corpus.preview import description
from eagle_train.corpus.render import ChatRenderer
from eagle_train.corpus.tokens import Document
from eagle_train.errors import UserError
from tests.support import chat_templates
from tests.support.chat_templates import (
    CALL,
    CONVERSATIONS,
    FAMILIES,
    RIGHT,
    TOOLS,
    documents_of,
    rendered,
    said,
    user,
)
from tests.support.renderers import produced_ranges, renderer_of, supervised_texts, to_conversation

EVERY = [(name, conversation) for name in RIGHT for conversation in CONVERSATIONS]


@pytest.mark.parametrize(("name", "conversation"), EVERY)
@pytest.mark.parametrize("merges", [0, 60])
def test_what_is_learnt(name, conversation, merges):
    right, renderer = RIGHT[name][conversation], renderer_of(name, merges)
    row = to_conversation(CONVERSATIONS[conversation])
    if isinstance(right, str):
        with pytest.raises(UserError, match=re.escape(right.removeprefix("refused: "))):
            renderer(row)
        return
    count, texts = documents_of(right)
    documents = renderer(row)
    assert supervised_texts(renderer, documents) == texts
    # Two line's ends are a token at a prompt's end and two before a word: what was served twice is not one document.
    assert len(documents) == count or (merges and name == "llama31" and len(documents) == len(texts))
    check_served(name, renderer, row, documents)


def check_served(name: str, renderer: ChatRenderer, row: Conversation, documents: list[Document], **given) -> None:
    """Each turn stands behind exactly the tokens that a server would have been given, and ends its document or is
    followed by the next one's prompt."""
    answers = [number for number, message in enumerate(row.messages) if message["role"] == "assistant"]
    turns = [(document, *span) for document in documents for span in produced_ranges(document)]
    assert len(turns) == len(answers)
    for number, (document, start, _) in zip(answers, turns, strict=True):
        prompt = rendered(name, row.messages[:number], row.tools, prompt=True, **given)
        if name == "no_prompt":
            prompt += "<|im_start|>assistant\n"
        assert document.tokens[:start].tolist() == renderer.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    for document in documents:
        assert renderer.decode(document.tokens.tolist()) == document.text
    if len(documents) > 1:
        assert [len(produced_ranges(document)) for document in documents] == [1] * len(answers)


def test_the_page_is_up_to_date():
    """python -m tests.support.chat_templates writes it."""
    assert chat_templates.PAGE.read_text() == chat_templates.page()


def test_markers_without_the_end_token_are_told_of_once():
    renderer = renderer_of("marked_content")
    for _ in range(3):
        renderer(to_conversation(CONVERSATIONS["several"]))
    assert len(renderer.notes) == 1
    assert "markers leave out '<|im_end|>'" in next(iter(renderer.notes))
    whole = renderer_of("marked")
    whole(to_conversation(CONVERSATIONS["several"]))
    assert not whole.notes


def test_markers_around_more_than_what_is_written_hold_that_alone():
    template = chat_templates.source("marked").replace(
        "{% endgeneration %}{{ '\\n' }}", "{{ '\\n' }}{% endgeneration %}"
    )
    assert template != chat_templates.source("marked")
    renderer = ChatRenderer(chat_templates.tokenizer_of("marked", template=template))
    documents = renderer(to_conversation(CONVERSATIONS["several"]))
    assert (len(documents), supervised_texts(renderer, documents)) == (1, ["a1<|im_end|>", "a2<|im_end|>"])


def test_a_template_that_leaves_out_the_names_of_calls_is_taken_with_a_note():
    """What it renders is what is served; a call without arguments is lost, and refused."""
    template = chat_templates.source("qwen3").replace("call.name", "''")
    renderer = ChatRenderer(chat_templates.tokenizer_of("qwen3", template=template))
    row = to_conversation({"messages": CONVERSATIONS["tools"]["messages"]})
    first, _ = supervised_texts(renderer, renderer(row))
    assert '"arguments": {"x": 1}}' in first
    assert any("leaves out the names of tool calls" in note for note in renderer.notes)
    row.messages[1]["tool_calls"][0]["function"]["arguments"] = {}
    with pytest.raises(UserError, match="the call of get in turn 2 is not in the rendering"):
        renderer(row)


def test_an_earlier_turns_lost_call_is_refused():
    with pytest.raises(UserError, match="the call of get in turn 2"):
        renderer_of("chatml", supervise="last")(to_conversation(CONVERSATIONS["tools"]))


def test_qwen3_without_thinking():
    """The prompt holds the empty block; behind it there is no place for reasoning."""
    renderer = renderer_of("qwen3", enable_thinking=False)
    row = to_conversation(CONVERSATIONS["several"])
    documents = renderer(row)
    assert supervised_texts(renderer, documents) == ["a1<|im_end|>", "a2<|im_end|>"]
    check_served("qwen3", renderer, row, documents, enable_thinking=False)
    with pytest.raises(UserError, match=r"generation prompt ends in .*</think>"):
        renderer(to_conversation(CONVERSATIONS["reasoning"]))


# As Kimi K3's: channels whose tags are of several tokens, the first of which the prompt opens.
CHANNELS = """\
{%- if thinking is undefined %}{% set thinking = true %}{% endif -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}<|sep|>
{%- if m.role != "assistant" -%}{{ m.content }}
{%- else -%}
{%- if thinking -%}<|open|>think<|sep|>{{ m.reasoning_content or "" }}<|close|>think<|sep|>{%- endif -%}
<|open|>response<|sep|>{{ m.content }}<|close|>response<|sep|>
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant<|sep|><|open|>{{ "think" if thinking else "response" }}<|sep|>
{%- endif -%}"""


def test_a_channel_of_reasoning_that_the_prompt_opens_is_the_rows_to_fill():
    def renderer(**given):
        tokenizer = chat_templates.tokenizer_of("chatml", template=CHANNELS)
        return ChatRenderer(tokenizer, template_kwargs=given)

    thinks, plain = renderer(), renderer(thinking=False)
    row = to_conversation(CONVERSATIONS["reasoning"])
    answers = ["a1<|close|>response<|sep|><|im_end|>", "a2<|close|>response<|sep|><|im_end|>"]
    thoughts = [f"r{n}<|close|>think<|sep|><|open|>response<|sep|>{each}" for n, each in enumerate(answers, 1)]
    assert supervised_texts(thinks, thinks(row)) == thoughts
    assert supervised_texts(plain, plain(to_conversation(CONVERSATIONS["several"]))) == answers
    told = r"ends in '<\|open\|>think.*so the model writes reasoning first.*thinking: false"
    with pytest.raises(UserError, match=told):
        thinks(to_conversation(CONVERSATIONS["several"]))


@pytest.mark.parametrize("name", ["qwen3", "glm45", "deepseek_r1"])
def test_reasoning_within_the_content_is_learnt_as_it_stands(name):
    renderer = renderer_of(name)
    texts = supervised_texts(renderer, renderer([user("q"), said("<think>\nhm\n</think>\n\na")]))
    assert (
        texts
        == {
            "qwen3": ["<think>\nhm\n</think>\n\na<|im_end|>"],
            "glm45": ["\n<think>hm</think>\na<|user|>"],
            "deepseek_r1": ["hm\n</think>\n\na<|end_of_sentence|>"],
        }[name]
    )


def test_a_rows_own_variables_go_over_the_configs():
    """Whether a prompt thinks is the row's to say, and what is known of one set of variables holds for it alone."""
    row = CONVERSATIONS["one turn"]
    asked = [
        to_conversation(row | {"chat_template_kwargs": given})
        for given in ({"enable_thinking": False}, '{"enable_thinking": null}', {"enable_thinking": True, "tone": "dry"})
    ]
    answers = ["a1<|im_end|>", "<think>\n\n</think>\n\na1<|im_end|>", "<think>\n\n</think>\n\na1<|im_end|>"]
    renderer = renderer_of("qwen3")
    for _ in range(2):
        assert [supervised_texts(renderer, renderer(each)) for each in asked] == [[answer] for answer in answers]
    assert list(renderer.notes) == ["chat_template_kwargs.tone of the data: the chat template reads no such variable"]
    closed = renderer_of("qwen3", enable_thinking=False)
    assert [supervised_texts(closed, closed(each)) for each in asked] == [answers[:1], answers[:1], answers[2:]]
    for given, told in (("[1]", "must hold an object of variables"), ({"tools": []}, "is set for each rendering")):
        with pytest.raises(UserError, match=f"chat_template_kwargs.*{told}"):
            renderer(to_conversation(row | {"chat_template_kwargs": given}))


@pytest.mark.parametrize("content", ["r1\n</think>\n\na1", "r1</think>a1"])
@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("qwen3", "<think>\nr1\n</think>\n\na1<|im_end|>"),
        ("gpt_oss", RIGHT["gpt_oss"]["reasoning"][1]),
        ("glm45", "\n<think>r1</think>\na1<|user|>"),
        ("deepseek_r1", "r1\n</think>\n\na1<|end_of_sentence|>"),
    ],
)
def test_reasoning_without_its_opening_tag_is_reasoning(name, right, content):
    """Servers return it so where the prompt ends in the tag."""
    renderer = renderer_of(name)
    assert supervised_texts(renderer, renderer([user("q"), said(content)])) == [right]


def test_reasoning_that_stays_in_the_content_gets_its_opening_tag():
    renderer = renderer_of("chatml")
    learnt = supervised_texts(renderer, renderer([user("q"), said("r1\n</think>\n\na1")]))
    assert learnt == ["<think>\nr1\n</think>\n\na1<|im_end|>"]


@pytest.mark.parametrize(
    "content", ["Use the </think> tag.", "It is `</think>`.", "End with </think>.", "</think> is it"]
)
def test_a_tag_that_an_answer_speaks_of_is_no_reasoning(content):
    renderer = renderer_of("gpt_oss")
    right = f"<|channel|>final<|message|>{content}<|return|>"
    assert supervised_texts(renderer, renderer([user("q"), said(content)])) == [right]


@pytest.mark.parametrize("content", ["It is `</think>`.", "Use the </think> tag."])
@pytest.mark.parametrize("name", ["qwen3", "glm45"])
def test_a_tag_that_a_template_takes_for_the_end_of_reasoning_is_refused(name, content):
    """It would make reasoning of the answer's first words."""
    with pytest.raises(UserError, match=r"takes '</think>' in the content of turn 2, .*, for the end of reasoning"):
        renderer_of(name)([user("q"), said(content)])
    texts = supervised_texts(renderer_of(name), renderer_of(name)([user("q"), said(content, reasoning_content="hm")]))
    assert texts[0].endswith(content + ("<|im_end|>" if name == "qwen3" else "<|user|>"))


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("<think>\nr1\n</think>\n\na1", "r1"),
        ("<think>r1</think>a1", "\nr1 "),
        ("r1\n</think>\n\na1", "r1"),
        ("<think>\n\n</think>\n\na1", "r1"),
        ("<think>\nr1\n</think>\n\na1", ""),
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "glm45", "gpt_oss", "deepseek_r1"])
def test_reasoning_within_the_content_and_beside_it_is_learnt_once(name, content, field):
    row = to_conversation({"messages": [user("q"), said(content, reasoning_content=field)]})
    renderer, alone = renderer_of(name), to_conversation({"messages": [user("q"), said("a1", reasoning_content="r1")]})
    texts, right = (supervised_texts(renderer, renderer(each)) for each in (row, alone))
    assert [re.sub(r"\s", "", text) for text in texts] == [re.sub(r"\s", "", text) for text in right]


def test_two_thoughts_of_one_turn_that_differ_are_refused():
    answer = said("<think>\nr1\n</think>\n\na1", reasoning_content="r2")
    with pytest.raises(UserError, match=r"^turn 4: reasoning stands in the content, 'r1', and beside it, 'r2'"):
        renderer_of("qwen3")([user("q"), said("a"), user("q"), answer])


THINKING = (  # its generation prompt begins the reasoning that its rendering of an answer has too
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
FORKED = (  # its generation prompt begins the reasoning, and an answer without any ends it at once
    "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '</think>' }}{{ m.content }}"
    "{{ '<|im_end|>' if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "message", "right"),
    [
        (THINKING, said("<think>\nhm\n</think>\n\na"), "hm\n</think>\n\na<|im_end|>"),
        (FORKED, said("a", reasoning_content="hm"), "hm</think>a<|im_end|>"),
    ],
)
def test_a_prompt_that_begins_the_reasoning(template, message, right):
    tokenizer = chat_templates.tokenizer_of("qwen3", template=template)
    renderer = ChatRenderer(tokenizer)
    assert supervised_texts(renderer, renderer([user("q"), message])) == [right]
    with pytest.raises(UserError, match=r"generation prompt ends in .*<think>"):
        ChatRenderer(chat_templates.tokenizer_of("deepseek_r1"))([user("q"), said("a")])


THINKS_OR_CLOSES = (  # its generation prompt begins the reasoning, and an answer without any has an empty block
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}"
    "\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("template", [THINKING, THINKS_OR_CLOSES])
def test_a_prompt_that_begins_the_reasoning_is_followed_by_the_rows_reasoning_alone(template):
    """Also where the rendering of an answer without any begins with that prompt."""
    renderer = ChatRenderer(chat_templates.tokenizer_of("qwen3", template=template))
    for earlier in ([], [user("q0"), said("<think>\nhm\n</think>\n\na0")]):
        with pytest.raises(UserError, match=rf"turn {len(earlier) + 2}: .* ends in '<think>\\n', so the model writes"):
            renderer([*earlier, user("q"), said("a")])
    if template == THINKS_OR_CLOSES:
        documents = renderer([user("q"), said("a", reasoning_content="hm")])
        assert supervised_texts(renderer, documents) == ["hm\n</think>\n\na<|im_end|>"]


@pytest.mark.parametrize("template", [THINKING, THINKS_OR_CLOSES])
def test_reasoning_without_its_opening_tag_behind_a_prompt_that_has_it(template):
    renderer = ChatRenderer(chat_templates.tokenizer_of("qwen3", template=template))
    for content in ("hm\n</think>\n\na", "<think>\nhm\n</think>\n\na"):
        assert supervised_texts(renderer, renderer([user("q"), said(content)])) == ["hm\n</think>\n\na<|im_end|>"]


@pytest.mark.parametrize("answer", [said("<think>r1</think>a1"), said("a1", reasoning_content="r1")])
def test_a_prompt_that_begins_the_reasoning_whose_end_no_template_knows(answer):
    """OLMo 3: neither the template has the closing tag nor the tokenizer."""
    template = THINKING.replace("<think>\n", "<think>")
    renderer = ChatRenderer(chat_templates.tokenizer_of("chatml", template=template))
    assert "</think>" not in template
    assert "</think>" not in renderer.tokenizer.get_vocab()
    assert supervised_texts(renderer, renderer([user("q"), answer])) == ["r1</think>a1<|im_end|>"]
    with pytest.raises(UserError, match="the model writes reasoning first, and the turn has none: give it as"):
        renderer([user("q"), said("a1")])


def test_an_answer_without_the_reasoning_that_its_prompt_begins_is_refused():
    """A template that knows no reasoning writes an empty block, and the reasoning behind it."""
    template = THINKS_OR_CLOSES.replace("m.reasoning_content", "''")
    renderer = ChatRenderer(chat_templates.tokenizer_of("qwen3", template=template))
    with pytest.raises(UserError, match=r"turn 2: the chat template does not continue .* reasoning, 'hm', but with"):
        renderer([user("q"), said("hm\n</think>\n\na")])


NOT_THINKING = THINKS_OR_CLOSES.replace("nt\n<think>\n{% endif %}", "nt\n<think>\n\n</think>\n\n{% endif %}")


@pytest.mark.parametrize("empty", ["<think>\n\n</think>\n\n", "</think>\n\n"])
@pytest.mark.parametrize("template", [chat_templates.source("qwen3"), NOT_THINKING])
def test_behind_a_prompt_that_closes_the_reasoning_there_is_none(template, empty):
    """Data of a server have the empty block in the content, which the prompt has already."""
    tokenizer = chat_templates.tokenizer_of("qwen3", template=template)
    renderer = ChatRenderer(tokenizer, template_kwargs={"enable_thinking": False})
    documents = renderer([user("q1"), said(f"{empty}a1"), user("q2"), said(f"{empty}a2")])
    assert supervised_texts(renderer, documents) == ["a1<|im_end|>", "a2<|im_end|>"]
    assert "</think>\n\n<think>" not in documents[-1].text
    for content in ("<think>\nhm\n</think>\n\na", "hm\n</think>\n\na"):
        with pytest.raises(UserError, match=r"turn 2: .* prompt ends in .*</think>.*, which closes the reasoning"):
            renderer([user("q"), said(content)])


@pytest.mark.parametrize("name", ["qwen3", "chatml", "deepseek_r1"])
@pytest.mark.parametrize("cut", ["<think>\nhm", "\n[THINK]hm", "<think>\nhm\n</think>\n\n<think>\nhm"])
def test_a_thought_that_was_cut_is_refused(name, cut):
    """No model ends its turn there. With the reasoning as a field, the content is the answer, whatever it says."""
    renderer = renderer_of(name)
    with pytest.raises(UserError, match=r"turn 2: its reasoning, which (<think>|\[THINK\]) begins, never ends"):
        renderer([user("q"), said(cut)])
    if name == "qwen3":
        learnt = supervised_texts(renderer, renderer([user("q"), said("<think> is a tag", reasoning_content="hm")]))
        assert learnt == ["<think>\nhm\n</think>\n\n<think> is a tag<|im_end|>"]


@pytest.mark.parametrize(
    ("supervise", "texts"), [("assistant", ["a1<|im_end|>", "a2<|im_end|>"]), ("last", ["a2<|im_end|>"])]
)
def test_supervise(supervise, texts):
    renderer = renderer_of("chatml", supervise=supervise)
    documents = renderer(to_conversation(CONVERSATIONS["several"]))
    assert (len(documents), supervised_texts(renderer, documents)) == (1, texts)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("mistral", [" a1</s>", " a3</s>"]),  # nothing but a stop is between a1 and a2
        ("no_prompt", ["a1<|im_end|>", "a2<|im_end|>", "a3<|im_end|>"]),
        ("phi3", ["a1<|end|>", "a2<|end|>", "a3<|end|>"]),  # its generation prompt ends in a stop token
    ],
)
def test_an_answer_behind_an_answer_is_learnt_where_a_prompt_asks_for_it(name, right):
    renderer = renderer_of(name)
    documents = renderer([user("q1"), said("a1"), said("a2"), user("q2"), said("a3")])
    assert supervised_texts(renderer, documents) == right
    assert any("the second is muted" in note for note in renderer.notes) == (name == "mistral")
    if name == "mistral":
        last = renderer_of(name, supervise="last")
        assert supervised_texts(last, last([user("q1"), said("a1"), said("a2")])) == []


def test_supervise_last_is_one_document_where_earlier_turns_are_rendered_otherwise():
    renderer = renderer_of("qwen3", supervise="last")
    documents = renderer(to_conversation(CONVERSATIONS["several"]))
    assert (len(documents), supervised_texts(renderer, documents)) == (1, ["<think>\n\n</think>\n\na2<|im_end|>"])


@pytest.mark.parametrize("name", ["chatml", "qwen3", "marked"])
@pytest.mark.parametrize("muted", [0, 1])
def test_weight_0_is_not_learnt(name, muted):
    messages = [dict(message) for message in CONVERSATIONS["several"]["messages"]]
    messages[1 + 2 * muted]["weight"], messages[3 - 2 * muted]["weight"] = 0, 1
    renderer = renderer_of(name)
    documents = renderer(to_conversation({"messages": messages}))
    assert supervised_texts(renderer, documents) == [documents_of(RIGHT[name]["several"])[1][1 - muted]]
    assert len(documents) == 1
    everything = renderer_of(name, supervise="all")(to_conversation({"messages": messages}))[0]
    if name != "qwen3" or muted == 1:
        assert not everything.produced.all()


@pytest.mark.parametrize(
    ("name", "stop"), [("chatml", "<|im_end|>"), ("qwen3", "<|im_end|>"), ("marked", "<|im_end|>"), ("mistral", "</s>")]
)
def test_the_stop_behind_an_answer_that_was_cut_is_not_learnt(name, stop):
    """The template puts it there; the model was not done."""
    row, renderer = CONVERSATIONS["several"], renderer_of(name)
    right = documents_of(RIGHT[name]["several"])[1]
    reasons = [["stop", "length"], ["length", "stop"], ["length"], ["tool_calls", "stop"], "length"]
    learnt = [
        supervised_texts(renderer, renderer(to_conversation({**row, "finish_reasons": each}))) for each in reasons
    ]
    first, second = (text.removesuffix(stop) for text in right)
    assert learnt == [[right[0], second], [first, right[1]], right, right, right]


@pytest.mark.parametrize("content", ["a\n  ", " "])
def test_white_space_at_the_end_of_an_answer_that_was_cut_is_learnt(content):
    renderer = renderer_of("chatml")
    row = {"messages": [user("q"), said(content)], "finish_reasons": ["length"]}
    assert supervised_texts(renderer, renderer(to_conversation(row))) == [content]


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x":1}'])
def test_calls_reach_the_template_as_it_takes_them(content, arguments):
    """As mappings if it makes JSON of them, as JSON if it is that it wants; never JSON twice over or Python."""
    call = {"id": "1", "type": "function", "function": {"name": "get", "arguments": arguments}}
    row = {"messages": [user("q"), {"role": "assistant", "content": content, "tool_calls": [call]}]}
    begin = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    end = "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    for form in (
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}',
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}',
        '{"name": "{{ c.function.name }}", "arguments": {{ "" + c.function.arguments }}}',
    ):
        renderer = ChatRenderer(chat_templates.tokenizer_of("chatml", template=begin + form + end))
        assert supervised_texts(renderer, renderer(to_conversation(row))) == [
            '{"name": "get", "arguments": {"x": 1}}<|im_end|>'
        ]
        with pytest.raises(UserError, match=r"does not render the row's tools \(give\)"):  # of the form that it takes
            renderer(to_conversation({**row, "tools": [{"name": "give"}]}))


SYSTEM_LAST = (  # the system message stands before the last question, and nowhere once that is answered
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST]"
    "{{ messages[0].content + ': ' if loop.last and messages[0].role == 'system' }}{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
TOLD_LAST = (  # what is to be done stands before the header of an answer that is asked for
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|system|>Answer.</s><|assistant|>{% endif %}"
)
CLOSED_LAST = (  # a result is closed in another way when it is the last message
    "{% for m in messages %}{% if m.role == 'tool' %}<r>{{ m.content }}</r>{{ '\n' if not loop.last }}{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NOT_ASKED = CLOSED_LAST.replace("if add_generation_prompt", "if add_generation_prompt and messages[-1].role != 'tool'")
LAST_THINKS = (  # an empty block of reasoning in front of the last message's answer alone
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<think></think>' if loop.last and m.role == 'assistant' }}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS_ALOUD = (  # the prompt begins reasoning, which is written as a field; without any, the rendering ends it at once
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>{% if m.reasoning_content %}"
    "\n{{ m.reasoning_content }}\n{% endif %}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n{% endif %}"
)
MENTIONED = (  # another end for calls, between which and the content there is a stop
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% for c in m.tool_calls or [] %}"
    "<|im_start|>assistant\n{{ c.function.name }} {{ c.function.arguments | tojson }}<|im_end|>\n{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALWAYS = (  # it ends in a generation prompt always; what it puts before answers and calls is the model's
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{{ '<|START_CALL|>' if m.tool_calls else "
    "'<|START_TEXT|>' }}{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}"
    "{% endfor %}<|im_end|>{% endfor %}<|assistant|>"
)
HALF_TAG = ALWAYS.removesuffix("<|assistant|>")  # both begin with the same letters


@pytest.mark.parametrize(
    ("template", "messages", "texts"),
    [
        (SYSTEM_LAST, CONVERSATIONS["system"]["messages"], [" a1</s>"]),
        (TOLD_LAST, CONVERSATIONS["several"]["messages"], ["a1</s>", "a2</s>"]),
        (
            CLOSED_LAST,
            CONVERSATIONS["tools"]["messages"],
            ['{"name": "get", "arguments": {"x": 1}}<|im_end|>', "a1<|im_end|>"],
        ),
        (
            NOT_ASKED,
            CONVERSATIONS["tools"]["messages"],
            ['{"name": "get", "arguments": {"x": 1}}<|im_end|>', "\n<|im_start|>assistant\na1<|im_end|>"],
        ),
        (
            LAST_THINKS,
            [user("q1"), said("a1"), said("b1")],
            ["<think></think>a1<|im_end|>", "<think></think>b1<|im_end|>"],
        ),
        (THINKS_ALOUD, CONVERSATIONS["reasoning"]["messages"][:2], ["r1\n</think>a1<|im_end|>"]),
        (ALWAYS, CONVERSATIONS["one turn"]["messages"], ["<|START_TEXT|>a1<|im_end|>"]),
        (
            HALF_TAG,
            [user("q1"), said("", tool_calls=[CALL])],
            ['<|START_CALL|>{"name": "get", "arguments": {"x": 1}}<|im_end|>'],
        ),
        (MENTIONED, [user("q1"), said("c", tool_calls=[CALL])], "has '<|im_end|>', a stop token, between the parts of"),
        (THINKS_ALOUD, CONVERSATIONS["one turn"]["messages"], r"ends in '<think>\n\n', so the model writes reasoning"),
        (
            THINKS_ALOUD.replace("<think>\n\n", "<think>\n\n{{ enable_thinking }}"),
            CONVERSATIONS["one turn"]["messages"],
            "set data.template_kwargs={enable_thinking: false}",
        ),
        (
            chat_templates.source("gemma4").replace("<channel|>{%", "<channel|>{{ thinking }}{%"),
            CONVERSATIONS["reasoning"]["messages"],
            "leave reasoning out of the data, set data.template_kwargs={thinking: true}",
        ),
    ],
)
def test_prompts_that_the_rendering_does_not_begin_with(template, messages, texts):
    tokenizer = chat_templates.tokenizer_of("qwen3" if "im_end" in template else "mistral", template=template)
    renderer = ChatRenderer(tokenizer)
    if isinstance(texts, str):
        with pytest.raises(UserError, match=re.escape(texts)):
            renderer(to_conversation({"messages": messages}))
        return
    documents = renderer(to_conversation({"messages": messages}))
    assert supervised_texts(renderer, documents) == texts
    if template == HALF_TAG:  # whose header a server writes too
        return
    first = next(number for number, message in enumerate(messages) if message["role"] == "assistant")
    prompt = tokenizer.apply_chat_template(messages[:first], add_generation_prompt=True, tokenize=False)
    assert documents[0].text.startswith(prompt + texts[0])


def test_a_template_that_loses_a_message_is_refused():
    with pytest.raises(UserError, match=r"turn 1 \(developer\).*'data\.roles=\{developer: system\}' makes it"):
        ChatRenderer(
            chat_templates.tokenizer_of(
                "llama31",
                template=chat_templates.source("chatml").replace(
                    "m.content", "(m.content if m.role != 'developer' else '')"
                ),
            )
        )([{"role": "developer", "content": "s0"}, user("q1"), said("a1")])
    for lost, message in (("user", "content of turn 1"), ("assistant", "content of turn 2")):
        template = chat_templates.source("chatml").replace("m.content", f"(m.content if m.role != '{lost}' else '')")
        renderer = ChatRenderer(chat_templates.tokenizer_of("chatml", template=template))
        with pytest.raises(UserError, match=message):
            renderer([user("q1"), said("a1")])


def test_tools_that_the_template_does_not_know_are_refused():
    with pytest.raises(UserError, match=r"does not render the row's tools \(get\)"):
        renderer_of("chatml")(to_conversation({**CONVERSATIONS["one turn"], "tools": TOOLS}))


def test_an_end_that_is_no_stop_is_told():
    """It is learnt, for the model writes it; engines would not stop there."""
    tokenizer = chat_templates.tokenizer_of("llama31", template=chat_templates.source("chatml"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(chat_templates.IM)})
    renderer = ChatRenderer(tokenizer)
    assert supervised_texts(renderer, renderer([user("q"), said("a")])) == ["a<|im_end|>"]
    assert any("'<|im_end|>', which is no stop token" in note for note in renderer.notes)
    tokenizer.chat_template = chat_templates.source("chatml").replace("<|im_end|>", "<|im_start|>end<|im_end|>")
    renderer = ChatRenderer(tokenizer)
    assert supervised_texts(renderer, renderer([user("q"), said("a")])) == ["a<|im_start|>end<|im_end|>"]


def test_a_template_with_markers_and_a_header_the_server_writes():
    renderer = renderer_of("no_prompt")
    (document,) = renderer(to_conversation(CONVERSATIONS["several"]))
    assert document.text.endswith("<|im_start|>assistant\na2<|im_end|>")


def test_the_clock_is_pinned_and_a_date_string_goes_before_it():
    for kwargs, day in (({}, "31 Jul 2026"), ({"date_string": "1 Jan 2000"}, "1 Jan 2000")):
        renderer = renderer_of("llama31", **kwargs)
        assert f"Today Date: {day}\n" in renderer(to_conversation(CONVERSATIONS["one turn"]))[0].text
        assert renderer.template.has_read_clock is (not kwargs)
    assert renderer.reads_clock
    assert not renderer_of("chatml").reads_clock


def test_merges_across_the_prompts_end_are_undone():
    """ "\\n\\n" is one token; a server's prompt ends in the first line's end, and the model writes the second."""
    renderer = renderer_of("chatml", merges=60)
    pair = renderer.tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    assert len(pair) == 1
    row = to_conversation({"messages": [user("q"), said("\n\nhello world"), user("q"), said("\nhello")]})
    documents = renderer(row)
    assert supervised_texts(renderer, documents) == ["\n\nhello world<|im_end|>", "\nhello<|im_end|>"]
    check_served("chatml", renderer, row, documents)


INSTRUCTED = (  # Llama 2: no tag is a token, and answers begin with a space
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    " {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
BELOW = (  # Zephyr: answers begin behind a line's end
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.mark.parametrize("kind", ["prepend", "first", "always", "none", "unigram"])
@pytest.mark.parametrize(("template", "lead"), [(INSTRUCTED, " "), (BELOW, "")])
def test_pieces_and_bytes_of_sentencepiece(kind, template, lead):
    """A token is the model's if its characters are, with the space that it begins with, and all of a character's
    bytes; the text of some tokens is what it is where they stand."""
    tokenizer = chat_templates.pieces_of(kind)
    tokenizer.chat_template = template
    renderer = ChatRenderer(tokenizer)
    contents = ["hello é", "ça hello 🙂", " q ", " hello\n a"]
    messages = [user(content) if n % 2 == 0 else said(content) for n, content in enumerate(contents)]
    documents = renderer(messages)
    assert len(documents) == 1 or kind == "unigram"  # which makes one unknown piece of a line's end and what follows
    texts = [text for each in documents for text in description("", each, renderer)["supervised_text"]]
    assert texts == [f"{lead}{contents[1]}</s>", f"{lead}{contents[3]}</s>"]
    turns = [(each.tokens.tolist(), start) for each in documents for start, _ in produced_ranges(each)]
    for number, (tokens, start) in zip((1, 3), turns, strict=True):
        prompt = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True, tokenize=False)
        assert tokens[:start] == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    text = renderer.render_text("Q: hello A: é", "A: (.*)")
    assert tokenizer.convert_ids_to_tokens(text.tokens[text.produced]) == ["<0xC3>", "<0xA9>", "</s>"]


PIECES = [
    "hello world", " Ça 🙂", "  spaced  ", "\n\nlines\n", "<|im_end|>", "<|user|>", '{"a": 1}', "a1", "[INST]", "</s>",
    "tab\tx", "\\n", "", "<tool_call>", "it's \"q\"", "<|end|>", "日本語", "\n",
]  # fmt: skip
INLINE = "<think>\nr1\n</think>\n\na1"
THINKS_FIRST = (  # reasoning is a field; an answer without any has an empty block
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AS_WRITTEN = THINKS_FIRST.replace("<think>{{ m.reasoning_content }}</think>", "{% if m.reasoning_content %}<think>{{ "
    "m.reasoning_content }}</think>{% endif %}")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "template", "right"),
    [
        ("qwen3", THINKS_FIRST, "<think>r1</think>a1<|im_end|>"),
        ("qwen3", AS_WRITTEN, INLINE + "<|im_end|>"),
        ("qwen3", chat_templates.source("chatml"), INLINE + "<|im_end|>"),
        ("qwen3", AS_WRITTEN.replace("think>", "seed:think>"), "<seed:think>r1</seed:think>a1<|im_end|>"),
        ("qwen3", AS_WRITTEN.replace("think>", "longcat_think>"), "<longcat_think>r1</longcat_think>a1<|im_end|>"),
        (
            "qwen3",
            AS_WRITTEN.replace("think>", "think:opensource>"),
            "<think:opensource>r1</think:opensource>a1<|im_end|>",
        ),
        ("gpt_oss", None, RIGHT["gpt_oss"]["reasoning"][1]),
    ],
)
def test_reasoning_within_the_content_is_a_field_where_it_would_stand_twice_or_in_other_tags(name, template, right):
    renderer = ChatRenderer(chat_templates.tokenizer_of(name, template=template))
    assert supervised_texts(renderer, renderer([user("q1"), said(INLINE)])) == [right]


NO_THOUGHTS = (  # Kimi K2 Thinking: of what ends a task only the answer
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_reasoning_behind_a_block_that_the_template_writes_empty_is_refused():
    """A model writes one block, and no empty one before it."""
    renderer = ChatRenderer(chat_templates.tokenizer_of("qwen3", template=NO_THOUGHTS))
    for thought in (said(INLINE), said("a1", reasoning_content="r1")):
        with pytest.raises(UserError, match="leaves out the reasoning of turn 2, 'r1'"):
            renderer([user("q1"), thought])
    for none in (said("a1"), said("<think>\n\n</think>\n\na1")):
        learnt = supervised_texts(renderer, renderer([user("q1"), none]))
        assert learnt == ["<think></think>a1<|im_end|>"]


THINKS_IN_PARTS = (  # Magistral: reasoning is a part of the content
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for p in m.content %}{{ '[THINK]' + p.thinking + '[/THINK]' if p.type == 'thinking' "
    "else p.text }}{% endfor %}{% endif %}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function | tojson }}"
    "{% endfor %}</s>{% endif %}{% endfor %}"
)


def test_reasoning_is_given_as_a_part_of_the_content_where_the_template_wants_it_so():
    renderer = ChatRenderer(chat_templates.tokenizer_of("mistral", template=THINKS_IN_PARTS))
    documents = renderer([*CONVERSATIONS["reasoning"]["messages"], user("q3"), said(INLINE)])
    texts = ["[THINK]r1[/THINK]a1</s>", "[THINK]r2[/THINK]a2</s>", "[THINK]r1[/THINK]a1</s>"]
    assert (len(documents), supervised_texts(renderer, documents)) == (1, texts)
    called = renderer([user("q1"), said("", reasoning_content="r1", tool_calls=[CALL])])
    assert supervised_texts(renderer, called) == [
        '[THINK]r1[/THINK][TOOL_CALLS]{"name": "get", "arguments": {"x": 1}}</s>'
    ]


def test_a_turn_behind_a_call_with_reasoning_ends_with_the_next_header():
    """Reasoning before the last question is left out, so what is before changes when a question follows."""
    renderer = renderer_of("glm45")
    first = said("", reasoning_content="r1", tool_calls=[CALL])
    row = {"messages": [user("q1"), first, {"role": "tool", "content": "42"}, said("a1")], "tools": TOOLS}
    assert supervised_texts(renderer, renderer(to_conversation(row)))[1] == "\n<think></think>\na1<|user|>"
    assert not renderer.notes


def test_what_is_noticed_in_a_form_that_the_template_does_not_take_is_not_told():
    template = chat_templates.source("chatml").replace("m.content", "(m.content if m.content != 'a2' else '')")
    row = {"messages": CONVERSATIONS["several"]["messages"]}
    tokenizer = chat_templates.tokenizer_of("llama31", template=template)
    renderer = ChatRenderer(tokenizer)
    with pytest.raises(UserError, match="content of turn 4"):
        renderer(to_conversation(row))
    assert not renderer.notes


REASONS = {"qwen3", "gpt_oss", "glm45"}
CALLS = {"llama31", "qwen3", "gpt_oss", "mistral", "glm45", "gemma4", "command_r7b", "apertus"}


def random_row(rng: random.Random, name: str) -> dict:
    def text(least: int = 0) -> str:
        return "".join(rng.choice(PIECES) for _ in range(rng.randint(least, 4)))

    messages, tools = [], name in CALLS and rng.random() < 0.4
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": text(1)})
    for _ in range(rng.randint(1, 4)):
        messages.append(user("q" + text()))
        if tools and rng.random() < 0.6:
            arguments = {"x": rng.choice([1, 2.5, True, None, text(), [1, {"y": text()}]])}
            messages.append(said("", tool_calls=[{"function": {"name": "get", "arguments": arguments}}]))
            messages.append({"role": "tool", "content": text(1)})
        reasoning = {"reasoning_content": "r" + text()} if name in REASONS and rng.random() < 0.4 else {}
        messages.append(said(text(), **reasoning))
    if name == "deepseek_r1":
        messages = [{**m, "reasoning_content": "r" + text()} if m["role"] == "assistant" else m for m in messages]
    return {"messages": messages, "tools": TOOLS if tools else None}


def letters(text: str) -> str:
    return re.sub(r"\s+", "", text)


def without_stop(message: dict, stops: tuple[str, ...]) -> dict:
    """An answer without the stop tokens that end its content."""
    content = message["content"]
    while message["role"] == "assistant" and content.rstrip().endswith(stops):
        content = content[: max(content.rfind(stop) for stop in stops)]
    return {**message, "content": content}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "marked_content"])
@pytest.mark.parametrize("merges", [0, 60])
def test_whatever_goes_in_comes_out(name, merges):
    """Random conversations: contents, reasoning and calls are in what is learnt, questions in the prompts, and each
    turn behind a server's tokens and to its stop."""
    rng, renderer = random.Random(f"{name} {merges}"), renderer_of(name, merges)
    stops = tuple(FAMILIES[name][1])
    for _ in range(20):
        row = to_conversation(random_row(rng, name))
        documents = renderer(row)
        row = Conversation([without_stop(message, stops) for message in row.messages], row.tools)
        check_served(name, renderer, row, documents)
        answers = [message for message in row.messages if message["role"] == "assistant"]
        for message, text in zip(answers, supervised_texts(renderer, documents), strict=True):
            assert text.endswith(stops)
            assert letters(message["content"]) in letters(text)
            assert letters(message.get("reasoning_content", "")) in letters(text)
            assert all(call["function"]["name"] in text for call in message.get("tool_calls", []))
        for message in row.messages:
            if message["role"] == "user":
                assert any(letters(message["content"]) in letters(document.text) for document in documents)
