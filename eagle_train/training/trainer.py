"""The training loop: `forward_backward_step`, `train_step`, `train`. Online distillation after the paper, section 2.1.

The frozen target runs on each packed batch, and the draft learns its hidden states and logits at once; nothing is
stored. Or its states were stored before, and are read (target=cached). Knows nothing of data files, of chat templates,
or of how the draft is used. DESIGN sections 3.1, 3.2.

Shapes: B rows, T tokens of a packed row, H hidden.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch

from eagle_train.corpus.stream import Batch
from eagle_train.distributed import CommonError
from eagle_train.drafts import Draft, Head, Lesson, LossSums, TargetStates
from eagle_train.drafts.kind import Rows
from eagle_train.errors import check
from eagle_train.models.target import TargetEnds
from eagle_train.profiling import stage
from eagle_train.progress import Progress, progress
from eagle_train.training.backend import Backend
from eagle_train.training.budget import Budget
from eagle_train.training.checkpoint.format import RankTensors
from eagle_train.training.checkpoint.store import CheckpointStore
from eagle_train.training.evaluate import measure_heldout
from eagle_train.training.lookahead import Lookahead
from eagle_train.training.metrics import Meter, MetricsLog, NoTracker, Record, summary
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.resume import check_budget, check_same_run
from eagle_train.training.runaway import appended, is_sound
from eagle_train.training.state import TrainState, set_random_state
from eagle_train.training.target_pass import Placed, autocast, casts_kept, unread
from eagle_train.training.train_config import TrainConfig

_POLL_S = 1.0  # seconds between two looks for data, and for who wants the run to stop


class Interrupted(Exception):
    """The run was asked to stop, and the checkpoint of its last whole step is written."""


class Trainer:
    """One rank's part of a run: a draft, its frozen target, a stream of batches, and the checkpoints it writes.

    `state` is what the run has come to so far. `stop_asked`: polled after every micro-batch, and while data is waited
    for; if it is true on any rank, all ranks leave the run. `around_step`: entered around each step of `train`
    (step_profile.py). `micro_batch`: the current one of the current step, from 1.
    """

    def __init__(
        self,
        train: TrainConfig,
        optim: OptimConfig,
        target: TargetEnds,
        draft: Draft,
        backend: Backend,
        lookahead: Lookahead,
        heldout: list[Batch],
        store: CheckpointStore,
    ):
        """`draft` is fp32 and on the target's device, `backend` is made from it (`parallelize.prepare`)."""
        self.config, self.optim = train, optim
        self.target, self.draft, self.backend = target, draft, backend
        self.lookahead, self.heldout = lookahead, heldout
        self.store, self.directory, self.world = store, store.directory, store.world
        self.head = Head(draft, target.lm_head)
        self.budget = Budget(train.steps, train.minutes)
        self.state = TrainState()
        self.micro_batch = 0
        self.stop_asked: Callable[[], bool] = lambda: False
        self.around_step: Callable[[], AbstractContextManager[None]] = nullcontext
        self._vote: Callable[[], bool] = lambda: False  # the result of the ranks' last vote on it
        self._saved_step = 0  # the last one with a checkpoint
        self._saved_score: float | None = None  # of that one

    def __str__(self) -> str:
        said, step = f"{self.draft.num_parameters / 1e6:.1f} M draft parameters for {self.target.name}", self.state.step
        if self.budget.is_over(step):
            return f"{said}: the run is complete, {self.budget.done(step)}; a longer one needs more steps or minutes"
        return f"{said}, {self.budget}, from step {step} on"

    def forward_backward_step(self, batch: Placed, states: TargetStates, scale: float) -> LossSums:
        """Add the gradients of one micro-batch, multiplied by `scale`, to the draft's. Returns the micro-batch's sums.

        `states` are the target's, in its dtype. What is learnt from is the draft's own: its passes, and the loss over
        all of them; the other sums are those of the first. The host waits for nothing that a device computes.
        """
        with autocast(self.target):
            embeddings = self.target.embed(batch.tokens)
            rows = Rows(embeddings, states, batch.positions, batch.lengths, self.target.embed, self._with_noise)
            passes = self.draft.unrolled(self.backend.draft, rows, len(batch.slots))
        with stage("loss"):
            sums = self.draft.losses(passes, batch.slots, states.hidden, self.head, self._lesson(), scale)
        self.backend.backward(sums.loss)
        return dataclasses.replace(sums, loss=sums.loss.detach())

    def _with_noise(self, fed: torch.Tensor) -> torch.Tensor:
        """What slots are fed of the target's states, with `feature_noise`."""
        if not self.config.feature_noise:
            return fed
        place = (self.state.step, self.micro_batch, self.world.rank)
        return fed + feature_noise(fed, self.config.feature_noise, *place)

    def _lesson(self) -> Lesson:
        """What the loss of the current step is like."""
        config = self.config
        weight = config.l1_weight_at(self.budget.progress_at(self.state.step + 1))
        return Lesson(weight, config.ce_weight, config.logits_loss, self.lookahead.run_parallel)

    def train_step(self) -> Record | None:
        """One optimiser step over its micro-batches; each supervised slot of the step has the same weight. DESIGN 3.2.

        The look-ahead must be started. Returns the step's record, or None if the run was left in it, or before it: the
        weights and the state are then as before the step, and so they are where it raises CommonError.
        """
        with stage("data"):
            supervised = self._begin_step()
            if supervised is None:
                return None
            micro_batches = self.lookahead.step()
        with casts_kept(self.target.device):
            meter = self._accumulate(micro_batches, self.backend.divisor / max(supervised, 1))
        if meter is None:
            return None
        with stage("optimiser"):
            norm, lr = self._update_weights()
        self.state.tokens += sum(batch.tokens.numel() for batch in micro_batches) * self.world.size
        self.state.stream = self.lookahead.state
        return {
            **meter.means(self.world),
            "grad_norm": norm,
            "lr": lr,
            "supervised": supervised,
            "skipped": self.state.skipped,
        }

    def _accumulate(self, micro_batches: list[Placed], scale: float) -> Meter | None:
        """Add up a step's gradients, each multiplied by `scale`. Returns its sums, or None where the run was left.

        Raises CommonError, with the step forgotten, where a rank could not read the target's states of it.
        """
        meter, fault = Meter(), None
        for number, (batch, states) in enumerate(self.lookahead.with_states(micro_batches), 1):
            self.micro_batch, fault = number, fault or states.fault
            self.backend.begin(last=number == len(micro_batches))
            with stage("draft"):
                sums = self.forward_backward_step(batch, states, scale)
            meter.add(sums.rows, loss=sums.loss / scale, **sums.figures)
            if number < len(micro_batches) and self._is_stopped():
                self._drop_step(batch, states)
                return None
        told = unread(self.target, fault, self.world)
        if told is not None:
            self._refuse_step(told)
        return meter

    def train(self, log: MetricsLog | NoTracker) -> Record:
        """All steps from where the run stands. Returns the last held-out measurements, {} for a finished run.

        Raises Interrupted if `stop_asked` is true, after a micro-batch, or with several ranks after the next one.
        Raises CommonError if the data, a cache of the target's states, or too many skipped steps end the run; what was
        learnt before is saved.
        """
        if self.budget.is_over(self.state.step):  # nothing is drawn for a finished run
            return {}
        self.budget.start()
        bar, heldout = self._progress_bar(), Record()
        with self.lookahead.start(self._steps_left(), wait=False):
            self._await_data()
            while not self.budget.is_last:
                with self.around_step():
                    record = self._timed_step()
                measured = Record()
                if self._is_due(self.config.eval_every) or self._is_due(self.config.save_every):
                    with self.budget.paused(), self._keeping():
                        heldout = measured = self.evaluate()
                    record |= {f"heldout_{name}": value for name, value in heldout.items()}
                log.log(self.state.step, record)
                self._show(bar, summary(record["loss"], record["tokens_per_s"]))
                if self._is_due(self.config.save_every):
                    with self.budget.paused():
                        self.save(measured.get("simulated_tpc"))
                if self._is_stopped() and not self.budget.is_last:
                    self._interrupt()
            self._save_last_step()
        bar.close()
        return heldout

    def evaluate(self) -> Record:
        """Losses, acceptance by depth and simulated TPC on the held-out rows (evaluate.py)."""
        depth = self.config.eval_depth
        return measure_heldout(
            self.target, self.draft, self.heldout, depth, self.world, forward=self.backend.draft, head=self.head
        )

    def save(self, score: float | None = None) -> None:
        """Write a checkpoint in the background: draft, optimiser, data position, random state. All ranks call it.

        Raises CommonError where the disk refused the one before, and refuses this one.
        """
        self.state.seconds, self.state.finished = self.budget.seconds, self.budget.is_last
        saved = self.state.saved(dataclasses.asdict(self.target.identity), self.config.target_quant)
        tensors = RankTensors.copied(*self.backend.state(), self.world)
        config = self.draft.config.saved()
        self.store.save_in_background(self.state.step, tensors, config, saved, keep=self.config.keep, score=score)
        self._saved_step, self._saved_score = self.state.step, score

    def resume(self) -> bool:
        """Continue from the newest complete checkpoint in the directory; False if there is none. All ranks call it.

        Raises UserError where it is another run's, or has used more steps or minutes than this run is to have.
        """
        path = self.store.latest()
        if path is None:
            return False
        found = self.store.open(path)
        state = TrainState.restored(found.step, found.state)
        check_budget(self.config, path, state)
        check_same_run(found, self.draft.config, self.target, self.config, self.optim, self.backend.state()[1])
        self.backend.restore(found.read_into)
        self.lookahead.stream.load_state_dict(state.stream)
        set_random_state(found.state["random"])
        self.state, self._saved_step = state, state.step
        self.budget.before, self.budget.finished = state.seconds, state.finished
        return True

    def _await_data(self) -> None:
        """Wait until all ranks have the first step's data; raises what its drawing raised, or Interrupted."""
        while True:
            waits = not self.lookahead.has_step(_POLL_S)
            own = torch.tensor([waits, self.stop_asked()], dtype=torch.int64)
            waiting, told = self.world.sum(own).tolist()
            if not waiting:
                self.lookahead.upcoming()
                return
            if told:
                self._interrupt()

    def _begin_step(self) -> int | None:
        """Begin a step, at the main rank's time, once all ranks have its data. Returns the supervised slots of all
        ranks; None if the run is to be left, because a rank was told to stop while one waits for data.

        Ranks that have their data wait in the sum for those that have not, which come to it every second.
        """
        while True:
            supervised, waits = 0, not self.lookahead.has_step(_POLL_S)
            if not waits:
                supervised = sum(len(batch.slots[0]) for batch in self.lookahead.upcoming())
            milliseconds = round(1000 * self.budget.seconds) if self.world.is_main else 0
            own = [supervised, milliseconds, waits, self.stop_asked()]
            # Summed by hosts: no device is waited for.
            supervised, milliseconds, waiting, told = self.world.sum(torch.tensor(own, dtype=torch.int64)).tolist()
            if not waiting:
                self.budget.begin(self.state.step, milliseconds / 1000)
                return supervised
            if told:
                return None

    def _update_weights(self) -> tuple[float, float]:
        """End a step: follow its gradient, or skip it. Returns the gradient's norm and the learning rate.

        Raises CommonError, with the step forgotten, where too many were skipped.
        """
        norm = self.backend.clip().item()
        sound = self._is_sound(norm)
        if not sound and self.state.skipped >= self.config.max_skipped:
            self._refuse_step(
                f"train.max_skipped={self.config.max_skipped}: step {self.state.step + 1} is one more with an unsound "
                f"gradient (its norm is {norm:.3g}); lower optim.lr or look at the data, and give a larger "
                "train.max_skipped to go on from here"
            )
        self.state.step += 1
        lr = self.optim.lr_at(self.state.step, self.budget.used)
        if sound:
            self.state.norms = appended(self.state.norms, norm)
            self.backend.step(lr)
        else:
            self.state.skipped += 1
            self.backend.skip()
        return norm, lr

    def _is_sound(self, norm: float) -> bool:
        """Whether a gradient of this norm may be followed."""
        return is_sound(norm, self.state.norms, self.config.runaway)

    def _refuse_step(self, why: str) -> NoReturn:
        """Forget the step, whose gradients are all added up, and raise CommonError: all ranks call it."""
        self.backend.skip()
        self.budget.drop()
        raise CommonError(why)

    def _is_stopped(self) -> bool:
        """Whether the run is to be left here, the same on every rank. Called after every micro-batch, by all.

        Ranks vote and go on. The result of a vote is read at the next one, so no rank waits for one that is less than a
        micro-batch behind.
        """
        before, self._vote = self._vote, self.world.vote(self.stop_asked())
        return before() if self.world.size > 1 else self._vote()

    def _drop_step(self, batch: Placed, states: TargetStates) -> None:
        """Forget the gradients of a part of a step. Backends can forget only those of a whole one, so a micro-batch of
        weight 0 completes it.
        """
        self.backend.begin(last=True)
        self.forward_backward_step(batch, states, scale=0.0)
        self.backend.skip()

    def _timed_step(self) -> Record:
        """A training step, with the tokens so far, the speed, and the share of time in which it waited for data.

        Raises Interrupted where the run is left in the middle, CommonError where the data or the gradients end it; what
        was learnt is saved first.
        """
        started, tokens, waited = time.perf_counter(), self.state.tokens, self.lookahead.waited
        with self._keeping():
            record = self.train_step()
        if record is None:
            self.budget.drop()
            self._interrupt()
        self._check_learnt()
        seconds = time.perf_counter() - started
        record |= {"tokens": self.state.tokens, "tokens_per_s": (self.state.tokens - tokens) / seconds}
        record["data_wait"] = (self.lookahead.waited - waited) / seconds
        return record

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """What was learnt is saved where a CommonError ends the run meanwhile, which then says how much."""
        try:
            yield
        except CommonError as error:
            self._save_last_step()
            raise CommonError(f"{error}; {self.budget.done(self.state.step)} are done and kept") from error

    def _check_learnt(self) -> None:
        """Raise CommonError after the last step if every step was skipped."""
        check(
            not self.budget.is_last or self.state.skipped < self.state.step,
            f"all {self.state.step} steps were skipped, for their gradients were not finite or too long, and nothing "
            f"was learnt; is a weight of target.path={self.target.name} not finite, or optim.lr={self.optim.lr} too "
            "high?",
            CommonError,
        )

    def _steps_left(self) -> int | None:
        return None if self.config.steps is None else self.config.steps - self.state.step

    def _is_due(self, every: int) -> bool:
        return self.budget.is_last or (every > 0 and self.state.step % every == 0)

    def _save_last_step(self) -> None:
        """Ensure that the last whole step has a checkpoint; step 0 needs none. What the disk refused is tried again."""
        if self.state.step > self._saved_step:
            self.save()
        if self.store.has_failed():
            self.save(self._saved_score)
        self.store.wait()

    def _interrupt(self) -> NoReturn:
        """Raise Interrupted, after saving what was learnt."""
        self._save_last_step()
        again = "the same command" if self.config.resume else "the same command with train.resume=true"
        raise Interrupted(f"told to stop, {self.budget.done(self.state.step)} done: {again} goes on")

    def _progress_bar(self) -> Progress:
        """A bar of the budget: of steps, or of seconds."""
        minutes = self.config.minutes
        if minutes is None:
            return progress(self.config.steps, "step", self.state.step)
        return progress(round(60 * minutes), "second", round(self.budget.before))

    def _show(self, bar: Progress, note: str) -> None:
        step, minutes = self.state.step, self.config.minutes
        if minutes is None:
            bar.update(step, note)
        else:
            bar.update(min(round(60 * minutes), round(self.budget.seconds)), f"step {step}, {note}")


def feature_noise(like: torch.Tensor, size: float, step: int, micro_batch: int, rank: int) -> torch.Tensor:
    """Uniform noise in [-size, size], of the shape and dtype of `like`.

    It follows from the seed, the step, the micro-batch and the rank, so that a resumed run has the same.
    """
    place: tuple[Any, ...] = (torch.initial_seed(), step, micro_batch, rank)
    generator = torch.Generator(like.device).manual_seed(hash(place) % 2**63)
    return torch.empty_like(like).uniform_(-size, size, generator=generator)
