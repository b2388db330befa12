"""The baseline: `transformers.generate` over the target's own weights, alone, with prompt lookup, or assisted.

It answers a batch of requests as the engine does, one output per request. Knows nothing of where prompts come from.
"""

import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from eagle_train.errors import UserError
from eagle_train.inference import Output, SamplingParams, Stats
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.inference.requests.sampling_keys import changed
from eagle_train.models.target import Target
from eagle_train.ops.threads import num_threads
from eagle_train.transformers_private import supports_sdpa
from evals.bench.requests import TimedRequest

TRIALS = 3  # of each number of threads


def stock_model(target: Target) -> PreTrainedModel:
    """The target with the layers of transformers itself; the weights are shared."""
    weights = {id(weight): weight for weight in target.model.parameters()}
    model, undo = copy.deepcopy((target.model, target.undo), weights)
    undo()
    model.set_attn_implementation("sdpa" if supports_sdpa(model) else "eager")
    model.generation_config = GenerationConfig()  # the checkpoint's own would fill in what is not given
    return model


class Transformers:
    """`transformers.generate`; with `prompt_lookup`, prompt lookup decoding with so many tokens; with `assistant`,
    assisted generation by that model of the same vocabulary. Both are for single prompts.

    `threads`: how many of a CPU's it uses; all of torch's, until `tune` has measured. `together`: the group of the
    ranks that hold the model together, see `Target.together`. All have the same threads, on which rounding depends:
    each rank takes the most likely tokens for itself.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop_ids: frozenset[int],
        prompt_lookup: int | None = None,
        assistant: PreTrainedModel | None = None,
        together: Any = None,
    ):
        self.model, self.stop_ids, self.prompt_lookup, self.assistant = model, stop_ids, prompt_lookup, assistant
        self.ranks = Ranks(together)
        self.threads = self.ranks.least_of_hosts([torch.get_num_threads()])[0]

    def tune(self, batch: Sequence[TimedRequest]) -> None:
        """Use as many threads as answer this batch fastest. Small products are slower with many threads, and the engine
        uses one for them. Tried are 1, 2, 4, ... and all, in turn, after a warm-up."""
        if self.model.device.type != "cpu":
            return
        counts = sorted({min(2**power, self.threads) for power in range(self.threads.bit_length() + 1)})
        seconds: dict[int, list[float]] = {number: [] for number in counts}
        for _ in range(1 + TRIALS):
            for self.threads in counts:
                started = time.perf_counter()
                self(batch)
                seconds[self.threads].append(time.perf_counter() - started)
        fastest = min(counts, key=lambda number: statistics.median(seconds[number][1:]))
        self.threads = int(self.ranks.agreed(torch.tensor(fastest)))

    def __call__(self, batch: Sequence[TimedRequest]) -> list[Output]:
        with num_threads(self.threads):
            return self.answers(batch)

    def answers(self, batch: Sequence[TimedRequest]) -> list[Output]:
        """One `generate` call. Prompts are padded on the left."""
        clock = TokenClock()
        prompts, params = [each.prompt for each in batch], batch[0].params
        width = max(map(len, prompts))
        stops = frozenset() if params.ignore_eos else self.stop_ids
        torch.manual_seed(params.seed)
        tokens, mask = (
            torch.tensor([[0] * (width - len(row)) + row for row in rows], device=self.model.device)
            for rows in (prompts, [[1] * len(prompt) for prompt in prompts])
        )
        settings = self.settings(params, stops)
        more = {} if self.assistant is None else {"assistant_model": self.assistant}
        out = self.model.generate(tokens, attention_mask=mask, generation_config=settings, streamer=clock, **more)
        return [clock.output(row, stops) for row in out[:, width:].tolist()]

    def settings(self, params: SamplingParams, stops: frozenset[int]) -> GenerationConfig:
        """The sampling parameters as transformers has them."""
        how: dict[str, Any] = {"do_sample": False}
        if params.temperature > 0:
            how = {"do_sample": True, "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
            how |= {"min_p": params.min_p} if params.min_p else {}
        return GenerationConfig(
            max_new_tokens=params.max_tokens,
            eos_token_id=sorted(stops) or None,
            pad_token_id=0,
            prompt_lookup_num_tokens=self.prompt_lookup,
            **how,
        )


def check_has(params: SamplingParams, remedy: str = "leave it out") -> None:
    """Raise UserError for keys of sampling that transformers' `generate` has not, or applies to padding too."""
    for name, value in changed(vars(params), "temperature", "top_p", "top_k", "min_p").items():
        raise UserError(f"{name}={value}: transformers.generate, which is compared, does not do the same; {remedy}")


class TokenClock(BaseStreamer):
    """Records when tokens come: `generate` gives it the prompts first, then every step's tokens."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.steps: list[tuple[float, int]] = []  # seconds after the start, tokens of each row
        self.has_prompts = False

    def put(self, value: torch.Tensor) -> None:
        if self.has_prompts:
            self.steps.append((time.perf_counter() - self.started, 1 if value.ndim == 1 else value.shape[1]))
        self.has_prompts = True

    def end(self) -> None:
        """Nothing to close."""

    def output(self, tokens: list[int], stops: frozenset[int]) -> Output:
        """A row's answer, which ends with its first stop token. A step's tokens share its time, as in the engine."""
        length = next((place for place, token in enumerate(tokens, 1) if token in stops), len(tokens))
        rounds = list(self.kept(length))
        times = [at for at, _ in self.steps]
        stats = Stats(calls=len(rounds) - 1, tokens=sum(rounds[1:]), ttft_s=times[0])
        stats.intervals_s += [0.0] * (rounds[0] - 1)
        for before, now, count in zip(times, times[1:], rounds[1:], strict=False):
            stats.intervals_s += [(now - before) / count] * count
        reason = "stop" if length and tokens[length - 1] in stops else "length"
        return Output(tokens[:length], None, reason, stats, rounds[1:])

    def kept(self, length: int) -> Iterator[int]:
        """How many of each step's tokens are among the first `length`."""
        for _, count in self.steps:
            if length <= 0:
                return
            yield min(count, length)
            length -= count
