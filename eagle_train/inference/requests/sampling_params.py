"""How one request is sampled. Knows nothing of tensors, models or batches. DESIGN sections 3.7, 3.8."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from eagle_train.corpus.template import check_template_kwargs
from eagle_train.errors import SURROGATE, UserError, check, shown
from eagle_train.inference.grammar.guided import check_grammar

_LARGEST = (1 << 63) - 1  # of the numbers that a tensor holds
_LEAST = -_LARGEST - 1
_MOST_ANSWERS = 1 << 16  # of one prompt
_MOST_BIAS = 100
_DIGITS = re.compile("[0-9]{1,18}")  # of a token id
_NEAR = 0.5  # how alike a known name must be to be told, of 1


def is_whole(value: Any, least: int) -> bool:
    """Whether it is an int from `least` to _LARGEST; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST


def is_number(value: Any, least: float, most: float) -> bool:
    """Whether it is an int or float from `least` to `most`; a bool or NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_listing(value: Any, kind: type) -> bool:
    """Whether it is None, or a list or tuple of `kind`."""
    return value is None or (isinstance(value, list | tuple) and all(type(each) is kind for each in value))


def _is_bias(value: Any) -> bool:
    """Whether it maps token ids, or texts of these, to numbers from -_MOST_BIAS to _MOST_BIAS."""
    if not isinstance(value, Mapping):
        return False
    tokens = all(is_whole(token, 0) or (isinstance(token, str) and _DIGITS.fullmatch(token)) for token in value)
    return tokens and all(is_number(number, -_MOST_BIAS, _MOST_BIAS) for number in value.values())


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Raises UserError, for unknown names too.

    temperature 0 is greedy; top_k 0 or -1, top_p 1 and min_p 0 are off. `min_p`: only tokens that are at least so many
    times as likely as the most likely one. `seed`: None: a random one. `stop`: strings that end the answer;
    one that is a special token's name ends it at that token too. `include_stop`: its text ends with the one that did.

    What changes the target's logits, at temperature 0 too, in this order. `logit_bias`: numbers from -100 to 100 to be
    added, by token id (as a text too, as JSON has it). `repetition_penalty`, 1 is off: positive logits of tokens in
    prompt or answer are divided by it, others multiplied. `presence_penalty` and `frequency_penalty`, from -2 to 2:
    subtracted for each token in the answer, and for each time that it is there. `min_tokens`: before the answer has so
    many, no stop token comes (unless a grammar allows nothing else), and no stop string ends it.

    `n`: answers that `generate` gives of a prompt, with seed, seed + 1, ... `logprobs`: log-probabilities of each
    token and of so many of the most likely ones (`TokenLogprobs`); None: none. `chat_template_kwargs`: the chat
    template's own variables for this request, over those of the target.

    `relaxed_topk` and `relaxed_delta` are LOSSY: at temperature 0 a drafted token is accepted too if it is one of the
    target's so many most likely ones, and its probability at most so much below the most likely one's. The answer is
    then not the target's own. `relaxed_thinking`: only between the target's tokens <think> and </think>.

    `grammar`: what the answer must match, one of {"json_schema": a schema}, {"regex": a text}, {"choice": texts} and
    {"ebnf": a text with a rule `root`}. The target's own stop tokens then end the answer, only where the grammar may
    end; with `ignore_eos` only where the grammar allows nothing else. An object has the properties that its schema
    names, and others only if `additionalProperties` says so. With json_schema, the key `whitespace` gives the most
    characters of white space between two tokens of JSON: a number (default 16), or "any".
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    seed: int | None = 0
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None  # None: the target's own
    ignore_eos: bool = False  # the target's own stop tokens end nothing; those given do
    grammar: Mapping[str, Any] | None = None
    drafter: str | None = None  # its name in the engine; None: the engine's first; none: no drafts
    min_p: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    n: int = 1
    logprobs: int | None = None
    include_stop: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    relaxed_topk: int = 0  # 0: off; above it answers are no longer the target's own
    relaxed_delta: float = 0.0
    relaxed_thinking: bool = False

    def __new__(cls, *_: Any, **given: Any) -> "SamplingParams":
        """Tell of a name that is no parameter, and of its neighbours."""
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                near = get_close_matches(name, known, cutoff=_NEAR)
                kind = "the nearest are" if len(near) > 1 else "the nearest is" if near else "there are"
                raise UserError(f"{name}: SamplingParams has no such parameter; {kind} {', '.join(near or known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        texts = [self.stop] if isinstance(self.stop, str) else self.stop
        for name, (right, wanted) in (self._numbers() | self._others(texts)).items():
            if not right:  # formatting every value would take longer than checking it, and servers make many of these
                raise UserError(f"{name}={shown(getattr(self, name))}: {wanted}")
        least, most = self.min_tokens, self.max_tokens
        check(least <= most, f"min_tokens={least}: must be at most max_tokens, which is {most}")
        self._normalise()
        self._check_relaxed()
        if self.chat_template_kwargs is not None:
            check_template_kwargs(self.chat_template_kwargs, "chat_template_kwargs")
        if texts:
            check("" not in texts, f"stop={shown(self.stop)}: an empty text would end every answer; leave it out")
            halves = any(map(SURROGATE.search, texts))
            check(not halves, f"stop={shown(self.stop)}: half of a surrogate pair is in no text")
        if self.grammar is not None:
            check_grammar(self.grammar)

    def _numbers(self) -> dict[str, tuple[bool, str]]:
        """By name whether a number is right, and what it must be."""
        return {
            "temperature": (is_number(self.temperature, 0, sys.float_info.max), "must be 0 or more, and finite"),
            "top_p": (is_number(self.top_p, 0, 1) and self.top_p > 0, "must be above 0 and at most 1"),
            "top_k": (is_whole(self.top_k, -1), "must be 0 or -1 (off), or more, a whole number"),
            "min_p": (is_number(self.min_p, 0, 1), "must be from 0 (off) to 1"),
            "max_tokens": (is_whole(self.max_tokens, 1), "must be at least 1, a whole number"),
            "min_tokens": (is_whole(self.min_tokens, 0), "must be at least 0, a whole number"),
            "seed": (
                self.seed is None or is_whole(self.seed, _LEAST),
                f"must be None (a random one) or a whole number of 64 bits, at most {_LARGEST}",
            ),
            # float32 holds a logit that is divided by these, and one that is multiplied
            "repetition_penalty": (is_number(self.repetition_penalty, 0.01, 100), "must be from 0.01 to 100; 1 is off"),
            "presence_penalty": (is_number(self.presence_penalty, -2, 2), "must be from -2 to 2"),
            "frequency_penalty": (is_number(self.frequency_penalty, -2, 2), "must be from -2 to 2"),
            "n": (is_whole(self.n, 1) and self.n <= _MOST_ANSWERS, f"must be a whole number from 1 to {_MOST_ANSWERS}"),
            "relaxed_topk": (is_whole(self.relaxed_topk, 0), "must be 0 (off) or more, a whole number"),
            "relaxed_delta": (is_number(self.relaxed_delta, 0, 1), "must be from 0 to 1"),
            "logprobs": (
                self.logprobs is None or is_whole(self.logprobs, 0),
                "must be None, or 0 or more, a whole number",
            ),
        }

    def _others(self, texts: Any) -> dict[str, tuple[bool, str]]:
        """As `_numbers`, of what is no number. `texts`: `stop` as a list."""
        variables = self.chat_template_kwargs
        return {
            "stop": (_is_listing(texts, str), "must be None, a text, or a list of texts"),
            "stop_token_ids": (_is_listing(self.stop_token_ids, int), "must be None or a list of token ids"),
            "ignore_eos": (isinstance(self.ignore_eos, bool), "must be true or false"),
            "relaxed_thinking": (isinstance(self.relaxed_thinking, bool), "must be true or false"),
            "include_stop": (isinstance(self.include_stop, bool), "must be true or false"),
            "drafter": (self.drafter is None or isinstance(self.drafter, str), "must be None, or a drafter's name"),
            "logit_bias": (
                self.logit_bias is None or _is_bias(self.logit_bias),
                f"must be None, or a mapping of token ids to numbers from {-_MOST_BIAS} to {_MOST_BIAS}",
            ),
            "chat_template_kwargs": (
                variables is None or isinstance(variables, Mapping),
                "must be None, or a mapping of the chat template's variables to their values",
            ),
        }

    def _check_relaxed(self) -> None:
        """Raise UserError for relaxed acceptance where it does nothing."""
        topk, delta, thinking = self.relaxed_topk, self.relaxed_delta, self.relaxed_thinking
        needs = "needs relaxed_topk above 0"
        check(topk > 0 or not delta, f"relaxed_delta={delta}: {needs}")
        check(topk > 0 or not thinking, f"relaxed_thinking=True: {needs}")
        check(topk == 0 or self.temperature == 0, f"relaxed_topk={topk}: is for temperature 0, not {self.temperature}")

    @property
    def is_lossy(self) -> bool:
        """Whether the answer may be another than the target's own."""
        return self.relaxed_topk > 0

    def _normalise(self) -> None:
        """Write in one way what may be said in two."""
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if self.logit_bias is not None:
            bias = {int(token): float(number) for token, number in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", bias)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def with_seed_after(self, offset: int) -> "SamplingParams":
        """The same with the seed plus `offset`, which wraps around at 64 bits. None stays."""
        if self.seed is None:
            return self
        return replace(self, seed=(self.seed + offset - _LEAST) % (1 << 64) + _LEAST)
