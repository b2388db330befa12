"""Turns prompts into sequences, and sequences into outputs. DESIGN section 3.9.

Knows texts, chat templates, stop tokens, stop strings and grammars; nothing of batches, caches or drafts.
"""

import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property
from importlib.util import find_spec
from typing import Any, TypeGuard

import torch

from eagle_train.corpus.template import ChatTemplate
from eagle_train.errors import HALF, SURROGATE, UserError, check, shown
from eagle_train.inference.decode.adjustments import Adjustment
from eagle_train.inference.decode.row_trees import OpenTree
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.grammar.guided import Guidance, Guide, Matcher, StopMasks
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.inference.requests.detokenizer import Detokenizer, Texts
from eagle_train.inference.requests.sampling_params import SamplingParams
from eagle_train.inference.requests.sequence import Output, Sequence, Thinking, Update, check_prompt
from eagle_train.models.stops import stop_ids_of
from eagle_train.models.target import Target

Prompt = str | Listing[int] | Listing[dict]


_THINKING = ("<think>", "</think>")
_EPOCH, _MICROSECOND = datetime(1970, 1, 1), timedelta(microseconds=1)


class Requests:
    """Prepares requests to a target, and their outputs."""

    def __init__(self, target: Target):
        self.target = target

    def sequence(self, index: int, prompt: Prompt, params: SamplingParams) -> Sequence:
        """A request from a prompt, of one answer. Raises UserError for what the target cannot answer, such as a prompt
        that is empty or does not fit its context."""
        name = f"prompt {index}"
        return self._sequence(index, self.tokens_of(prompt, name, params.chat_template_kwargs), params, name)

    def sequences(self, prompts: Listing[Prompt], params: list[list[SamplingParams]]) -> list[Sequence]:
        """The requests of several prompts, as `sequence`. `params`: of each prompt's answers."""
        made: list[Sequence] = []
        for place, (prompt, answers) in enumerate(zip(prompts, params, strict=True)):
            name = f"prompt {place}"
            tokens = self.tokens_of(prompt, name, answers[0].chat_template_kwargs)
            for each in answers:
                made.append(self._sequence(len(made), tokens, each, name))
        return made

    def _sequence(self, index: int, tokens: list[int], params: SamplingParams, name: str) -> Sequence:
        """As `sequence`, of a prompt's token ids. `name`: the prompt's, for errors."""
        limit = self.target.max_positions
        self._check_prompt(tokens, name)
        self._check_params(params)
        if (most := limit - len(tokens)) < params.max_tokens:
            params = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
        if params.seed is None:
            params = replace(params, seed=self._random_seed())
        stop_ids, matcher = self.stops_of(params), self.matcher_of(params)
        text = None if self.texts is None else detokenizer_of(self.texts, params)
        sequence = Sequence(index, tokens, params, stop_ids, matcher, text, self.adjustment_of(params), name)
        if params.relaxed_thinking:
            sequence.thinking = Thinking(*self.thinking_ids)
            sequence.thinking.read(*tokens)
        return sequence

    @cached_property
    def thinking_ids(self) -> tuple[int, int]:
        """The tokens that begin and end the target's thinking. Raises UserError where it has none."""
        tokenizer = self.target.tokenizer
        known = {} if tokenizer is None else tokenizer.get_vocab()
        there = all(text in known for text in _THINKING)
        check(there, f"relaxed_thinking=True: {self.target.name} has no tokens {' and '.join(_THINKING)}")
        begin, end = (known[text] for text in _THINKING)
        return begin, end

    def _check_prompt(self, tokens: list[int], name: str) -> None:
        """Raise UserError for token ids that the target cannot continue."""
        target, vocabulary = self.target, self.target.identity.vocab_size
        check(len(tokens) > 0, f"{name} is empty: give at least one token")
        check(
            len(tokens) < target.max_positions,
            f"{name} has {len(tokens)} tokens: the context of {target.name} holds {target.context}, "
            "one of them for the answer",
        )
        wrong = [token for token in tokens if not 0 <= token < vocabulary]
        check(not wrong, f"{name} holds token {wrong[:1]}: the vocabulary has {vocabulary}")

    def _check_params(self, params: SamplingParams) -> None:
        """Raise UserError for parameters that do not fit the target."""
        vocabulary = self.target.identity.vocab_size
        check(
            self.target.tokenizer is not None or not params.stop_strings,
            f"stop={params.stop}: stop strings need a tokenizer, and {self.target.name} has none",
        )
        self._check_stop_strings(params)
        for name in ("stop_token_ids", "logit_bias"):
            foreign = [token for token in getattr(params, name) or () if not 0 <= token < vocabulary]
            check(not foreign, f"{name}={shown(foreign[:1])}: the vocabulary has {vocabulary}")
        check((params.logprobs or 0) <= vocabulary, f"logprobs={params.logprobs}: the vocabulary has {vocabulary}")
        possible = params.min_tokens == 0 or len(self.stops_of(params)) < vocabulary
        check(possible, f"min_tokens={params.min_tokens}: must be 0 where every token is a stop token")

    def _check_stop_strings(self, params: SamplingParams) -> None:
        """Raise UserError for stop strings that hold a special token beside other text, and for `include_stop` with one
        that is a special token: answers show no text of these."""
        for text in params.stop_strings:
            assert self.texts is not None
            held = max((name for name in self.texts.unshown if name in text), key=len, default=None)
            if held is None:
                continue
            other = f"use stop={shown(held)}, or stop_token_ids=[{self.texts.unshown[held]}]"
            check(held == text, f"stop={shown(text)}: answers have no text of the special token {held}; {other}")
            told = f"answers have no text of the special token {held}, which stop names; leave include_stop out"
            check(not params.include_stop, f"include_stop=True: {told}")

    def stops_of(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that end an answer with these parameters: also those of which a stop string is the name."""
        own = frozenset() if params.ignore_eos else self.stop_ids
        stop_ids = own if params.stop_token_ids is None else frozenset(params.stop_token_ids)
        unshown = {} if self.texts is None or not params.stop_strings else self.texts.unshown
        stop_ids |= {unshown[text] for text in params.stop_strings if text in unshown}
        return stop_ids if params.grammar is None else stop_ids | self.stop_ids

    def adjustment_of(self, params: SamplingParams) -> Adjustment | None:
        """What a request changes of the target's logits; None where it changes nothing."""
        stop_ids, vocabulary = self.stops_of(params), self.target.identity.vocab_size
        forbidden = frozenset(token for token in stop_ids if 0 <= token < vocabulary)
        adjustment = Adjustment(
            params.logit_bias or {},
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.min_tokens if forbidden else 0,
            forbidden,
        )
        return adjustment if adjustment.is_on(0) else None

    def _random_seed(self) -> int:
        """A seed that nobody can foresee, one for all ranks that hold the target together."""
        seed = torch.tensor(int.from_bytes(secrets.token_bytes(8), "little", signed=True))
        return int(Ranks(self.target.together).agreed(seed))

    def matcher_of(self, params: SamplingParams) -> Matcher | None:
        """The initial state of a request's grammar; None without one. Raises UserError for an invalid grammar."""
        return None if params.grammar is None else self.guide.matcher(params.grammar, longest=params.ignore_eos)

    def guidance(self, sequences: list[Sequence], tree: Tree | OpenTree) -> Guidance | None:
        """Which tokens the sequences' grammars allow at the nodes of a tree; None where no sequence has a grammar."""
        matchers = [sequence.matcher for sequence in sequences]
        return Guidance(self.guide, tree, matchers) if any(matchers) else None

    def tokens_of(self, prompt: Prompt, name: str, variables: Mapping[str, Any] | None = None) -> list[int]:
        """The token ids of a prompt: a text, a list of ids, or a list of chat messages for the chat template.

        `name`: the prompt's, for errors. `variables`: of the chat template, over the target's own. Raises UserError for
        what is no prompt, and for variables that no template reads.
        """
        check_prompt(prompt, name)
        is_chat = not isinstance(prompt, str) and not _are_token_ids(prompt)
        check(
            is_chat or not variables,
            f"chat_template_kwargs={shown(variables)}: {name} is no list of chat messages, and no template renders it",
        )
        if _are_token_ids(prompt):
            return list(prompt)
        tokenizer = self.target.tokenizer
        check(tokenizer is not None, f"{self.target.name} has no tokenizer: give prompts as token ids")
        if isinstance(prompt, str):
            check(not SURROGATE.search(prompt), f"{name} holds {HALF}")
            return tokenizer(prompt)["input_ids"]
        check(tokenizer.chat_template is not None, f"{self.target.name} has no chat template: give prompts as texts")
        messages = [message for message in prompt if isinstance(message, dict)]
        template = self._template_with(variables)
        try:
            return template.prompt_tokens(messages)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error

    @cached_property
    def template(self) -> ChatTemplate:
        """The target's chat template. Raises UserError for `template_kwargs` that are invalid, or that it does not
        read."""
        template = ChatTemplate(self.target.tokenizer, self.target.template_kwargs, clock=self._now)
        self._check_read(template, template.kwargs, "template_kwargs")
        return template

    def _template_with(self, variables: Mapping[str, Any] | None) -> ChatTemplate:
        """The target's chat template, with these variables over its own. Raises UserError for those that it does not
        read."""
        if not variables:
            return self.template
        self._check_read(self.template, variables, "chat_template_kwargs")
        return ChatTemplate(self.target.tokenizer, self.template.kwargs | dict(variables), clock=self._now)

    def _now(self) -> datetime:
        """The time that templates read: the first rank's, for all ranks that hold the target together, since they must
        render the same prompts."""
        own = torch.tensor((datetime.now() - _EPOCH) // _MICROSECOND)
        return _EPOCH + int(Ranks(self.target.together).agreed(own)) * _MICROSECOND

    def _check_read(self, template: ChatTemplate, variables: Mapping[str, Any], field: str) -> None:
        """Raise UserError, naming `field`, for variables that a template does not read."""
        unread = [name for name in variables if name not in template.variables()]
        if unread:
            known = ", ".join(template.switches) or "none"
            said = f"the chat template of {self.target.name} reads no such variable; it reads {known}"
            raise UserError(f"{field}.{unread[0]}: {said}")

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return stop_ids_of(self.target.model.generation_config, self.target.config, self.target.tokenizer)

    @cached_property
    def guide(self) -> Guide:
        """The compiler of grammars. Raises UserError where the target or the installation cannot do it."""
        return Guide(self.target.tokenizer, self.target.identity.vocab_size, self.stop_ids, self.target.device)

    @cached_property
    def stop_masks(self) -> StopMasks | None:
        """Of rounds with grammars; None where there can be none."""
        vocab_size = self.target.identity.vocab_size
        stop_ids = [token for token in self.stop_ids if 0 <= token < vocab_size]
        possible = self.target.tokenizer is not None and bool(stop_ids) and find_spec("xgrammar") is not None
        return StopMasks.of(stop_ids, vocab_size, self.target.device) if possible else None

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
        logprobs = sequence.logprobs_from(sequence.num_reported)
        tokens, text = sequence.new_tokens(), None
        if sequence.text is not None:
            sequence.text.add(sequence.generated[sequence.text.num_tokens :])
            text = sequence.text.new_text(final=sequence.finish_reason is not None)
        return Update(sequence, tokens, text, self.output(sequence) if sequence.finish_reason else None, logprobs)

    def output(self, sequence: Sequence) -> Output:
        """A sequence's output so far. The text is what `update` has returned of it."""
        text = None if sequence.text is None else "".join(sequence.text.text)
        logprobs = sequence.logprobs_from(0)
        return Output(
            list(sequence.generated),
            text,
            sequence.finish_reason,
            sequence.stats.copy(),
            list(sequence.rounds),
            logprobs,
            sequence.params.is_lossy,
        )


def _are_token_ids(prompt: Prompt) -> TypeGuard[Listing[int]]:
    """Of a prompt that `check_prompt` accepts; an empty list is, too."""
    return not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], dict))


def params_of(params: SamplingParams | Listing[SamplingParams] | None, count: int) -> list[list[SamplingParams]]:
    """The parameters of each answer of `count` prompts. One set for all gives each answer of all prompts another seed,
    a list each answer of a prompt. Raises UserError."""
    if params is None or isinstance(params, SamplingParams):
        given = params or SamplingParams()
        return [[given.with_seed_after(i * given.n + j) for j in range(given.n)] for i in range(count)]
    known = isinstance(params, list | tuple) and all(isinstance(each, SamplingParams) for each in params)
    check(known, "params: must be SamplingParams, or a list of them")
    check(len(params) == count, f"params: {len(params)} given for {count} prompts")
    return [[each.with_seed_after(j) for j in range(each.n)] for each in params]


def detokenizer_of(texts: Texts, params: SamplingParams) -> Detokenizer:
    """Of an answer with these parameters."""
    return Detokenizer(texts, params.stop_strings, params.include_stop, params.min_tokens)
