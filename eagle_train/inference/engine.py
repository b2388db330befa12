"""The engine: prefill, dispatch, draft, validate, sample, commit, again and again, for a batch of sequences.

`Engine.step` is the decoding cycle; each stage is a function of the module with its name. Paper section 3, DESIGN 3.9.
Sequences advance independently: each accepts as much as it can, leaves when it is done, and the next one takes its row.
Speculation off is the same code with a tree that is its root alone.

Ranks that hold one target together (tensor parallel) each run the whole cycle, and must be given the same requests in
the same order: all that is decided then follows from tokens, which are the same on every rank (tensor_parallel.py).
"""

import copy
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listing
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from eagle_train.artifacts.format import load_draft
from eagle_train.errors import check, shown
from eagle_train.inference.cache.block_memory import BlockMemory
from eagle_train.inference.cache.block_pool import BlockPool, blocks_for
from eagle_train.inference.cache.paged_kv import BLOCK, BlockEnds, PagedKV, Prefix, Suffix
from eagle_train.inference.cache.prefix_cache import PrefixCache
from eagle_train.inference.decode.bookkeeping import Round, commit
from eagle_train.inference.decode.dispatcher import Dispatcher, Plan
from eagle_train.inference.decode.graphs import EAGER, check_graphs, launcher
from eagle_train.inference.decode.prefill import prefill
from eagle_train.inference.decode.sampling import (
    SamplingTensors,
    Verified,
    probabilities,
    restrict,
    sample,
    uniform,
    verify_chosen,
    verify_drawn,
    verify_sampled,
)
from eagle_train.inference.decode.tree import Tree, chain
from eagle_train.inference.drafters.drafter import MOST_UNREAD, Choice, Drafted, Drafter, Pending, check_drafting
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.inference.grammar.guided import Guidance
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.inference.requests.requests import Prompt, Requests, params_of
from eagle_train.inference.requests.scheduler import Scheduler
from eagle_train.inference.requests.sequence import Output, SamplingParams, Sequence, Update, is_whole
from eagle_train.models.draft import Draft, DraftConfig
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.patches import optimize_for_decoding
from eagle_train.models.target import Target
from eagle_train.ops.threads import threads_for
from eagle_train.ops.torch_private import with_own_sizes
from eagle_train.ops.transfer import to_device
from eagle_train.progress import progress


class Engine:
    """Generates with a target and, if there is one, a drafter. The outputs are the target's own, whoever drafts.

    The target stays as it is from then on. On a CPU in fp32 its weights and the draft's are kept in fp16 besides, which
    is half as much memory again, where that changes no result (ops/linear.py).
    """

    def __init__(
        self,
        target: str | Path | TargetConfig | Target,
        draft: str | Path | Draft | Drafter | None = None,
        tree: Any = "chain3",
        device: str = "cpu",
        max_batch_size: int = 16,
        drafting: str = "greedy",
        kv_tokens: int | None = None,
        prefill_tokens: int | None = 8192,
        prefix_cache: bool = False,
        host_kv_tokens: int = 0,
        compile: bool = False,
        overlap: bool | None = None,
        graphs: bool = False,
    ):
        """`tree`: a name (`chainN`, `dM_bfN`, a YAML in conf/tree), a Tree, or a mapping {largest batch size:
        tree}. Without a draft it is not used.

        `device`: where a target that is given by name is loaded; a Target stays on its own.
        `drafting`: how a node's children are chosen: greedy, multinomial or multinomial_without_replacement. Greedy
        drafts leave a request the tokens that it has without drafts, at any temperature, but for roundings. With the
        others a seed's tokens are another draw of the same distribution for each tree, and so for each batch size that
        has its own; with `Eagle`'s alignment `last` also where its text was found in the cache or is read anew.
        `kv_tokens`: of how many tokens keys and values are kept at most, drafted ones included; sequences wait for
        room, or give theirs up and are recomputed. None: as many as `max_batch_size` of the requests may need, on a GPU
        as many of these as there is memory for.
        `prefill_tokens`: how many tokens of prompts are read between two rounds, so that who decodes does not wait for
        long for who comes. None: all there are.
        `prefix_cache`: prompts that begin as an earlier text did are read from there on; the store's blocks keep what
        they hold until others need them, and then go to host memory, which has room for `host_kv_tokens`.
        `compile`: the forwards of target and drafter in decoding and, on a GPU, the verification of sampled rounds
        (paper section 3.2), by torch.compile: here, for a batch of one and, if `max_batch_size` is more, for larger
        ones. Reading prompts stays as it is, and so does the forward of a target that is divided over ranks. Raises
        UserError where torch.compile fails.
        `overlap`: a round begins before what came of the one before it is known to the host, which sees to that while
        the device works (paper section 3.3); `step` tells of each round one call later, and a sequence that ends may
        have been in one round too many. Who has a grammar waits for its results. None: on a GPU.
        `graphs`: drafting and validation are CUDA graphs (paper section 3.4), recorded when a round first needs them;
        not with a grammar. Raises UserError where there is no GPU, where the target is divided over ranks or offloaded,
        and where a forward has the host wait.
        """
        check_options(
            target=target,
            device=device,
            draft=draft,
            max_batch_size=max_batch_size,
            drafting=drafting,
            kv_tokens=kv_tokens,
            prefill_tokens=prefill_tokens,
            prefix_cache=prefix_cache,
            host_kv_tokens=host_kv_tokens,
            compile=compile,
            overlap=overlap,
            graphs=graphs,
        )
        check_graphs(graphs, target.device if isinstance(target, Target) else device)
        if not isinstance(target, Target):
            target = load_target(target if isinstance(target, TargetConfig) else TargetConfig(str(target)), device)
        check_graphs(graphs, target.device, target.together is not None, target.is_offloaded)
        if isinstance(draft, str | Path):
            draft = Eagle(load_draft(draft, target.identity), target)
        elif isinstance(draft, Draft):
            draft = Eagle(copy.deepcopy(draft), target)
        optimize_for_decoding(target.model, target.dtype, [target.lm_head.weight])
        self.target, self.max_batch_size, self.drafting = target, max_batch_size, drafting
        kept = target.kv_layers
        self.cache = PagedKV(kept.kv_shapes, 0, target.dtype, target.device, kept.given)
        shape = DraftConfig.from_target(target.config)  # refuses what has no rotary positions
        self.drafter: Drafter | None = draft
        self.ranks, self.requests = Ranks(target.together, target.device), Requests(target)
        self.prefill_tokens = prefill_tokens
        self.dispatcher = Dispatcher(tree if draft is not None else chain(0), target.device)
        self.verify_sampled, self.verify_drawn = verify_sampled, verify_drawn
        self.compiled = compile and target.together is None
        self.elements, self.compiled_rows = mean_elements(target), 0
        if compile:  # for one number of threads, that of the largest rounds
            self.compiled_rows = max_batch_size * self.dispatcher.largest.num_nodes
            with threads_for(self.compiled_rows, self.elements):
                self.compile()
        self.overlap = target.device.type == "cuda" if overlap is None else overlap
        self.launcher = launcher(graphs, target.device, max_batch_size, self.dispatcher.deepest + 1)
        self.under_way: Round | None = None  # what came of it is not known yet
        self.stage_seconds: dict[str, float] = defaultdict(float)
        self.stages_entered: Counter[str] = Counter()
        self.num_added = 0
        self.advanced: dict[Sequence, None] = {}  # who got tokens in this step, in order
        self.seated: list[Sequence] = []  # whose settings are at hand
        self.told_first = False  # the step before told first tokens: this one's round is due
        self.ends = BlockEnds(shape.hidden_size, target.dtype, target.device) if prefix_cache else None
        stores = [self.cache, *(draft.caches if draft is not None else []), *([self.ends] if prefix_cache else [])]

        def moved(slots: int) -> None:
            self.launcher.forget(slots)  # the one there is then: it may be given another

        self.memory = BlockMemory(stores, BlockPool(0), self.ranks, kv_tokens, moved)
        prefixes = PrefixCache(self.memory, host_kv_tokens // BLOCK) if prefix_cache else None
        self.scheduler = Scheduler(self.memory.pool, max_batch_size, self.dispatcher.deepest + 1, prefixes)

    @torch.inference_mode()
    def compile(self) -> None:
        """Run the forwards of target and drafter in decoding by torch.compile from now on, and verification on a GPU:
        on a CPU its few operations gain nothing by it."""
        ends = {1, 2, self.max_batch_size, *(size + n for size, _ in self.dispatcher.table for n in (0, 1))}
        sizes = [(rows, self.dispatcher.dispatch(rows)) for rows in sorted(ends) if rows <= self.max_batch_size]
        jobs = [] if self.drafter is None else self.drafter.compile(sizes)
        if self.compiled:
            for rows, plan in sizes:
                tokens = torch.zeros(rows, plan.tree.num_nodes, dtype=torch.long, device=self.target.device)
                jobs.append(partial(self.target.compiled.prepare, tokens, tokens))
        if self.target.device.type == "cuda":
            jobs += self.compile_sampling(sizes)
        bar = progress(len(jobs), "compiled shape", shown=self.ranks.rank == 0)
        for done, job in enumerate(jobs, 1):
            job()
            bar.update(done)
        bar.close()

    def compile_sampling(self, sizes: list[tuple[int, Plan]]) -> list[Callable[[], None]]:
        """Run the verification of sampled rounds by torch.compile from now on. Returns calls that have it done for
        these batch sizes, each with its plan. Paper section 3.2: one row, and several; each with top-k or top-p or not.
        """
        self.verify_sampled = with_own_sizes(torch.compile(verify_sampled, dynamic=True))
        self.verify_drawn = with_own_sizes(torch.compile(verify_drawn, dynamic=True))
        shapes = {(min(-(-rows // self.ranks.size), 2), plan): None for rows, plan in sizes}
        jobs = [partial(self.prepare_sampling, rows, plan, top_p) for rows, plan in shapes for top_p in (1.0, 0.5)]
        torch.compiler.config.recompile_limit += len(jobs)
        return jobs

    def prepare_sampling(self, rows: int, plan: Plan, top_p: float) -> None:
        """Have verification compiled for so many rows; 1 is for those without top-k and top-p."""
        device, weight = self.target.device, self.target.lm_head.weight
        sampling = SamplingTensors.from_lists([1.0] * rows, [0] * rows, [top_p] * rows, device)
        tree, tokens = plan.tree, torch.zeros(rows, plan.tree.num_nodes, dtype=torch.long, device=device)
        logits = weight.new_zeros(*tokens.shape, len(weight))
        seeds, lengths = (torch.zeros(rows, dtype=torch.long, device=device) for _ in range(2))
        if self.drafting == "greedy" or tree.num_nodes == 1:
            self.verify_sampled(tree, tokens, logits, sampling, seeds, lengths)
        else:
            draws, q = uniform(seeds, lengths, plan.num_draws), torch.zeros_like(logits, dtype=torch.float32)
            self.verify_drawn(tree, tokens, logits, sampling, draws, q, self.drafting == "multinomial")

    def generate(
        self, prompts: Listing[Prompt], params: SamplingParams | Listing[SamplingParams] | None = None
    ) -> list[Output]:
        """One output per prompt: text, token ids or chat messages each.

        `params`: one for all (request i then uses seed + i) or a list. Raises UserError for a prompt that is empty or
        does not fit the target's context, before anything is run, and where other requests are under way.
        """
        check(isinstance(prompts, list | tuple), "prompts: must be a list of prompts")
        check(not self.scheduler.unfinished, "requests were added before: step until they are done")
        sequences = [
            self.requests.sequence(i, prompt, params_of(params, i, len(prompts))) for i, prompt in enumerate(prompts)
        ]
        self.enqueue(sequences)
        try:
            while self.scheduler.unfinished:
                self.step()
        finally:
            for sequence in self.scheduler.unfinished:  # interrupted, they have nobody left to step for them
                sequence.finish_reason = "cancelled"
            self.scheduler.leave()
            self.under_way, self.told_first = None, False
            self.advanced.clear()
        return [self.requests.output(sequence) for sequence in sequences]

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> Sequence:
        """A request that waits for its turn in `step`. Raises UserError as `generate` does."""
        params = SamplingParams() if params is None else params
        check(isinstance(params, SamplingParams), f"params={shown(params)}: must be SamplingParams")
        sequence = self.requests.sequence(self.num_added, prompt, params)
        self.enqueue([sequence])
        self.num_added += 1
        return sequence

    def cancel(self, request: Sequence) -> None:
        """End a request, between two steps; what it has is in its output. One that is finished stays as it is."""
        if request in self.scheduler.unfinished:
            request.finish_reason = "cancelled"
            self.leave()
            self.scheduler.leave()  # should it have waited still, or read

    def enqueue(self, sequences: list[Sequence]) -> None:
        """Let sequences wait, and have room for them. Raises UserError where one alone would not fit."""
        unfinished = [*self.scheduler.unfinished, *sequences]
        needs = [blocks_for(self.longest(each)) for each in unfinished]
        kv_tokens, total = self.memory.kv_tokens, self.scheduler.pool.total
        for sequence, need in zip(unfinished, needs, strict=True):
            check(
                kv_tokens is None or need <= total,
                f"kv_tokens={kv_tokens}: prompt {sequence.index} and its answer need {need * BLOCK}",
            )
        blocks = (max(needs, default=0) + 1) * min(self.max_batch_size, len(needs))
        if kv_tokens is None and blocks > total:
            self.memory.grow(blocks, least=max(needs))
        self.scheduler.waiting.extend(sequences)

    def longest(self, sequence: Sequence) -> int:
        """Slots that a sequence may need."""
        return len(sequence.prompt) + sequence.params.max_tokens + self.scheduler.ahead

    @property
    def active(self) -> list[Sequence]:
        """The batch's sequences, row by row."""
        return self.scheduler.active

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """One round of the decoding cycle. Paper section 3, figure 4. Returns what it brought, and to whom; with
        `overlap`, what the round before it did. Where first tokens are there to be told, the round is the next step's.
        Where it fails, for want of memory, say, nobody is lost: the next one goes on.
        """
        began = not self.told_first and self.prefill()
        self.told_first = began and bool(self.advanced)
        if not self.told_first:
            self.decode()
        told, self.advanced = self.advanced, {}
        return [self.requests.update(sequence) for sequence in told]

    def decode(self) -> None:
        """A round of those who have read their texts."""
        self.make_room()
        before, fresh = self.under_way, None
        if any(map(self.may_go_on, self.active)):
            plan = self.dispatch()
            rows = self.compiled_rows or len(self.active) * plan.tree.num_nodes
            with threads_for(rows, self.elements):
                fresh = self.round(plan)
        self.under_way = fresh
        self.finish(before)
        if not self.overlap:
            self.land()

    def round(self, plan: Plan) -> Round:
        """Drafting, validation, sampling, and the device's half of the bookkeeping."""
        drafted = self.draft_tree(plan)
        hidden, logits, suffix = self.validate(plan, drafted.tokens)
        verified = self.sample(plan, drafted.tokens, logits, drafted.q)
        return self.commit(plan, drafted, hidden, suffix, verified)

    @torch.inference_mode()
    def prefill(self) -> bool:
        """Waiting sequences take the free rows and blocks, and texts are read; first tokens are sampled at once.

        Returns whether anyone has read all of its text.
        """
        self.make_room()
        staying = len(self.active)
        self.scheduler.admit()
        self.read(self.scheduler.chunks(self.prefill_tokens))
        ready = self.scheduler.ready
        if ready:
            with self.stage("prefill"):
                tokens = self.firsts(ready)
            fresh = self.begin(ready, tokens)
            self.pending = self.pending.followed_by(fresh) if staying else fresh
            self.leave()
        return bool(ready)

    def make_room(self) -> None:
        """Active sequences get blocks for the next round. What is under way is waited for where it decides on that."""
        if self.under_way is not None:
            guided = any(sequence.matcher is not None for sequence in self.under_way.sequences)
            if not guided and self.scheduler.make_room(self.under_way.most):
                return
            self.land()
        before = self.active
        self.scheduler.make_room()
        if len(self.active) < len(before):
            stay = [row for row, sequence in enumerate(before) if sequence in self.active]
            self.pending = self.pending.rows(to_device(stay, self.target.device, torch.long))
            self.leave()

    def read(self, chunks: list[tuple[Sequence, int]]) -> None:
        """Read chunks of texts. Those at most twice as long as each other are read together: what pads them is less
        than they are."""
        for _, alike in groupby(sorted(chunks, key=octave), octave):
            with self.stage("prefill"):
                self.read_together(list(alike))

    def read_together(self, chunks: list[tuple[Sequence, int]]) -> None:
        """Run chunks of texts through target and drafter."""
        device = self.target.device
        new = [sequence for sequence, _ in chunks]
        texts = [sequence.to_prefill[sequence.read : sequence.read + count] for sequence, count in chunks]
        prefix = Prefix.of([sequence.read for sequence in new], [sequence.blocks for sequence in new], device)
        before = torch.stack([self.hidden_before(each) for each in new]) if prefix.longest > 0 else None
        with threads_for(len(texts) * max(map(len, texts)), self.elements):
            hidden = prefill(self.target, self.cache, self.drafter, prefix, texts, before)
        if self.ends is not None:
            self.ends.write(prefix, hidden)
        ends = to_device([len(text) - 1 for text in texts], device)
        hidden = hidden[torch.arange(len(new), device=device), ends]
        for sequence, text, state in zip(new, texts, hidden, strict=True):
            sequence.read, sequence.last_hidden = sequence.read + len(text), state
            self.scheduler.note(sequence)

    def firsts(self, new: list[Sequence]) -> list[int]:
        """The first tokens of those who have read all of their texts."""
        device = self.target.device
        settings = Settings.of(new, device)
        last = to_device([sequence.read - 1 for sequence in new], device)
        own, coins = self.ranks.own, uniform(settings.seeds, last, 1).squeeze(1)
        logits = self.target.lm_head(own(torch.stack([each.last_hidden for each in new]))).unsqueeze(1)
        if guidance := self.guidance_of(new, chain(0)):
            logits = restrict(logits, own(guidance.allowed([0])))
        tokens = sample(probabilities(logits, settings.sampling.rows(own)).squeeze(1), own(coins))
        (tokens,) = self.ranks.all(len(new), tokens)
        return tokens.tolist()

    def begin(self, new: list[Sequence], tokens: list[int]) -> Pending:
        """These have read all of their texts and become active: with their first tokens, or, where one comes back, with
        the pending token that it has already. What `step` tells together has one time."""
        now, hidden = time.perf_counter(), torch.stack([each.last_hidden for each in new])
        for sequence, token, finite in zip(new, tokens, hidden.isfinite().all(1).tolist(), strict=True):
            sequence.last_hidden = None
            if not finite:
                sequence.fail()
                self.advanced[sequence] = None
            elif not sequence.generated:
                sequence.start(token, now)
                self.requests.cut_at_stop_strings(sequence)
                self.advanced[sequence] = None
        self.scheduler.activate(new)
        first = to_device([sequence.generated[-1:] or [0] for sequence in new], hidden.device)
        lengths = to_device([sequence.committed for sequence in new], hidden.device)
        return Pending(first, hidden.unsqueeze(1), torch.ones_like(lengths), lengths)

    def hidden_before(self, sequence: Sequence) -> torch.Tensor:
        """The target's hidden state at the last token that was read [H]; zeros where none was."""
        if sequence.last_hidden is not None:
            return sequence.last_hidden
        if sequence.read > 0:  # its beginning was found in the caches
            return self.ends.hidden[sequence.blocks[sequence.read // BLOCK - 1]]
        return torch.zeros_like(self.target.lm_head.weight[0], dtype=self.target.dtype)

    def dispatch(self) -> Plan:
        """The tree for the current batch; where each sequence stands; the round's random numbers."""
        plan = self.dispatcher.dispatch(len(self.active))
        if self.under_way is None:  # else only the device knows how much is unread
            self.pending = self.pending.narrow(max(each.num_known - each.read for each in self.active))
        lengths, blocks = [s.committed for s in self.active], [s.blocks for s in self.active]
        self.prefix = Prefix.of(lengths, blocks, self.target.device, self.pending.lengths)
        if self.under_way is not None:
            self.prefix = self.prefix.at_most(self.pending.lengths, self.prefix.longest + self.under_way.most)
        self.guidance = self.guidance_of(self.active, plan.tree)
        self.run = self.launcher if self.guidance is None else EAGER  # the host has a part in what obeys a grammar
        self.draws = None
        if self.drafting != "greedy" and plan.tree.num_nodes > 1 and not self.settings.sampling.all_greedy:
            self.draws = uniform(self.settings.seeds, self.prefix.lengths, plan.num_draws)
        return plan

    def guidance_of(self, sequences: list[Sequence], tree: Tree) -> Guidance | None:
        """What the sequences' grammars allow, None where there is no grammar."""
        matchers = [sequence.matcher for sequence in sequences]
        return Guidance(self.requests.guide, tree, matchers) if any(matchers) else None

    def asks_drafter(self, plan: Plan) -> bool:
        """Where nothing is drafted, the drafter need not read along; it catches up before the next tree, or in between,
        when so much is unread that it costs about as little for each token as reading a prompt does.
        """
        return self.drafter is not None and (plan.tree.num_nodes > 1 or self.pending.tokens.shape[1] >= MOST_UNREAD)

    def draft_tree(self, plan: Plan) -> Drafted:
        if not self.asks_drafter(plan):
            return Drafted(self.pending.last, None, None)
        with self.stage("drafting"):
            if self.under_way is None:
                read = self.prefix.at([sequence.read for sequence in self.active])
            else:
                read = self.prefix.at_most(self.pending.read, self.prefix.longest)
            drafted = self.run.propose(self.drafter, plan, self.prefix, read, self.pending, self.choice(plan))
            if self.ranks.size == 1:
                return drafted
            if self.guidance is not None:  # it has read this rank's own drafts
                self.guidance.rewind()
                self.guidance = self.guidance_of(self.active, plan.tree)
            return drafted._replace(tokens=self.ranks.agreed(drafted.tokens), q=self.ranks.agreed(drafted.q))

    def choice(self, plan: Plan) -> Choice:
        """At temperature 0 every way of choosing proposes the most likely tokens."""
        if self.draws is None:
            return Choice(guidance=self.guidance)
        noise = self.draws[:, 1 + plan.tree.num_nodes :]
        return Choice(self.drafting, self.settings.sampling.temperature, noise, self.guidance)

    def validate(self, plan: Plan, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Suffix | None]:
        with self.stage("validation"):
            if self.guidance is not None:
                self.guidance.read(tokens)  # now, because it waits for what the device was told before
            read = self.target.compiled if self.compiled else self.target.hidden_states
            return self.run.validate(self.target, read, self.cache, self.prefix, plan.tree, tokens, self.ranks)

    def sample(self, plan: Plan, tokens: torch.Tensor, logits: torch.Tensor, q: torch.Tensor | None) -> Verified:
        with self.stage("sampling"):
            if self.guidance is not None:
                logits = restrict(logits, self.ranks.own(self.guidance.allowed(list(range(plan.tree.num_nodes)))))
                self.guidance.rewind()
            own = self.sample_own(plan, self.ranks.own(tokens), logits, q)
            return Verified(*self.ranks.all(len(tokens), *own))

    def sample_own(self, plan: Plan, tokens: torch.Tensor, logits: torch.Tensor, q: torch.Tensor | None) -> Verified:
        """Of this rank's rows."""
        own, settings = self.ranks.own, self.settings
        if settings.sampling.all_greedy:
            return verify_chosen(plan.tree, tokens, logits.argmax(-1))
        sampling = settings.sampling.rows(own)
        if q is None or self.draws is None:  # a drafter may draw unasked; the target's own draw is right for any
            seeds, lengths = own(settings.seeds), own(self.prefix.lengths)
            return self.verify_sampled(plan.tree, tokens, logits, sampling, seeds, lengths)
        replacement = self.drafting == "multinomial"
        return self.verify_drawn(plan.tree, tokens, logits, sampling, own(self.draws), own(q), replacement)

    def commit(
        self, plan: Plan, drafted: Drafted, hidden: torch.Tensor, suffix: Suffix | None, verified: Verified
    ) -> Round:
        """The device's half of the bookkeeping, after which the next round can begin."""
        with self.stage("bookkeeping"):
            pending = commit(self.cache, self.prefix, plan.tree, suffix, hidden, drafted.tokens, verified)
            if self.ends is not None:
                self.ends.write(self.prefix, pending.hidden)
            if self.drafter is None:
                self.pending = pending
            elif self.asks_drafter(plan):
                self.pending = self.drafter.rewind(plan, self.prefix, drafted.suffix, verified.node, pending)
            else:
                self.pending = self.pending.then(pending)
            return Round(self.active, plan, pending, self.pending.counts)

    def finish(self, done: Round | None) -> None:
        """The host's half: sequences get what a round brought them, and those that end leave."""
        if done is None:
            return
        with self.stage("bookkeeping"):
            gains, now = done.gains(), time.perf_counter()
            for sequence, gain in gains:
                if sequence.finish_reason:  # it has ended since the round began
                    continue
                if gain.tokens:
                    sequence.advance(gain.tokens, len(gain.tokens) - 1, done.plan.tree.max_depth, now)
                    self.requests.cut_at_stop_strings(sequence)
                    # Where it ended early, `unread` counts what it did not get as well.
                    sequence.read = max(sequence.read, sequence.num_known - gain.unread)
                if not gain.finite:
                    sequence.fail()
                self.advanced[sequence] = None
            self.leave()

    def land(self) -> None:
        """Wait for the round that is under way."""
        done, self.under_way = self.under_way, None
        self.finish(done)

    def may_go_on(self, sequence: Sequence) -> bool:
        """Whether the round under way, which brings a token at least, leaves it some to generate."""
        coming = self.under_way is not None and sequence in self.under_way.sequences
        return len(sequence.generated) + coming < sequence.params.max_tokens

    def leave(self) -> None:
        """Finished sequences give up their rows and blocks."""
        stay = [row for row, sequence in enumerate(self.active) if not sequence.finish_reason]
        if len(stay) < len(self.active):
            self.pending = self.pending.rows(to_device(stay, self.target.device, torch.long))
            self.scheduler.leave()
        if self.seated != self.active:
            self.seated, self.settings = list(self.active), Settings.of(self.active, self.target.device)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds a stage's wall time to `stage_seconds`, on a GPU the time to launch it, and 1 to `stages_entered`."""
        start = time.perf_counter()
        yield
        self.stage_seconds[name] += time.perf_counter() - start
        self.stages_entered[name] += 1


def check_options(target: Any, device: Any, draft: Any, **options: Any) -> None:
    """Raise UserError for an option of `Engine` that makes no sense."""
    check(
        isinstance(target, str | Path | TargetConfig | Target),
        f"target={shown(target)}: must be a directory, a hub id, a TargetConfig or a Target",
    )
    kind, _, number = str(device).partition(":")
    right = kind in ("cpu", "cuda") and (number.isdigit() or not number)
    check(right, f"device={shown(device)}: must be cpu, cuda or cuda:N")
    there = kind == "cpu" or isinstance(target, Target) or int(number or 0) < torch.cuda.device_count()
    check(there, f"device={device}: no such GPU is visible; use device=cpu")
    drafts = draft is None or isinstance(draft, str | Path | Draft) or hasattr(draft, "propose")
    check(drafts, f"draft={shown(draft)}: must be None, an artifact's directory, a Draft or a Drafter")
    numbers = {"max_batch_size": 1, "kv_tokens": 1, "prefill_tokens": 1, "host_kv_tokens": 0}
    for name, least in numbers.items():
        value, may_be_none = options[name], name in ("kv_tokens", "prefill_tokens")
        wanted = f"must be at least {least}, a whole number" + (", or None" if may_be_none else "")
        check(is_whole(value, least) or (may_be_none and value is None), f"{name}={shown(value)}: {wanted}")
    for name in ("prefix_cache", "compile", "overlap", "graphs"):
        value = options[name]
        is_switch = isinstance(value, bool) or (name == "overlap" and value is None)
        check(is_switch, f"{name}={shown(value)}: must be True or False" + (", or None" if name == "overlap" else ""))
    check_drafting(options["drafting"])
    host = options["host_kv_tokens"]
    check(host == 0 or options["prefix_cache"], f"host_kv_tokens={host}: needs prefix_cache=True")
    check(host == 0 or host >= BLOCK, f"host_kv_tokens={host}: a block has {BLOCK}; must be 0 (none) or so many")


def mean_elements(target: Target) -> float:
    """Of a matrix of the target; infinite where a CPU's threads have no part in it."""
    sizes = [math.prod(weight.shape[-2:]) for weight in target.model.parameters() if weight.ndim > 1]
    return sum(sizes) / len(sizes) if target.device.type == "cpu" else math.inf


def octave(chunk: tuple[Sequence, int]) -> int:
    """Which power of two its length is below: chunks of the same octave differ by less than a factor of two."""
    return chunk[1].bit_length()


@dataclass(frozen=True)
class Settings:
    """The active sequences' sampling settings and seeds [A], as tensors."""

    sampling: SamplingTensors
    seeds: torch.Tensor

    @classmethod
    def of(cls, sequences: list[Sequence], device: torch.device) -> "Settings":
        params = [sequence.params for sequence in sequences]
        sampling = SamplingTensors.from_lists(
            [p.temperature for p in params], [p.top_k for p in params], [p.top_p for p in params], device
        )
        return cls(sampling, to_device([p.seed for p in params], device, torch.int64))
