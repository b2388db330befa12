"""A request: its state while it runs, its output. Knows nothing of tensors or models.

DESIGN sections 3.8, 3.9.
"""

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from eagle_train.errors import UserError, check, shown
from eagle_train.inference.decode.acceptance import Acceptance
from eagle_train.inference.decode.adjustments import Adjustment
from eagle_train.inference.decode.logprobs import TokenLogprobs
from eagle_train.inference.grammar.guided import Matcher
from eagle_train.inference.requests.detokenizer import Detokenizer
from eagle_train.inference.requests.sampling_params import SamplingParams, is_whole

OVERFLOW = "computes NaN or infinity from some token on; float16 has a narrow range: try target.dtype=float32"


def check_prompt(prompt: Any, name: str) -> None:
    """Raise UserError unless `prompt` is a text, a list of token ids, or a list of chat messages. `name`: for the
    error."""
    wanted = "must be a text, a list of token ids, or a list of chat messages"
    check(isinstance(prompt, str | list | tuple), f"{name} is {shown(prompt)}: {wanted}")
    if not isinstance(prompt, str):
        is_chat = len(prompt) > 0 and isinstance(prompt[0], dict)
        for each in prompt:
            if not (isinstance(each, dict) if is_chat else is_whole(each, 0)):  # a long prompt has no message made
                raise UserError(f"{name} holds {shown(each)}: {wanted}")
            role = each.get("role", "") if is_chat else ""
            if not isinstance(role, str):
                raise UserError(f"{name} holds a message with role={shown(role)}: must be a text")


@dataclass
class Stats:
    """Counts and times of a request. `calls` and `tokens` are of decoding: without the prefill's call and token."""

    calls: int = 0  # of the target
    tokens: int = 0  # committed
    ttft_s: float = 0.0  # seconds from arrival to the first token
    cached_tokens: int = 0  # of the prompt, found by prefix caching and not prefilled
    accepted_per_depth: list[int] = field(default_factory=list)  # rounds that accepted a node at depth 1, 2, ...
    drafted_per_depth: list[int] = field(default_factory=list)  # rounds that drafted a node at depth 1, 2, ...
    accepted: list[int] = field(default_factory=list)  # drafts of each round, those behind the answer's end too
    drafted: list[int] = field(default_factory=list)  # of each round: how deep its tree was
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

    def copy(self) -> "Stats":
        """As they are now, with lists of its own."""
        values: dict[str, Any] = {name: list(x) if isinstance(x, list) else x for name, x in vars(self).items()}
        return Stats(**values)


@dataclass(frozen=True)
class Output:
    """A request's answer, or its beginning while the request is unfinished. Later steps do not change it.

    `finish_reason`: None while it is unfinished; `stop`: a stop token or stop string; `length`: `max_tokens` or the end
    of the target's context; `cancelled`; `dead_end`: its grammar needs text for which the target has no tokens, and the
    answer is a prefix of a valid one; `overflow`: the target computed NaN or infinity, as float16 may, for the answer
    or for the drafted tokens, and the answer ends before it.

    `text` is that of the tokens, without special ones and up to the first stop string, or with it where `include_stop`
    says so; the tokens go on to its end. `logprobs`: one for each token; None where the request did not ask.
    `is_lossy`: its acceptance was relaxed, so that it may be another than the target's own.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str | None
    stats: Stats
    rounds: list[int]  # tokens that each target call of the decoding committed
    logprobs: list[TokenLogprobs] | None = None
    is_lossy: bool = False


@dataclass(frozen=True)
class Update:
    """What a step brought a request: new tokens, new text, and the output once the request is finished.

    The updates' tokens concatenated are the output's, and so are the texts and the `logprobs` (None where the request
    did not ask). `text` is held back for incomplete characters and for what may be the beginning of a stop string; the
    stop string itself is part of it with `include_stop` alone. `token_ids` are not held back: they end with the stop
    string's tokens. `text` is None without a tokenizer. A cancelled request gets no further updates.
    """

    request: "Sequence"
    token_ids: list[int]
    text: str | None
    output: Output | None
    logprobs: list[TokenLogprobs] | None = None


@dataclass
class Thinking:
    """Whether a text is between the tokens that begin and end the target's thinking."""

    begin: int
    end: int
    is_open: bool = False

    def read(self, *tokens: int) -> None:
        """The text goes on."""
        for token in tokens:
            if token in (self.begin, self.end):
                self.is_open = token == self.begin


@dataclass(eq=False)
class Sequence:
    """A request in the engine. `Engine.add` returns it, for reading only, and `Engine.cancel` takes it."""

    index: int
    prompt: list[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]
    matcher: Matcher | None = None  # the state of its grammar after `generated`
    text: Detokenizer | None = None  # None without a tokenizer
    adjustment: Adjustment | None = None  # of the target's logits
    name: str = "the prompt"  # for errors
    arrival: float = field(default_factory=time.perf_counter)
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the generated tokens, where it asks for them
    rounds: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish_reason: str | None = None
    last_token_at: float = 0.0
    blocks: list[int] = field(default_factory=list)  # its blocks in the cache, in the order of its tokens
    most_blocks: int = 0  # that it may come to need
    had_blocks: bool = False  # it was admitted, and may have been preempted since
    num_computed: int = 0  # tokens that are in the caches of both models
    remote_task: Any = None  # of the process that prefills it; None: this one does
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks (cache/prefix_cache.py)
    drafter_hashes: dict[str, list[bytes]] = field(default_factory=dict)  # the same with these drafters, where known
    last_hidden: Any = None  # [S]: the target's states at the last computed token, until it decodes
    num_reported: int = 0  # generated tokens that updates had
    thinking: Thinking | None = None  # of a request whose acceptance is relaxed while it thinks alone
    key: int = field(default_factory=itertools.count().__next__)  # by which drafters know it
    drafter: str | None = None  # the name of its drafter; None: its tokens are the target's alone
    acceptance: Acceptance | None = None  # of its drafts so far, where trees are chosen by it
    is_read: bool = False  # its drafter reads its tokens on the host
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

    @property
    def relaxation(self) -> tuple[int, float, int] | None:
        """Top-k, delta and ending token of relaxed acceptance in the next round; None: it is verified exactly, as where
        nothing is drafted for it."""
        params = self.params
        thinks = self.thinking is None or self.thinking.is_open
        if params.relaxed_topk == 0 or self.drafter is None or not thinks:
            return None
        return params.relaxed_topk, params.relaxed_delta, -1 if self.thinking is None else self.thinking.end

    @property
    def is_awaited(self) -> bool:
        """Whether the host must have its tokens so far before its next round: it works out from them what may come
        next, or how likely it is, or its drafter reads them."""
        counts = self.adjustment is not None and self.adjustment.counts_tokens(len(self.generated))
        return counts or self.matcher is not None or self.is_read or self.thinking is not None

    def logprobs_from(self, first: int) -> list[TokenLogprobs] | None:
        """Of the generated tokens from number `first` on; None where it does not ask."""
        return None if self.params.logprobs is None else self.logprobs[first:]

    def new_tokens(self) -> list[int]:
        """The tokens that were generated since the last call."""
        new, self.num_reported = self.generated[self.num_reported :], len(self.generated)
        return new

    def drop_cache(self) -> None:
        """Its blocks were taken: all its tokens are to be computed again, with the drafter that it has by then."""
        self.num_computed, self.last_hidden, self.remote_task = 0, None, None
        self.block_hashes.clear()
        self.drafter_hashes.clear()

    def start(self, token: int, logprobs: TokenLogprobs | None = None, *, now: float) -> None:
        """Append the first token, which was sampled after prefill. `now`: of time.perf_counter."""
        self.stats.ttft_s = now - self.arrival
        self.last_token_at = now
        self.append([token], logprobs and [logprobs])

    def advance(
        self,
        tokens: list[int],
        num_accepted: int,
        max_depth: int,
        now: float,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        """Append a round's tokens, the accepted ones and the target's own, and count them. `max_depth`: the tree's."""
        stats = self.stats
        stats.accepted_per_depth += [0] * (max_depth - len(stats.accepted_per_depth))
        stats.drafted_per_depth += [0] * (max_depth - len(stats.drafted_per_depth))
        for depth in range(max_depth):
            stats.drafted_per_depth[depth] += 1
            stats.accepted_per_depth[depth] += depth < num_accepted
        stats.accepted.append(num_accepted)
        stats.drafted.append(max_depth)
        kept = self.append(tokens, logprobs)
        stats.calls += 1
        stats.tokens += kept
        stats.intervals_s += [(now - self.last_token_at) / kept] * kept
        self.rounds.append(kept)
        self.last_token_at = now

    def append(self, tokens: list[int], logprobs: list[TokenLogprobs] | None = None) -> int:
        """Append tokens up to the first that ends the request. Returns how many were appended, at least one."""
        for kept, token in enumerate(tokens, start=1):
            self.generated.append(token)
            if self.thinking is not None:
                self.thinking.read(token)
            if logprobs is not None:
                self.logprobs.append(logprobs[kept - 1])
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
        del self.generated[length:], self.logprobs[length:]
        self.finish_reason = "stop"
        if self.rounds:
            seconds = sum(self.stats.intervals_s[len(self.stats.intervals_s) - self.rounds[-1] :])
            del self.stats.intervals_s[len(self.stats.intervals_s) - self.rounds[-1] :]
            self.rounds[-1] -= dropped
            self.stats.tokens -= dropped
            self.stats.intervals_s += [seconds / self.rounds[-1]] * self.rounds[-1]
