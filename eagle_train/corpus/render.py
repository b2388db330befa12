"""Rows as documents: the tokens of the server's prompts and of the model's answers, with a mask of the latter.

Knows nothing of files, packing or training: a row in, its documents out. DESIGN section 3.1.
"""

import copy
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eagle_train.corpus.columns import VARIABLES
from eagle_train.corpus.content_checks import NotAsJson, check_read, check_tools
from eagle_train.corpus.conversations import (
    REASONING_FIELDS,
    SUPERVISE,
    Conversation,
    Message,
    column,
    conversation_of,
    is_answer,
)
from eagle_train.corpus.source import SourceConfig
from eagle_train.corpus.template import ChatTemplate, Refused, TemplateFault, check_template_kwargs
from eagle_train.corpus.tokens import Document, Encoder, Span, check_text, document, misfit
from eagle_train.corpus.turns import Turn, TurnFinder
from eagle_train.errors import UserError, check

_MOST_OTHERS = 64  # sets of the rows' own variables whose templates are kept
_OF_FORMS = (Refused, NotAsJson)  # errors that another form of the tool calls may avoid


class ChatRenderer:
    """Renders conversations through the tokenizer's chat template; `supervise` says which tokens count as produced.

    `stop_ids`: the tokens that end an answer; the tokenizer's EOS is added. `template_kwargs`, `date`: see
    `ChatTemplate`. `num_embeddings`: the target's, None without a target. `notes`: remarks for the user, once each.
    Raises UserError for a tokenizer without offsets.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        supervise: str = "assistant",
        stop_ids: Iterable[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        date: str | None = None,
        num_embeddings: int | None = None,
    ):
        check(supervise in SUPERVISE, f"data.supervise is {supervise!r}; it must be one of {', '.join(SUPERVISE)}")
        self.encode, self.supervise, self.num_embeddings = Encoder(tokenizer), supervise, num_embeddings
        self.tokenizer = self.encode.tokenizer
        self.notes: dict[str, None] = {}
        if num_embeddings is not None and (note := misfit(tokenizer, num_embeddings)):
            self.notes[note] = None
        eos = self.tokenizer.eos_token_id
        self.stop_ids = frozenset([*stop_ids, *([] if eos is None else [eos])])
        self.stops = tuple(_text_of(self.tokenizer, token) for token in sorted(self.stop_ids))
        self.ending = _ending_of(self.stops)
        self.special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._set_template(ChatTemplate(self.tokenizer, template_kwargs, date))

    def _set_template(self, template: ChatTemplate) -> None:
        self.template = template
        self.others: dict[str, ChatRenderer] = {}  # by the variables that rows have over this one's
        self.finder = TurnFinder(template, self.stops, self.special, self.notes)

    def with_variables(self, variables: Mapping[str, Any]) -> "ChatRenderer":
        """The renderer with these variables of the chat template over its own; it takes its notes where this one does.

        What is known of a template's renderings holds for one set of variables. Raises UserError for invalid ones.
        """
        if not variables:
            return self
        key = json.dumps(variables, sort_keys=True, default=str)
        if key not in self.others:
            check_template_kwargs(variables, VARIABLES)
            self._note_unread(variables)
            if len(self.others) >= _MOST_OTHERS:
                self.others.clear()
            other = copy.copy(self)
            other._set_template(
                ChatTemplate(self.tokenizer, self.template.kwargs | dict(variables), self.template.date)
            )
            self.others[key] = other
        return self.others[key]

    def _note_unread(self, variables: Mapping[str, Any]) -> None:
        known = self.template.variables() | self.template.variables([])
        for name, value in variables.items():
            if name not in known and value not in ("", [], {}):
                self.notes[f"{VARIABLES}.{name} of the data: the chat template reads no such variable"] = None

    def __call__(self, conversation: Conversation | list[Message]) -> list[Document]:
        """The documents of a conversation: one, if every prompt of a server begins with the prompt before and the
        model's text after it; else one for each of the assistant's turns.

        Raises UserError if the template refuses the conversation, loses a part of it, or masks everything that the
        assistant says, or if the model's text is unknown; TemplateFault if it can render no conversation.
        """
        if isinstance(conversation, list):
            conversation = Conversation(conversation)
        if conversation.variables:
            other = self.with_variables(conversation.variables)
            documents = other(replace(conversation, variables={}))
            self.template.has_read_clock |= other.template.has_read_clock
            return documents
        try:
            return self._first_that_renders(conversation)
        except Refused as error:
            if self.template.fault is not None:
                raise TemplateFault(self.template.fault) from error
            raise

    def _first_that_renders(self, conversation: Conversation) -> list[Document]:
        """The documents, with tool calls in the first form that the template renders.

        If there is none, raises the error of the first form that it accepts, else of the first form.
        """
        first: UserError | None = None
        known = dict(self.notes)
        for variant in call_forms(self.finder.answer_starts.with_fields(self._without_stops(conversation))):
            try:
                return self.documents(variant)
            except TemplateFault:
                raise
            except UserError as error:
                if first is None or (isinstance(first, _OF_FORMS) and not isinstance(error, _OF_FORMS)):
                    first = error  # the error in a form that the template accepts says more
                self._drop_notes(known)
        assert first is not None
        raise first

    def _without_stops(self, conversation: Conversation) -> Conversation:
        """The conversation without stop tokens at the ends of answers: the template adds the one that ends them."""
        return replace(conversation, messages=[self._without_stop(message) for message in conversation.messages])

    def _without_stop(self, message: Message) -> Message:
        found = self.ending.search(message["content"] or "") if self.ending and is_answer(message) else None
        if found is None:
            return message
        self.notes[f"answers of the data end in {found[1]!r}, a stop token: it is left to the chat template"] = None
        return {**message, "content": message["content"][: found.start()]}

    def _drop_notes(self, known: dict[str, None]) -> None:
        """Drop notes that were taken for a form that the template does not render."""
        for note in self.notes.keys() - known.keys():
            del self.notes[note]

    def documents(self, conversation: Conversation) -> list[Document]:
        answers = [number for number, message in enumerate(conversation.messages) if is_answer(message)]
        if self.supervise == "all":
            return [self._all_of(conversation, [number for number in answers if number in conversation.muted])]
        answers = answers[-1:] if self.supervise == "last" else answers
        wanted = [number for number in answers if number not in conversation.muted and self._can_be_asked(number)]
        turns = self.finder.turns(conversation, wanted) if wanted else []
        if not turns:
            return [self.encode.whole(self.template.render(conversation.messages, conversation.tools), [])]
        documents = self._as_one_document(turns) or [self._as_own_document(turn) for turn in turns]
        whole = [number for number in wanted if number not in conversation.cut]  # one that was cut may be a space
        speaks = any(conversation.messages[number]["content"] for number in whole)
        if speaks and not any(document.produced.any() for document in documents):
            raise UserError(
                "the chat template masks everything that the assistant says: put {% generation %} around it, or set "
                f"data.supervise=all; the rendered text begins {turns[0].text[:160]!r}"
            )
        return documents

    def _can_be_asked(self, number: int) -> bool:
        """Whether there is a prompt for a message: before the first the template may render none; the message then
        counts as prompt."""
        if number > 0:
            return True
        try:
            self.template.render([], prompt=True)
        except Refused:
            return False
        return True

    def _as_one_document(self, turns: list[Turn]) -> list[Document]:
        """The turns as one document, if each prompt begins with all of the turn before, in characters and in tokens;
        else an empty list."""
        if any(not after.prompt.startswith(turn.text) for turn, after in itertools.pairwise(turns)):
            return []
        cuts = [cut for turn in turns for cut in (len(turn.prompt), len(turn.text))]
        spans = [span for turn in turns for span in turn.produced]
        found = self.encode.served(turns[-1].text, cuts[:-1], spans)
        return [] if found is None else [found]

    def _as_own_document(self, turn: Turn) -> Document:
        found = self.encode.served(turn.text, [len(turn.prompt)], turn.produced)
        return found or self.encode.apart(turn.prompt, turn.written, turn.produced)

    def _all_of(self, conversation: Conversation, muted: list[int]) -> Document:
        """The whole rendering; all of it counts as produced, except for the muted turns."""
        text = self._read_whole(conversation)
        self.finder.round_trip.check(conversation, self._read_whole, "all")
        found = self.encode.whole(text)
        for number in muted:
            prompt = self.template.render(conversation.messages[:number], conversation.tools, prompt=True)
            check(
                text.startswith(prompt),
                f"turn {number + 1}: has weight 0, and the whole rendering does not begin with its prompt",
            )
            without_reasoning = {
                key: value for key, value in conversation.messages[number].items() if key not in REASONING_FIELDS
            }
            spoken = Conversation([*conversation.messages[:number], without_reasoning], conversation.tools)
            written = self.finder.to_its_stop(prompt, text[len(prompt) :], spoken, number)
            found.produced[self.encode.whole(text, [(len(prompt), len(prompt + written))]).produced] = False
        return found

    def _read_whole(self, conversation: Conversation) -> str:
        """The conversation's rendering. Raises UserError if a part of the conversation is missing from it."""
        text = self.template.render(conversation.messages, conversation.tools)
        check_read(conversation.messages, 0, text)
        check_tools(conversation.tools, text)
        return text

    def check_known(self, document: Document) -> Document:
        """The document. Raises UserError for a token without an embedding in the target."""
        tokens, known = document.tokens, self.num_embeddings
        if known is None or tokens.numel() == 0 or (token := int(tokens.max())) < known:
            return document
        raise UserError(
            f"token {token} ({self.tokenizer.convert_ids_to_tokens(token)!r}) is beyond the {known} embeddings "
            "of the target; give it the tokenizer that it was trained with, or resize its embedding"
        )

    def render_text(self, text: str, pattern: str | None = None) -> Document:
        """Plain text with the tokenizer's BOS and EOS, if it has them and the text does not.

        Every token counts as produced; with a `pattern`, what its first group matches, or all of it without groups.
        """
        check_text(text)
        encoding = self.encode(text)
        ids, bos, eos = encoding.ids, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        spans = None if pattern is None else _matches(pattern, text)
        produced = self.encode.whole(text, spans).produced.tolist()
        if bos is not None and ids[:1] != [bos]:
            ids, produced = [bos, *ids], [spans is None, *produced]
        if eos is not None and not (self.ending and self.ending.search(text)):
            is_answer_at_end = spans is None or any(end == len(text) for _, end in spans)
            ids, produced = [*ids, eos], [*produced, is_answer_at_end]
        return document(ids, torch.tensor(produced, dtype=torch.bool), text)

    def decode(self, tokens: list[int], before: Sequence[int] = ()) -> str:
        """The text of tokens, special tokens included, behind the tokens `before`: SentencePiece tokenizers drop the
        first token's leading space at the beginning of a text."""
        start, text = (
            self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (before, [*before, *tokens])
        )
        return text[len(start) :] if text.startswith(start) else self.decode(tokens)

    @property
    def reads_clock(self) -> bool:
        """Whether renderings may contain the date."""
        return self.tokenizer.chat_template is not None and self.template.reads_clock

    def identity(self) -> str:
        """A digest that changes with the template's text and the stop tokens."""
        sources = "" if self.tokenizer.chat_template is None else str(self.tokenizer.chat_template)
        return hashlib.sha256("\n".join([sources, *self.stops]).encode()).hexdigest()


def render_row(row: Mapping, config: SourceConfig, renderer: ChatRenderer) -> list[Document]:
    """A row as documents. Raises UserError, without the row's place, for a row that does not have this format."""
    if config.format != "text":
        documents = renderer(conversation_of(row, config.format, config.columns, config.speakers))
        return [renderer.check_known(each) for each in documents]
    text = column(row, "text", config.columns)
    check(isinstance(text, str), f"the text must be a string, not {type(text).__name__}")
    return [renderer.check_known(renderer.render_text(text, config.assistant_pattern))]


def _ending_of(stops: Sequence[str]) -> re.Pattern | None:
    """A pattern for stop tokens at a text's end, white space behind them included; None without any."""
    known = sorted((re.escape(stop) for stop in stops if stop.strip()), key=len, reverse=True)
    return re.compile(rf"(?:({'|'.join(known)})\s*)+\Z") if known else None


def _matches(pattern: str, text: str) -> Sequence[Span]:
    """The spans that a pattern's first group matches in a text, or the whole pattern without groups."""
    compiled = re.compile(pattern)
    group = 1 if compiled.groups else 0
    return [found.span(group) for found in compiled.finditer(text) if found.start(group) >= 0]


def _text_of(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token's text in renderings; empty for an unused id."""
    added = tokenizer.added_tokens_decoder.get(token)
    if added is not None:
        return added.content
    return tokenizer.decode([token]) if token < len(tokenizer) else ""


def call_forms(conversation: Conversation) -> Iterator[Conversation]:
    """The forms in which templates may want a conversation with tool calls: unchanged first, then with arguments as
    JSON text, and with the content None instead of empty. Without calls: the conversation alone."""
    yield conversation
    if not any(message.get("tool_calls") for message in conversation.messages):
        return
    for as_json, as_none in ((True, False), (False, True), (True, True)):
        messages = [_with_calls(message, as_json, as_none) for message in conversation.messages]
        yield Conversation(messages, conversation.tools, conversation.muted, cut=conversation.cut)


def _with_calls(message: Message, as_json: bool, as_none: bool) -> Message:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_as_called(call, as_json) for call in message["tool_calls"]]} | (
        {"content": None} if as_none and not message["content"] else {}
    )


def _as_called(call: dict, as_json: bool) -> dict:
    function = call["function"]
    if not as_json or not isinstance(function["arguments"], dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
