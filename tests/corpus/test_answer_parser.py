"""corpus/answer_parser.py: an answer becomes the fields that the chat template renders back to the same tokens."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from eagle_train.corpus.answer_parser import AnswerParser
from eagle_train.corpus.render import ChatRenderer
from eagle_train.errors import UserError

# Templates of well-known families by their meaning. A line's end, and blanks at its beginning, are not rendered.
SOURCES = {
    "CHATML": r"""
        {% for t in tools or [] %}<tools>{{ t|tojson }}</tools>{% endfor %}
        {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}
    """,
    # Reasoning of the last turn, or an empty block, and calls in JSON behind the content.
    "QWEN": r"""
        {% for m in messages %}<|im_start|>{{ m.role }}\n
        {% if m.role == 'assistant' and loop.last %}
        <think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}
        {% for t in m.tool_calls or [] %}{% if not loop.first or m.content %}\n{% endif %}
        {% set a = t.function.arguments %}
        <tool_call>\n{"name": "{{ t.function.name }}", "arguments": {{ a if a is string else a|tojson }}}\n</tool_call>
        {% endfor %}<|im_end|>\n{% endfor %}
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}
    """,
    "HARMONY": r"""
        {% for m in messages %}{% if m.role != 'assistant' %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
        {% else %}
        {% if m.thinking and loop.last %}
        <|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
        {% if m.tool_calls %}{% set f = m.tool_calls[0].function %}
        <|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json
        <|message|>{{ f.arguments|tojson }}<|call|>
        {% else %}
        <|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}
        {% endif %}{% endif %}{% endfor %}
        {% if add_generation_prompt %}<|start|>assistant{% endif %}
    """,
    "LLAMA": r"""
        {% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n
        {% if m.tool_calls %}{% set f = m.tool_calls[0].function %}
        {"name": "{{ f.name }}", "parameters": {{ f.arguments|tojson }}}
        {% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}
        {% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}
    """,
    # Contents are null beside calls, arguments are JSON, and calls have ids.
    "MISTRAL": r"""
        {% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]
        {% elif m.tool_calls %}{% if m.content is not none %}{{ raise_exception('content beside calls') }}{% endif %}
        {% for t in m.tool_calls %}[TOOL_CALLS]{{ t.function.name }}[CALL_ID]{{ t.id }}[ARGS]{{ t.function.arguments }}
        {% endfor %}</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}
    """,
    "OLD_MISTRAL": r"""
        {% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]
        {% elif m.tool_calls %}[TOOL_CALLS] [{% for t in m.tool_calls %}{{ t.function|tojson }}
        {{ ', ' if not loop.last }}{% endfor %}]</s>{% else %}{{ ' ' + m.content }}</s>{% endif %}{% endfor %}
    """,
    # The next header ends an answer.
    "GLM": r"""
        {% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}
        \n<think>{{ m.reasoning_content or '' }}</think>\n{{ m.content }}
        {% for t in m.tool_calls or [] %}\n<tool_call>{{ t.function.name }}\n
        {% for k, v in t.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n
        <arg_value>{{ v if v is string else v|tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}
        {% else %}\n{{ m.content }}{% endif %}{% endfor %}
        {% if add_generation_prompt %}<|assistant|>{% endif %}
    """,
    "CODER": r"""
        {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}
        {% for t in m.tool_calls or [] %}\n<tool_call>\n<function={{ t.function.name }}>\n
        {% for k, v in t.function.arguments.items() %}
        <parameter={{ k }}>\n{{ v if v is string else v|tojson }}\n</parameter>\n{% endfor %}
        </function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}
    """,
    "NO_STOP": r"""
        {% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}
        {% if add_generation_prompt %}a:{% endif %}
    """,
}
TEMPLATES = {
    name: "".join(map(str.strip, text.strip().splitlines())).replace(
        "\\n", "{{ '\\n' }}"
    )  # of blocks' it takes the first
    for name, text in SOURCES.items()
}
CHATML, QWEN, HARMONY, LLAMA, MISTRAL, OLD_MISTRAL, GLM, CODER, NO_STOP = TEMPLATES.values()
# The prompt opens the reasoning.
OPENED = QWEN.replace("assistant{{ '\\n' }}{% endif %}", "assistant{{ '\\n' }}<think>{{ '\\n' }}{% endif %}")
assert OPENED != QWEN
OPENED_NO_STOP = OPENED.replace("<|im_end|>", ";")
STOPS = ("</s>", "<|im_end|>", "<|return|>", "<|call|>", "<|eot_id|>", "<|user|>")
SPECIAL = (
    *STOPS, "<|im_start|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|start_header_id|>",
    "<|end_header_id|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|assistant|>",
)  # fmt: skip
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
ASKED = [{"role": "user", "content": "rain?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A token for each character and for `ab`, and the special ones of several families."""
    characters = [*map(chr, range(32, 127)), "\n", "é"]
    vocabulary = {token: i for i, token in enumerate([*characters, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    fast.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    fast.chat_template = template
    return fast


def make_parser(template: str) -> AnswerParser:
    tokenizer = make_tokenizer(template)
    stop_ids = [tokenizer.convert_tokens_to_ids(stop) for stop in STOPS]
    return AnswerParser(ChatRenderer(tokenizer, stop_ids=stop_ids))


def parsed(template: str, text: str, tools: list | None = None, was_cut: bool = False, messages: list = ASKED):
    """The message of an answer that was written so, having seen that it is rendered so."""
    parser = make_parser(template)
    written = parser.written(parser.prompt(messages, tools), parser.tokens(text), was_cut)
    message, same = parser.message(messages, tools, written)
    assert same
    assert parser.rendered([*messages, message], tools).startswith(written.text)
    return {key: value for key, value in message.items() if key != "role"}


def call(arguments: dict, name: str = "weather", **more: str) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


ROME = {"city": "Rome", "days": 2}


@pytest.mark.parametrize(
    ("template", "text", "fields"),
    [
        (CHATML, "no\n<|im_end|>", {"content": "no\n"}),
        (CHATML, "<think>so</think>no<|im_end|>", {"content": "<think>so</think>no"}),  # it knows of no reasoning
        (QWEN, "<think>\nso\n</think>\n\nno<|im_end|>", {"content": "no", "reasoning_content": "so"}),
        (QWEN, "<think>\n\n so\n\n</think>\n\n\nno<|im_end|>", {"content": "\nno", "reasoning_content": "\n so\n"}),
        (QWEN, "<think>\n\n</think>\n\nno<|im_end|>", {"content": "no"}),
        (OPENED, "so\n</think>\n\nno<|im_end|>", {"content": "no", "reasoning_content": "so"}),
        (HARMONY, "<|channel|>final<|message|>no<|return|>", {"content": "no"}),
        (
            HARMONY,
            "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>no<|return|>",
            {"content": "no", "thinking": "so"},
        ),
        (LLAMA, "no<|eot_id|>", {"content": "no"}),
        (LLAMA, '{"name": "x", "parameters": {}}<|eot_id|>', {"content": '{"name": "x", "parameters": {}}'}),
        (OLD_MISTRAL, " no</s>", {"content": "no"}),
        (GLM, "\n<think>so</think>\nno<|user|>", {"content": "no", "reasoning_content": "so"}),
        (NO_STOP, "no</s>", {"content": "no"}),  # the template ends all answers otherwise
        (OPENED_NO_STOP, "so\n</think>\n\nno</s>", {"content": "no", "reasoning_content": "so"}),
    ],
)  # fmt: skip
def test_an_answer_is_told_in_the_templates_fields(template, text, fields):
    assert parsed(template, text) == fields


@pytest.mark.parametrize(
    ("template", "text", "fields"),
    [
        (
            QWEN,
            '<think>\nso\n</think>\n\nlook\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}'
            '\n</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>',
            {"content": "look", "reasoning_content": "so", "tool_calls": [call(ROME), call({})]},
        ),
        (
            HARMONY,
            "<|channel|>analysis<|message|>so<|end|><|start|>assistant to=functions.weather<|channel|>commentary json"
            '<|message|>{"city": "Rome", "days": 2}<|call|>',
            {"content": "", "thinking": "so", "tool_calls": [call(ROME)]},
        ),
        (
            LLAMA,
            '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}<|eot_id|>',
            {"content": "", "tool_calls": [call(ROME)]},
        ),
        (
            MISTRAL,
            '[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Rome", "days": 2}</s>',
            {"content": "", "tool_calls": [call(ROME, id="a1b2c3d4e")]},
        ),
        (
            OLD_MISTRAL,
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome", "days": 2}}]</s>',
            {"content": "", "tool_calls": [call(ROME)]},
        ),
        (
            GLM,
            "\n<think>so</think>\n\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|user|>",
            {"content": "", "reasoning_content": "so", "tool_calls": [call(ROME)]},
        ),
        (
            CODER,
            "look\n<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
            "</function>\n</tool_call><|im_end|>",
            {"content": "look", "tool_calls": [call(ROME)]},
        ),
        (CHATML, '<tool_call>{"name": "x"}</tool_call><|im_end|>', {"content": '<tool_call>{"name": "x"}</tool_call>'}),
    ],
)  # fmt: skip
def test_calls_of_tools_are_told_as_calls_where_the_template_renders_them(template, text, fields):
    assert parsed(template, text, TOOLS) == fields


def test_the_next_prompt_is_made_of_the_fields():
    """As a server makes it: reasoning of earlier turns is left out."""
    parser = make_parser(QWEN)
    answer = parsed(QWEN, "<think>\nso\n</think>\n\nno<|im_end|>")
    messages = [*ASKED, {"role": "assistant", **answer}, {"role": "user", "content": "sun?"}]
    assert parser.prompt(messages, None) == (
        "<|im_start|>user\nrain?<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
        "<|im_start|>user\nsun?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert parsed(QWEN, "<think>\nas\n</think>\n\nyes<|im_end|>", messages=messages)["content"] == "yes"


def test_a_tokenizers_own_description_of_its_answers_is_used():
    musing = "{% if m.musing %}{{ '{{' + m.musing + '}}' }}{% endif %}"
    template = CHATML.replace("{{ m.content }}", musing + "{{ m.content }}")
    tokenizer = make_tokenizer(template)
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"musing": {"open": "{{", "close": "}}"}, "content": {"close": "<|im_end|>"}},
    }
    parser = AnswerParser(ChatRenderer(tokenizer, stop_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")]))
    written = parser.written(parser.prompt(ASKED, None), parser.tokens("{{so}}no<|im_end|>"), False)
    message, same = parser.message(ASKED, None, written)
    assert (message, same) == ({"role": "assistant", "content": "no", "musing": "so"}, True)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (LLAMA, "no \n<|eot_id|>"),  # it is trimmed
        (QWEN, "no<|im_end|>"),  # it adds a block that was not written
        (QWEN, "<think>\nso<|im_end|>"),  # nor was its end
        (HARMONY, "no<|return|>"),
        (HARMONY, "<|channel|>analysis<|message|>so<|return|>"),
        (HARMONY, "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}<|call|>"),
    ],
)
def test_what_the_template_does_not_render_back_is_refused(template, text):
    with pytest.raises(UserError, match=r"^the chat template does not render the answer back: "):
        parsed(template, text)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (QWEN, "<think>\nso"),
        (QWEN, "<think>\nso\n</think>\n"),
        (OPENED, "so"),
        (HARMONY, "<|channel|>analysis<|message|>so"),
        (HARMONY, "<|channel|>final"),
    ],
)
def test_an_answer_that_was_cut_before_its_text_is_refused(template, text):
    """The template would close what the target left open."""
    with pytest.raises(UserError, match=r"^the answer was cut within its reasoning or a call \(max_tokens\), or "):
        parsed(template, text, was_cut=True)


@pytest.mark.parametrize(
    ("template", "text", "fields"),
    [
        (CHATML, "no", {"content": "no"}),
        (QWEN, "<think>\nso\n</think>\n\nno", {"content": "no", "reasoning_content": "so"}),
        (HARMONY, "<|channel|>final<|message|>no", {"content": "no"}),
        (LLAMA, "no", {"content": "no"}),
        (NO_STOP, "no", {"content": "no"}),
    ],
)
def test_an_answer_that_was_cut_in_its_text_is_told(template, text, fields):
    assert parsed(template, text, was_cut=True) == fields


def test_letters_that_look_like_a_special_token_are_refused():
    """Rendered, they would become it."""
    parser = make_parser(CHATML)
    letters = parser.tokenizer.convert_tokens_to_ids(list("a</think>b"))
    stop = parser.tokens("<|im_end|>")
    written = parser.written(parser.prompt(ASKED, None), letters + stop, False)
    assert written.text == "a</think>b"
    with pytest.raises(UserError, match="does not render the answer back"):
        parser.message(ASKED, None, written)
    assert parser.tokens("a</think>b") != letters


def test_a_text_that_has_other_tokens_again_is_told_so():
    parser = make_parser(CHATML)
    tokens = parser.tokenizer.convert_tokens_to_ids(list("ab")) + parser.tokens("<|im_end|>")
    assert len(parser.tokens("ab")) == 1
    written = parser.written(parser.prompt(ASKED, None), tokens, False)
    assert parser.message(ASKED, None, written) == ({"role": "assistant", "content": "ab"}, False)
