"""Rows as documents: what a server would have been given and what its model writes, in tokens. DESIGN section 3.1.

Knows nothing of files, packing or training: a row comes in, its documents go out.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eagle_train.corpus.chat import REASONING, SUPERVISE, Conversation, Message, column, conversation_of, is_answer
from eagle_train.corpus.contents import NoJson, check_read, check_tools
from eagle_train.corpus.source import SourceConfig
from eagle_train.corpus.template import ChatTemplate, Refused, TemplateFault
from eagle_train.corpus.tokens import Document, Encoder, Span, check_text, document, misfit
from eagle_train.corpus.turns import Turn, TurnFinder
from eagle_train.errors import UserError, check

OF_FORMS = (Refused, NoJson)  # what another form of a conversation's calls may mend


class ChatRenderer:
    """Renders conversations through the tokenizer's chat template; `supervise` says whose tokens count as produced.

    `stop_ids`: the tokens that end an answer, the tokenizer's own EOS among them. `template_kwargs`, `date`: see
    `ChatTemplate`. `num_embeddings`: how many tokens the target knows, None where none is at hand. `notes`: what it
    noticed that its user should know, once each. Raises UserError for a tokenizer that cannot tell which characters a
    token came from.
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
        self.tokenizer, self.notes = self.encode.tokenizer, {}
        if num_embeddings is not None and (note := misfit(tokenizer, num_embeddings)):
            self.notes[note] = None
        self.template = ChatTemplate(self.tokenizer, template_kwargs, date)
        eos = self.tokenizer.eos_token_id
        self.stop_ids = frozenset([*stop_ids, *([] if eos is None else [eos])])
        self.stops = tuple(text_of(self.tokenizer, token) for token in sorted(self.stop_ids))
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.finder = TurnFinder(self.template, self.stops, special, self.notes)

    def __call__(self, conversation: Conversation | list[Message]) -> list[Document]:
        """The conversation as its documents: one where every prompt that a server would be given begins with the one
        before and what the model wrote after it, else one for each of the assistant's turns.

        Raises UserError where the template refuses the conversation, loses some of it, or masks everything that its
        assistant says, and where what the model writes is unknown; TemplateFault where it can render no conversation.
        """
        if isinstance(conversation, list):
            conversation = Conversation(conversation)
        try:
            return self.first_that_renders(conversation)
        except Refused as error:
            if self.template.fault is not None:
                raise TemplateFault(self.template.fault) from error
            raise

    def first_that_renders(self, conversation: Conversation) -> list[Document]:
        """The documents, with calls in the form that the template takes. Raises what the first of them does that it
        takes, or the first of all."""
        first: UserError | None = None
        known = dict(self.notes)
        for variant in call_forms(self.finder.beginnings.with_fields(conversation)):
            try:
                return self.documents(variant)
            except TemplateFault:
                raise
            except UserError as error:
                if first is None or (isinstance(first, OF_FORMS) and not isinstance(error, OF_FORMS)):
                    first = error  # what comes of the form that the template takes tells more
                self.forget(known)
        assert first is not None
        raise first

    def forget(self, known: dict[str, None]) -> None:
        """What was noticed in a form that the template does not take is nothing of its form's."""
        for note in self.notes.keys() - known.keys():
            del self.notes[note]

    def documents(self, conversation: Conversation) -> list[Document]:
        answers = [number for number, message in enumerate(conversation.messages) if is_answer(message)]
        if self.supervise == "all":
            return [self.all_of(conversation, [number for number in answers if number in conversation.muted])]
        answers = answers[-1:] if self.supervise == "last" else answers
        wanted = [number for number in answers if number not in conversation.muted and self.can_be_asked(number)]
        if not wanted:
            return [self.encode.whole(self.template.render(conversation.messages, conversation.tools), [])]
        turns = self.finder.turns(conversation, wanted)
        documents = self.together(turns) or [self.alone(turn) for turn in turns]
        speaks = any(conversation.messages[number]["content"] for number in wanted)
        if speaks and not any(document.produced.any() for document in documents):
            raise UserError(
                "the chat template masks everything that the assistant says: put {% generation %} around it, or set "
                f"data.supervise=all; the rendered text begins {turns[0].text[:160]!r}"
            )
        return documents

    def can_be_asked(self, number: int) -> bool:
        """Whether a server could be asked for a message: for the first there may be no prompt that the template can
        render, and then it is the prompt's."""
        if number > 0:
            return True
        try:
            self.template.render([], prompt=True)
        except Refused:
            return False
        return True

    def together(self, turns: list[Turn]) -> list[Document]:
        """The turns as one document, if each prompt begins with all that was before, in characters and in tokens;
        none if not."""
        if any(not after.prompt.startswith(turn.text) for turn, after in itertools.pairwise(turns)):
            return []
        cuts = [cut for turn in turns for cut in (len(turn.prompt), len(turn.text))]
        spans = [span for turn in turns for span in turn.produced]
        found = self.encode.served(turns[-1].text, cuts[:-1], spans)
        return [] if found is None else [found]

    def alone(self, turn: Turn) -> Document:
        found = self.encode.served(turn.text, [len(turn.prompt)], turn.produced)
        return found or self.encode.apart(turn.prompt, turn.written, turn.produced)

    def all_of(self, conversation: Conversation, muted: list[int]) -> Document:
        """The whole rendering, in which everything counts as produced but the muted turns."""
        text = self.read_whole(conversation)
        self.finder.kept.check(conversation, self.read_whole, "all")
        found = self.encode.whole(text)
        for number in muted:
            prompt = self.template.render(conversation.messages[:number], conversation.tools, prompt=True)
            check(text.startswith(prompt), f"turn {number + 1}: weight 0, and the whole rendering begins otherwise")
            thoughtless = {key: value for key, value in conversation.messages[number].items() if key not in REASONING}
            said = Conversation([*conversation.messages[:number], thoughtless], conversation.tools)
            written = self.finder.to_its_stop(prompt, text[len(prompt) :], said, number)
            found.produced[self.encode.whole(text, [(len(prompt), len(prompt + written))]).produced] = False
        return found

    def read_whole(self, conversation: Conversation) -> str:
        """The conversation's rendering, in which all of it must be. Raises UserError where something is not."""
        text = self.template.render(conversation.messages, conversation.tools)
        check_read(conversation.messages, 0, text)
        check_tools(conversation.tools, text)
        return text

    def check_known(self, document: Document) -> Document:
        """The document. Raises UserError for a token that the target has no embedding of: its tokenizer got tokens that
        it did not."""
        tokens, known = document.tokens, self.num_embeddings
        if known is None or tokens.numel() == 0 or (token := int(tokens.max())) < known:
            return document
        raise UserError(
            f"token {token} ({self.tokenizer.convert_ids_to_tokens(token)!r}) is beyond the {known} embeddings "
            "of the target; give it the tokenizer that it was trained with, or resize its embedding"
        )

    def render_text(self, text: str, pattern: str | None = None) -> Document:
        """Plain text between the tokenizer's BOS and EOS, where it has them and they do not stand there already.

        Every token counts as produced, or with a `pattern` what its first group matches, or all of it without groups.
        """
        check_text(text)
        encoding = self.encode(text)
        ids, bos, eos = encoding.ids, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        spans = None if pattern is None else matches(pattern, text)
        produced = self.encode.whole(text, spans).produced.tolist()
        if bos is not None and ids[:1] != [bos]:
            ids, produced = [bos, *ids], [spans is None, *produced]
        if eos is not None and not self.is_ended(text):
            is_answer_at_end = spans is None or any(end == len(text) for _, end in spans)
            ids, produced = [*ids, eos], [*produced, is_answer_at_end]
        return document(ids, torch.tensor(produced, dtype=torch.bool), text)

    def is_ended(self, text: str) -> bool:
        """Whether a text has its stop already, but for white space behind it."""
        return text.rstrip().endswith(tuple(stop for stop in self.stops if stop.strip()))

    def decode(self, tokens: list[int], before: Sequence[int] = ()) -> str:
        """The text of some tokens, special ones among them, where they stand: SentencePiece's leave out a space that
        the first of them begins with, unless some are `before`."""
        start, text = (
            self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (before, [*before, *tokens])
        )
        return text[len(start) :] if text.startswith(start) else self.decode(tokens)

    @property
    def reads_clock(self) -> bool:
        """Whether conversations may be rendered with the day in them."""
        return self.tokenizer.chat_template is not None and self.template.reads_clock

    def identity(self) -> str:
        """Changes when what the template makes of a conversation may, as far as its text and its stops tell."""
        sources = "" if self.tokenizer.chat_template is None else str(self.tokenizer.chat_template)
        return hashlib.sha256("\n".join([sources, *self.stops]).encode()).hexdigest()


def render_row(row: Mapping, config: SourceConfig, renderer: ChatRenderer) -> list[Document]:
    """A row of the data as documents. Raises UserError, without the row's place, if the row is not of this format."""
    if config.format != "text":
        documents = renderer(conversation_of(row, config.format, config.columns, config.speakers))
        return [renderer.check_known(each) for each in documents]
    text = column(row, "text", config.columns)
    check(isinstance(text, str), f"the text must be a string, not {type(text).__name__}")
    return [renderer.check_known(renderer.render_text(text, config.assistant_pattern))]


def matches(pattern: str, text: str) -> Sequence[Span]:
    """What a pattern's first group, or all of it where it has none, matches in a text."""
    compiled = re.compile(pattern)
    group = 1 if compiled.groups else 0
    return [found.span(group) for found in compiled.finditer(text) if found.start(group) >= 0]


def text_of(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token as it stands in rendered text; empty for an id that is no token's."""
    added = tokenizer.added_tokens_decoder.get(token)
    if added is not None:
        return added.content
    return tokenizer.decode([token]) if token < len(tokenizer) else ""


def call_forms(conversation: Conversation) -> Iterator[Conversation]:
    """The conversation as it is; where it has calls, then with their arguments as JSON, which other templates want,
    and with no content instead of an empty one beside them."""
    yield conversation
    if not any(message.get("tool_calls") for message in conversation.messages):
        return
    for as_json, as_none in ((True, False), (False, True), (True, True)):
        messages = [with_calls(message, as_json, as_none) for message in conversation.messages]
        yield Conversation(messages, conversation.tools, conversation.muted)


def with_calls(message: Message, as_json: bool, as_none: bool) -> Message:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [as_called(call, as_json) for call in message["tool_calls"]]} | (
        {"content": None} if as_none and not message["content"] else {}
    )


def as_called(call: dict, as_json: bool) -> dict:
    function = call["function"]
    if not as_json or not isinstance(function["arguments"], dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
