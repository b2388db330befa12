"""The runner: prefill, dispatch, draft, validate, sample, commit. Paper section 3, DESIGN section 3.9.

`Runner.run` is one decoding round. Each stage is a function of its inputs and the caches; no other state is kept. Plain
decoding is the same code with a tree of one node, the root. The engine decides which requests are in a batch. Knows
nothing of requests, the scheduler or texts.

Ranks of one tensor-parallel target run every stage with the same inputs, and so get the same results.

Shapes: A active rows, N tree nodes, T tokens of a prompt, H hidden, V vocabulary.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from eagle_train.errors import OptionError
from eagle_train.inference.cache.block_ends import BlockEnds
from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.decode.bookkeeping import RoundResult, commit, report_of
from eagle_train.inference.decode.graphs import EndKey, Graphs
from eagle_train.inference.decode.prefill import prefill
from eagle_train.inference.decode.rounds import RoundInputs, Validated
from eagle_train.inference.decode.sampling import (
    SamplingTensors,
    Verified,
    probabilities,
    restrict,
    sample,
    uniform,
    verify_chosen,
)
from eagle_train.inference.decode.stage_times import StageTimes
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.decode.validation import validate
from eagle_train.inference.decode.verification import Verification
from eagle_train.inference.drafters.checks import checked_drafts, checked_pending
from eagle_train.inference.drafters.drafter import MAX_PENDING, Choice, Drafted, Drafter, Pending, TreePlan
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.inference.grammar.guided import Guidance
from eagle_train.inference.options import EngineConfig
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.models.target import Target
from eagle_train.ops import kernels
from eagle_train.ops.threads import threads_for
from eagle_train.ops.transfer import to_device
from eagle_train.progress import progress


class Runner:
    """A target, a drafter and their caches, and the stages that run them."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        config: EngineConfig,
        acceptance: Callable[[RoundInputs, Verified], Verified] | None = None,
    ):
        """`acceptance`: replaces the verification result of each round."""
        self.target, self.drafter, self.acceptance, self.config = target, drafter, acceptance, config
        self.graphs: Graphs | None = None  # what is recorded; rounds that fit none run kernel by kernel
        layers = target.kv_layers
        joint = config.tree_attention == "joint"
        self.cache = PagedKV(layers.kv_shapes, 0, target.dtype, target.device, layers.given, joint=joint)
        self.ends: BlockEnds | None = None
        if config.prefix_cache:
            self.ends = BlockEnds(target.embedding.shape[1], target.dtype, target.device)
        self.ranks = Ranks(target.together, target.device, divided=config.divide_sampling)
        self.verification = Verification(config.drafting)
        self.times = StageTimes()
        self._is_compiled = False  # the target's forward
        self._elements = _mean_elements(target)
        self._compiled_rows = 0  # tokens of the largest round: all compiled forwards use its number of threads
        self._plain = [name for name in ("attention", "linear") if getattr(config, name) == "plain"]

    @property
    def stores(self) -> list[PagedKV | BlockEnds]:
        """The caches of target and drafter, and the hidden states at block ends: one entry per block each."""
        drafter = [] if self.drafter is None else self.drafter.caches
        return [self.cache, *drafter, *([] if self.ends is None else [self.ends])]

    def run(self, inputs: RoundInputs) -> tuple[Pending, RoundResult]:
        """One round. Returns the next round's pending tokens, and the results, without synchronising."""
        rows = self._compiled_rows or len(inputs.pending.lengths) * inputs.plan.tree.num_nodes
        with self.resources(rows):
            drafted = self.draft(inputs)
            validated = self.validate(inputs, drafted.tokens)
            if (key := self._end_key(inputs)) is not None:
                return self._replay_end(inputs, key)
            verified = self.sample(inputs, drafted, validated.logits)
            return self.commit(inputs, drafted, validated, verified)

    def prefill(self, prefix: Prefix, texts: list[list[int]], before: torch.Tensor | None) -> torch.Tensor:
        """Prefill texts, each after its prefix, into the caches of target and drafter.

        `before` [A, H]: the target's hidden states at the prefixes' last tokens; None if every prefix is empty.
        Returns the hidden states at the texts' last tokens [A, H].
        """
        with self.times.stage("prefill"), self.resources(len(texts) * max(map(len, texts))):
            hidden = prefill(self.target, self.cache, self.drafter, prefix, texts, before)
            if self.ends is not None:
                self.ends.write(prefix, hidden)
            last = to_device([len(text) - 1 for text in texts], hidden.device)
            return hidden[torch.arange(len(texts), device=hidden.device), last]

    def first_tokens(
        self,
        hidden: torch.Tensor,
        lengths: torch.Tensor,
        sampling: SamplingTensors,
        seeds: torch.Tensor,
        guidance: Guidance | None,
    ) -> list[int]:
        """Sample the first tokens from the target's hidden states at the prompts' last tokens [A, H].

        `lengths` int64 [A]: the positions of these last tokens. Synchronises with the device.
        """
        with self.times.stage("prefill"):
            own, coins = self.ranks.own, uniform(seeds, lengths, 1).squeeze(1)
            logits = self.ranks.logits(self.target.lm_head, hidden).unsqueeze(1)
            if guidance is not None:
                logits = restrict(logits, own(guidance.allowed([0])))
            tokens = sample(probabilities(logits, sampling.rows(own)).squeeze(1), own(coins))
            (tokens,) = self.ranks.all(len(hidden), tokens)
            return tokens.tolist()

    def drafts(self, plan: TreePlan, pending: Pending) -> bool:
        """Whether the drafter runs in a round.

        A plain round does not need it. Its cache is brought up to date before the next tree, or when MAX_PENDING tokens
        are pending, so that one forward processes them at about the cost per token of a prefill.
        """
        return self.drafter is not None and (plan.tree.num_nodes > 1 or pending.tokens.shape[1] >= MAX_PENDING)

    def draft(self, inputs: RoundInputs) -> Drafted:
        """A tree of tokens for each row; the pending token alone if the drafter does not run."""
        if self.drafter is None or inputs.draft_prefix is None:
            return Drafted(inputs.pending.last, None, None)
        with self.times.stage("drafting"):
            plan, pending, guidance = inputs.plan, inputs.pending, inputs.guidance
            # With a grammar the host computes masks in between.
            key = None if self.graphs is None or guidance is not None else self.graphs.drafting_key(inputs)
            if self.graphs is not None and key is not None:
                drafted = self.graphs.propose(key, inputs)
            else:
                drafted = self.propose(plan, inputs.prefix, inputs.draft_prefix, pending, inputs.choice)
            if not isinstance(self.drafter, Eagle):  # ours needs no check, which would cost kernel launches
                drafted = checked_drafts(self.drafter, drafted, plan, pending, self.target.identity.vocab_size)
                drafted = self._agreed(drafted)
            if self.ranks.size > 1 and guidance is not None:
                guidance.reset()  # it has this rank's drafts, which may differ from rank 0's by rounding
            return drafted

    def propose(
        self, plan: TreePlan, prefix: Prefix, draft_prefix: Prefix, pending: Pending, choice: Choice
    ) -> Drafted:
        """The drafter's trees, without a wait for the device unless `choice` has a grammar. Ours are rank 0's already;
        a user's are checked first."""
        assert self.drafter is not None
        drafted = self.drafter.propose(plan, prefix, draft_prefix, pending, choice)
        return self._agreed(drafted) if isinstance(self.drafter, Eagle) else drafted

    def _agreed(self, drafted: Drafted) -> Drafted:
        """Rank 0's tokens and `q`, on every rank."""
        tokens, q = self.ranks.agreed(drafted.tokens), drafted.q
        return Drafted(tokens, None if q is None else self.ranks.agreed(q), drafted.suffix)

    def validate(self, inputs: RoundInputs, tokens: torch.Tensor) -> Validated:
        """The target's forward of the trees' tokens [A, N]."""
        with self.times.stage("validation"):
            if inputs.guidance is not None:
                inputs.guidance.set_tokens(tokens)  # before the launch: the host walks the trees while the target runs
            key = None if self.graphs is None else self.graphs.validation_key(inputs)
            ends_recorded = self._end_key(inputs) is not None
            # A rank's share of the logits is one of the padded batch, which the host does not divide.
            if self.graphs is None or key is None or (self.ranks.divided and not ends_recorded):
                return self.forward(inputs.prefix, inputs.plan.tree, tokens)
            validated = self.graphs.validate(key, inputs, tokens)
            if ends_recorded:
                return validated
            # The drafter may use the hidden states rounds later, when the graph has run again.
            return validated._replace(hidden=validated.hidden.clone())

    def forward(self, prefix: Prefix, tree: Tree, tokens: torch.Tensor) -> Validated:
        """As `validate`, kernel by kernel and without a wait for the device."""
        forward = self.target.compiled if self._is_compiled else self.target.hidden_states
        return Validated(*validate(self.target, forward, self.cache, prefix, tree, tokens, self.ranks))

    def sample(self, inputs: RoundInputs, drafted: Drafted, logits: torch.Tensor) -> Verified:
        """Verify the drafts: the nodes that the target accepts, and the token after each row's last accepted node."""
        with self.times.stage("sampling"):
            if inputs.guidance is not None:
                nodes = list(range(inputs.plan.tree.num_nodes))
                logits = restrict(logits, self.ranks.own(inputs.guidance.allowed(nodes)))
                inputs.guidance.rewind()
            verified = self.verify(inputs, drafted, logits)
            return verified if self.acceptance is None else self.acceptance(inputs, verified)

    def verify(self, inputs: RoundInputs, drafted: Drafted, logits: torch.Tensor) -> Verified:
        """As `sample`, by the logits of the tokens that are allowed, without a wait for the device."""
        tree, own = inputs.plan.tree, self.ranks.own
        tokens = own(drafted.tokens)
        if inputs.sampling.all_greedy:
            verified = verify_chosen(tree, tokens, logits.argmax(-1))
        else:
            sampling, seeds, lengths = inputs.sampling.rows(own), own(inputs.seeds), own(inputs.prefix.lengths)
            drawn = [None if x is None else own(x) for x in (inputs.draws, drafted.q)]
            verified = self.verification(inputs.plan, tokens, logits, sampling, seeds, lengths, *drawn)
        return Verified(*self.ranks.all(len(drafted.tokens), *verified))

    def commit(
        self, inputs: RoundInputs, drafted: Drafted, validated: Validated, verified: Verified
    ) -> tuple[Pending, RoundResult]:
        """Commit the accepted paths to the caches. Returns the next round's pending tokens, and the round's results."""
        with self.times.stage("bookkeeping"):
            return self._results(inputs, *self._keep(inputs, drafted, validated, verified))

    def finish(self, inputs: RoundInputs, drafted: Drafted, validated: Validated) -> tuple[Pending, torch.Tensor]:
        """`sample` and `commit` up to where the host takes part: what the drafter may process next of the round's
        tokens, and `report_of` them."""
        return self._keep(inputs, drafted, validated, self.verify(inputs, drafted, validated.logits))

    def _keep(
        self, inputs: RoundInputs, drafted: Drafted, validated: Validated, verified: Verified
    ) -> tuple[Pending, torch.Tensor]:
        """As `finish`, of what was verified."""
        plan, prefix, (hidden, _, suffix) = inputs.plan, inputs.prefix, validated
        committed = commit(self.cache, prefix, plan.tree, suffix, hidden, drafted.tokens, verified)
        if self.ends is not None:
            self.ends.write(prefix, committed.hidden)
        pending = committed
        if self.drafter is not None and inputs.draft_prefix is not None:
            rewound = self.drafter.rewind(plan, prefix, drafted.suffix, verified.node, committed)
            pending = checked_pending(self.drafter, rewound)
        return pending, report_of(committed)

    def _results(self, inputs: RoundInputs, pending: Pending, report: torch.Tensor) -> tuple[Pending, RoundResult]:
        """The next round's pending tokens, and the round's results, from what `finish` returns."""
        if self.drafter is not None and inputs.draft_prefix is None:
            pending = inputs.pending.append_token(pending)
        return pending, RoundResult(inputs.plan.tree.max_depth, report, pending.counts)

    def _end_key(self, inputs: RoundInputs) -> EndKey | None:
        """The recording of a round's end; None where there is none. With a grammar the host computes masks before."""
        return None if self.graphs is None or inputs.guidance is not None else self.graphs.end_key(inputs)

    def _replay_end(self, inputs: RoundInputs, key: EndKey) -> tuple[Pending, RoundResult]:
        assert self.graphs is not None
        with self.times.stage("sampling"):
            pending, report = self.graphs.finish(key, inputs)
        with self.times.stage("bookkeeping"):
            return self._results(inputs, pending, report)

    @torch.inference_mode()
    def compile(self, sizes: list[tuple[int, TreePlan]], most: int) -> None:
        """Compile as the config says for pairs of batch size and plan; a round has at most `most` tokens.

        Raises UserError if torch.compile fails.
        """
        config, is_gpu = self.config, self.target.device.type == "cuda"
        jobs: list[Callable[[], None]] = []
        if config.compile and self.drafter is not None:
            jobs += self.drafter.compile(sizes)
        if config.compile:
            self._is_compiled = True
            for rows, plan in sizes:
                tokens = torch.zeros(rows, plan.tree.num_nodes, dtype=torch.long, device=self.target.device)
                jobs.append(partial(self.target.compiled.prepare, tokens, tokens))
        # On a CPU compiling the few operations of verification gains nothing.
        if config.compile and is_gpu if config.compile_sampling is None else config.compile_sampling:
            own = [(self.ranks.rows_per_rank(rows), plan) for rows, plan in sizes]
            jobs.append(partial(self._compile_verification, own))
        if not jobs:
            return
        self._compiled_rows = most
        bar = progress(len(jobs), "compiled shape")
        with self.resources(self._compiled_rows):
            for done, job in enumerate(jobs, 1):
                job()
                bar.update(done)
        bar.close()

    def _compile_verification(self, sizes: list[tuple[int, TreePlan]]) -> None:
        """Compile verification. If that fails, raise if `compile_sampling` is set, else warn and run it eagerly."""
        try:
            for job in self.verification.compile(sizes, self.target.lm_head.weight):
                job()
        except OptionError as error:
            if self.config.compile_sampling:
                raise
            warnings.warn(f"{error}; rounds above temperature 0 are verified without", stacklevel=2)
            self.verification = Verification(self.config.drafting)

    @contextmanager
    def resources(self, rows: int) -> Iterator[None]:
        """Number of threads and choice of kernels for forwards of `rows` tokens."""
        with kernels.plain(*self._plain), threads_for(rows, self._elements):
            yield


def _mean_elements(target: Target) -> float:
    """Mean number of elements of the target's matrices; infinite on a GPU, which uses no CPU threads."""
    sizes = [math.prod(weight.shape[-2:]) for weight in target.model.parameters() if weight.ndim > 1]
    return sum(sizes) / len(sizes) if target.device.type == "cpu" else math.inf
