"""training/trainer.py: a step's loss is that of its documents, however they are packed; runs are reproducible and
resume.
"""

import errno
import math
import os
import random
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

from eagle_train import train
from eagle_train.corpus.render import ChatRenderer
from eagle_train.corpus.source import DataConfig
from eagle_train.corpus.stream import Batch, PackedRow, Stream, collate
from eagle_train.distributed import CommonError
from eagle_train.drafts import Draft, EagleConfig, EagleDraft, shift_hidden
from eagle_train.errors import UserError
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from eagle_train.training import runaway
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.budget import Budget
from eagle_train.training.checkpoint.format import checkpoints, score_of, step_of
from eagle_train.training.evaluate import most_likely
from eagle_train.training.metrics import NoTracker
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.target_pass import target_states
from eagle_train.training.train_config import TrainConfig, accumulation
from eagle_train.training.trainer import Interrupted, Trainer, feature_noise
from tests.support.casts import casts_of_a_step
from tests.support.command_line import chats, read_jsonl, write_jsonl
from tests.support.graph_recorder import no_values
from tests.support.reference_chains import PASSES, chains
from tests.support.tiny import random_tokens, tiny_draft, tiny_model, tiny_tokenizer
from tests.support.trainers import ROW, a_target, assert_same, make_trainer, run_training, started, trainer_of


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A directory with train.jsonl, heldout.jsonl and other.jsonl."""
    directory = tmp_path_factory.mktemp("data")
    for seed, (name, count) in enumerate({"train": 60, "heldout": 12, "other": 60}.items()):
        write_jsonl(directory / f"{name}.jsonl", chats(count, seed))
    return directory


class Given:
    """A stream of these batches; the last one repeats."""

    def __init__(self, batches: list[Batch]):
        self.config = DataConfig("unread", row_tokens=ROW)
        self.batches = chain(batches, repeat(batches[-1]))

    def __next__(self) -> Batch:
        return next(self.batches)

    def state_dict(self) -> dict:
        return {}

    def close(self) -> None:
        pass


def gradients_of_step(trainer: Trainer) -> tuple[dict, dict[str, torch.Tensor]]:
    """The record of a step, and the gradients that the optimiser would be given."""
    found = {}

    def note(lr: float) -> None:
        found.update({name: weight.grad.clone() for name, weight in trainer.draft.named_parameters()})

    trainer.backend.step = note
    return started(trainer).train_step(), found


@pytest.mark.parametrize("rows", [1, 2])
def test_a_step_is_the_same_whatever_its_micro_batches(tmp_path, data, rows):
    record, gradients = {}, {}
    for size in (4, rows):
        draft = tiny_draft(a_target()).requires_grad_(True)
        trainer = make_trainer(tmp_path, data, rows=size, optim={"max_grad_norm": 1e9}, draft=draft)
        assert trainer.lookahead.accumulation == 4 // size
        record[size], gradients[size] = gradients_of_step(trainer)
    assert record[4]["supervised"] > 0
    assert_same(record[rows], record[4], 1e-5)
    assert_same(gradients[rows], gradients[4], 1e-5)


def packed_row(*documents: tuple[list[int], list[int]]) -> PackedRow:
    """A row of documents (tokens, supervised slots)."""
    row = PackedRow.empty(ROW)
    for tokens, slots in documents:
        supervised = torch.zeros(len(tokens), dtype=torch.bool)
        supervised[slots] = True
        row.append(torch.tensor(tokens), supervised)
    return row


def naive_losses(target: Target, draft: Draft, rows: list[PackedRow]) -> tuple[torch.Tensor, ...]:
    """Means over all supervised slots, document by document and without packing: smooth-L1 and cross-entropy."""
    l1, ce, count = torch.zeros(()), torch.zeros(()), 0
    for row in rows:
        parts = zip(*(x[: sum(row.lengths)].split(row.lengths) for x in (row.tokens, row.supervised)), strict=True)
        for tokens, supervised in parts:
            positions, attend = torch.arange(len(tokens))[None], packed_attention([[len(tokens)]])
            hidden = target.hidden_states(tokens[None], positions, attend)
            previous = shift_hidden(hidden, positions)
            predicted = draft(target.embed(tokens[None]), previous, positions, attend)[0, supervised]
            hidden = hidden[0, supervised]
            l1 = l1 + F.smooth_l1_loss(predicted, hidden, reduction="sum") / hidden.shape[-1]
            wanted = target.lm_head(hidden).softmax(-1)
            ce = ce + F.cross_entropy(target.lm_head(predicted), wanted, reduction="sum")
            count += int(supervised.sum())
    return l1 / count, ce / count


def test_every_supervised_slot_weighs_the_same(tmp_path):
    long, one, two, three, four, none = random_tokens(30, 8, 11, 13, 32, 9)
    rows = [
        packed_row((long, [29])),  # a single slot, alone in its micro-batch
        packed_row((one, list(range(1, 8))), (two, list(range(1, 11))), (three, [3, 4, 5, 12])),
        packed_row((none, [])),
        packed_row((four, list(range(1, 32)))),
    ]
    target, stream = a_target(), Given([collate([row]) for row in rows])
    config = TrainConfig(steps=1, micro_batch_rows=1, l1_weight=0.7, ce_weight=0.3)
    optim = OptimConfig(tokens_per_step=4 * ROW, max_grad_norm=1e9)
    draft = tiny_draft(target).requires_grad_(True)
    record, gradients = gradients_of_step(trainer_of(config, optim, target, draft, stream, [], tmp_path))

    l1, ce = naive_losses(target, draft, rows)
    expected = torch.autograd.grad(0.7 * l1 + 0.3 * ce, list(draft.parameters()))
    assert_same(gradients, dict(zip(gradients, expected, strict=True)), 1e-5)
    assert record["supervised"] == 1 + (7 + 10 + 4) + 31
    assert_same({name: record[name] for name in ("l1", "ce")}, {"l1": l1, "ce": ce}, 1e-5)
    assert record["loss"] == pytest.approx(0.7 * record["l1"] + 0.3 * record["ce"])


@pytest.mark.parametrize("first_token", ["self_fusion", "skip"])
def test_an_unrolled_step_learns_from_every_pass(tmp_path, first_token):
    rows = [packed_row((tokens, list(range(1, len(tokens))))) for tokens in random_tokens(9, 2, 14)]
    target, stream = a_target(), Given([collate(rows)])
    draft = tiny_draft(target, first_token=first_token).requires_grad_(True)
    optim = OptimConfig(tokens_per_step=len(rows) * ROW, max_grad_norm=1e9)
    config = TrainConfig(steps=1, micro_batch_rows=len(rows), unroll=PASSES)
    record, gradients = gradients_of_step(trainer_of(config, optim, target, draft, stream, [], tmp_path))

    losses = []
    for row in rows:
        tokens = row.tokens[: row.lengths[0]][None]
        positions, attend = torch.arange(tokens.shape[1])[None], packed_attention([row.lengths])
        hidden = target.hidden_states(tokens, positions, attend)
        previous = shift_hidden(hidden, positions)
        by_chain = chains(draft, target.embed(tokens)[0], previous[0])
        supervised = {(depth, slot): state for (depth, slot), state in by_chain.items() if slot >= 1}
        for (_, slot), state in supervised.items():
            l1 = F.smooth_l1_loss(state, hidden[0, slot])
            losses.append(
                l1 + 0.1 * F.cross_entropy(target.lm_head(state), target.lm_head(hidden[0, slot]).softmax(-1))
            )
    loss = torch.stack(losses).sum() / PASSES / (8 + 1 + 13)
    expected = torch.autograd.grad(loss, list(draft.parameters()))
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert record["l1"] + 0.1 * record["ce"] != pytest.approx(loss.item(), rel=1e-3)  # they are of the first pass
    assert_same(gradients, dict(zip(gradients, expected, strict=True)), 1e-4)


def test_a_draft_of_few_tokens_learns_the_distribution_among_them(tmp_path, data):
    target, few = a_target(), list(range(0, 96, 2))
    draft = tiny_draft(target, vocab_size=len(few), vocabulary=few).requires_grad_(True)
    trainer = started(make_trainer(tmp_path, data, rows=4, draft=draft))
    (batch,) = trainer.lookahead.upcoming()
    hidden = target_states(target, batch).hidden
    record = trainer.train_step()
    previous = shift_hidden(hidden, batch.positions)
    twin = tiny_draft(target)  # with the weights before the step
    predicted = twin(target.embed(batch.tokens), previous, batch.positions, packed_attention(batch.lengths))
    rows = batch.supervised
    wanted, found = (target.lm_head(states[rows])[:, few] for states in (hidden, predicted))
    assert record["ce"] == pytest.approx(F.cross_entropy(found, wanted.softmax(-1)).item(), rel=1e-5)


def test_what_a_draft_cannot_propose_is_never_accepted(tmp_path, data):
    target = a_target()
    trainer = make_trainer(tmp_path, data, steps=1)
    best = {token for batch in trainer.heldout for token in chosen_at(trainer, batch)}
    others = sorted(set(range(96)) - best)
    draft = tiny_draft(target, vocab_size=len(others), vocabulary=others)
    assert make_trainer(tmp_path, data, draft=draft.requires_grad_(True)).evaluate()["simulated_tpc"] == 1
    known = sorted(best)
    draft = tiny_draft(target, vocab_size=len(known), vocabulary=known)
    assert make_trainer(tmp_path, data, draft=draft.requires_grad_(True)).evaluate()["simulated_tpc"] > 1


def chosen_at(trainer: Trainer, batch: Batch) -> list[int]:
    """The target's most likely tokens at a batch's supervised slots."""
    target = trainer.target
    return most_likely(target_states(target, batch).hidden, target.lm_head)[batch.supervised].tolist()


def test_feature_noise_is_fed_to_the_draft_and_is_no_larger_than_asked(tmp_path, data):
    fed = []
    for noise in (0.0, 0.25):
        trainer = started(make_trainer(tmp_path, data, rows=4, feature_noise=noise))
        trainer.draft.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[1]))
        trainer.train_step()
    without, with_noise = fed
    moved = (with_noise - without).abs()
    assert 0.2 < moved.max() <= 0.25 * (1 + 1e-5)
    assert moved.mean().item() == pytest.approx(0.125, rel=0.05)


def test_feature_noise_is_another_for_each_micro_batch_step_and_rank():
    states, places = torch.zeros(50), [(0, 1, 0), (0, 2, 0), (1, 1, 0), (1, 1, 1)]
    noises = [feature_noise(states, 0.5, *place) for place in places]
    assert torch.equal(feature_noise(states, 0.5, *places[0]), noises[0])
    assert len({tuple(noise.tolist()) for noise in noises}) == len(places)


@pytest.mark.parametrize(
    ("draft", "train", "dtype"),
    [
        ({}, {}, torch.float32),
        ({}, {}, torch.bfloat16),
        ({"ffn": "moe", "num_experts": 3}, {}, torch.float32),
        ({"ffn": "moe", "num_experts": 3}, {}, torch.bfloat16),
        ({"first_token": "skip"}, {"unroll": 3, "feature_noise": 0.1, "logits_loss": "lk"}, torch.float32),
    ],
)
def test_a_micro_batch_waits_for_no_device(tmp_path, data, monkeypatch, draft, train, dtype):
    """Neither the target's forward nor the draft's step asks for a value that was computed, or for a shape that hangs
    on one. Here the device is the host, and every value counts as the device's."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # the target runs in this thread, as on a GPU
    target, seen = a_target(dtype=dtype), []
    draft = tiny_draft(target, **draft).float().requires_grad_(True)
    trainer = make_trainer(tmp_path, data, rows=1, target=target, draft=draft, **train)

    def without_waiting(work: Callable) -> Callable:
        def watched(*arguments):
            with no_values():
                seen.append(work)
                return work(*arguments)

        return watched

    for owner, name in ((trainer, "forward_backward_step"), (trainer.lookahead, "target_states")):
        setattr(owner, name, without_waiting(getattr(owner, name)))
    assert math.isfinite(started(trainer).train_step()["loss"])
    assert len(seen) >= 2 * 4


@pytest.mark.parametrize(
    ("draft", "parallel", "train", "uses"),
    [
        ({}, {}, {}, 1),
        ({}, {}, {"unroll": 2}, 1),
        ({}, {"activation_checkpointing": True}, {}, 2),
        ({"ffn": "moe", "num_experts": 3}, {}, {}, 1),
        ({"ffn": "moe", "num_experts": 3}, {"activation_checkpointing": True}, {}, 2),
    ],
)
def test_weights_are_cast_once_a_step_and_gradients_are_as_if_each_micro_batch_cast(
    tmp_path, data, monkeypatch, draft, parallel, train, uses
):
    """In bf16, whose gradients add up in fp32. `uses`: how often a micro-batch would cast a weight in a layer."""

    def trainer() -> Trainer:
        made = tiny_draft(target, fc_bias=True, **draft).float().requires_grad_(True)
        given = {"target": target, "draft": made, "parallel": ParallelConfig(**parallel)}
        return make_trainer(tmp_path, data, rows=1, optim={"max_grad_norm": 1e9}, **given, **train)

    target = a_target(dtype=torch.bfloat16)
    assert casts_of_a_step(trainer()) == {1}
    _, kept = gradients_of_step(trainer())
    monkeypatch.setattr("eagle_train.training.trainer.casts_kept", lambda _: nullcontext())
    assert casts_of_a_step(trainer()) == {4, 4 * uses}  # `fc` is in no layer
    _, anew = gradients_of_step(trainer())
    for name, gradient in kept.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, anew[name])


@pytest.mark.parametrize("shape", [{"kind": "eagle3", "layers": [1]}, {"kind": "medusa", "own_head": True}])
def test_an_lm_head_of_the_drafts_own_is_cast_once_a_step(tmp_path, data, shape):
    target = a_target(dtype=torch.bfloat16)
    assert casts_of_a_step(make_trainer(tmp_path, data, rows=1, target=target, shape=shape)) == {1}


def test_the_weight_of_smooth_l1_goes_evenly_to_its_end(tmp_path, data):
    config, budget = TrainConfig(steps=5, l1_weight_end=0.2), Budget(5)
    falling = [config.l1_weight_at(budget.progress_at(step)) for step in range(1, 6)]
    assert falling == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert TrainConfig(steps=5, l1_weight=0.7).l1_weight_at(0.75) == 0.7
    trainer = started(make_trainer(tmp_path, data, steps=3, l1_weight_end=0.0))
    records = [trainer.train_step() for _ in range(3)]
    for weight, record in zip((1.0, 0.5, 0.0), records, strict=True):
        assert record["loss"] == pytest.approx(weight * record["l1"] + 0.1 * record["ce"])


def test_gradients_are_clipped_and_their_norm_is_told_before(tmp_path, data):
    free = gradients_of_step(make_trainer(tmp_path, data, optim={"max_grad_norm": 1e9}))
    held = gradients_of_step(make_trainer(tmp_path, data, optim={"max_grad_norm": 1e-3}))
    norms = [torch.stack([gradient.norm() for gradient in found.values()]).norm().item() for _, found in (free, held)]
    assert norms == pytest.approx([free[0]["grad_norm"], 1e-3], rel=1e-3)
    assert held[0]["grad_norm"] == free[0]["grad_norm"] > 1e-3


def test_loss_falls_on_a_handful_of_rows(tmp_path):
    few = write_jsonl(tmp_path / "train.jsonl", chats(12, seed=5)).parent
    write_jsonl(tmp_path / "heldout.jsonl", chats(3, seed=6))
    trainer = started(make_trainer(tmp_path, few, steps=120, rows=4, optim={"lr": 1e-2}))
    records = [trainer.train_step() for _ in range(120)]
    first, last = records[0], records[-1]
    assert last["loss"] < 0.6 * first["loss"]  # most of what is left is the target's own entropy
    assert last["l1"] < 0.25 * first["l1"]
    assert last["top1_agreement"] > first["top1_agreement"] + 0.3


def same_weights(one: Trainer, other: Trainer) -> bool:
    pairs = zip(one.draft.parameters(), other.draft.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


SCHEDULE = {"warmup_steps": 2, "decay_share": 0.5}


def breaking(trainer: Trainer, done: int) -> Callable[[], dict]:
    """Its `train_step`, which raises KeyboardInterrupt once so many steps are done."""

    def train_step() -> dict:
        if trainer.state.step == done:
            raise KeyboardInterrupt
        return Trainer.train_step(trainer)

    return train_step


BEYOND = {"feature_noise": 0.1, "l1_weight_end": 0.1, "logits_loss": "lk", "unroll": 2}


EAGLE3 = {"shape": {"kind": "eagle3", "layers": [1], "num_layers": 2, "steps": 3, "loss": "lk"}, "feature_noise": 0.1}
MEDUSA = {"shape": {"kind": "medusa", "heads": 3, "num_layers": 2, "loss": "hard"}, "feature_noise": 0.1}
MTP = {"shape": {"kind": "mtp", "steps": 3, "modules": 2}, "feature_noise": 0.1}
PEAGLE = {"shape": {"kind": "peagle", "layers": [1], "num_layers": 2, "steps": 3}, "feature_noise": 0.1}


@pytest.mark.parametrize(
    ("name", "breaks", "train"),
    [
        ("adamw", (1, 3), {}),
        ("muon", (5,), BEYOND),
        ("adamw", (3,), EAGLE3),
        ("muon", (5,), EAGLE3),
        ("adamw", (3,), MEDUSA),
        ("muon", (5,), MEDUSA),
        ("muon", (3,), MTP),
        ("muon", (3,), PEAGLE),
    ],
)
def test_a_run_that_was_interrupted_is_as_if_it_had_not_been(tmp_path, data, name, breaks, train):
    options = {"optim": {"name": name, **SCHEDULE}, "save_every": 2, "eval_every": 3, **train}
    whole = make_trainer(tmp_path / "whole", data, **options)
    metrics = run_training(whole)
    assert [record["step"] for record in metrics] == list(range(1, 7))
    for done in breaks:
        first = make_trainer(tmp_path / str(done), data, **options)
        first.train_step = breaking(first, done)
        with pytest.raises(KeyboardInterrupt):
            run_training(first)
        first.store.wait()  # as a process that ends waits for what its threads still write
        second = make_trainer(tmp_path / str(done), data, **options)
        assert second.resume() == (done >= 2)
        assert second.state.step == done // 2 * 2
        assert run_training(second, resumed=done >= 2) == metrics
        assert same_weights(second, whole)


def stopping_at(trainer: Trainer, step: int, micro_batch: int) -> Trainer:
    """The trainer, told to stop after so many steps and this micro-batch of the next."""
    trainer.stop_asked = lambda: (trainer.state.step, trainer.micro_batch) == (step, micro_batch)
    return trainer


FIRST, WITHIN, BETWEEN, SAVED = (0, 1), (3, 2), (3, 4), (2, 1)


@pytest.mark.parametrize("at", [FIRST, WITHIN, BETWEEN, SAVED])
def test_a_run_that_is_told_to_stop_leaves_its_step_and_repeats_it(tmp_path, data, at):
    options = {"rows": 1, "optim": SCHEDULE, "save_every": 2, "keep": 0, "feature_noise": 0.1}
    whole = make_trainer(tmp_path / "whole", data, **options)
    metrics = run_training(whole)
    first = stopping_at(make_trainer(tmp_path / "run", data, **options), *at)
    done = at[0]
    with pytest.raises(Interrupted, match=f"^told to stop, {done} of 6 steps done: the same command goes on$"):
        run_training(first)
    assert first.micro_batch == at[1]
    assert all(weight.grad is None for weight in first.draft.parameters())
    kept = {0: [], 2: [2], 3: [2, 3]}[done]
    assert [path.name for path in checkpoints(tmp_path / "run")] == [f"step-{step:08d}" for step in kept]
    if at == SAVED:  # it is still the one with the score of its step
        assert score_of(checkpoints(tmp_path / "run")[-1]) == metrics[done - 1]["heldout_simulated_tpc"]
    again = stopping_at(make_trainer(tmp_path / "run", data, **options), done, 3)
    assert again.resume() == (done > 0)
    with pytest.raises(Interrupted):
        run_training(again, resumed=done > 0)
    second = make_trainer(tmp_path / "run", data, **options)
    assert second.resume() == (done > 0)
    assert second.state.step == done
    assert run_training(second, resumed=done > 0) == metrics
    assert same_weights(second, whole)


@pytest.mark.parametrize("stop", [True, False], ids=["told to stop", "at the end"])
def test_a_last_checkpoint_that_the_disk_refused_is_tried_again(tmp_path, data, monkeypatch, stop):
    trainer = make_trainer(tmp_path / "run", data, save_every=2, keep=0)
    last = 2 if stop else trainer.config.steps
    refused, write = [], os.fsync

    def refuse_once(descriptor):
        if trainer.state.step == last and not refused:
            refused.append(last)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_once)
    trainer.stop_asked = lambda: stop and trainer.state.step == last
    with pytest.raises(Interrupted) if stop else nullcontext():
        metrics = run_training(trainer)
    assert refused == [last]
    assert step_of(checkpoints(tmp_path / "run")[-1]) == last
    if not stop:
        assert score_of(checkpoints(tmp_path / "run")[-1]) == metrics[-1]["heldout_simulated_tpc"]


@pytest.mark.parametrize("done", [0, 2])
def test_a_run_that_waits_for_data_can_be_told_to_stop(tmp_path, data, monkeypatch, done):
    monkeypatch.setattr("eagle_train.training.trainer._POLL_S", 0.01)
    trainer = make_trainer(tmp_path / "run", data)
    take, comes = trainer.lookahead.stream.__class__.__next__, threading.Event()
    waits = []

    def slow(stream):
        if trainer.state.step >= done and (done == 0 or stream.position.drawn > 0):
            waits.append(True)
            comes.wait()
        return take(stream)

    monkeypatch.setattr(Stream, "__next__", slow)
    trainer.stop_asked = lambda: bool(waits)
    try:
        with pytest.raises(Interrupted, match=r"^told to stop, \d of 6 steps done"):
            run_training(trainer)
    finally:
        comes.set()
    assert [step_of(path) for path in checkpoints(tmp_path / "run")] == [trainer.state.step] * (trainer.state.step > 0)
    assert (trainer.state.step > 0) == (done > 0)


def test_resuming_goes_on_with_the_random_numbers(tmp_path, data):
    trainer = started(make_trainer(tmp_path, data))
    trainer.train_step()
    trainer.save()
    trainer.store.wait()
    expected = random.random(), torch.rand(3).tolist()
    assert make_trainer(tmp_path, data).resume()
    assert (random.random(), torch.rand(3).tolist()) == expected


def test_nothing_to_resume(tmp_path, data):
    assert not make_trainer(tmp_path / "new", data).resume()


def test_a_finished_run_that_is_started_again_logs_nothing(tmp_path, data, monkeypatch, capsys):
    """No W&B run is begun for it, and no file is written."""
    run_training(make_trainer(tmp_path, data, steps=2))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    monkeypatch.setattr(train, "_open_log", lambda *_: pytest.fail("a log is opened"))
    finished = make_trainer(tmp_path, data, steps=2, resume=True)
    train._run(OmegaConf.create({"profile": False}), finished, lambda: False, NoTracker(tmp_path, {}))
    assert "the run is complete, 2 of 2 steps" in capsys.readouterr().out
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_finished_run_draws_nothing_and_is_not_made_shorter(tmp_path, data):
    run_training(make_trainer(tmp_path, data, steps=2))
    finished, drawn = make_trainer(tmp_path, data, steps=2), []
    finished.lookahead.start = drawn.append
    assert finished.resume()
    assert "the run is complete, 2 of 2 steps" in str(finished)
    assert run_training(finished, resumed=True)[-1]["step"] == 2
    assert drawn == []
    with pytest.raises(UserError, match=r"^train\.steps=1: .*step-00000002 has made 2 already; give as many or more$"):
        make_trainer(tmp_path, data, steps=1).resume()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 2}, r"^draft\.num_layers=2: .*step-00000001 was trained with 1; resume with the same draft$"),
        ({"file": "other"}, r"^data\.path is .*other\.jsonl.* but was .*train\.jsonl.* resume with the same data$"),
        (
            {"optim": {"name": "muon"}},
            r"^optim\.name=muon: .*step-00000001 was trained with another, without .*; resume with the same$",
        ),
        (
            {"target_quant": "fp8"},
            r"^train\.target_quant=fp8: .*step-00000001 was trained with none; resume with the same$",
        ),
        ({"target": "other"}, r"^target\.path=other: .*step-00000001 was trained for tiny-llama$"),
    ],
    ids=["draft", "data", "optimiser", "precision", "target"],
)
def test_a_run_is_resumed_only_as_what_it_was(tmp_path, data, change, message):
    trainer = started(make_trainer(tmp_path, data))
    trainer.train_step()
    trainer.save()
    trainer.store.wait()
    if "target" in change:
        other = Target(tiny_model(seed=1, num_hidden_layers=2), tiny_tokenizer(), name="other")
        change = {"target": other}
    with pytest.raises(UserError, match=message) as error:
        make_trainer(tmp_path, data, **change).resume()
    assert "\n" not in str(error.value)


def test_every_checkpoint_has_the_score_of_its_own_step(tmp_path, data):
    trainer = make_trainer(tmp_path, data, steps=4, eval_every=3, save_every=2, keep=0)
    saved, save = {}, trainer.save
    trainer.save = lambda score: (saved.update({trainer.state.step: score}), save(score))
    metrics = {record["step"]: record.get("heldout_simulated_tpc") for record in run_training(trainer)}
    assert saved == {2: metrics[2], 4: metrics[4]}
    assert None not in saved.values()
    assert metrics[1] is None


def test_when_it_measures_and_saves(tmp_path, data):
    metrics = run_training(trainer := make_trainer(tmp_path, data, steps=5, eval_every=2, save_every=2, keep=2))
    assert [record["step"] for record in metrics if "heldout_simulated_tpc" in record] == [2, 4, 5]
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000004", "step-00000005"]
    assert [record["tokens"] for record in metrics] == [step * trainer.optim.tokens_per_step for step in range(1, 6)]
    names = {"step", "loss", "l1", "ce", "top1_agreement", "grad_norm", "lr", "supervised", "tokens"}
    assert names <= metrics[0].keys()
    assert read_jsonl(tmp_path / "metrics.jsonl")[0]["tokens_per_s"] > 0


def test_steps_follow_the_learning_rate(tmp_path, data):
    metrics = run_training(make_trainer(tmp_path, data, optim={"lr": 0.8, **SCHEDULE}))
    assert [record["lr"] for record in metrics] == pytest.approx([0.4, 0.8, 0.8, 0.8, 0.8 * 2 / 3, 0.8 / 3])


def test_held_out_measurements(tmp_path, data):
    draft = tiny_draft(a_target()).requires_grad_(True)
    trainer = make_trainer(tmp_path, data, rows=3, rows_per_step=3, eval_batches=100, eval_depth=2, draft=draft)
    before = [weight.clone() for weight in trainer.draft.parameters()]
    record = trainer.evaluate()
    rows = []
    for batch in trainer.heldout:
        for tokens, supervised, lengths in zip(batch.tokens, batch.supervised, batch.lengths, strict=True):
            rows.append(PackedRow(tokens, supervised, lengths))
    l1, ce = naive_losses(trainer.target, trainer.draft, rows)
    assert_same({name: record[name] for name in ("l1", "ce")}, {"l1": l1, "ce": ce}, 1e-5)
    by_depth = record["acceptance_per_depth"]
    assert len(by_depth) == 2
    assert by_depth[0] == pytest.approx(record["top1_agreement"])  # depth 1 is the draft on true hidden states
    assert record["simulated_tpc"] == pytest.approx(1 + sum(by_depth))
    assert all(torch.equal(*pair) for pair in zip(before, trainer.draft.parameters(), strict=True))
    assert all(weight.grad is None for weight in trainer.draft.parameters())

    alone = make_trainer(tmp_path, data, rows=1, rows_per_step=3, eval_batches=100, eval_depth=2, draft=draft)
    assert len(alone.heldout) > len(trainer.heldout)
    assert_same(alone.evaluate(), record, 1e-5)
    alone.heldout = []
    assert alone.evaluate() == {}


def test_depths_without_a_chain_are_left_out(tmp_path, data):
    """Of a short document, every supervised slot is counted at depth 1, one fewer at each further depth, at last
    none."""
    trainer = make_trainer(tmp_path, data, eval_depth=4)
    trainer.heldout = [collate([packed_row((random_tokens(5)[0], [1, 2, 3]))])]
    record = trainer.evaluate()
    assert len(record["acceptance_per_depth"]) == 3
    assert record["simulated_tpc"] == pytest.approx(1 + sum(record["acceptance_per_depth"]))


def test_a_bf16_target_trains_an_fp32_draft(tmp_path, data):
    target = Target(tiny_model(num_hidden_layers=2).bfloat16(), tiny_tokenizer(), name="low")
    record = {}
    for name, one in {"bf16": target, "fp32": a_target()}.items():
        trainer = started(make_trainer(tmp_path, data, target=one))
        record[name] = trainer.train_step()
        assert {weight.dtype for weight in trainer.draft.parameters()} == {torch.float32}
        assert trainer.evaluate()["l1"] > 0
    for name in ("loss", "grad_norm"):
        assert record["bf16"][name] == pytest.approx(record["fp32"][name], rel=0.05)
        assert record["bf16"][name] != record["fp32"][name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_in_fp8_teaches_nearly_the_same(tmp_path, data, dtype):
    """From the same draft on: the losses of some steps, and of what is held out."""
    found = {}
    for quant in ("none", "fp8"):
        target = Target(tiny_model(num_hidden_layers=2).to(dtype), tiny_tokenizer(), name="target")
        if quant == "fp8":
            target.round_to_fp8()
        trainer = started(make_trainer(tmp_path / quant, data, target=target, steps=30, target_quant=quant))
        losses = [trainer.train_step()["loss"] for _ in range(30)]
        found[quant] = torch.tensor([*losses, trainer.evaluate()["l1"]])
    assert found["fp8"][-2] < 0.9 * found["fp8"][0], "it learns"
    assert not torch.equal(found["fp8"], found["none"])
    torch.testing.assert_close(found["fp8"], found["none"], rtol=0.1, atol=0)


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("field", ["activation_checkpointing", "compile"])
def test_recomputed_and_compiled_layers_train_the_same(tmp_path, data, field, unroll):
    plain, changed = (
        gradients_of_step(make_trainer(tmp_path, data, parallel=ParallelConfig(**{field: on}), unroll=unroll))
        for on in (False, True)
    )
    assert_same(changed[0], plain[0], 1e-5)
    assert_same(changed[1], plain[1], 1e-5)


@pytest.mark.parametrize(
    ("backend", "optim", "ranks", "message"),
    [
        ("single", "adamw", 2, r"^parallel=single: 2 processes were started; use parallel=ddp, "),
        ("deepspeed", "muon", 2, r"^optim\.name=muon: DeepSpeed trains with adamw here"),
    ],
)
def test_jobs_that_a_backend_cannot_run(backend, optim, ranks, message):
    with pytest.raises(UserError, match=message):
        ParallelConfig(backend).check_job(OptimConfig(optim), ranks)


@pytest.mark.parametrize("target", ["fsdp2", "tensor"])
def test_a_divided_target_is_not_compiled_for_who_asks_for_it(target):
    message = rf"^parallel\.compile=true: .*\(parallel\.target={target}\).*; use parallel\.compile=null, "
    with pytest.raises(UserError, match=message):
        ParallelConfig("ddp", target, compile=True).check_job(OptimConfig(), 2)
    for compile in (None, False):
        ParallelConfig("ddp", target, compile=compile).check_job(OptimConfig(), 2)


def test_a_step_is_a_whole_number_of_micro_batches():
    train = TrainConfig(steps=1, micro_batch_rows=4)
    assert accumulation(OptimConfig(tokens_per_step=2_097_152), train, row_tokens=2048) == 256
    assert accumulation(OptimConfig(tokens_per_step=2_097_152), train, row_tokens=2048, ranks=8) == 32
    with pytest.raises(UserError, match=r"\* data\.row_tokens \* 3 processes = 384; 768 would do$"):
        accumulation(OptimConfig(tokens_per_step=1000), train, row_tokens=32, ranks=3)
    for tokens, suggestion in ((1000, 896), (100, 128), (129, 128)):
        with pytest.raises(UserError, match=rf"^optim\.tokens_per_step={tokens}: .* = 128; {suggestion} would do$"):
            accumulation(OptimConfig(tokens_per_step=tokens), train, row_tokens=32)


def with_gradient(trainer: Trainer, values: dict[int, float]) -> None:
    """By step number: fill the gradients of that step with a value."""
    clip = trainer.backend.clip

    def spoilt() -> torch.Tensor:
        value = values.get(trainer.state.step + 1)
        if value is not None:
            for weight in trainer.draft.parameters():
                weight.grad.fill_(value)
        return clip()

    trainer.backend.clip = spoilt


@pytest.mark.parametrize(("bad", "value"), [(1, math.nan), (3, math.inf), (5, 1e6)])
def test_a_step_with_an_unsound_gradient_is_skipped_and_counted(tmp_path, data, bad, value):
    trainer = started(make_trainer(tmp_path, data, steps=7))
    with_gradient(trainer, {bad: value})
    for step in range(1, 8):
        before = [weight.detach().clone() for weight in trainer.draft.parameters()]
        record = trainer.train_step()
        assert all(torch.equal(*pair) for pair in zip(before, trainer.draft.parameters(), strict=True)) == (step == bad)
        assert record["skipped"] == (step >= bad)
    assert all(weight.isfinite().all() for weight in trainer.draft.parameters())


def followed(norms: list[float], recent: list[float] | None = None) -> list[bool]:
    """Which steps with gradients of these norms are made, with a limit of 10 times the usual norm."""
    recent, sound = recent or [], []
    for norm in norms:
        sound.append(runaway.is_sound(norm, recent, limit=10))
        recent = runaway.appended(recent, norm) if sound[-1] else recent
    return sound


def test_what_a_runaway_gradient_is_compared_with(monkeypatch):
    odd = [1.0, 1e-9, 1.0, 1e9]  # nothing is usual yet, and none of them makes what is odd usual
    assert followed([*odd, 1.0, 9.0, 11.0, math.nan, 5.0]) == [*[True] * 6, False, False, True]
    assert all(followed([*[0.0] * 5, *[1.0] * 4]))  # a step without a supervised slot
    monkeypatch.setattr(runaway, "_RECENT", 4)
    assert followed([8.0] * 4 + [79.0, 81.0], recent=[1.0] * 4) == [*[True] * 5, False]  # the first are forgotten


def test_no_step_of_a_real_runs_beginning_is_a_runaway(tmp_path):
    """At the paper's constant rate, with a limit of 5 where the default is 100."""
    target = load_target(TargetConfig("data/tiny_target"), "cpu")
    config = DataConfig("data/tiny_target/answers.jsonl.gz", row_tokens=128)
    optim = OptimConfig(tokens_per_step=128)
    draft = EagleDraft(EagleConfig.from_target(target.config, num_layers=3)).init_weights(0)
    stream = Stream(config, ChatRenderer(target.tokenizer), 1)
    train = TrainConfig(steps=20, micro_batch_rows=1, runaway=5)
    trainer = started(trainer_of(train, optim, target, draft, stream, [], tmp_path))
    assert [trainer.train_step()["skipped"] for _ in range(20)] == [0] * 20
    assert len(trainer.state.norms) == 20


def test_too_many_unsound_gradients_end_the_run_and_what_was_learnt_is_kept(tmp_path, data):
    """A run that may skip more goes on from there, as if it had not been ended."""
    bad = {2: math.nan, 5: math.inf}
    whole, ended, again = (
        make_trainer(tmp_path / place, data, max_skipped=most, save_every=0)
        for place, most in (("whole", 2), ("parts", 1), ("parts", 2))
    )
    for trainer in (whole, ended, again):
        with_gradient(trainer, bad)
    run_training(whole)
    told = r"^train\.max_skipped=1: step 5 is one more with an unsound gradient .*; 4 of 6 steps are done and kept$"
    with pytest.raises(CommonError, match=told):
        run_training(ended)
    assert [path.name for path in checkpoints(tmp_path / "parts")] == ["step-00000004"]
    assert again.resume()
    assert (again.state.step, again.state.skipped) == (4, 1)
    assert all(weight.isfinite().all() for weight in again.draft.parameters())
    assert_same(dict(again.draft.named_parameters()), dict(ended.draft.named_parameters()), 0.0)
    run_training(again, resumed=True)
    assert_same(dict(again.draft.named_parameters()), dict(whole.draft.named_parameters()), 0.0)


def test_a_resumed_run_may_have_skipped_more_than_it_now_may(tmp_path, data):
    first = make_trainer(tmp_path, data, steps=3)
    with_gradient(first, {1: math.nan, 2: math.nan})
    run_training(first)
    second = make_trainer(tmp_path, data, steps=6, max_skipped=1)
    with_gradient(second, {5: math.nan})
    assert second.resume()
    with pytest.raises(CommonError, match=r"^train\.max_skipped=1: step 5 .*; 4 of 6 steps are done and kept$"):
        run_training(second, resumed=True)


@pytest.mark.parametrize("field", ["steps", "micro_batch_rows", "eval_batches", "eval_depth"])
def test_counts_are_at_least_one(field):
    with pytest.raises(UserError, match=rf"^train\.{field}=0: must be at least 1$"):
        TrainConfig(**{"steps": 1, field: 0})


NOT_NEGATIVE = ("l1_weight", "ce_weight", "save_every", "keep", "eval_every", "max_skipped", "feature_noise")


@pytest.mark.parametrize("field", NOT_NEGATIVE)
def test_weights_and_intervals_are_not_negative(field):
    with pytest.raises(UserError, match=rf"^train\.{field}=-1: must be 0 or more$"):
        TrainConfig(**{"steps": 1, field: -1})


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [("logits_loss", "kl", "ce or lk"), ("l1_weight_end", -1, "null, 0 or more"), ("unroll", 0, "at least 1")],
)
def test_options_beyond_the_paper_are_checked(field, value, right):
    with pytest.raises(UserError, match=rf"^train\.{field}={value}: must be {right}$"):
        TrainConfig(**{"steps": 1, field: value})


def test_a_loss_without_a_weight_is_refused():
    """Nothing would be learnt, and every gradient be 0."""
    told = r"^train\.l1_weight=0\.0, train\.ce_weight=0\.0: nothing is learnt; one must be above 0$"
    with pytest.raises(UserError, match=told):
        TrainConfig(steps=1, l1_weight=0.0, ce_weight=0.0)
    for weights in ({"ce_weight": 0.0}, {"l1_weight": 0.0}, {"l1_weight": 0.0, "l1_weight_end": 1.0, "ce_weight": 0.0}):
        TrainConfig(steps=1, **weights)
    with pytest.raises(UserError, match=r"^train\.logits_loss=lk: has no weight, train\.ce_weight=0\.0; give one$"):
        TrainConfig(steps=1, logits_loss="lk", ce_weight=0.0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_checkpoint_before_the_first_step_that_is_followed_changes_nothing(tmp_path, data, name):
    """Saving makes the optimiser's state, and no step of it; nor does resuming."""
    options = {"steps": 4, "optim": {"name": name}, "keep": 0}
    plain, saving = (
        make_trainer(tmp_path / f"every-{every}", data, save_every=every, eval_every=4, **options) for every in (0, 1)
    )
    again = make_trainer(tmp_path / "every-1", data, save_every=0, **options)
    for trainer in (plain, saving, again):
        with_gradient(trainer, {1: math.nan, 2: math.nan})
        if trainer is again:
            for path in checkpoints(tmp_path / "every-1")[2:]:
                shutil.rmtree(path)
            assert trainer.resume()
            assert trainer.state.step == 2
        run_training(trainer, resumed=trainer is again)
    for other in (saving, again):
        assert_same(dict(other.draft.named_parameters()), dict(plain.draft.named_parameters()), 0.0)
        assert_same(other.backend.state()[1], plain.backend.state()[1], 0.0)


def test_a_run_in_which_every_step_was_skipped_fails(tmp_path, data):
    """A weight of the target is not finite, which the samples that are checked while loading do not show."""
    target = a_target.__wrapped__()
    with torch.no_grad():
        target.model.get_input_embeddings().weight[:] = math.nan
    trainer = make_trainer(tmp_path, data, target=target, steps=3)
    with pytest.raises(
        CommonError, match=r"^all 3 steps were skipped, for their gradients were not finite or too long"
    ):
        run_training(trainer)
    assert not checkpoints(tmp_path)
    sound = make_trainer(tmp_path, data, steps=3)
    backward = sound.backend.backward
    sound.backend.backward = lambda loss: backward(loss * (math.nan if sound.state.step < 2 else 1.0))
    records = run_training(sound)  # one step is enough
    assert records[-1]["skipped"] == 2
