"""A request: its sampling parameters, its state while it runs, its output. Knows nothing of tensors or models.

DESIGN sections 3.8, 3.9.
"""

import itertools
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_train.errors import SURROGATE, UserError, check, shown
from eagle_train.inference.decode.acceptance import Acceptance
from eagle_train.inference.grammar.guided import Matcher, check_grammar
from eagle_train.inference.requests.detokenizer import Detokenizer

_LARGEST = (1 << 63) - 1  # of the numbers that a tensor holds
_LEAST = -_LARGEST - 1
OVERFLOW = "computes NaN or infinity from some token on; float16 has a narrow range: try target.dtype=float32"


def is_whole(value: Any, least: int) -> bool:
    """Whether it is an int from `least` to _LARGEST; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST


def is_number(value: Any, least: float, most: float) -> bool:
    """Whether it is an int or float from `least` to `most`; a bool or NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_listing(value: Any, kind: type) -> bool:
    """Whether it is None, or a list or tuple of `kind`."""
    return value is None or (isinstance(value, list | tuple) and all(type(each) is kind for each in value))


def check_prompt(prompt: Any, name: str) -> None:
    """Raise UserError unless `prompt` is a text, a list of token ids, or a list of chat messages. `name`: for the
    error."""
    wanted = "must be a text, a list of token ids, or a list of chat messages"
    check(isinstance(prompt, str | list | tuple), f"{name} is {shown(prompt)}: {wanted}")
    if not isinstance(prompt, str):
        is_chat = len(prompt) > 0 and isinstance(prompt[0], dict)
        for each in prompt:
            check(isinstance(each, dict) if is_chat else is_whole(each, 0), f"{name} holds {shown(each)}: {wanted}")
            role = each.get("role", "") if is_chat else ""
            check(isinstance(role, str), f"{name} holds a message with role={shown(role)}: must be a text")


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. temperature 0 is greedy; top_k 0 and top_p 1 are off; `stop`: strings that end the
    answer. Raises UserError.

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
    seed: int = 0
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None  # None: the target's own
    ignore_eos: bool = False  # the target's own stop tokens end nothing; those given do
    grammar: Mapping[str, Any] | None = None
    drafter: str | None = None  # its name in the engine; None: the engine's first; none: no drafts

    def __post_init__(self) -> None:
        texts = [self.stop] if isinstance(self.stop, str) else self.stop
        rules = {
            "temperature": (is_number(self.temperature, 0, sys.float_info.max), "must be 0 or more, and finite"),
            "top_p": (is_number(self.top_p, 0, 1) and self.top_p > 0, "must be above 0 and at most 1"),
            "top_k": (is_whole(self.top_k, 0), "must be 0 (off) or more, a whole number"),
            "max_tokens": (is_whole(self.max_tokens, 1), "must be at least 1, a whole number"),
            "seed": (is_whole(self.seed, _LEAST), f"must be a whole number of 64 bits, at most {_LARGEST}"),
            "stop": (_is_listing(texts, str), "must be None, a text, or a list of texts"),
            "stop_token_ids": (_is_listing(self.stop_token_ids, int), "must be None or a list of token ids"),
            "ignore_eos": (isinstance(self.ignore_eos, bool), "must be true or false"),
            "drafter": (self.drafter is None or isinstance(self.drafter, str), "must be None, or a drafter's name"),
        }
        for name, (right, wanted) in rules.items():
            if not right:  # formatting every value would take longer than checking it, and servers make many of these
                raise UserError(f"{name}={shown(getattr(self, name))}: {wanted}")
        if texts:
            check("" not in texts, f"stop={shown(self.stop)}: an empty text would end every answer; leave it out")
            halves = any(map(SURROGATE.search, texts))
            check(not halves, f"stop={shown(self.stop)}: half of a surrogate pair is in no text")
        if self.grammar is not None:
            check_grammar(self.grammar)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def with_seed_after(self, offset: int) -> "SamplingParams":
        """The same with the seed plus `offset`, which wraps around at 64 bits."""
        return replace(self, seed=(self.seed + offset - _LEAST) % (1 << 64) + _LEAST)


@dataclass
class Stats:
    """Counts and times of a request. `calls` and `tokens` are of decoding: without the prefill's call and token."""

    calls: int = 0  # of the target
    tokens: int = 0  # committed
    ttft_s: float = 0.0  # seconds from arrival to the first token
    cached_tokens: int = 0  # of the prompt, found by prefix caching and not prefilled
    accepted_per_depth: list[int] = field(default_factory=list)  # rounds that accepted a node at depth 1, 2, ...
    drafted_per_depth: list[int] = field(default_factory=list)  # rounds that drafted a node at depth 1, 2, ...
    intervals_s: list[float] = field(default_factory=list)  # seconds between successive tokens

    @property
    def tpc(self) -> float | None:
        """Tokens per call: tokens committed in decoding per target call in decoding, the target's own token included;
        None without a call. DESIGN section 3.8."""
        return self.tokens / self.calls if self.calls else None

    @property
    def ttit_s(self) -> float | None:
        """Mean seconds between tokens; None with fewer than two."""
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
    """What a step brought a request: new tokens, new text, and the output once the request is finished.

    The updates' tokens concatenated are the output's, and so are the texts. `text` is held back for incomplete
    characters and for what may be the beginning of a stop string; a stop string itself is never part of it. `token_ids`
    are not held back: they end with the stop string's tokens. `text` is None without a tokenizer. A cancelled request
    gets no further updates.
    """

    request: "Sequence"
    token_ids: list[int]
    text: str | None
    output: Output | None


@dataclass(eq=False)
class Sequence:
    """A request in the engine. `Engine.add` returns it, for reading only, and `Engine.cancel` takes it."""

    index: int
    prompt: list[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]
    matcher: Matcher | None = None  # the state of its grammar after `generated`
    text: Detokenizer | None = None  # None without a tokenizer
    arrival: float = field(default_factory=time.perf_counter)
    generated: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish_reason: str | None = None
    last_token_at: float = 0.0
    blocks: list[int] = field(default_factory=list)  # its blocks in the cache, in the order of its tokens
    had_blocks: bool = False  # it was admitted, and may have been preempted since
    num_computed: int = 0  # tokens that are in the caches of both models
    remote_task: Any = None  # of the process that prefills it; None: this one does
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks (cache/prefix_cache.py)
    last_hidden: Any = None  # [S]: the target's states at the last computed token, until it decodes
    num_reported: int = 0  # generated tokens that updates had
    key: int = field(default_factory=itertools.count().__next__)  # by which drafters know it
    drafter: str | None = None  # the name of its drafter; None: its tokens are the target's alone
    acceptance: Acceptance | None = None  # of its drafts so far, where trees are chosen by it
    cached_by: str = ""  # the drafter whose keys and values lie in its blocks beside the target's

    @property
    def committed(self) -> int:
        """Tokens in the target's cache: all but the pending one."""
        return len(self.prompt) + len(self.generated) - 1

    @property
    def num_known(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.prompt) + len(self.generated)

    @property
    def to_prefill(self) -> list[int]:
        """The tokens that must be in the caches before it decodes: the prompt, and after a preemption the answer so far
        without the pending token."""
        return self.prompt + self.generated[:-1]

    def new_tokens(self) -> list[int]:
        """The tokens that were generated since the last call."""
        new, self.num_reported = self.generated[self.num_reported :], len(self.generated)
        return new

    def drop_cache(self) -> None:
        """Its blocks were taken: all its tokens are to be computed again."""
        self.num_computed, self.last_hidden, self.remote_task = 0, None, None

    def start(self, token: int, now: float) -> None:
        """Append the first token, which was sampled after prefill. `now`: of time.perf_counter."""
        self.stats.ttft_s = now - self.arrival
        self.last_token_at = now
        self.append([token])

    def advance(self, tokens: list[int], num_accepted: int, max_depth: int, now: float) -> None:
        """Append a round's tokens, the accepted ones and the target's own, and count them. `max_depth`: the tree's."""
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
        """Append tokens up to the first that ends the request. Returns how many were appended, at least one."""
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
        """End the request: the target's hidden states overflowed, and later tokens would be meaningless."""
        self.finish_reason = self.finish_reason or "overflow"

    def cut(self, length: int) -> None:
        """End the request after its first `length` tokens, with which a stop string is complete."""
        dropped = len(self.generated) - length
        del self.generated[length:]
        self.finish_reason = "stop"
        if self.rounds:
            seconds = sum(self.stats.intervals_s[len(self.stats.intervals_s) - self.rounds[-1] :])
            del self.stats.intervals_s[len(self.stats.intervals_s) - self.rounds[-1] :]
            self.rounds[-1] -= dropped
            self.stats.tokens -= dropped
            self.stats.intervals_s += [seconds / self.rounds[-1]] * self.rounds[-1]
