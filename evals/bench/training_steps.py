"""A training step as users run it and a naive one, with random targets and made-up documents; and a step's products.

Knows nothing of how the two are compared.
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from eagle_train.corpus.render import ChatRenderer
from eagle_train.corpus.rows import parse
from eagle_train.corpus.source import DataConfig, open_source
from eagle_train.corpus.stream import Stream
from eagle_train.distributed import ALONE
from eagle_train.drafts import EagleConfig, EagleDraft, shift_hidden
from eagle_train.errors import check
from eagle_train.models.loading import DTYPES, training_dtype
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.torch_private import DispatchMode, fp8_operator
from eagle_train.training.assembly import look_ahead, round_target
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.checkpoint.store import CheckpointStore
from eagle_train.training.cost.measured import StepPlan, step_plan
from eagle_train.training.optimizer import OptimConfig, Optimizer
from eagle_train.training.parallelize import prepare
from eagle_train.training.target_pass import can_compile, target_states
from eagle_train.training.train_config import TrainConfig, accumulation
from eagle_train.training.trainer import Trainer
from evals.bench.config import check_least
from evals.bench.memory import peak_bytes
from evals.bench.random_models import AS_TARGET, random_target
from evals.bench.stage_clock import timed

DOCUMENTS = 2000
SHORTEST, LONGEST = 24, 512  # tokens of a document; the logarithm of its length is uniform
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm, fp8_operator())


@dataclass
class StepConfig:
    """conf/commands/train_throughput.yaml, which says what each key is. Raises UserError for values that cannot be."""

    out: str
    device: str
    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    draft_layers: int
    row_tokens: int
    micro_batch_rows: int
    tokens_per_step: int
    rounds: int
    steps: int
    seed: int
    tflops: float | None
    compile: bool | None
    naive: bool
    target_quant: str

    def __post_init__(self) -> None:
        check_least(self, 1, "vocab", "hidden", "layers", "draft_layers", "rounds", "steps")
        least = f"must be at least {LONGEST}, as long as the longest document"
        self.train_config()  # raises for a target_quant that is none
        check(self.row_tokens >= LONGEST, f"row_tokens={self.row_tokens}: {least}")

    def train_config(self) -> TrainConfig:
        """The run that the steps are of. Raises UserError."""
        return TrainConfig(steps=10**6, micro_batch_rows=self.micro_batch_rows, target_quant=self.target_quant)


def write_documents(path: Path, config: StepConfig) -> None:
    """Documents of mixed length, in which each word is one token."""
    rng = random.Random(config.seed)
    with path.open("w") as file:
        for _ in range(DOCUMENTS):
            length = round(SHORTEST * (LONGEST / SHORTEST) ** rng.random())
            words = " ".join(f"w{rng.randrange(config.vocab - 1)}" for _ in range(length))
            file.write(json.dumps({"text": words}) + "\n")


def word_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A token per word."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0} | {f"w{i}": i + 1 for i in range(vocab - 1)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def llama(config: StepConfig) -> LlamaConfig:
    """The target's config."""
    return LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        num_hidden_layers=config.layers,
        tie_word_embeddings=False,
    )


def llama_target(config: StepConfig, device: str) -> Target:
    """A random Llama of this shape, in the dtype that training loads one in."""
    dtype = DTYPES[training_dtype(AS_TARGET, device).dtype]
    assert dtype is not None  # `training_dtype` leaves no auto
    return random_target(llama(config), dtype, device, word_tokenizer(config.vocab))


class Ours:
    """The trainer as users run it."""

    def __init__(self, config: StepConfig, folder: str, device: str):
        self.target = llama_target(config, device)
        if config.target_quant == "fp8":
            round_target(self.target)
        data = DataConfig(f"{folder}/documents.jsonl", format="text", row_tokens=config.row_tokens, seed=config.seed)
        self.stream = Stream(
            data,
            ChatRenderer(self.target.tokenizer, num_embeddings=len(self.target.embedding)),
            config.micro_batch_rows,
        )
        draft = EagleDraft(EagleConfig.from_target(self.target.config, num_layers=config.draft_layers)).init_weights(0)
        self.draft = draft.to(device)
        optim = OptimConfig(tokens_per_step=config.tokens_per_step)
        compiled = can_compile(self.target, config.micro_batch_rows, config.row_tokens, config.compile)
        self.parallel = ParallelConfig(compile=compiled)
        backend = prepare(self.draft, optim, self.parallel, ALONE, self.target.dtype)
        train = config.train_config()
        steps = accumulation(optim, train, config.row_tokens)
        ahead = look_ahead(self.stream, self.target, self.draft.config, train, steps, compiled=compiled)
        store = CheckpointStore(folder)
        self.trainer = Trainer(train, optim, self.target, self.draft, backend, ahead, [], store)
        ahead.start(steps=None)
        self.parts = PartTimes(device)
        self.watch()

    def watch(self) -> None:
        """Add up the time of a step's parts. On a CPU the target's part runs in parallel with the draft's."""
        part = self.parts.timed

        trainer, backend = self.trainer, self.trainer.backend
        watched: list[tuple[str, Any, str]] = [
            ("target", trainer.lookahead, "target_states"),
            ("draft and loss", trainer, "forward_backward_step"),
            ("  draft, forward", backend, "draft"),
            ("  draft, backward", backend, "backward"),
            ("clip", backend, "clip"),
            ("optimiser", backend, "step"),
        ]
        for name, owner, method in watched:
            setattr(owner, method, part(name, getattr(owner, method)))

    def run(self, steps: int) -> int:
        """Train so many steps; returns the number of tokens without padding."""
        before, waited = self.stream_tokens(), self.trainer.lookahead.waited
        for _ in range(steps):
            self.trainer.train_step()
        waited = self.trainer.lookahead.waited - waited
        self.parts.add("waiting for data", waited)
        return self.stream_tokens() - before

    def stream_tokens(self) -> int:
        """Tokens of the rows that were trained on, with the share of padding that all drawn rows have."""
        counts = self.stream.counts
        filled = counts["tokens"] / max(1, counts["tokens"] + counts["padding"])
        return round(self.trainer.state.tokens * filled)

    def plan(self) -> StepPlan:
        """What `plan=true` would say of the step on this machine."""
        return step_plan(self.trainer, AS_TARGET, self.parallel)

    def floor(self) -> list[float]:
        """Seconds of a step's products alone, in two ways: the target's in parallel with the draft's, or before."""
        ahead = self.trainer.lookahead
        batches = [ahead.to_device(next(self.stream)) for _ in range(ahead.accumulation)]
        with Products() as of_target:
            all_states = [target_states(self.target, batch) for batch in batches]
        here = patch.object(ahead, "run_parallel", lambda work: work())  # in this thread, which is recorded
        with here, Products() as of_draft:
            for batch, states in zip(batches, all_states, strict=True):
                self.trainer.forward_backward_step(batch, states, 1.0)
        self.trainer.backend.skip()

        def both() -> None:
            of_target.replay()
            of_draft.replay()

        def in_parallel() -> None:
            other = pool.submit(of_target.replay)
            of_draft.replay()
            other.result()

        threads = torch.get_num_threads()
        with ThreadPoolExecutor(1) as pool:
            parallel = warm_seconds(in_parallel)
        torch.set_num_threads(threads * 2)
        before = warm_seconds(both)
        torch.set_num_threads(threads)
        return [parallel, before]


def warm_seconds(function: Callable[[], None]) -> float:
    """Seconds of the second of two runs: the first warms up operands and threads."""
    function()
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


class Products(DispatchMode):
    """Records every matrix product, with its operands' shapes, strides and dtypes, so that it can be replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, list[Any], dict[str, Any]]] = []
        self.known: dict[Any, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS:
            named = {name: self.like(x) for name, x in (kwargs or {}).items()}
            self.calls.append((func.overloadpacket, [self.like(x) for x in args], named))
        return result

    def like(self, value: Any) -> Any:
        """An operand of the same layout; products with the same layout share it."""
        if not isinstance(value, torch.Tensor):
            return value
        key = (value.shape, value.stride(), value.dtype)
        if key not in self.known:
            size = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
            memory = torch.randn(size, device=value.device).to(value.dtype)
            self.known[key] = memory.as_strided(value.shape, value.stride())
        return self.known[key]

    @torch.no_grad()
    def replay(self) -> None:
        """Compute all products again."""
        for function, operands, named in self.calls:
            function(*operands, **named)
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class PartTimes:
    """Seconds by part of a step. A GPU's are those between two marks in its queue, read when it has caught up."""

    def __init__(self, device: str):
        self.seconds: dict[str, float] = {}
        self.marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.is_gpu = device != "cpu"

    def timed(self, name: str, function: Callable) -> Callable:
        """`function`, whose calls are added to this part."""
        if not self.is_gpu:
            return timed(function, lambda seconds: self.add(name, seconds))

        def marked(*arguments: Any, **options: Any) -> Any:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            result = function(*arguments, **options)
            last.record()
            self.marks.append((name, first, last))
            return result

        return marked

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def add_gpu_times(self) -> None:
        """Add the times between recorded CUDA events. The device must be synchronised."""
        for name, first, last in self.marks:
            self.add(name, first.elapsed_time(last) / 1e3)
        self.marks.clear()

    def clear(self) -> None:
        self.seconds.clear()
        self.marks.clear()


class Naive:
    """A simple step: documents padded to the longest, all logits at once."""

    def __init__(self, config: StepConfig, folder: str, device: str):
        self.config, self.device = config, device
        self.target = llama_target(config, device)
        data = DataConfig(f"{folder}/documents.jsonl", format="text")
        self.rows = [parse(*placed) for placed in open_source(data).rows()]
        self.draft = EagleDraft(EagleConfig.from_target(self.target.config, num_layers=config.draft_layers))
        self.draft.init_weights(0).to(device)
        self.optimizer = Optimizer(self.draft, OptimConfig())
        self.batches = self.padded()
        self.parts = PartTimes(device)

    def padded(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(tokens, mask) of as many documents as fill a step, padded to the longest of them."""
        tokenizer, rng = self.target.tokenizer, random.Random(self.config.seed)
        while True:
            rng.shuffle(self.rows)
            batch: list[torch.Tensor] = []
            for row in self.rows:
                document = torch.tensor(tokenizer(row["text"])["input_ids"])
                if (len(batch) + 1) * max(len(document), *map(len, batch), 0) > self.config.tokens_per_step:
                    yield self.collated(batch)
                    batch = []
                batch.append(document)

    def collated(self, documents: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        pad = torch.nn.utils.rnn.pad_sequence
        tokens = pad(documents, batch_first=True)
        mask = pad([torch.ones(len(document), dtype=torch.bool) for document in documents], batch_first=True)
        return tokens.to(self.device), mask.to(self.device)

    def run(self, steps: int) -> int:
        """Train so many steps; returns the number of tokens without padding."""
        return sum(self.step(*next(self.batches)) for _ in range(steps))

    def step(self, tokens: torch.Tensor, mask: torch.Tensor) -> int:
        """One step on tokens [B, T]; returns the number of tokens without padding."""
        rows, length = tokens.shape
        positions = torch.arange(length, device=self.device).expand(rows, -1)
        attend = packed_attention([[length]] * rows)
        low = self.target.dtype != torch.float32
        hidden = self.target.hidden_states(tokens, positions, attend)
        with torch.autocast(self.device, dtype=self.target.dtype if low else None, enabled=low):
            previous = shift_hidden(hidden, positions)
            predicted = self.draft(self.target.embed(tokens), previous, positions, attend)
            logits, wanted = self.target.lm_head(predicted).float(), self.target.lm_head(hidden).float()
        ce = -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        l1 = F.smooth_l1_loss(predicted.float(), hidden.float(), reduction="none").mean(-1)
        loss = ((l1 + 0.1 * ce) * mask).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        self.optimizer.step(2e-4)
        self.optimizer.zero_grad()
        return int(mask.sum())


def work(kind: str, config: StepConfig, folder: str, device: str, line: Connection) -> None:
    """A worker process: builds its step; on each order runs `steps` of it, or its floor, and sends what they took; or
    plans it, and sends the plan."""
    torch.manual_seed(config.seed)
    torch.empty(1, device=device)  # memory of the device's own libraries is not the step's
    before = peak_memory(device)
    step = Ours(config, folder, device) if kind == "ours" else Naive(config, folder, device)
    step.run(2)  # caches, compiled kernels, the optimiser's state
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    while (order := line.recv()) is not None:
        if order != "steps":
            assert isinstance(step, Ours)
            line.send(step.floor() if order == "floor" else step.plan())
            continue
        step.parts.clear()
        seconds, tokens = [], 0
        for _ in range(config.steps):
            started = time.perf_counter()
            tokens += step.run(1)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        step.parts.add_gpu_times()
        took = {"seconds": seconds, "tokens": tokens, "parts": dict(step.parts.seconds)}
        line.send({**took, "memory": peak_memory(device) - before})


def peak_memory(device: str) -> int:
    """Bytes: the largest allocation on the GPU so far, or the largest resident memory of this process."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else peak_bytes()
