"""The training loop: `forward_backward_step`, `train_step`, `train`. Online distillation after the paper, section 2.1.

The frozen target runs on each packed batch, and the draft learns its hidden states and logits at once; nothing is
stored. Knows nothing of files of data, of templates, or of how the draft is used. DESIGN sections 3.1, 3.2.
"""

import dataclasses
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eagle_train.config import UserError, check
from eagle_train.corpus.stream import Batch, Stream
from eagle_train.models.artifact import load_tensors
from eagle_train.models.draft import Draft, shift_hidden
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from eagle_train.training import checkpoint
from eagle_train.training.lookahead import Lookahead
from eagle_train.training.losses import LossSums, distillation_loss
from eagle_train.training.metrics import Meter, MetricsLog, Record, progress
from eagle_train.training.optimizer import OptimConfig, Optimizer
from eagle_train.training.unroll import chain_acceptance, unroll

CHOICE_ROWS = 1024  # rows whose logits exist at once when a token is chosen for each


@dataclass
class TrainConfig:
    """The group `train`. `save_every` and `eval_every` are in steps; 0 is at the end only. `keep` 0 keeps all."""

    steps: int
    micro_batch_rows: int = 1
    l1_weight: float = 1.0
    ce_weight: float = 0.1
    save_every: int = 0
    keep: int = 3
    resume: bool = True
    eval_every: int = 0
    eval_batches: int = 8
    eval_depth: int = 3

    def __post_init__(self) -> None:
        for field in ("steps", "micro_batch_rows", "eval_batches", "eval_depth"):
            check(getattr(self, field) >= 1, f"train.{field}={getattr(self, field)}: must be at least 1")
        for field in ("l1_weight", "ce_weight", "save_every", "keep", "eval_every"):
            check(getattr(self, field) >= 0, f"train.{field}={getattr(self, field)}: must be 0 or more")


def accumulation(optim: OptimConfig, train: TrainConfig, row_tokens: int) -> int:
    """Micro-batches in an optimiser step. Raises UserError where the token budget is no whole number of them."""
    micro = train.micro_batch_rows * row_tokens
    count, rest = divmod(optim.tokens_per_step, micro)
    check(
        rest == 0 and count > 0,
        f"optim.tokens_per_step={optim.tokens_per_step}: must be a multiple of train.micro_batch_rows * "
        f"data.row_tokens = {micro}; {max(count, 1) * micro} would do",
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
        stream: Stream,
        heldout: list[Batch],
        directory: Path,
    ):
        self.config, self.optim = train, optim
        self.target, self.draft, self.stream, self.heldout = target, draft, stream, heldout
        self.directory = directory
        self.accumulation = accumulation(optim, train, stream.config.row_tokens)
        self.optimizer = Optimizer(draft, optim)
        self.step = self.tokens = 0

    def forward_backward_step(self, batch: Batch, hidden: torch.Tensor, scale: float) -> LossSums:
        """One micro-batch's sums; its gradients, multiplied by `scale`, are added to the draft's.

        `hidden` [B, T, H] are the target's hidden states.
        """
        with self.autocast():
            previous = shift_hidden(hidden, batch.positions, self.draft.config.first_token)
            embeddings = self.target.embed(batch.tokens)
            predicted = self.draft(embeddings, previous, batch.positions, packed_attention(batch.lengths))
        sums = distillation_loss(
            predicted[batch.supervised],
            hidden[batch.supervised],
            self.target.lm_head,
            l1_weight=self.config.l1_weight,
            ce_weight=self.config.ce_weight,
            scale=scale,
        )
        sums.loss.backward()
        return sums

    @cached_property
    def ahead(self) -> Lookahead:
        """The stream's batches with their hidden states, from where the stream stands when training begins."""
        return Lookahead(self.stream, self.accumulation, self.placed, self.hidden_states, self.target.device)

    def train_step(self) -> Record:
        """One optimiser step over its micro-batches; each supervised slot of the step weighs the same. DESIGN 3.2."""
        micro_batches = self.ahead.step()
        supervised = sum(int(batch.supervised.sum()) for batch in micro_batches)
        meter = Meter()
        for batch, hidden in self.ahead.with_hidden_states(micro_batches):
            sums = self.forward_backward_step(batch, hidden, 1.0 / max(supervised, 1))
            meter.add(sums.rows, l1=sums.l1, ce=sums.ce, top1_agreement=sums.agree)
        norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.optim.max_grad_norm)
        self.step += 1
        lr = self.optim.lr_at(self.step, self.config.steps)
        self.optimizer.step(lr)
        self.optimizer.zero_grad()
        self.tokens += sum(batch.tokens.numel() for batch in micro_batches)
        means = meter.means()
        loss = self.config.l1_weight * means["l1"] + self.config.ce_weight * means["ce"]
        return {"loss": loss, **means, "grad_norm": norm.item(), "lr": lr, "supervised": supervised}

    def train(self, log: MetricsLog) -> Record:
        """All steps from where the run stands. Returns the last held-out measurements."""
        bar = progress(self.config.steps, self.step)
        heldout: Record = {}
        while self.step < self.config.steps:
            started, tokens = time.perf_counter(), self.tokens
            record = self.train_step()
            seconds = time.perf_counter() - started
            record |= {"tokens": self.tokens, "tokens_per_s": (self.tokens - tokens) / seconds}
            if self.is_due(self.config.eval_every):
                heldout = self.evaluate()
                record |= {f"heldout_{name}": value for name, value in heldout.items()}
            log.log(self.step, record)
            bar.update(self.step, record["loss"], record["tokens_per_s"])
            if self.is_due(self.config.save_every):
                self.save()
        self.ahead.close()
        bar.close()
        return heldout

    def is_due(self, every: int) -> bool:
        return self.step == self.config.steps or (every > 0 and self.step % every == 0)

    @torch.no_grad()
    def evaluate(self) -> Record:
        """Losses, acceptance by depth and simulated TPC on held-out rows, the draft unrolled on its own features."""
        meter = Meter()
        accepted = chains = torch.zeros(self.config.eval_depth, dtype=torch.float64)
        for batch in self.heldout[: self.config.eval_batches]:
            batch = self.placed(batch)
            hidden, positions = self.hidden_states(batch), batch.positions
            with self.autocast():
                previous = shift_hidden(hidden, positions, self.draft.config.first_token)
                embeddings = self.target.embed(batch.tokens)
                states = unroll(self.draft, embeddings, previous, positions, batch.lengths, self.config.eval_depth)
            rows = batch.supervised
            sums = distillation_loss(states[0][rows], hidden[rows], self.target.lm_head)
            meter.add(sums.rows, l1=sums.l1, ce=sums.ce, top1_agreement=sums.agree)
            held, possible = chain_acceptance(states, self.choose(hidden), self.choose, batch.supervised, positions)
            accepted, chains = accepted + held.cpu(), chains + possible.cpu()
        if not self.heldout:
            return {}
        by_depth = (accepted / chains).tolist()
        return {**meter.means(), "acceptance_per_depth": by_depth, "simulated_tpc": 1 + sum(by_depth)}

    def placed(self, batch: Batch) -> Batch:
        """The batch on the target's device."""
        tensors = {name: getattr(batch, name) for name in ("tokens", "positions", "supervised")}
        return dataclasses.replace(batch, **{name: x.to(self.target.device) for name, x in tensors.items()})

    def hidden_states(self, batch: Batch) -> torch.Tensor:
        """The target's hidden states [B, T, H]."""
        return self.target.hidden_states(batch.tokens, batch.positions, packed_attention(batch.lengths))

    def choose(self, hidden: torch.Tensor) -> torch.Tensor:
        """The most likely token [B, T] for hidden states [B, T, H]."""
        rows = hidden.flatten(0, 1).split(CHOICE_ROWS)
        return torch.cat([self.target.lm_head(chunk).argmax(-1) for chunk in rows]).view(hidden.shape[:2])

    def autocast(self) -> torch.autocast:
        """The draft's weights stay fp32; it computes in the target's precision."""
        low = self.target.dtype != torch.float32
        return torch.autocast(self.target.device.type, dtype=self.target.dtype if low else None, enabled=low)

    def save(self) -> Path:
        """Write a checkpoint: draft, optimiser, data position, random state."""
        state = {
            "optimizer": self.optimizer.state_dict(),
            "stream": self.ahead.state,
            "random": checkpoint.random_state(),
            "tokens": self.tokens,
            "target": dataclasses.asdict(self.target.identity),
        }
        config = dataclasses.asdict(self.draft.config)
        return checkpoint.save(self.directory, self.step, self.draft.state_dict(), config, state, keep=self.config.keep)

    def resume(self) -> bool:
        """Go on from the newest whole checkpoint in the directory, if there is one."""
        path = checkpoint.latest(self.directory)
        if path is None:
            return False
        found = checkpoint.load(path)
        ours: dict[str, Any] = dataclasses.asdict(self.draft.config)
        for name, value in ours.items():
            then = found.config.get(name)
            check(then == value, f"draft.{name}={value}: {path} was trained with {then}; resume with the same draft")
        made_for = found.state["target"]["fingerprint"]
        if made_for != self.target.identity.fingerprint:
            raise UserError(f"target.path={self.target.name}: {path} was trained for {found.state['target']['name']}")
        load_tensors(self.draft, found.tensors, path)
        self.optimizer.load_state_dict(found.state["optimizer"])
        self.stream.load_state_dict(found.state["stream"])
        checkpoint.set_random_state(found.state["random"])
        self.step, self.tokens = found.step, found.state["tokens"]
        return True
