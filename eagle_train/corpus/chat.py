"""A conversation as tokens, with a mask of those that the assistant produced. DESIGN section 3.1.

Knows nothing of files, packing or training: a row comes in, a document goes out.
"""

import copy
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jinja2 import TemplateError
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from eagle_train.config import SURROGATE, UserError, check, one_line

# What each format reads: the keys of `data.columns`, each naming a column of the row.
FORMATS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_response": ("prompt", "response"),
    "text": ("text",),
}
SUPERVISE = ("assistant", "all")
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

Message = dict[str, Any]
Span = tuple[int, int]  # characters [start, end) of a rendered text

# transformers keeps a template, and in it the spans of the rendering under way, for all threads of the process.
RENDERING = threading.Lock()


def check_text(text: str) -> None:
    """Raise UserError for what no token can be made of."""
    check(SURROGATE.search(text) is None, "the text holds half of a surrogate pair")


@dataclass(frozen=True, eq=False)
class Document:
    """tokens int64 [n], and produced bool [n]: True where the assistant produced the token."""

    tokens: torch.Tensor
    produced: torch.Tensor


def render_row(row: Mapping, data_format: str, columns: Mapping[str, str], renderer: "ChatRenderer") -> Document:
    """A row of the data as a Document. Raises UserError, without the row's place, if the row is not of this format."""
    if data_format != "text":
        return renderer(to_messages(row, data_format, columns))
    text = column(row, "text", columns)
    check(isinstance(text, str), f"the text must be a string, not {type(text).__name__}")
    return renderer.render_text(text)


def to_messages(row: Mapping, data_format: str, columns: Mapping[str, str]) -> list[Message]:
    """A row of the formats messages, sharegpt or prompt_response as messages of string role and content.

    `columns` maps the format's keys (`FORMATS`) to the row's columns; a key left out is its own column's name. Other
    fields of a message (reasoning_content, say) are kept for the template, unless they are None. Raises UserError,
    without the row's place, for a row without turns and for roles and contents that are not text.
    """
    if data_format == "messages":
        turns = column(row, "messages", columns)
    elif data_format == "sharegpt":
        turns = from_sharegpt(column(row, "conversations", columns))
    else:
        assert data_format == "prompt_response", data_format
        prompt, response = (column(row, key, columns) for key in FORMATS["prompt_response"])
        turns = [*as_turns(prompt), {"role": "assistant", "content": response}]
    check(isinstance(turns, list), f"the turns must be a list, not {type(turns).__name__}")
    check(len(turns) > 0, "the row has no turns")
    return [validated(turn) for turn in turns]


def column(row: Mapping, key: str, columns: Mapping[str, str]) -> Any:
    """The row's value for a key of the format. Raises UserError if the row has no such column."""
    name = columns.get(key, key)
    check(name in row, f"no column {name!r}; the row has {', '.join(row) or 'none'}: set data.columns.{key}")
    return row[name]


def as_turns(prompt: Any) -> list:
    """A prompt column: a list of messages, or the content of a single user message."""
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


def from_sharegpt(turns: Any) -> list[Message]:
    """ShareGPT's {"from", "value"} turns as messages. Raises UserError for a speaker that has no role."""
    check(isinstance(turns, list), f"the turns must be a list, not {type(turns).__name__}")
    for turn in turns:
        speaker = turn.get("from") if isinstance(turn, dict) else None
        check(speaker in SHAREGPT_ROLES, f"a turn's 'from' must be one of {', '.join(SHAREGPT_ROLES)}, not {speaker!r}")
    return [{"role": SHAREGPT_ROLES[turn["from"]], "content": turn.get("value")} for turn in turns]


def validated(turn: Any) -> Message:
    """A message with its text parts joined. Raises UserError unless role and content are text."""
    check(isinstance(turn, dict), f"a turn must be an object with role and content, not {type(turn).__name__}")
    role, content = turn.get("role"), turn.get("content")
    if isinstance(content, list) and all(is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    check(isinstance(role, str), f"a turn's role must be a string, not {role!r}")
    check(isinstance(content, str), f"the content of a turn of {role} must be text, not {type(content).__name__}")
    kept = {key: value for key, value in turn.items() if value is not None}
    return {**kept, "content": content}


def is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


class ChatRenderer:
    """Renders conversations through the tokenizer's chat template; `supervise` says whose tokens count as produced.

    `num_embeddings`: how many tokens the target knows, None where no target is at hand. Raises UserError for a
    tokenizer that cannot tell which characters a token came from.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, supervise: str = "assistant", num_embeddings: int | None = None
    ):
        check(supervise in SUPERVISE, f"data.supervise is {supervise!r}; it must be one of {', '.join(SUPERVISE)}")
        check(
            tokenizer.is_fast,
            f"the target's tokenizer, {type(tokenizer).__name__}, gives no offsets: it needs a tokenizer.json",
        )
        self.tokenizer = with_whole_offsets(tokenizer)
        self.supervise, self.num_embeddings = supervise, num_embeddings

    def check_known(self, document: Document) -> None:
        """Raise UserError for a token that the target has no embedding of: its tokenizer got tokens that it did not."""
        tokens, known = document.tokens, self.num_embeddings
        if known is None or tokens.numel() == 0 or (token := int(tokens.max())) < known:
            return
        raise UserError(
            f"token {token} ({self.tokenizer.convert_ids_to_tokens(token)!r}) is beyond the {known} embeddings "
            "of the target; give it the tokenizer that it was trained with, or resize its embedding"
        )

    def __call__(self, messages: list[Message]) -> Document:
        """The conversation as the target sees it. Raises UserError where the template refuses it, gives no reliable
        mask (`turn_by_turn`), or masks everything that its assistant says."""
        if self.supervise == "all":
            return self.encode(self.render(messages)[0])
        text, spans = self.marked(messages) if self.has_markers else self.turn_by_turn(messages)
        document = self.encode(text, spans)
        speaks = any(message["role"] == "assistant" and message["content"] for message in messages)
        if speaks and not document.produced.any():
            raise UserError(
                "the chat template masks everything that the assistant says: put {% generation %} around it, or set "
                f"data.supervise=all; the rendered text begins {text[:160]!r}"
            )
        return document

    def render_text(self, text: str) -> Document:
        """Plain text between the tokenizer's BOS and EOS, where it has them; every token counts as produced."""
        check_text(text)
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        tokens = [token for token in (bos, *tokens, eos) if token is not None]
        return Document(torch.tensor(tokens, dtype=torch.int64), torch.ones(len(tokens), dtype=torch.bool))

    @cached_property
    def template(self) -> str:
        check(
            self.tokenizer.chat_template is not None,
            "the target's tokenizer has no chat template: add chat_template.jinja beside it, or use data.format=text",
        )
        return self.tokenizer.get_chat_template()

    @cached_property
    def has_markers(self) -> bool:
        return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.template) is not None

    def render(self, messages: list[Message], **options: bool) -> tuple[str, list[Span]]:
        """The rendered text and, with return_assistant_tokens_mask, the spans between generation markers."""
        variables = {**self.tokenizer.special_tokens_map, **options}
        try:
            with RENDERING:
                texts, spans = render_jinja_template([messages], chat_template=self.template, **variables)
        except TemplateError as error:
            raise UserError(f"the chat template refuses the conversation: {one_line(error)}") from error
        return texts[0], spans[0] if spans else []

    def marked(self, messages: list[Message]) -> tuple[str, list[Span]]:
        """The rendered text and the assistant's spans, by the template's own generation markers."""
        return self.render(messages, return_assistant_tokens_mask=True)

    def turn_by_turn(self, messages: list[Message]) -> tuple[str, list[Span]]:
        """The rendered text and the assistant's spans: what each of its turns adds to the prompt before it.

        Raises UserError where a longer conversation's text does not begin with the shorter one's, as with templates
        that strip reasoning from earlier turns: what a turn adds is then unknown.
        """
        text, spans = self.render(messages)[0], []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self.render(messages[:i], add_generation_prompt=True)[0]
                answered = self.render(messages[: i + 1])[0]
                check(
                    answered.startswith(prompt) and text.startswith(answered),
                    f"the chat template renders turn {i + 1} differently alone and within the conversation, so what "
                    "the assistant produced is unknown: use a template with {% generation %} markers, or "
                    "data.supervise=all",
                )
                spans.append((len(prompt), self.end_of_turn(answered, len(prompt))))
        return text, spans

    def end_of_turn(self, text: str, start: int) -> int:
        """Where the assistant stops: after its end token. What a template adds to it (ChatML a newline) is not its."""
        eos = self.tokenizer.eos_token
        at = text.rfind(eos, start) if eos else -1
        return len(text) if at < 0 else at + len(eos)

    def encode(self, text: str, spans: list[Span] | None = None) -> Document:
        """Tokens of the text; produced are those that hold a character of a span, or all without spans."""
        check_text(text)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens = torch.tensor(encoded["input_ids"], dtype=torch.int64)
        if spans is None:
            return Document(tokens, torch.ones_like(tokens, dtype=torch.bool))
        starts, ends = torch.tensor(encoded["offset_mapping"], dtype=torch.int64).reshape(-1, 2).unbind(1)
        produced = torch.zeros_like(tokens, dtype=torch.bool)
        for start, end in spans:
            if start < end:
                produced |= (starts < end) & (ends > start)
        return Document(tokens, produced)


def with_whole_offsets(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy whose offsets are exact. Byte-level post-processors trim spaces from them, so that the space an answer
    begins with would belong to no token; special tokens, their other use, are the chat template's here."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    return tokenizer
