"""Turns prompts into sequences, and sequences into outputs. DESIGN section 3.9.

Knows texts, chat templates, stop tokens, stop strings and grammars; nothing of batches, caches or drafts.
"""

from collections.abc import Sequence as Listing
from dataclasses import replace
from functools import cached_property
from typing import TypeGuard

from eagle_train.corpus.template import ChatTemplate
from eagle_train.errors import HALF, SURROGATE, UserError, check, shown
from eagle_train.inference.decode.row_trees import OpenTree
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.grammar.guided import Guidance, Guide, Matcher
from eagle_train.inference.requests.detokenizer import Detokenizer, Texts
from eagle_train.inference.requests.sequence import Output, SamplingParams, Sequence, Update, check_prompt
from eagle_train.models.stops import stop_ids_of
from eagle_train.models.target import Target

Prompt = str | Listing[int] | Listing[dict]


class Requests:
    """Prepares requests to a target, and their outputs."""

    def __init__(self, target: Target):
        self.target = target

    def sequence(self, index: int, prompt: Prompt, params: SamplingParams) -> Sequence:
        """A request from a prompt. Raises UserError for what the target cannot answer, such as a prompt that is empty
        or does not fit its context."""
        tokens = self.tokens_of(prompt, f"prompt {index}")
        limit, vocabulary = self.target.max_positions, self.target.identity.vocab_size
        check(len(tokens) > 0, f"prompt {index} is empty: give at least one token")
        check(
            len(tokens) < limit,
            f"prompt {index} has {len(tokens)} tokens: the context of {self.target.name} holds {self.target.context}, "
            "one of them for the answer",
        )
        wrong = [token for token in tokens if not 0 <= token < vocabulary]
        check(not wrong, f"prompt {index} holds token {wrong[:1]}: the vocabulary has {vocabulary}")
        check(
            self.target.tokenizer is not None or not params.stop_strings,
            f"stop={params.stop}: stop strings need a tokenizer, and {self.target.name} has none",
        )
        foreign = [token for token in params.stop_token_ids or () if not 0 <= token < vocabulary]
        check(not foreign, f"stop_token_ids={shown(foreign[:1])}: the vocabulary has {vocabulary}")
        if params.max_tokens > limit - len(tokens):
            params = replace(params, max_tokens=limit - len(tokens))
        own = frozenset() if params.ignore_eos else self.stop_ids
        stop_ids = own if params.stop_token_ids is None else frozenset(params.stop_token_ids)
        if params.grammar is not None:
            stop_ids |= self.stop_ids
        text = None if self.texts is None else Detokenizer(self.texts, params.stop_strings)
        return Sequence(index, tokens, params, stop_ids, self.matcher_of(params), text)

    def matcher_of(self, params: SamplingParams) -> Matcher | None:
        """The initial state of a request's grammar; None without one. Raises UserError for an invalid grammar."""
        return None if params.grammar is None else self.guide.matcher(params.grammar, longest=params.ignore_eos)

    def guidance(self, sequences: list[Sequence], tree: Tree | OpenTree) -> Guidance | None:
        """Which tokens the sequences' grammars allow at the nodes of a tree; None where no sequence has a grammar."""
        matchers = [sequence.matcher for sequence in sequences]
        return Guidance(self.guide, tree, matchers) if any(matchers) else None

    def tokens_of(self, prompt: Prompt, name: str) -> list[int]:
        """The token ids of a prompt: a text, a list of ids, or a list of chat messages for the chat template.

        `name`: the prompt's, for errors. Raises UserError for what is no prompt.
        """
        check_prompt(prompt, name)
        if _are_token_ids(prompt):
            return list(prompt)
        tokenizer = self.target.tokenizer
        check(tokenizer is not None, f"{self.target.name} has no tokenizer: give prompts as token ids")
        if isinstance(prompt, str):
            check(not SURROGATE.search(prompt), f"{name} holds {HALF}")
            return tokenizer(prompt)["input_ids"]
        check(tokenizer.chat_template is not None, f"{self.target.name} has no chat template: give prompts as texts")
        messages = [message for message in prompt if isinstance(message, dict)]
        try:
            return self.template.prompt_tokens(messages)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error

    @cached_property
    def template(self) -> ChatTemplate:
        """The target's chat template. Raises UserError for invalid `template_kwargs`."""
        return ChatTemplate(self.target.tokenizer, self.target.template_kwargs)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return stop_ids_of(self.target.model.generation_config, self.target.config, self.target.tokenizer)

    @cached_property
    def guide(self) -> Guide:
        """The compiler of grammars. Raises UserError where the target or the installation cannot do it."""
        return Guide(self.target.tokenizer, self.target.identity.vocab_size, self.stop_ids, self.target.device)

    @cached_property
    def texts(self) -> Texts | None:
        """The decoder of tokens; None without a tokenizer."""
        return None if self.target.tokenizer is None else Texts(self.target.tokenizer)

    def cut_at_stop_strings(self, sequence: Sequence) -> None:
        """End a sequence at the first token with which a stop string is complete; later tokens are dropped."""
        text = sequence.text
        if text is None or not text.stop_strings:
            return
        for token in sequence.generated[text.num_tokens :]:
            text.add([token])
            if text.has_stop_string():
                sequence.cut(text.num_tokens)
                return

    def update(self, sequence: Sequence) -> Update:
        """What is new of a sequence since the last call."""
        tokens, text = sequence.new_tokens(), None
        if sequence.text is not None:
            sequence.text.add(sequence.generated[sequence.text.num_tokens :])
            text = sequence.text.new_text(final=sequence.finish_reason is not None)
        return Update(sequence, tokens, text, self.output(sequence) if sequence.finish_reason else None)

    def output(self, sequence: Sequence) -> Output:
        """A sequence's output so far. The text is what `update` has returned of it."""
        text = None if sequence.text is None else "".join(sequence.text.text)
        return Output(sequence.generated, text, sequence.finish_reason, sequence.stats, sequence.rounds)


def _are_token_ids(prompt: Prompt) -> TypeGuard[Listing[int]]:
    """Of a prompt that `check_prompt` accepts; an empty list is, too."""
    return not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], dict))


def params_of(params: SamplingParams | Listing[SamplingParams] | None, index: int, count: int) -> SamplingParams:
    """Request `index`'s parameters, of `count`. One set for all gives each request another seed. Raises UserError."""
    if params is None or isinstance(params, SamplingParams):
        params = params or SamplingParams()
        return params.with_seed_after(index)
    known = isinstance(params, list | tuple) and all(isinstance(each, SamplingParams) for each in params)
    check(known, "params: must be SamplingParams, or a list of them")
    check(len(params) == count, f"params: {len(params)} given for {count} prompts")
    return params[index]
