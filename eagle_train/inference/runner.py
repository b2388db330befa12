"""The runner: prefill, dispatch, draft, validate, sample, commit. Paper section 3, DESIGN section 3.9.

`Runner.run` is one decoding round. Each stage is a function of its inputs and the caches; no other state is kept. Plain
decoding is the same code with a tree of one node, the root. The engine decides which requests are in a batch. Knows
nothing of requests, the scheduler or texts.

Ranks of one tensor-parallel target run every stage with the same inputs, and so get the same results.

Shapes: A active rows, N tree nodes, T tokens of a prompt, H hidden, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from eagle_train.inference.cache.block_ends import BlockEnds
from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.decode.adjustments import Adjustments
from eagle_train.inference.decode.bookkeeping import FirstToken, RoundResult, commit, first_tokens, report_of
from eagle_train.inference.decode.graphs import EndKey, Graphs
from eagle_train.inference.decode.logprobs import LogprobCopy, LogprobRows
from eagle_train.inference.decode.prefill import prefill
from eagle_train.inference.decode.rounds import RoundInputs, Validated
from eagle_train.inference.decode.row_trees import AnyTree, RowTrees
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
from eagle_train.inference.decode.tree import Tree, chain
from eagle_train.inference.decode.validation import last_states, validate, validate_rest
from eagle_train.inference.decode.verification import Verification
from eagle_train.inference.drafters.checks import checked_drafts, checked_form, checked_pending
from eagle_train.inference.drafters.drafter import (
    MAX_PENDING,
    Computed,
    Drafted,
    Drafter,
    DraftRound,
    Outcome,
    Pending,
    TreePlan,
)
from eagle_train.inference.drafters.drafters import Drafters, Seats
from eagle_train.inference.drafters.proposed import Part, Proposed
from eagle_train.inference.grammar.guided import Guidance, NodeMasks
from eagle_train.inference.options import EngineConfig
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.models.target import Target
from eagle_train.ops import kernels
from eagle_train.ops.compiled import Forward
from eagle_train.ops.threads import threads_for
from eagle_train.ops.transfer import to_device


class Runner:
    """A target, a drafter and their caches, and the stages that run them."""

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter],
        config: EngineConfig,
        acceptance: Callable[[RoundInputs, AnyTree, Verified], Verified] | None = None,
    ):
        """`drafters`: by name. `acceptance`: as of `Engine`. Raises UserError."""
        self.target, self.acceptance, self.config = target, acceptance, config
        width = target.embedding.shape[1]
        needs = [drafter.needs for drafter in drafters.values()]
        divided = config.divide_sampling and not any(each.logits for each in needs)
        self.ranks = Ranks(target.together, target.device, divided=divided)
        self.drafters = Drafters(drafters, self.ranks, width)
        self.width = width * (1 + len(self.drafters.layers))  # S
        self.graphs: Graphs | None = None  # what is recorded; rounds that fit none run kernel by kernel
        layers = target.kv_layers
        joint = config.tree_attention == "joint"
        self.cache = PagedKV(layers.kv_shapes, 0, target.dtype, target.device, layers.given, joint=joint)
        self.ends: BlockEnds | None = None
        if config.prefix_cache:
            self.ends = BlockEnds(self.width, target.dtype, target.device)
        self.verification = Verification(config.drafting)
        self.times = StageTimes()
        self._root = chain(0).to(target.device)
        self.compiled: Forward | None = None  # the target's forward in rounds
        self._elements = _mean_elements(target)
        self.compiled_rows = 0  # tokens of the largest round: all compiled forwards use its number of threads
        self._plain = [name for name in ("attention", "linear") if getattr(config, name) == "plain"]

    @property
    def states(self) -> Forward:
        """The target's forward: tokens and positions int64 [A, T], attend -> [A, T, S]."""
        return self.target.states(self.drafters.layers)

    @property
    def stores(self) -> list[PagedKV | BlockEnds]:
        """The caches of target and drafter, and the hidden states at block ends: one entry per block each."""
        ends = [] if self.ends is None else [self.ends]
        return [self.cache, *self.drafters.caches, *self.drafters.block_states, *ends]

    def run(self, inputs: RoundInputs) -> tuple[Pending, RoundResult]:
        """One round. Returns the next round's pending tokens, and the results, without synchronising."""
        with self.resources(self.compiled_rows or len(inputs.pending.lengths) * inputs.plan.tree.num_nodes):
            return self.complete(inputs, self.draft(inputs))

    def complete(self, inputs: RoundInputs, drafted: Proposed) -> tuple[Pending, RoundResult]:
        """As `run`, of a round that is drafted."""
        with self.resources(self.compiled_rows or drafted.tokens.numel()):
            validated = self.validate(inputs, drafted)
            if (key := self._end_key(inputs)) is not None:
                return self._replay_end(inputs, drafted, key)
            verified = self.sample(inputs, drafted, validated.logits)
            return self.commit(inputs, drafted, validated, verified)

    def prefill(
        self, prefix: Prefix, texts: list[list[int]], before: torch.Tensor | None, seats: Seats
    ) -> tuple[torch.Tensor, dict[int, str]]:
        """Prefill texts, each after its prefix, into the caches of target and drafters.

        `before` [A, S]: the target's states at the prefixes' last tokens; None if every prefix is empty. `seats`: the
        rows' drafters. Returns the states at the texts' last tokens [A, S], and the rows whose drafter is at fault with
        the reason: their drafters' caches lack these texts.
        """
        with self.times.stage("prefill"), self.resources(len(texts) * max(map(len, texts))):
            hidden, reasons = prefill(self.states, self.cache, self.drafters, prefix, texts, before, seats)
            if self.ends is not None:
                self.ends.write(prefix, hidden)
            last = to_device([len(text) - 1 for text in texts], hidden.device)
            return hidden[torch.arange(len(texts), device=hidden.device), last], reasons

    def first_tokens(
        self,
        hidden: torch.Tensor,
        lengths: torch.Tensor,
        sampling: SamplingTensors,
        seeds: torch.Tensor,
        guidance: Guidance | None,
        adjustments: Adjustments | None,
        logprobs: LogprobRows | None,
    ) -> list[FirstToken]:
        """Sample the first tokens from the target's states at the prompts' last tokens [A, S].

        `lengths` int64 [A]: the positions of these last tokens; the rest as in `RoundInputs`. Synchronises with the
        device.
        """
        with self.times.stage("prefill"):
            own, coins = self.ranks.own, uniform(seeds, lengths, 1).squeeze(1)
            raw = self.ranks.logits(self.target.lm_head, last_states(hidden, self.target)).unsqueeze(1)
            root = torch.zeros_like(lengths).unsqueeze(1)  # [A, 1]: the one node of a tree without drafts
            logits = self._changed(raw, root, self._root, adjustments, guidance)
            tokens = sample(probabilities(logits, sampling.rows(own)).squeeze(1), own(coins))
            (tokens,) = self.ranks.all(len(hidden), tokens)
            copy = None if logprobs is None else logprobs.compute(raw, root, tokens.unsqueeze(1), self.ranks)
            return first_tokens(tokens.tolist(), copy)

    def _changed(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        tree: AnyTree,
        adjustments: Adjustments | None,
        guidance: Guidance | None,
    ) -> torch.Tensor:
        """The target's logits [R, N, V] as requests have them changed: adjusted, then restricted by grammars.

        tokens int64 [A, N]: the trees'.
        """
        if adjustments is not None:
            logits = adjustments.apply(logits, tokens, tree, self.ranks)
        return self._restricted(logits, tree, guidance)

    def _restricted(self, logits: torch.Tensor, tree: AnyTree, masks: NodeMasks | None) -> torch.Tensor:
        """Logits [R, N, V] without what grammars forbid."""
        return logits if masks is None else restrict(logits, self.ranks.own(masks.allowed(list(range(tree.num_nodes)))))

    def drafts(self, plan: TreePlan, pending: Pending) -> bool:
        """Whether drafters run in a round.

        A plain round does not need them. Their caches are brought up to date before the next tree, or when MAX_PENDING
        tokens are pending, so that one forward processes them at about the cost per token of a prefill.
        """
        catches_up = bool(self.drafters.caches) and pending.tokens.shape[1] >= MAX_PENDING
        return bool(self.drafters.by_name) and (plan.tree.num_nodes > 1 or catches_up)

    def draft(self, inputs: RoundInputs) -> Proposed:
        """A tree of tokens for each row; the pending token alone if no drafter runs."""
        if inputs.draft_prefix is None:
            assert isinstance(inputs.plan.tree, Tree)
            return Proposed(inputs.pending.last, None, inputs.plan.tree, [], None, {}, None)
        with self.times.stage("drafting"):
            guidance, round = inputs.guidance, self.draft_round(inputs)
            key = None if self.graphs is None else self.graphs.drafting_key(inputs)
            if self.graphs is not None and key is not None:
                drafted = self._proposed(inputs, self.graphs.propose(key, inputs), checks=True)
            else:
                # A graph is of a form of trees; with several drafters those that differ by row are recorded.
                drafted = self.drafters.propose(round, inputs.seats, by_row=self.graphs is not None)
            if guidance is not None and not self._knows_drafts(drafted):
                guidance.reset()
            return drafted

    def _knows_drafts(self, drafted: Proposed) -> bool:
        """Whether the drafts of which a drafter asked the grammars are surely these: not where it was asked for parts
        of the batch, is a user's, or is a rank's own, whose drafts may differ from rank 0's by rounding."""
        is_whole = [part.rows for part in drafted.parts] == [None]
        return is_whole and not self.drafters.are_checked and self.ranks.size == 1

    def draft_round(self, inputs: RoundInputs) -> DraftRound:
        """What drafters are given in a round in which they run."""
        assert inputs.draft_prefix is not None
        return DraftRound(
            inputs.plan,
            inputs.prefix,
            inputs.draft_prefix,
            inputs.pending,
            inputs.choice,
            self.target.identity.vocab_size,
            inputs.texts,
            self.cache,
        )

    def _proposed(self, inputs: RoundInputs, drafted: Drafted, checks: bool) -> Proposed:
        """The drafts of the only drafter, or of none. `checks`: they are checked, where that drafter is to be."""
        drafter, wrong, parts = self.drafters.only, None, list[Part]()
        tree = inputs.plan.tree if drafted.trees is None else drafted.trees
        assert isinstance(tree, AnyTree)
        if drafter is not None and inputs.draft_prefix is not None:
            round = self.draft_round(inputs)
            if checks and drafter.needs.checks:
                drafted, wrong = checked_drafts(drafter, drafted, round)
            parts = [Part(drafter, None, round, drafted)]
        return Proposed(drafted.tokens, drafted.q, tree, parts, wrong, {}, wrong)

    def propose(self, round: DraftRound) -> Drafted:
        """The only drafter's trees, rank 0's on all ranks, without a wait for the device. To be recorded. Raises
        UserError as `checked_form` does."""
        only = self.drafters.only
        assert only is not None
        drafted = only.propose(round)
        if only.needs.checks:
            checked_form(only, drafted, round)
        agreed, trees = self.ranks.agreed, drafted.trees
        q = None if drafted.q is None else agreed(drafted.q)
        if trees is not None and self.ranks.group is not None:
            trees = RowTrees(agreed(trees.parents), agreed(trees.real.long()).bool(), trees.max_depth)
        return drafted._replace(tokens=agreed(drafted.tokens), q=q, trees=trees)

    def validate(self, inputs: RoundInputs, drafted: Proposed) -> Validated:
        """The target's forward of the drafted trees."""
        with self.times.stage("validation"):
            if inputs.guidance is not None:  # before the launch: the host walks the trees while the target runs
                inputs.guidance.set_trees(drafted.tokens, drafted.tree)
            key = None if self.graphs is None else self.graphs.validation_key(inputs, drafted.tree)
            ends_recorded = self._end_key(inputs) is not None
            # A rank's share of the logits is one of the padded batch, which the host does not divide.
            if self.graphs is None or key is None or (self.ranks.divided and not ends_recorded):
                if (computed := self._computed(drafted)) is not None:
                    plan = drafted.parts[0].round.plan  # the drafter's own, where the engine has several
                    given = (self.cache, inputs.prefix, plan, drafted.tokens, self.ranks)
                    return Validated(*validate_rest(self.target, computed, *given))
                return self.forward(inputs.prefix, drafted.tree, drafted.tokens)
            validated = self.graphs.validate(key, inputs, drafted.tokens, drafted.tree)
            if ends_recorded:
                return validated
            # The drafter may use the hidden states rounds later, when the graph has run again.
            return validated._replace(hidden=validated.hidden.clone())

    def _computed(self, drafted: Proposed) -> Computed | None:
        """What drafting has computed of the target's forward, where that can be gone on from: not in a compiled
        forward, which is whole; nor by ranks, whose own drafts may be others than rank 0's; nor with states of layers,
        which would be those of nodes in part."""
        if self.compiled is not None or self.ranks.group is not None or self.drafters.layers:
            return None
        only = drafted.parts[0] if len(drafted.parts) == 1 and drafted.parts[0].rows is None else None
        return None if only is None else only.drafted.computed

    def forward(self, prefix: Prefix, tree: AnyTree, tokens: torch.Tensor) -> Validated:
        """As `validate`, kernel by kernel and without a wait for the device."""
        forward = self.compiled or self.states
        return Validated(*validate(self.target, forward, self.cache, prefix, tree, tokens, self.ranks))

    def sample(self, inputs: RoundInputs, drafted: Proposed, logits: torch.Tensor) -> Verified:
        """Verify the drafts: the nodes that the target accepts, and the token after each row's last accepted node."""
        with self.times.stage("sampling"):
            logits = self._changed(logits, drafted.tokens, drafted.tree, inputs.adjustments, inputs.guidance)
            if inputs.guidance is not None:
                inputs.guidance.rewind()
            return self.verify(inputs, drafted, logits)

    def verify(self, inputs: RoundInputs, drafted: Proposed, logits: torch.Tensor) -> Verified:
        """As `sample`, by the logits of the tokens that are allowed, without a wait for the device."""
        own, (offered, q) = self.ranks.own, drafted.offered
        tree, tokens = drafted.tree.rows(own), own(offered)
        if inputs.sampling.all_greedy:
            verified = verify_chosen(tree, tokens, logits.argmax(-1))
        else:
            sampling, seeds, lengths = inputs.sampling.rows(own), own(inputs.seeds), own(inputs.prefix.lengths)
            drawn = [None if x is None else own(x) for x in (inputs.draws, q)]
            verified = self.verification(tree, tokens, logits, sampling, seeds, lengths, *drawn)
        if inputs.relaxed is not None:
            verified = inputs.relaxed.rows(own).verify(verified, tree, tokens, logits)
        verified = Verified(*self.ranks.all(len(drafted.tokens), *verified))
        if self.acceptance is None:
            return verified
        node, token = self.acceptance(inputs, drafted.tree, verified)
        return Verified(node if drafted.undrafted is None else node.masked_fill(drafted.undrafted, 0), token)

    def commit(
        self, inputs: RoundInputs, drafted: Proposed, validated: Validated, verified: Verified
    ) -> tuple[Pending, RoundResult]:
        """Commit the accepted paths to the caches. Returns the next round's pending tokens, and the round's results."""
        with self.times.stage("bookkeeping"):
            committed = self._kept(inputs, drafted, validated, verified)
            pending, at_fault, reasons, logprobs = committed, drafted.wrong, drafted.reasons, None
            if inputs.draft_prefix is not None:
                outcome = self._outcome(drafted, validated, verified, committed)
                pending, rows, more = self.drafters.rewind(drafted.parts, outcome)
                at_fault, reasons = self._at_fault(at_fault, rows, len(inputs.seats)), reasons | more
            if inputs.logprobs is not None:
                path = drafted.tree.paths_to(verified.node)
                logprobs = inputs.logprobs.compute(validated.logits, path, committed.tokens, self.ranks)
            report, row_depth = report_of(committed), _row_depth(drafted.tree)
            return self._results(inputs, pending, report, row_depth, at_fault, reasons, logprobs)

    def finish(
        self,
        inputs: RoundInputs,
        drafted: Drafted,
        validated: Validated,
        masks: NodeMasks | None,
        undrafted: torch.Tensor | None,
    ) -> tuple[Pending, torch.Tensor, torch.Tensor | None]:
        """`sample` and `commit` up to where the host takes part: what the drafter may process next of the round's
        tokens, `report_of` them, and how deep each row's tree is, None where all have the plan's.

        `masks`: of the rows' grammars. `undrafted`: as of `Proposed`. To be recorded, with the only drafter or none."""
        proposed = self._proposed(inputs, drafted, checks=False)._replace(undrafted=undrafted)
        verified = self.verify(inputs, proposed, self._restricted(validated.logits, proposed.tree, masks))
        committed = pending = self._kept(inputs, proposed, validated, verified)
        for part in proposed.parts:
            outcome = self._outcome(proposed, validated, verified, committed)
            pending = part.drafter.rewind(part.round, part.drafted, outcome)
            if part.drafter.needs.checks:
                pending = checked_pending(part.drafter, pending, committed)
        return pending, report_of(committed), _row_depth(proposed.tree)

    def _kept(self, inputs: RoundInputs, drafted: Proposed, validated: Validated, verified: Verified) -> Pending:
        """The round's tokens, which are in the target's cache now but for the last one."""
        prefix, (hidden, _, suffix) = inputs.prefix, validated
        committed = commit(self.cache, prefix, drafted.tree, suffix, hidden, drafted.tokens, verified)
        if self.ends is not None:
            self.ends.write(prefix, committed.hidden)
        return committed

    def _outcome(self, drafted: Proposed, validated: Validated, verified: Verified, committed: Pending) -> Outcome:
        logits = validated.logits if self.drafters.need_logits else None
        return Outcome(drafted.tree, verified.node, committed, validated.hidden, logits)

    def _at_fault(self, known: torch.Tensor | None, rows: list[int], count: int) -> torch.Tensor | None:
        """bool [A]: rows whose drafter is at fault, by rank 0; None where no drafter is checked."""
        if not self.drafters.are_checked or (known is None and not rows and self.ranks.group is None):
            return known
        device = self.target.device
        known = torch.zeros(count, dtype=torch.bool, device=device) if known is None else known
        if rows:
            known[rows] = True
        return self.ranks.agreed(known.long()).bool()

    def _results(
        self,
        inputs: RoundInputs,
        pending: Pending,
        report: torch.Tensor,
        row_depth: torch.Tensor | None,
        at_fault: torch.Tensor | None = None,
        reasons: dict[int, str] | None = None,
        logprobs: LogprobCopy | None = None,
    ) -> tuple[Pending, RoundResult]:
        """The next round's pending tokens, and the round's results."""
        if inputs.draft_prefix is None and any(map(self.drafters.caching, inputs.seats)):
            pending = inputs.pending.append_token(pending)
        reasons = reasons or {}
        undrafted = [row for row, name in enumerate(inputs.seats) if name is None or row in reasons]
        depth = inputs.plan.tree.max_depth
        result = RoundResult(depth, report, pending.counts, row_depth, at_fault, reasons, undrafted, logprobs)
        return pending, result

    def _end_key(self, inputs: RoundInputs) -> EndKey | None:
        """The recording of a round's end; None where there is none."""
        return None if self.graphs is None or not inputs.has_plain_end else self.graphs.end_key(inputs)

    def _replay_end(self, inputs: RoundInputs, drafted: Proposed, key: EndKey) -> tuple[Pending, RoundResult]:
        assert self.graphs is not None
        with self.times.stage("sampling"):
            pending, report, row_depth = self.graphs.finish(key, inputs, drafted.undrafted)
            if inputs.guidance is not None:
                inputs.guidance.rewind()
        with self.times.stage("bookkeeping"):
            return self._results(inputs, pending, report, row_depth, drafted.wrong)

    @contextmanager
    def resources(self, rows: int) -> Iterator[None]:
        """Number of threads and choice of kernels for forwards of `rows` tokens."""
        with kernels.plain(*self._plain), threads_for(rows, self._elements):
            yield


def _row_depth(tree: AnyTree) -> torch.Tensor | None:
    """int64 [A]: the depth of each row's tree; None where all are alike."""
    return tree.row_depth if isinstance(tree, RowTrees) else None


def _mean_elements(target: Target) -> float:
    """Mean number of elements of the target's matrices; infinite on a GPU, which uses no CPU threads."""
    sizes = [math.prod(weight.shape[-2:]) for weight in target.model.parameters() if weight.ndim > 1]
    return sum(sizes) / len(sizes) if target.device.type == "cpu" else math.inf
