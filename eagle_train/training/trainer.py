"""The training loop: `forward_backward_step`, `train_step`, `train`. Online distillation after the paper, section 2.1.

The frozen target runs on each packed batch, and the draft learns its hidden states and logits at once; nothing is
stored. Knows nothing of files of data, of templates, or of how the draft is used. DESIGN sections 3.1, 3.2.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch

from eagle_train.corpus.stream import TENSORS, Batch, Stream
from eagle_train.distributed import ALONE, CommonError, World
from eagle_train.errors import UserError, check
from eagle_train.models.draft import Draft, DraftConfig, Head, shift_hidden
from eagle_train.models.target import LMHead, Target
from eagle_train.ops.attention import packed_attention
from eagle_train.progress import Progress, progress
from eagle_train.settings import build
from eagle_train.training import checkpoint
from eagle_train.training.backend import Backend
from eagle_train.training.budget import Budget
from eagle_train.training.lookahead import Lookahead
from eagle_train.training.losses import LOGITS_LOSSES, LossSums, distillation_loss
from eagle_train.training.metrics import Meter, MetricsLog, NoTracker, Record, summary
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.unroll import chain_acceptance, unroll

CHOICE_ROWS = 1024  # rows whose logits exist at once when a token is chosen for each
NORMS = 64  # of the last steps, to which a runaway gradient is compared
FEWEST_NORMS = 4  # from which a usual one can be told: one that is odd does not move the median of four


@dataclass
class TrainConfig:
    """The group `train`. One of `steps` and `minutes` says how long the run is; minutes are those of training, and a
    resumed run has what is left of them. `save_every` and `eval_every` are in steps; 0 is at the end only. `keep` 0
    keeps all. A step that saves measures as well: the best checkpoint is kept by its own held-out score.

    Beyond the paper: `l1_weight_end` is what `l1_weight` has become by the last step, falling or rising evenly; null
    leaves it. `logits_loss`: ce, or lk (losses.py). `unroll`: how many passes the draft learns from, each after the
    first on its own features of the pass before (HASS, arXiv 2408.15766); the loss is their mean. `feature_noise`:
    uniform noise, up to so much, on every number of the hidden states that the draft is fed (EAGLE, arXiv 2401.15077).

    `init_from`: the artifact of a draft for the same target, whose weights the first step starts from; None for fresh
    ones. Resuming goes on from the run's own checkpoint.

    A step whose gradient is not finite, or longer than `runaway` times the median of the last NORMS, is skipped;
    `max_skipped` such steps end the run. At the beginning the median is of FEWEST_NORMS or more.
    """

    steps: int | None = None
    minutes: float | None = None
    init_from: str | None = None
    micro_batch_rows: int = 1
    l1_weight: float = 1.0
    l1_weight_end: float | None = None
    ce_weight: float = 0.1
    logits_loss: str = "ce"
    unroll: int = 1
    feature_noise: float = 0.0
    save_every: int = 0
    keep: int = 3
    resume: bool = True
    eval_every: int = 0
    eval_batches: int = 8
    eval_depth: int = 3
    runaway: float = 100.0
    max_skipped: int = 20

    def __post_init__(self) -> None:
        both = f"train.steps={self.steps} and train.minutes={self.minutes}"
        check((self.steps is None) != (self.minutes is None), f"{both}: give one of them, and the other as null")
        check(self.steps is None or self.steps >= 1, f"train.steps={self.steps}: must be at least 1")
        check(self.minutes is None or self.minutes > 0, f"train.minutes={self.minutes}: must be above 0")
        for field in ("micro_batch_rows", "unroll", "eval_batches", "eval_depth"):
            check(getattr(self, field) >= 1, f"train.{field}={getattr(self, field)}: must be at least 1")
        for field in ("l1_weight", "ce_weight", "save_every", "keep", "eval_every", "max_skipped", "feature_noise"):
            check(getattr(self, field) >= 0, f"train.{field}={getattr(self, field)}: must be 0 or more")
        end = self.l1_weight_end
        check(end is None or end >= 0, f"train.l1_weight_end={end}: must be null, 0 or more")
        kinds = " or ".join(LOGITS_LOSSES)
        check(self.logits_loss in LOGITS_LOSSES, f"train.logits_loss={self.logits_loss}: must be {kinds}")
        check(self.runaway > 1, f"train.runaway={self.runaway}: must be above 1")

    def l1_weight_at(self, course: float) -> float:
        """The weight of smooth-L1, from course 0 in the first step to 1 in the last."""
        end = self.l1_weight if self.l1_weight_end is None else self.l1_weight_end
        return self.l1_weight + (end - self.l1_weight) * course


class Interrupted(Exception):
    """The run was told to stop, and the checkpoint of its last whole step is written."""


def accumulation(optim: OptimConfig, train: TrainConfig, row_tokens: int, ranks: int = 1) -> int:
    """Micro-batches of a rank in an optimiser step. Raises UserError where they do not make up the token budget."""
    micro = train.micro_batch_rows * row_tokens * ranks
    count, rest = divmod(optim.tokens_per_step, micro)
    on_ranks = f" * {ranks} processes" if ranks > 1 else ""
    check(
        rest == 0 and count > 0,
        f"optim.tokens_per_step={optim.tokens_per_step}: must be a multiple of train.micro_batch_rows * "
        f"data.row_tokens{on_ranks} = {micro}; {max(count, 1) * micro} would do",
    )
    return count


class Trainer:
    """One run: a draft, its frozen target, a stream of batches, and what is written to `directory`."""

    def __init__(
        self,
        train: TrainConfig,
        optim: OptimConfig,
        target: Target,
        draft: Draft,
        backend: Backend,
        stream: Stream,
        heldout: list[Batch],
        directory: Path,
        world: World = ALONE,
    ):
        self.config, self.optim = train, optim
        self.target, self.draft, self.stream, self.heldout = target, draft, stream, heldout
        self.backend, self.world, self.directory = backend, world, directory
        self.head = Head(draft, target.lm_head)
        self.budget = Budget(train.steps, train.minutes)
        self.accumulation = accumulation(optim, train, stream.config.row_tokens, world.size)
        self.saver = checkpoint.Saver(world)
        self.step = self.tokens = self.skipped = 0
        self.micro_batch = 0  # of the step
        self.norms: list[float] = []
        self.stop_asked: Callable[[], bool] = lambda: False  # if it says so on any rank, the run is left
        self.voted: Callable[[], bool] = lambda: False  # what the last vote on it came to
        self.stream_state: dict[str, Any] = {}  # after the last whole step
        self.saved = 0  # the last step with a checkpoint

    def __str__(self) -> str:
        size = self.draft.num_parameters / 1e6
        return f"{size:.1f} M draft parameters for {self.target.name}, {self.budget}, from step {self.step} on"

    def forward_backward_step(self, batch: Batch, hidden: torch.Tensor, scale: float) -> LossSums:
        """One micro-batch's sums; its gradients, multiplied by `scale`, are added to the draft's.

        `hidden` [B, T, H] are the target's hidden states. The loss is that of all passes, the rest the first one's.
        """
        config, positions = self.config, batch.positions
        with self.autocast():
            previous = shift_hidden(hidden, positions)
            if config.feature_noise:
                previous = previous + self.noise_like(previous)
            embeddings = self.target.embed(batch.tokens)
            passes = unroll(self.backend.draft, embeddings, previous, positions, batch.lengths, config.unroll)
        sums = []
        for depth, predicted in enumerate(passes):
            rows = batch.supervised & (positions >= self.draft.config.first_slot + depth)  # before, no chain is so deep
            sums.append(
                distillation_loss(
                    predicted[rows],
                    hidden[rows],
                    self.head.lm_head,
                    l1_weight=config.l1_weight_at(self.budget.course(self.step + 1)),
                    ce_weight=config.ce_weight,
                    logits_loss=config.logits_loss,
                    scale=scale / len(passes),
                    share=self.ahead.share,
                )
            )
        loss = torch.stack([each.loss for each in sums]).sum()
        self.backend.backward(loss)
        return dataclasses.replace(sums[0], loss=loss.detach())

    def noise_like(self, states: torch.Tensor) -> torch.Tensor:
        """Another for each rank, step and micro-batch, the same when a run is resumed."""
        place = (torch.initial_seed(), self.step, self.micro_batch, self.world.rank)
        generator = torch.Generator(states.device).manual_seed(hash(place) % 2**63)
        size = self.config.feature_noise
        return torch.empty_like(states).uniform_(-size, size, generator=generator)

    @cached_property
    def ahead(self) -> Lookahead:
        """The stream's batches with their hidden states, from where the stream stands when training begins."""
        steps = None if self.config.steps is None else self.config.steps - self.step
        beside = self.world.share == 1
        given = self.stream, self.accumulation, steps, self.placed, self.hidden_states, self.target.device
        return Lookahead(*given, beside=beside)

    def train_step(self) -> Record | None:
        """One optimiser step over its micro-batches; each supervised slot of the step weighs the same. DESIGN 3.2.

        None where the run is left on the way: all is then as it was before the step, but for what was drawn.
        """
        micro_batches = self.ahead.step()
        own = sum(int(batch.supervised.sum()) for batch in micro_batches)
        supervised = self.begin(own)
        scale = self.backend.divisor / max(supervised, 1)
        meter = Meter()
        for number, (batch, hidden) in enumerate(self.ahead.with_hidden_states(micro_batches), 1):
            self.micro_batch = number
            self.backend.begin(last=number == self.accumulation)
            sums = self.forward_backward_step(batch, hidden, scale)
            meter.add(sums.rows, loss=sums.loss / scale, l1=sums.l1, ce=sums.ce, top1_agreement=sums.agree)
            if number < self.accumulation and self.is_stopped():
                self.drop(batch, hidden)
                return None
        norm = self.backend.clip().item()
        self.step += 1
        lr = self.optim.lr_at(self.step, self.budget.used)
        if self.is_sound(norm):
            self.backend.step(lr)
        else:
            self.backend.skip()
        self.tokens += sum(batch.tokens.numel() for batch in micro_batches) * self.world.size
        self.stream_state = self.ahead.state
        return {
            **meter.means(self.world),
            "grad_norm": norm,
            "lr": lr,
            "supervised": supervised,
            "skipped": self.skipped,
        }

    def is_stopped(self) -> bool:
        """Whether the run is to be left here, the same on every rank. To be asked after every micro-batch.

        Ranks vote and go on; what a vote came to is read at the next, so that none waits for those that are less than a
        micro-batch behind.
        """
        before, self.voted = self.voted, self.world.vote(self.stop_asked())
        return before() if self.world.size > 1 else self.voted()

    def drop(self, batch: Batch, hidden: torch.Tensor) -> None:
        """Forget the gradients of a part of a step. Backends can forget a whole one's: a micro-batch that counts for
        nothing makes it one."""
        self.backend.begin(last=True)
        self.forward_backward_step(batch, hidden, scale=0.0)
        self.backend.skip()

    def begin(self, supervised: int) -> int:
        """A step begins, at the first rank's time. Returns the supervised slots of all ranks."""
        milliseconds = round(1000 * self.budget.seconds) if self.world.is_main else 0
        own = torch.tensor([supervised, milliseconds], dtype=torch.int64, device=self.target.device)
        supervised, milliseconds = self.world.sum(own).tolist()
        self.budget.begin(self.step, milliseconds / 1000)
        return supervised

    def is_sound(self, norm: float) -> bool:
        """Whether a step with a gradient of this norm is to be made. Raises UserError where too many were not."""
        usual = statistics.median(self.norms) if len(self.norms) >= FEWEST_NORMS else math.inf
        if math.isfinite(norm) and norm <= self.config.runaway * usual:
            if norm > 0:  # else there was nothing to learn from, and any other would be longer
                self.norms = [*self.norms[1 - NORMS :], norm]
            return True
        self.skipped += 1
        check(
            self.skipped <= self.config.max_skipped,
            f"train.max_skipped={self.config.max_skipped}: step {self.step} is one more with an unsound gradient (its "
            f"norm is {norm:.3g}); lower optim.lr or look at the data",
        )
        return False

    def train(self, log: MetricsLog | NoTracker) -> Record:
        """All steps from where the run stands. Returns the last held-out measurements.

        Raises Interrupted where `stop_asked` on the way: after a micro-batch, or with several ranks after the next.
        """
        if self.budget.is_over(self.step):  # a finished run: nothing is to be drawn
            return {}
        self.budget.start()
        bar = self.progress()
        heldout: Record = {}
        while not self.budget.is_last:
            started, tokens, waited = time.perf_counter(), self.tokens, self.ahead.waited
            try:
                record = self.train_step()
            except CommonError as error:
                self.keep()
                raise CommonError(f"{error}; {self.budget.done(self.step)} are done and kept") from error
            if record is None:
                self.budget.drop()
                self.interrupt()
            self.check_learnt()
            seconds = time.perf_counter() - started
            record |= {"tokens": self.tokens, "tokens_per_s": (self.tokens - tokens) / seconds}
            record["data_wait"] = (self.ahead.waited - waited) / seconds
            measured: Record = {}
            if self.is_due(self.config.eval_every) or self.is_due(self.config.save_every):  # each is kept by its score
                heldout = measured = self.evaluate()
                record |= {f"heldout_{name}": value for name, value in heldout.items()}
            log.log(self.step, record)
            self.show(bar, summary(record["loss"], record["tokens_per_s"]))
            if self.is_due(self.config.save_every):
                self.save(measured.get("simulated_tpc"))
            if self.is_stopped() and not self.budget.is_last:
                self.interrupt()
        self.saver.wait()
        self.ahead.close()
        bar.close()
        return heldout

    def check_learnt(self) -> None:
        """Raise UserError after a last step where no step at all was made."""
        check(
            not self.budget.is_last or self.skipped < self.step,
            f"all {self.step} steps were skipped, for their gradients were not finite or too long, and nothing was "
            f"learnt; is a weight of target.path={self.target.name} not finite, or optim.lr={self.optim.lr} too high?",
        )

    def progress(self) -> Progress:
        """A bar of the budget: of steps, or of seconds."""
        minutes, shown = self.config.minutes, self.world.is_main
        if minutes is None:
            return progress(self.config.steps, "step", self.step, shown)
        return progress(round(60 * minutes), "second", round(self.budget.before), shown)

    def show(self, bar: Progress, note: str) -> None:
        if self.config.minutes is None:
            bar.update(self.step, note)
        else:
            bar.update(min(round(60 * self.config.minutes), round(self.budget.seconds)), f"step {self.step}, {note}")

    def keep(self) -> None:
        """See that there is a checkpoint of the last whole step; at the very beginning it takes none."""
        if self.step > self.saved:
            self.save()
        self.saver.wait()

    def interrupt(self) -> NoReturn:
        """Raise Interrupted, when what was learnt is kept."""
        self.keep()
        again = "the same command" if self.config.resume else "the same command with train.resume=true"
        raise Interrupted(f"told to stop, {self.budget.done(self.step)} done: {again} goes on")

    def is_due(self, every: int) -> bool:
        return self.budget.is_last or (every > 0 and self.step % every == 0)

    @torch.no_grad()
    def evaluate(self) -> Record:
        """Losses, acceptance by depth and simulated TPC on held-out rows, the draft unrolled on its own features.

        Depths that no held-out document is long enough for are left out.
        """
        meter = Meter()
        batches = self.heldout
        accepted = chains = torch.zeros(self.config.eval_depth, dtype=torch.float64, device=self.target.device)
        for start in range(0, len(batches), self.world.size):  # a rank without a batch runs the first, uncounted
            number = start + self.world.rank
            counts = number < len(batches)
            batch = self.placed(batches[number] if counts else batches[0])
            hidden, positions = self.hidden_states(batch), batch.positions
            with self.autocast():
                previous = shift_hidden(hidden, positions)
                embeddings = self.target.embed(batch.tokens)
                states = unroll(
                    self.backend.draft, embeddings, previous, positions, batch.lengths, self.config.eval_depth
                )
            rows = batch.supervised & counts
            sums = distillation_loss(states[0][rows], hidden[rows], self.head.lm_head)
            meter.add(sums.rows, l1=sums.l1, ce=sums.ce, top1_agreement=sums.agree)
            best = self.choose(hidden, self.target.lm_head)
            held, possible = chain_acceptance(states, best, self.drafted, rows, positions)
            accepted, chains = accepted + held, chains + possible
        if not batches:
            return {}
        accepted, chains = self.world.sum(accepted), self.world.sum(chains)
        by_depth = (accepted / chains)[chains > 0].tolist()
        return {**meter.means(self.world), "acceptance_per_depth": by_depth, "simulated_tpc": 1 + sum(by_depth)}

    def placed(self, batch: Batch) -> Batch:
        """The batch on the target's device."""
        tensors = {name: getattr(batch, name).to(self.target.device, non_blocking=True) for name in TENSORS}
        return dataclasses.replace(batch, **tensors)

    def hidden_states(self, batch: Batch) -> torch.Tensor:
        """The target's hidden states [B, T, H]."""
        return self.target.own_hidden_states(batch.tokens, batch.positions, packed_attention(batch.lengths))

    def choose(self, hidden: torch.Tensor, lm_head: LMHead) -> torch.Tensor:
        """The most likely of the head's tokens [B, T] for hidden states [B, T, H]."""
        rows = hidden.flatten(0, 1).split(CHOICE_ROWS)
        return torch.cat([lm_head(chunk).argmax(-1) for chunk in rows]).view(hidden.shape[:2])

    def drafted(self, hidden: torch.Tensor) -> torch.Tensor:
        """The token [B, T] that the draft would propose for its hidden states [B, T, H]."""
        return self.head.tokens(self.choose(hidden, self.head.lm_head))

    def autocast(self) -> torch.autocast:
        """The draft's weights stay fp32; it computes in the target's precision."""
        low = self.target.dtype != torch.float32
        return torch.autocast(self.target.device.type, dtype=self.target.dtype if low else None, enabled=low)

    def save(self, score: float | None = None) -> None:
        """Write a checkpoint in the background: draft, optimiser, data position, random state."""
        state = {
            "stream": self.stream_state,
            "random": checkpoint.random_state(),
            "tokens": self.tokens,
            "seconds": self.budget.seconds,
            "finished": self.budget.is_last,
            "skipped": self.skipped,
            "norms": self.norms,
            "target": dataclasses.asdict(self.target.identity),
        }
        parts = checkpoint.Parts.of(*self.backend.state(), self.world)
        config = dataclasses.asdict(self.draft.config)
        self.saver.save(self.directory, self.step, parts, config, state, keep=self.config.keep, score=score)
        self.saved = self.step

    def resume(self) -> bool:
        """Go on from the newest whole checkpoint in the directory, if there is one.

        Raises UserError where it is another run's, or of more steps than this one is to have.
        """
        path = checkpoint.latest(self.directory, self.world.exchange, self.world.rank)
        if path is None:
            return False
        found = checkpoint.load(path, self.world.exchange, self.world.rank)
        self.check_budget(path, found.step, found.state["seconds"])
        trained = build(DraftConfig, found.config, f"{path}: draft")
        for name, value in dataclasses.asdict(self.draft.config).items():
            then = getattr(trained, name)
            mine, theirs = (f"={value}", then) if name != "vocabulary" else ("", "other tokens")
            check(then == value, f"draft.{name}{mine}: {path} was trained with {theirs}; resume with the same draft")
        made_for = found.state["target"]["fingerprint"]
        if made_for != self.target.identity.fingerprint:
            raise UserError(f"target.path={self.target.name}: {path} was trained for {found.state['target']['name']}")
        names, optimizer = found.names, f"optim.name={self.optim.name}"
        missing = next((name for name in self.backend.state()[1] if name not in names), None)
        check(missing is None, f"{optimizer}: {path} was trained with another, without {missing}; resume with the same")
        self.backend.restore(found.read_into)
        self.stream.load_state_dict(found.state["stream"])
        checkpoint.set_random_state(found.state["random"])
        self.step, self.saved, self.tokens = found.step, found.step, found.state["tokens"]
        self.budget.before, self.budget.finished = found.state["seconds"], found.state["finished"]
        self.skipped, self.norms = found.state["skipped"], found.state["norms"]
        return True

    def check_budget(self, path: Path, step: int, seconds: float) -> None:
        """Raise UserError where a checkpoint has used more than the run is to have."""
        steps, minutes = self.config.steps, self.config.minutes
        check(
            steps is None or step <= steps,
            f"train.steps={steps}: {path} has made {step} already; give as many or more",
        )
        check(
            minutes is None or seconds <= 60 * minutes,
            f"train.minutes={minutes}: {path} has used {seconds / 60:.1f} already; give as many or more",
        )
