"""corpus/chat.py: every row format becomes messages; the mask holds what the assistant produced and nothing else."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from eagle_train.config import UserError
from eagle_train.corpus.chat import ChatRenderer, render_row, to_messages

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
    document = renderer(messages)
    assert document.tokens.dtype == torch.int64
    assert document.produced.dtype == torch.bool
    return renderer.tokenizer.decode(document.tokens[document.produced])


@pytest.mark.parametrize("merges", [0, 60])
def test_markers_and_turn_by_turn_give_the_same_mask(merges):
    marked = ChatRenderer(make_tokenizer(MARKED, merges))(CHAT)
    unmarked = ChatRenderer(make_tokenizer(UNMARKED, merges))(CHAT)
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
    tokenizer = make_tokenizer(MARKED)
    assert ChatRenderer(tokenizer)(CHAT).tokens.tolist() == tokenizer.apply_chat_template(CHAT)["input_ids"]


def test_mask_is_the_librarys_where_the_librarys_is_right():
    tokenizer = make_tokenizer(MARKED)
    chat = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "return a + b"}]
    expected = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True)["assistant_masks"]
    assert ChatRenderer(tokenizer)(chat).produced.tolist() == [bool(one) for one in expected]


def test_threads_do_not_spoil_one_anothers_masks():
    """Training data are drawn in a thread while held-out data are read in another."""
    renderers = [ChatRenderer(make_tokenizer(MARKED)) for _ in range(3)]
    wanted, interval = renderers[0](CHAT).produced.tolist(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(len(renderers)) as pool:
            found = pool.map(lambda renderer: [renderer(CHAT).produced.tolist() for _ in range(400)], renderers)
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
    document = ChatRenderer(make_tokenizer(template))([{"role": "assistant", "content": ""}] * 2)
    assert len(document.tokens) > 0
    assert not document.produced.any()


def test_supervise_all():
    renderer = ChatRenderer(make_tokenizer(FORGETFUL), supervise="all")
    assert renderer(CHAT).produced.all()


def test_conversation_without_assistant_produces_nothing():
    assert not ChatRenderer(make_tokenizer(UNMARKED))(CHAT[:2]).produced.any()


def test_template_that_rewrites_earlier_turns_is_refused():
    renderer = ChatRenderer(make_tokenizer(FORGETFUL))
    thought = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "hm</think>a"}]
    assert produced_text(renderer, thought) == "hm</think>a<|im_end|>"
    with pytest.raises(UserError, match=r"turn 2 .*\{% generation %\}.*data\.supervise=all"):
        renderer(thought + thought)


def test_prompt_that_is_no_prefix_is_refused():
    template = UNMARKED.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'")
    with pytest.raises(UserError, match=r"turn 3 .*data\.supervise=all"):
        ChatRenderer(make_tokenizer(template))(CHAT)


def test_template_that_masks_everything_is_refused():
    template = MARKED.replace("message['role'] == 'assistant'", "message['role'] == 'model'")
    with pytest.raises(UserError, match=r"masks everything.*system.nBe brief"):
        ChatRenderer(make_tokenizer(template))(CHAT)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "refuses the conversation: roles must alternate"),
        ("{{ messages[0].content.nowhere.at_all }}", "refuses the conversation"),
        ("{% if %}", "refuses the conversation"),
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


TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


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
    text = render_row({"body": "Add."}, "text", {"text": "body"}, renderer)
    assert torch.equal(text.tokens, renderer.render_text("Add.").tokens)
    chat = render_row({"messages": TURNS}, "messages", {}, renderer)
    assert torch.equal(chat.tokens, renderer(TURNS).tokens)


@pytest.mark.parametrize(
    ("data_format", "row", "message"),
    [
        ("messages", {"messages": []}, "no turns"),
        ("messages", {"text": "x"}, r"no column 'messages'; the row has text: set data\.columns\.messages"),
        ("messages", {"messages": "hello"}, "must be a list, not str"),
        ("messages", {"messages": ["hello"]}, "must be an object"),
        ("messages", {"messages": [{"content": "x"}]}, "role must be a string, not None"),
        ("messages", {"messages": [{"role": "user", "content": 3}]}, "must be text, not int"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "must be text, not list"),
        ("sharegpt", {"conversations": []}, "no turns"),
        ("sharegpt", {"conversations": None}, "must be a list, not NoneType"),
        ("sharegpt", {"conversations": [{"from": "tool", "value": "x"}]}, "must be one of human.*not 'tool'"),
        ("sharegpt", {"conversations": [{"from": "gpt"}]}, "must be text, not NoneType"),
        ("prompt_response", {"prompt": "q"}, "no column 'response'"),
        ("prompt_response", {"prompt": 1, "response": "a"}, "of a turn of user must be text, not int"),
        ("text", {"text": ["x"]}, "must be a string, not list"),
    ],
)
def test_rows_of_another_shape_are_refused(data_format, row, message):
    with pytest.raises(UserError, match=message):
        render_row(row, data_format, {}, ChatRenderer(make_tokenizer(MARKED)))
