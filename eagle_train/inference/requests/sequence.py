"""A request on its way: its prompt, its parameters, what was generated and how it went. Knows nothing of tensors.

DESIGN sections 3.8, 3.9.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_train.errors import SURROGATE, UserError, check, shown
from eagle_train.inference.grammar.guided import Matcher, check_grammar
from eagle_train.inference.requests.detokenizer import Detokenizer

LARGEST = (1 << 63) - 1  # of the numbers that a tensor holds
LEAST = -LARGEST - 1
OVERFLOW = "computes NaN or infinity from some token on; float16 has a narrow range: try target.dtype=float32"


def is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def is_listing(value: Any, kind: type) -> bool:
    """Whether it is None, or a list or tuple of that kind."""
    return value is None or (isinstance(value, list | tuple) and all(type(each) is kind for each in value))


def check_prompt(prompt: Any, name: str) -> None:
    """Raise UserError for a prompt that is no text, no list of token ids and no list of chat messages."""
    wanted = "must be a text, a list of token ids, or a list of chat messages"
    check(isinstance(prompt, str | list | tuple), f"{name} is {shown(prompt)}: {wanted}")
    if not isinstance(prompt, str):
        is_chat = len(prompt) > 0 and isinstance(prompt[0], dict)
        for each in prompt:
            check(isinstance(each, dict) if is_chat else is_whole(each, 0), f"{name} holds {shown(each)}: {wanted}")


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. temperature 0 is greedy; top_k 0 and top_p 1 are off; `stop`: strings that end it.

    `grammar`: what the answer must obey, one of {"json_schema": a schema}, {"regex": a text}, {"choice": texts} and
    {"ebnf": a text whose first rule is `root`}. The target's own stop tokens then end the answer, exactly where the
    grammar may end; with `ignore_eos` only where it lets nothing else follow. An object has the properties its schema
    names, and others only if `additionalProperties` says so. Beside json_schema, `whitespace` says how many characters
    may stand between two tokens of JSON: a number (16, unless told), or "any". Raises UserError.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    seed: int = 0
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None  # None: the target's own
    ignore_eos: bool = False  # the target's own stop tokens end nothing; those given do
    grammar: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        texts = [self.stop] if isinstance(self.stop, str) else self.stop
        rules = {
            "temperature": (is_number(self.temperature, 0, sys.float_info.max), "must be 0 or more, and finite"),
            "top_p": (is_number(self.top_p, 0, 1) and self.top_p > 0, "must be above 0 and at most 1"),
            "top_k": (is_whole(self.top_k, 0), "must be 0 (off) or more, a whole number"),
            "max_tokens": (is_whole(self.max_tokens, 1), "must be at least 1, a whole number"),
            "seed": (is_whole(self.seed, LEAST), f"must be a whole number of 64 bits, at most {LARGEST}"),
            "stop": (is_listing(texts, str), "must be None, a text, or a list of texts"),
            "stop_token_ids": (is_listing(self.stop_token_ids, int), "must be None or a list of token ids"),
            "ignore_eos": (isinstance(self.ignore_eos, bool), "must be true or false"),
        }
        for name, (right, wanted) in rules.items():
            if not right:  # a server makes these by the thousand; to show every value takes longer than to check it
                raise UserError(f"{name}={shown(getattr(self, name))}: {wanted}")
        if texts:
            check("" not in texts, f"stop={shown(self.stop)}: an empty text would end every answer; leave it out")
            halves = any(map(SURROGATE.search, texts))
            check(not halves, f"stop={shown(self.stop)}: half of a surrogate pair is in no text")
        if self.grammar is not None:
            check_grammar(self.grammar)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def with_seed_after(self, offset: int) -> "SamplingParams":
        """The same with a seed that is greater by `offset`; after the greatest of 64 bits comes the least."""
        return replace(self, seed=(self.seed + offset - LEAST) % (1 << 64) + LEAST)


@dataclass
class Stats:
    """What a request cost. `calls` and `tokens` count decoding alone: the prefill's call and token are left out."""

    calls: int = 0
    tokens: int = 0
    ttft_s: float = 0.0
    cached_tokens: int = 0  # of the prompt, that were not read because the caches had them
    accepted_per_depth: list[int] = field(default_factory=list)  # rounds in which the node at depth 1, 2, ... held
    drafted_per_depth: list[int] = field(default_factory=list)  # rounds in which there was a node at that depth
    intervals_s: list[float] = field(default_factory=list)  # between one token and the next

    @property
    def tpc(self) -> float | None:
        """Tokens committed in decoding for each target call in decoding, the bonus token counted. DESIGN 3.8."""
        return self.tokens / self.calls if self.calls else None

    @property
    def ttit_s(self) -> float | None:
        """Mean time between tokens, in seconds."""
        return sum(self.intervals_s) / len(self.intervals_s) if self.intervals_s else None


@dataclass(frozen=True)
class Output:
    """A request's answer, or its beginning while the request is unfinished.

    `finish_reason`: None while it is unfinished; `stop`: a stop token or stop string; `length`: `max_tokens` or the end
    of the target's context; `cancelled`; `dead_end`: its grammar needs text for which the target has no tokens, and the
    answer is a prefix of a valid one; `overflow`: the target computed NaN or infinity, as float16 may, for the answer
    or for the drafted tokens, and the answer ends before it.

    `text` is that of the tokens, without special ones and up to the first stop string; the tokens go on to its end.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str | None
    stats: Stats
    rounds: list[int]  # tokens that each target call of the decoding committed


@dataclass(frozen=True)
class Update:
    """What a round brought a request: its new tokens, its new text, and the whole of it when it is finished.

    All updates' tokens together are the output's, and so are their texts. `text` waits for characters that are not
    whole yet, and for what may be the beginning of a stop string; of one that was found it shows nothing. `token_ids`
    does not wait: the output has a stop string's tokens, and none behind them. Without a tokenizer `text` is None. A
    request that is cancelled gets no more updates, and its text is what they told.
    """

    request: "Sequence"
    token_ids: list[int]
    text: str | None
    output: Output | None


@dataclass(eq=False)
class Sequence:
    """A request in the engine: what `Engine.add` returns, to be looked at, and `Engine.cancel` takes."""

    index: int
    prompt: list[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]
    matcher: Matcher | None = None  # where it stands in its grammar; all of `generated` was read
    text: Detokenizer | None = None  # None without a tokenizer
    arrival: float = field(default_factory=time.perf_counter)
    generated: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish_reason: str | None = None
    last_token_at: float = 0.0
    blocks: list[int] = field(default_factory=list)  # of the store, in order
    had_blocks: bool = False  # now, or before it had to give them up
    num_computed: int = 0  # tokens that are in the caches of both models
    reader: Any = None  # who reads its text in this process's place
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks (cache/prefix_cache.py)
    last_hidden: Any = None  # the target's hidden state at the last of them [H], until it decodes
    reported: int = 0  # how many of the generated tokens were told

    @property
    def committed(self) -> int:
        """Tokens in the target's cache: all but the pending one."""
        return len(self.prompt) + len(self.generated) - 1

    @property
    def num_known(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def to_prefill(self) -> list[int]:
        """What the caches must hold before it decodes; more than the prompt where it had to give up its blocks."""
        return self.prompt + self.generated[:-1]

    def news(self) -> list[int]:
        """The tokens since it was last asked."""
        new, self.reported = self.generated[self.reported :], len(self.generated)
        return new

    def forget(self) -> None:
        """Its blocks are gone: all of it is to be read anew."""
        self.num_computed, self.last_hidden, self.reader = 0, None, None

    def start(self, token: int, now: float) -> None:
        """The prefill's token."""
        self.stats.ttft_s = now - self.arrival
        self.last_token_at = now
        self.append([token])

    def advance(self, tokens: list[int], num_accepted: int, max_depth: int, now: float) -> None:
        """One decoding call's tokens: the accepted draft and the target's own."""
        stats = self.stats
        stats.accepted_per_depth += [0] * (max_depth - len(stats.accepted_per_depth))
        stats.drafted_per_depth += [0] * (max_depth - len(stats.drafted_per_depth))
        for depth in range(max_depth):
            stats.drafted_per_depth[depth] += 1
            stats.accepted_per_depth[depth] += depth < num_accepted
        kept = self.append(tokens)
        stats.calls += 1
        stats.tokens += kept
        stats.intervals_s += [(now - self.last_token_at) / kept] * kept
        self.rounds.append(kept)
        self.last_token_at = now

    def append(self, tokens: list[int]) -> int:
        """Keep tokens up to the first that ends the request; returns how many were kept, at least one."""
        for kept, token in enumerate(tokens, start=1):
            self.generated.append(token)
            if self.matcher is not None and not self.matcher.accept(token):
                self.finish_reason = "dead_end"
            elif token in self.stop_token_ids:
                self.finish_reason = "stop"
            elif len(self.generated) == self.params.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                return kept
        return len(tokens)

    def fail(self) -> None:
        """The target's hidden states are no numbers: nothing that would follow means anything."""
        self.finish_reason = self.finish_reason or "overflow"

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens only: a stop string was found there."""
        dropped = len(self.generated) - length
        del self.generated[length:]
        self.finish_reason = "stop"
        if self.rounds:
            seconds = sum(self.stats.intervals_s[len(self.stats.intervals_s) - self.rounds[-1] :])
            del self.stats.intervals_s[len(self.stats.intervals_s) - self.rounds[-1] :]
            self.rounds[-1] -= dropped
            self.stats.tokens -= dropped
            self.stats.intervals_s += [seconds / self.rounds[-1]] * self.rounds[-1]
