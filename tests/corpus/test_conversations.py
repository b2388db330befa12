"""corpus/conversations.py: every row format becomes messages; the mask covers what the assistant wrote, no more."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from eagle_train.corpus.columns import unread_columns
from eagle_train.corpus.conversations import Conversation, conversation_of, to_messages
from eagle_train.corpus.render import ChatRenderer, render_row
from eagle_train.corpus.source import DataConfig, SourceConfig
from eagle_train.errors import UserError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}BEGIN{{ message['content'] + '<|im_end|>' }}END"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = CHATML.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")
UNMARKED = CHATML.replace("BEGIN", "").replace("END", "")
# Reasoning is dropped from every answer but the last, as several families do.
FORGETFUL = UNMARKED.replace(
    "{{ message['content'] + '<|im_end|>' }}{% else",
    "{% if not loop.last %}{{ message['content'].split('</think>')[-1] + '<|im_end|>' }}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{% else",
)
TEXT = ["def add(a, b):\n    return a + b\n", "Add two numbers. Ça va? ", "  user asks; assistant answers\n\n"]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Add two?\n"},
    # Spaces at both ends, a character of several bytes, and a blank line after the header: where offsets go wrong.
    {"role": "assistant", "content": "  def add(a, b): ça 🙂 "},
    {"role": "user", "content": "Again."},
    {"role": "assistant", "content": "\n\nreturn a + b\n"},
]

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
DEEP = "[" * 100_000  # of a model that repeats itself


def make_tokenizer(template: str | None, merges: int = 60) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose post-processor trims offsets, as those of Llama 3 and GPT-2 do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special) + merges,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>")
    fast.chat_template = template
    return fast


def produced_text(renderer: ChatRenderer, messages: list[dict]) -> str:
    (document,) = renderer(messages)
    assert document.tokens.dtype == torch.int64
    assert document.produced.dtype == torch.bool
    return renderer.tokenizer.decode(document.tokens[document.produced])


@pytest.mark.parametrize("merges", [0, 60])
def test_markers_and_turn_by_turn_give_the_same_mask(merges):
    marked = ChatRenderer(make_tokenizer(MARKED, merges))(CHAT)[0]
    unmarked = ChatRenderer(make_tokenizer(UNMARKED, merges))(CHAT)[0]
    assert torch.equal(marked.tokens, unmarked.tokens)
    assert torch.equal(marked.produced, unmarked.produced)


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_mask_is_exactly_what_the_assistant_wrote(template):
    """Without merges every byte is a token, so that the mask can be read back as text, white space included."""
    answers = "".join(turn["content"] + "<|im_end|>" for turn in CHAT if turn["role"] == "assistant")
    assert produced_text(ChatRenderer(make_tokenizer(template, merges=0)), CHAT) == answers


def test_mask_keeps_the_space_that_ends_a_span():
    template = MARKED.replace("{{ message['content'] + '<|im_end|>' }}{% endgen", "{{ message['content'] }}{% endgen")
    answers = "".join(turn["content"] for turn in CHAT if turn["role"] == "assistant")
    assert template != MARKED
    assert produced_text(ChatRenderer(make_tokenizer(template, merges=0)), CHAT) == answers


def test_tokens_are_those_of_apply_chat_template():
    """To the token that ends the last answer: nobody writes the line's end behind it."""
    tokenizer = make_tokenizer(MARKED)
    chat = [*CHAT[:-1], {"role": "assistant", "content": "return a + b\n"}]
    wanted = tokenizer.apply_chat_template(chat)["input_ids"]
    assert wanted[-1:] == tokenizer("\n")["input_ids"]
    assert ChatRenderer(tokenizer)(chat)[0].tokens.tolist() == wanted[:-1]


def test_mask_is_the_librarys_where_the_librarys_is_right():
    tokenizer = make_tokenizer(MARKED)
    chat = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "return a + b"}]
    expected = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True)["assistant_masks"]
    assert ChatRenderer(tokenizer)(chat)[0].produced.tolist() == [bool(one) for one in expected[:-1]]


def test_threads_do_not_spoil_one_anothers_masks():
    """Training data are drawn in a thread while held-out data are read in another."""
    renderers = [ChatRenderer(make_tokenizer(MARKED)) for _ in range(3)]
    wanted, interval = renderers[0](CHAT)[0].produced.tolist(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(renderers)) as pool:
            found = pool.map(lambda renderer: [renderer(CHAT)[0].produced.tolist() for _ in range(400)], renderers)
            assert all(mask == wanted for masks in found for mask in masks)
    finally:
        sys.setswitchinterval(interval)


def test_the_users_tokenizer_is_left_alone():
    tokenizer = make_tokenizer(MARKED)
    before = tokenizer.backend_tokenizer.to_str()
    ChatRenderer(tokenizer)(CHAT)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_an_empty_answer_supervises_nothing_of_its_neighbours():
    """An empty span inside a token ("\n\n" around it) must not mark the token."""
    template = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}\n\n{% endfor %}"
    for document in ChatRenderer(make_tokenizer(template))([{"role": "assistant", "content": ""}] * 2):
        assert len(document.tokens) > 0
        assert not document.produced.any()


@pytest.mark.parametrize("ending", ["<|im_end|>", "<|im_end|>\n", "<|im_end|> <|im_end|>"])
def test_a_stop_token_at_the_end_of_an_answer_is_the_templates(ending):
    renderer = ChatRenderer(make_tokenizer(MARKED))
    turns = [*TURNS, TURNS[0], {"role": "assistant", "content": "b <|im_end|> c"}]
    right = renderer(turns)[0]
    ended = [{**turn, "content": turn["content"] + (ending if turn["role"] == "assistant" else "")} for turn in turns]
    (document,) = renderer(ended)
    assert document.text == right.text
    assert torch.equal(document.produced, right.produced)
    assert [note for note in renderer.notes if "a stop token" in note] == [
        "answers of the data end in '<|im_end|>', a stop token: it is left to the chat template"
    ]


def test_supervise_all():
    renderer = ChatRenderer(make_tokenizer(FORGETFUL), supervise="all")
    assert renderer(CHAT)[0].produced.all()


def test_conversation_without_assistant_produces_nothing():
    assert not ChatRenderer(make_tokenizer(UNMARKED))(CHAT[:2])[0].produced.any()


def test_template_that_rewrites_earlier_turns_gives_a_document_for_each():
    renderer = ChatRenderer(make_tokenizer(FORGETFUL, merges=0))
    thought = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>hm</think>a"}]
    assert produced_text(renderer, thought) == "<think>hm</think>a<|im_end|>"
    first, second = renderer(thought + thought)
    for document in (first, second):
        assert renderer.tokenizer.decode(document.tokens[document.produced]) == "<think>hm</think>a<|im_end|>"
    turn = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert first.text == f"{turn}<think>hm</think>a<|im_end|>"
    assert second.text == f"{turn}a<|im_end|>\n{turn}<think>hm</think>a<|im_end|>"


def test_prompt_that_is_no_prefix_is_refused():
    template = UNMARKED.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\nSure: '")
    with pytest.raises(UserError, match=r"turn 3: the chat template's generation prompt ends in 'Sure: '"):
        ChatRenderer(make_tokenizer(template))(CHAT)


def test_template_that_masks_everything_is_refused():
    template = MARKED.replace("message['role'] == 'assistant'", "message['role'] == 'model'")
    with pytest.raises(UserError, match=r"masks everything.*system.nBe brief"):
        ChatRenderer(make_tokenizer(template))(CHAT)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template: give target.chat_template"),
        ("{{ raise_exception('no') }}", "refuses the conversation: no; it does so with the plainest .* too"),
        ("{{ messages[0].content.nowhere.at_all }}", "refuses the conversation.*with the plainest"),
        ("{{ messages[0].content + 1 }}", "fails on the conversation: TypeError.*with the plainest"),
        ("{% if %}", "the chat template, line 1: Expected an expression"),
        ("{{ messages | nothing }}", "the chat template, line 1: No filter named 'nothing'"),
    ],
)
def test_template_errors_are_the_users(template, message):
    with pytest.raises(UserError, match=message):
        ChatRenderer(make_tokenizer(template))(CHAT)


def test_tokenizer_without_offsets_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(UserError, match="Slow"):
        ChatRenderer(Slow())


def test_unknown_supervise_is_refused():
    with pytest.raises(UserError, match=r"data\.supervise is 'user'"):
        ChatRenderer(make_tokenizer(MARKED), supervise="user")


@pytest.mark.parametrize("text", ["Add two numbers.", ""])
def test_render_text_has_bos_and_eos(text):
    renderer = ChatRenderer(make_tokenizer(None))
    document = renderer.render_text(text)
    assert renderer.tokenizer.decode(document.tokens) == f"<s>{text}<|im_end|>"
    assert document.produced.all()
    renderer.tokenizer.bos_token = renderer.tokenizer.eos_token = None
    assert renderer.render_text(text).tokens.dtype == torch.int64
    assert renderer.tokenizer.decode(renderer.render_text(text).tokens) == text


@pytest.mark.parametrize(
    ("data_format", "columns", "row"),
    [
        ("messages", {}, {"messages": TURNS, "id": 1}),
        ("messages", {"messages": "chat"}, {"chat": TURNS}),
        ("messages", {}, {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, TURNS[1]]}),
        ("messages", {}, {"messages": [{**turn, "tool_calls": None} for turn in TURNS]}),
        ("sharegpt", {}, {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}),
        ("prompt_response", {}, {"prompt": "q", "response": "a"}),
        ("prompt_response", {"prompt": "question", "response": "answer"}, {"question": "q", "answer": "a"}),
        ("prompt_response", {}, {"prompt": TURNS[:1], "response": "a"}),
    ],
)
def test_formats_become_messages(data_format, columns, row):
    assert to_messages(row, data_format, columns) == TURNS


def test_other_fields_reach_the_template():
    turn = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    assert to_messages({"messages": [turn]}, "messages", {}) == [turn]


def test_render_row_of_text_and_of_messages():
    renderer = ChatRenderer(make_tokenizer(MARKED))
    (text,) = render_row({"body": "Add."}, SourceConfig(format="text", columns={"text": "body"}), renderer)
    assert torch.equal(text.tokens, renderer.render_text("Add.").tokens)
    (chat,) = render_row({"messages": TURNS}, SourceConfig(), renderer)
    assert torch.equal(chat.tokens, renderer(TURNS)[0].tokens)


@pytest.mark.parametrize(
    ("data_format", "row", "message"),
    [
        ("messages", {"messages": []}, "no turns"),
        ("messages", {"text": "x"}, r"no column 'messages'; the row has text: set data=text$"),
        ("messages", {"data": [{"messages": TURNS}]}, "no column 'messages', but rows within 'data' that have one"),
        ("messages", {"a": 1, "train": {"0": {"messages": TURNS}}}, "but rows within 'train' that have one"),
        ("messages", {"id": {"messages": TURNS}}, "but rows within 'id' that have one"),
        ("messages", {"a": "x"}, r"the row has a: set data\.columns\.messages=NAME$"),
        ("messages", {"chat": TURNS}, r"the row has chat: set data\.columns\.messages=chat$"),
        ("messages", {"c": [{"from": "human", "value": "q"}]}, r"set data=sharegpt data\.columns\.conversations=c$"),
        ("sharegpt", {"messages": TURNS}, "set data=messages$"),
        ("prompt_response", {"prompt": "q", "completion": "a"}, r"set data\.columns\.response=completion$"),
        (
            "messages",
            {"instruction": "q", "input": "", "output": "a"},
            r"set data=prompt_response data\.columns\.prompt=instruction data\.columns\.response=output "
            r"data\.columns\.input=input$",
        ),
        (
            "messages",
            {"prompt": "q", "rejected": TURNS, "chosen": TURNS},
            r"the row has prompt, rejected, chosen: set data\.columns\.messages=chosen$",
        ),
        ("messages", {"rejected": TURNS, "chosen": TURNS}, r"set data\.columns\.messages=chosen$"),
        (
            "messages",
            {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": TURNS[1:]},
            r"set data=prompt_response data\.columns\.response=chosen$",
        ),
        (
            "prompt_response",
            {"prompt": "q", "response": [{"role": "Human", "content": "q"}, TURNS[1]]},
            r"column 'response' begins with a turn of Human.*: set data=messages data\.columns\.messages=response$",
        ),
        ("prompt_response", {"prompt": "q", "response": json.dumps(TURNS)}, "begins with a turn of user"),
        (
            "prompt_response",
            {"prompt": "q", "response": ["a", "b"]},
            r"of assistant is a list of 2 texts, \['a', 'b'\]",
        ),
        (
            "prompt_response",
            {"prompt": ["q", "", "r"], "response": "a"},
            "content of a turn of user is a list of 2 texts",
        ),
        ("messages", {"messages": "hello"}, "must be a list, not str"),
        ("messages", {"messages": ["hello"]}, "must be an object"),
        ("messages", {"messages": [{"content": "x"}]}, "role must be a string, not None"),
        ("messages", {"messages": [{"role": "user", "content": 3}]}, "must be text, not int"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "must be text, not list"),
        ("sharegpt", {"conversations": []}, "no turns"),
        ("sharegpt", {"conversations": None}, "must be a list, not NoneType"),
        (
            "sharegpt",
            {"conversations": [{"from": "narrator", "value": "x"}]},
            "must be one of human.*not 'narrator'.*roles",
        ),
        (
            "messages",
            {"messages": [{"role": "critic", "content": "x"}]},
            "must be one of human.*not 'critic'.*data.roles",
        ),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "f(x)"}]}, "a tool call must be JSON"),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "{}"}]}, "must have a name and arguments"),
        ("messages", {"messages": [{"role": "user", "content": None, "tool_calls": []}]}, "must be text, not NoneType"),
        (
            "messages",
            {"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]},
            "weight must be 0 or 1, not 0.5",
        ),
        ("messages", {"messages": TURNS, "tools": ["calculator"]}, "'tools' must be JSON"),
        ("messages", {"messages": TURNS, "tools": DEEP}, "'tools' must be JSON"),
        (
            "messages",
            {"messages": [{"role": "tool", "content": {"at": datetime(2026, 7, 31)}}]},
            "a tool's result must be text or values of JSON: Object of type datetime",
        ),
        ("messages", {"messages": TURNS, "tools": [{"x": 1}]}, "must hold function schemas.*columns.tools=null"),
        ("sharegpt", {"conversations": [{"from": "gpt"}]}, "must be text, not NoneType"),
        (
            "messages",
            {"messages": [{**TURNS[1], "reasoning": {"summary": "x"}}]},
            "a turn's reasoning must be text, not dict",
        ),
        (
            "messages",
            {"messages": [{**TURNS[1], "reasoning": "x", "thinking": "y"}]},
            "a turn has reasoning and thinking, which differ",
        ),
        (
            "messages",
            {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}], "reasoning": "x"}]},
            "a turn has reasoning within its content and beside it",
        ),
        ("prompt_response", {"prompt": "q"}, "no column 'response'"),
        ("prompt_response", {"prompt": 1, "response": "a"}, "of a turn of user must be text, not int"),
        ("text", {"text": ["x"]}, "must be a string, not list"),
    ],
)
def test_rows_of_another_shape_are_refused(data_format, row, message):
    with pytest.raises(UserError, match=message):
        render_row(row, SourceConfig(format=data_format), ChatRenderer(make_tokenizer(MARKED)))


@pytest.mark.parametrize("role", ["Assistant", "model", "GPT", "chatgpt", "bing", " bard "])
def test_whoever_answers_is_the_assistant(role):
    assert to_messages({"messages": [TURNS[0], {"role": role, "content": "a"}]}, "messages", {}) == TURNS
    said = [{"from": "Human", "value": "q"}, {"from": role, "value": "a"}]
    assert to_messages({"conversations": said}, "sharegpt", {}) == TURNS


def test_roles_are_extendable():
    turns = [{"from": "Narrator", "value": "q"}, {"from": "Hero", "value": "a"}]
    roles = SourceConfig(roles={"NARRATOR": "user", "hero": "assistant"}).speakers
    assert to_messages({"conversations": turns}, "sharegpt", {}, roles) == TURNS


@pytest.mark.parametrize("weight", [0, 0.0, False, "0"])
def test_weights_may_be_written_in_several_ways(weight):
    assert conversation_of({"messages": [{**TURNS[1], "weight": weight}]}, "messages", {}).muted == {0}


def test_calls_and_their_results_of_sharegpt():
    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "42"},
        {"from": "gpt", "value": "a", "weight": 0},
    ]
    row = {"conversations": turns, "tools": '[{"name": "f", "parameters": {}}]', "system": "s"}
    read = conversation_of(row, "sharegpt", {"system": "system"})
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert read.messages == [
        {"role": "system", "content": "s"},
        TURNS[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        TURNS[1],
    ]
    assert read.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert read.muted == {4}


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ("", {}),
        (None, {}),
        (json.dumps('{"x": 1}'), {"x": 1}),
        ('"x"', '"x"'),
        ('{"x": 1', '{"x": 1'),
        ("[1]", "[1]"),
        pytest.param(DEEP, DEEP, id="deep"),
    ],
)
def test_arguments_of_calls(arguments, right):
    """What is no object, a model may have written so."""
    turn = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    (message,) = to_messages({"messages": [turn]}, "messages", {})
    assert message["tool_calls"][0]["function"]["arguments"] == right


@pytest.mark.parametrize(
    "calls", [[{"function": {"name": "f", "arguments": '{"x": 1}'}}], '[{"name": "f", "arguments": {"x": 1}}]']
)
@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
@pytest.mark.parametrize("content", [None, "\n\n"])
def test_calls_beside_no_content(calls, key, content):
    """What stands between reasoning and calls, servers give as the content."""
    (message,) = to_messages({"messages": [{"role": "assistant", "content": content, key: calls}]}, "messages", {})
    assert message["content"] == ""
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


@pytest.mark.parametrize(
    ("result", "text"),
    [({"r": "é"}, '{"r": "é"}'), ([1, 2], "[1, 2]"), (42, "42"), (None, ""), ([{"type": "text", "text": "x"}], "x")],
)
def test_results_of_tools_are_text_as_a_model_is_given_them(result, text):
    assert to_messages({"messages": [{"role": "tool", "content": result}]}, "messages", {})[0]["content"] == text


@pytest.mark.parametrize(
    "thought",
    [
        {"type": "thinking", "thinking": "hm"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "reasoning", "text": "hm"},
        {"type": "reasoning", "text": "hm", "reasoning": None},
    ],
)
def test_reasoning_as_a_part_of_the_content_is_a_field(thought):
    turn = {"role": "assistant", "content": [thought, {"type": "text", "text": "a"}]}
    assert to_messages({"messages": [turn]}, "messages", {}) == [{**TURNS[1], "reasoning_content": "hm"}]


@pytest.mark.parametrize(
    "thought", [{"summary": [{"type": "summary_text", "text": "hm"}]}, {"reasoning": 1}, {"text": None}]
)
def test_reasoning_whose_text_is_not_found_is_no_empty_reasoning(thought):
    """OpenAI's responses have a summary of it."""
    content = [{"type": "reasoning", **thought}, {"type": "text", "text": "a"}]
    with pytest.raises(UserError, match=r"the reasoning within a turn's content must be text, and .* has none"):
        to_messages({"messages": [{"role": "assistant", "content": content}]}, "messages", {})


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_reasoning_without_text_is_none(blank):
    """Columns of text have it where others have reasoning."""
    fields = {"reasoning_content": blank, "thinking": "hm", "reasoning": None}
    assert to_messages({"messages": [TURNS[1] | fields]}, "messages", {}) == [{**TURNS[1], "thinking": "hm"}]
    part = {"type": "thinking", "thinking": blank}
    turn = {"role": "assistant", "content": [part, {"type": "text", "text": "a"}], "reasoning": blank}
    assert to_messages({"messages": [turn]}, "messages", {}) == [TURNS[1]]


@pytest.mark.parametrize(("given", "asked"), [("x", "q\nx"), ("", "q"), (None, "q")])
@pytest.mark.parametrize("prompt", ["q", TURNS[:1]])
def test_alpacas_input_goes_on_the_prompt(prompt, given, asked):
    columns, row = {"input": "input"}, {"prompt": prompt, "response": "a", "input": given}
    assert to_messages(row, "prompt_response", columns) == [{"role": "user", "content": asked}, TURNS[1]]
    assert unread_columns(row, "prompt_response", columns) == []
    with pytest.raises(UserError, match="'input' must be text, not list"):
        to_messages({**row, "input": []}, "prompt_response", columns)


def test_columns_that_look_like_data_and_are_not_read():
    turns = [
        {**TURNS[0], "images": ["x"], "name": "n"},
        {**TURNS[1], "train": False, "refusal": None, "reasoning_content": "r"},
    ]
    assert unread_columns({"messages": turns}, "messages", {}) == ["messages.images", "messages.train"]
    row = {"conversations": [], "system": "s", "Input": "x", "id": 1, "tools": [], "source": "web", "history": None}
    assert unread_columns(row, "sharegpt", {}) == ["system", "Input"]
    assert unread_columns(row, "sharegpt", {"system": "system"}) == ["Input"]
    for name in ("available_tools", "xml_tools"):
        assert unread_columns({"messages": turns[:0], name: [{"name": "get"}]}, "messages", {}) == [name]
    preferred = {"prompt": "q", "response": "a", "label": False, "chat_template_kwargs": {"tone": "dry"}}
    assert unread_columns(preferred, "prompt_response", {}) == ["label"]
    ignored = {"chat_template_kwargs": None}
    assert unread_columns(preferred, "prompt_response", ignored) == ["label", "chat_template_kwargs"]
    assert unread_columns({"messages": [], "dialogue": TURNS, "tools": [{}]}, "messages", {"tools": None}) == [
        "dialogue",
        "tools",
    ]


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("<s>Add.<|im_end|>", "<s>Add.<|im_end|>"),
        ("Add.<|im_end|>\n", "<s>Add.<|im_end|>\n"),
        ("<s>Add.", "<s>Add.<|im_end|>"),
    ],
)
def test_bos_and_eos_that_stand_already_are_not_doubled(text, whole):
    renderer = ChatRenderer(make_tokenizer(None, merges=0))
    document = renderer.render_text(text)
    assert renderer.tokenizer.decode(document.tokens) == whole
    assert document.produced.all()


@pytest.mark.parametrize(
    ("pattern", "right"),
    [(r"A: ([^;]*;)", "one;two;"), (r"A: [^;]*", "A: oneA: two"), (r"A: (two)?", "two"), ("x", "")],
)
def test_what_the_assistant_wrote_of_a_text_is_said_by_a_pattern(pattern, right):
    renderer = ChatRenderer(make_tokenizer(None, merges=0))
    document = renderer.render_text("Q: q A: one; Q: q A: two; Q", pattern)
    assert renderer.tokenizer.decode(document.tokens[document.produced]) == right
    assert renderer.render_text("Q: q A: one", "A: (.*)").produced[-1]  # its end, too


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": "text", "assistant_pattern": "("}, r"data\.assistant_pattern is '\('; it is no regular expression"),
        ({"assistant_pattern": "x"}, r"it is for data\.format=text, not messages"),
        ({"roles": {"x": ""}}, r"data\.roles\.x is ''"),
        ({"format": "text", "roles": {"x": "user"}}, r"data\.roles\.x is 'user'; data\.format=text has no speakers"),
        ({"columns": {"messages": None}}, r"data\.columns\.messages is None; it must name a column"),
    ],
)
def test_impossible_sources(values, message):
    with pytest.raises(UserError, match=message):
        SourceConfig("x.jsonl", **values).check("data")


def test_supervise_is_for_conversations():
    text = SourceConfig("a.jsonl", "text")
    for values in ({"path": "a.jsonl", "format": "text"}, {"mix": {"a": text}}):
        DataConfig(**values)
        with pytest.raises(UserError, match=r"^data\.supervise is 'last'; it is for conversations, and format=text"):
            DataConfig(**values, supervise="last")
    DataConfig(mix={"a": text, "b": SourceConfig("b.jsonl")}, supervise="last")


QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TOOL = {"name": "get", "parameters": {}}


@pytest.mark.parametrize(
    ("data_format", "row"),
    [
        ("messages", {"messages": json.dumps([QUESTION, ANSWER])}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "q"}, None]}, ANSWER]}),
        ("messages", {"messages": [{"role": "user", "content": ["q", ""]}, ANSWER], "tools": "null"}),
        ("messages", {"messages": [{**QUESTION, "tool_calls": "[]"}, {**ANSWER, "tool_calls": "null"}], "tools": " "}),
        ("messages", {"messages": [QUESTION, {**ANSWER, "function_call": "", "tool_calls": "[]"}], "tools": "[]"}),
        ("sharegpt", {"conversations": '[{"from": "Prompter", "value": "q"}, {"from": "gpt", "value": "a"}]'}),
        ("sharegpt", {"conversations": [{"from": None, "role": "user", "value": None, "content": "q"}, ANSWER]}),
        ("prompt_response", {"prompt": [QUESTION], "response": [ANSWER]}),
        ("prompt_response", {"prompt": json.dumps([QUESTION]), "response": json.dumps([ANSWER])}),
        ("prompt_response", {"prompt": "q", "response": ["a"]}),
    ],
)
def test_other_spellings_of_one_conversation(data_format, row):
    assert conversation_of(row, data_format, {}) == Conversation([QUESTION, ANSWER])


def test_a_prompt_that_looks_like_json_is_text_unless_it_is_messages():
    for prompt in ("[1, 2]", "[INST] q", '[{"a": 1}]'):
        assert to_messages({"prompt": prompt, "response": "a"}, "prompt_response", {})[0]["content"] == prompt
    assert to_messages({"prompt": "q", "response": "[]"}, "prompt_response", {})[1]["content"] == "[]"


def test_functions_of_older_rows_are_tools_and_names_may_have_hyphens():
    tools = [{"type": "function", "function": TOOL}]
    row = {"messages": [QUESTION, ANSWER], "functions": [TOOL], "parallel_tool_calls": False}
    assert conversation_of(row, "messages", {}).tools == tools
    assert unread_columns(row, "messages", {}) == []
    assert conversation_of(row, "messages", {"tools": None}).tools is None
    assert unread_columns({**row, "tools": tools}, "messages", {}) == ["functions"]
    turns = [{"from": "human", "value": "q"}, {"from": "Function-Call", "value": '{"name": "get", "arguments": {}}'}]
    assert to_messages({"conversations": turns}, "sharegpt", {})[1]["tool_calls"][0]["function"]["name"] == "get"


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        (None, "the column 'messages': the turns must be a list, not NoneType"),
        ([{"from": "human", "value": "q"}], "data.format=sharegpt reads such turns"),
        ([{**QUESTION, "tool_calls": [{"function": TOOL}]}], "a turn of user has calls of tools"),
        ([{**ANSWER, "tool_calls": [{"function": TOOL}], "function_call": TOOL}], "function_call and tool_calls"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"its part \{'type': 'image'\} is none"),
    ],
)
def test_what_would_be_lost_is_refused(messages, told):
    with pytest.raises(UserError, match=told):
        to_messages({"messages": messages}, "messages", {})
