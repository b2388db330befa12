"""A run of any kind of draft: the target's layers are captured as they are needed, and what does not fit is refused."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle_train.artifacts.format import load_draft, read_artifact, save_draft
from eagle_train.artifacts.layouts import check_runs, unserved
from eagle_train.drafts import planned_config
from eagle_train.errors import UserError
from eagle_train.models.draft_quantisation import Quant
from eagle_train.models.forward import LayerOutputs
from eagle_train.training.assembly import _given_draft, check_lesson
from eagle_train.training.target_pass import target_states, to_device
from eagle_train.training.train_config import TrainConfig
from eagle_train.training.trained_draft import read_trained
from tests.support.command_line import chats, write_jsonl
from tests.support.tiny import shared_target, tiny_draft, tiny_eagle3, tiny_medusa, tiny_mtp, tiny_peagle
from tests.support.trainers import a_target, make_trainer, run_training, started

EAGLE3 = {"kind": "eagle3", "layers": [1], "steps": 3}
MEDUSA = {"kind": "medusa", "heads": 3}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
MTP = {"kind": "mtp", "steps": 3}
CHAINED = {**MTP, "modules": 2}
PEAGLE = {"kind": "peagle", "layers": [1], "num_layers": 2, "steps": 3}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    for seed, (name, count) in enumerate({"train": 60, "heldout": 12}.items()):
        write_jsonl(directory / f"{name}.jsonl", chats(count, seed))
    return directory


@pytest.mark.parametrize(
    ("shape", "share"),
    [(EAGLE3, 0.9), (MEDUSA, 0.97), (MTP, 0.9), (CHAINED, 0.9), (PEAGLE, 0.9)],
    ids=["eagle3", "medusa", "mtp", "mtp, chained", "peagle"],
)
def test_a_run_learns_and_its_checkpoint_names_its_kind(tmp_path, data, shape, share):
    """`share`: of its first loss; heads cannot learn much of random letters."""
    trainer = make_trainer(tmp_path, data, shape=shape, steps=40, eval_every=20, eval_depth=3, optim={"lr": 5e-3})
    metrics = run_training(trainer)
    assert metrics[-1]["ce"] < share * metrics[0]["ce"]
    assert metrics[-1]["heldout_ce"] < metrics[19]["heldout_ce"]
    assert len(metrics[-1]["heldout_acceptance_per_depth"]) == 3
    assert not {"l1", "heldout_l1"} & metrics[-1].keys()
    found, draft = read_trained(tmp_path)
    assert found.config["kind"] == shape["kind"]
    assert draft.config == trainer.draft.config
    for own, other in zip(draft.parameters(), trainer.draft.parameters(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("shape", [MEDUSA, PEAGLE], ids=["medusa", "peagle"])
def test_no_deeper_acceptance_than_tokens_are_proposed_at_once(tmp_path, data, shape):
    trainer = make_trainer(tmp_path, data, shape=shape, steps=1, eval_every=1, eval_depth=7)
    assert len(run_training(trainer)[0]["heldout_acceptance_per_depth"]) == 3


def test_layers_are_captured_also_by_two_threads(tmp_path, data):
    """The look-ahead's target and held-out measurements run at once; each gets the states of its own rows."""
    target, layers = a_target(), (0, 1)
    trainer = make_trainer(tmp_path, data, shape=EAGLE3)
    batches = [trainer.lookahead.to_device(next(trainer.lookahead.stream)) for _ in range(2)]
    expected = [target_states(target, batch, layers) for batch in batches]

    def all_right(number: int) -> bool:
        found = (target_states(target, batches[number], layers) for _ in range(60))
        return all(torch.equal(each.joined(layers), expected[number].joined(layers)) for each in found)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(all_right, [0, 1])) == [True, True]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_captured_states_are_the_layers_outputs(data, tmp_path, compiled):
    target = a_target()
    trainer = started(make_trainer(tmp_path, data, shape=EAGLE3 | {"layers": [1]}))
    batch = trainer.lookahead.step()[0]
    found = target_states(target, batch, (0, 1), compiled)
    outputs = LayerOutputs([target.model.model.layers[0]])
    assert torch.equal(target_states(target, batch).hidden, target_states(target, batch, (0,)).hidden)
    states = outputs.beside(lambda: target.own_states(batch.tokens, batch.positions, batch.lengths))
    torch.testing.assert_close(found.layers[0], states[..., found.hidden.shape[-1] :])
    torch.testing.assert_close(target.model.model.norm(found.layers[1]), found.hidden)
    assert torch.equal(found.joined((0, 1))[..., :32], found.hidden)
    assert to_device(batch, torch.device("cpu")).slots[0].numel() > 0


@pytest.mark.parametrize(
    ("shape", "train", "message"),
    [
        (
            EAGLE3,
            {"unroll": 3},
            r"^train\.unroll=3: draft=eagle3 does not read it; give draft\.steps, and leave train\.unroll at 1",
        ),
        (EAGLE3, {"l1_weight": 0.5}, r"^train\.l1_weight=0\.5: draft=eagle3 does not read it; it does not learn"),
        (EAGLE3, {"logits_loss": "lk"}, r'^train\.logits_loss=lk: .*; give draft\.loss=.* at "ce"$'),
        (MTP, {"unroll": 3}, r"^train\.unroll=3: draft=mtp does not read it; give draft\.steps, and leave"),
        (MTP, {"l1_weight": 0.5}, r"^train\.l1_weight=0\.5: draft=mtp does not read it; it does not learn"),
        (MTP, {"logits_loss": "lk"}, r'^train\.logits_loss=lk: .*; give draft\.loss=.* at "ce"$'),
        (PEAGLE, {"unroll": 3}, r"^train\.unroll=3: draft=peagle does not read it; give draft\.steps, and leave"),
        (PEAGLE, {"l1_weight": 0.5}, r"^train\.l1_weight=0\.5: draft=peagle does not read it; it does not learn"),
        (MEDUSA, {"unroll": 3}, r"^train\.unroll=3: draft=medusa does not read it; give draft\.heads, and leave"),
        (MEDUSA, {"ce_weight": 1.0}, r"^train\.ce_weight=1\.0: draft=medusa does not read it; the loss on logits"),
    ],
)
def test_settings_that_a_kind_does_not_read(shape, train, message):
    settings = TrainConfig(steps=1, **train)
    with pytest.raises(UserError, match=message):
        check_lesson(settings, planned_config(shared_target().config, shape))
    check_lesson(settings, planned_config(shared_target().config, {"kind": "eagle"}))


def test_resuming_another_kind(tmp_path, data):
    run_training(make_trainer(tmp_path, data, steps=2))
    with pytest.raises(UserError, match=r"^draft=eagle3: .*-00000002 was trained with draft=eagle; resume with"):
        make_trainer(tmp_path, data, shape=EAGLE3).resume()


def test_starting_from_an_artifact_of_the_same_kind(tmp_path):
    target = shared_target()
    draft = tiny_eagle3(target, steps=7)
    save_draft(draft, tmp_path / "three", target.identity, dtype=torch.float32)
    assert read_artifact(tmp_path / "three").draft == draft.config
    assert load_draft(tmp_path / "three").config == draft.config
    shape = replace(draft.config, steps=2, loss="hard", first_token="self_fusion")
    given = _given_draft(str(tmp_path / "three"), shape, target)
    assert given.config == shape
    assert torch.equal(given.lm_head.weight, draft.lm_head.weight)
    with pytest.raises(UserError, match=r"^draft\.norm_output=true: .*three has it; give draft\.norm_output=false"):
        _given_draft(str(tmp_path / "three"), replace(shape, norm_output=True), target)
    short = replace(draft.config, max_position_embeddings=64)  # an imported draft's, whose angles depend on it
    save_draft(short.module().init_weights(0, target.lm_head), tmp_path / "short", target.identity)
    given = _given_draft(str(tmp_path / "short"), draft.config, target, own_length=True)
    assert given.config == short
    with pytest.raises(UserError, match=r"has it; give draft\.max_position_embeddings=null$"):
        _given_draft(str(tmp_path / "short"), draft.config, target)
    save_draft(tiny_draft(target), tmp_path / "one", target.identity)
    with pytest.raises(UserError, match=r"^draft=eagle3: not as train\.init_from=.*one has it; give draft=eagle$"):
        _given_draft(str(tmp_path / "one"), shape, target)


def test_an_artifact_of_an_mtp_module(tmp_path):
    target = shared_target()
    draft = tiny_mtp(target, steps=5)
    save_draft(draft, tmp_path / "mtp", target.identity, dtype=torch.float32)
    shape = replace(draft.config, steps=2, loss="lk", first_token="self_fusion")
    given = _given_draft(str(tmp_path / "mtp"), shape, target)
    assert given.config == shape
    assert torch.equal(given.hnorm.weight, draft.hnorm.weight)
    for layout in ("vllm", "sglang", "trtllm", "speculators"):
        with pytest.raises(UserError, match=rf"^layout={layout}: .* loads MTP modules of certain families alone"):
            check_runs(layout, draft.config, Quant())


def test_starting_from_medusa_heads(tmp_path):
    target = shared_target()
    draft, out = tiny_medusa(target, heads=3, num_layers=2), tmp_path / "heads"
    save_draft(draft, out, target.identity, dtype=torch.float32)
    assert load_draft(out).config == read_artifact(out).draft == draft.config
    shape = replace(draft.config, decay=1.0, loss="hard")
    given = _given_draft(str(out), shape, target)
    assert given.config == shape
    assert all(map(torch.equal, given.parameters(), draft.parameters()))
    with pytest.raises(
        UserError, match=r"^draft\.heads=4: not as train\.init_from=.*heads has it; give draft\.heads=3$"
    ):
        _given_draft(str(out), replace(shape, heads=4), target)


def test_starting_from_a_peagle_draft(tmp_path):
    target = shared_target()
    draft, out = tiny_peagle(target, steps=7), tmp_path / "peagle"
    save_draft(draft, out, target.identity, dtype=torch.float32)
    assert load_draft(out).config == read_artifact(out).draft == draft.config
    shape = replace(draft.config, steps=2, loss="hard", first_token="self_fusion")
    given = _given_draft(str(out), shape, target)
    assert given.config == shape
    assert torch.equal(given.mask_hidden, draft.mask_hidden)
    with pytest.raises(UserError, match=r"^draft\.mask_token=5: not as train\.init_from=.*; give .*mask_token=95$"):
        _given_draft(str(out), replace(shape, mask_token=5), target)


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (
            {"kind": "eagle"},
            [
                "layout=vllm,sglang,trtllm: each has no slot for the first token, and accepts fewer tokens than our "
                "engine (draft.first_token); for it, train with draft.first_token=skip"
            ],
        ),
        ({"kind": "eagle", "first_token": "skip"}, []),
        (
            {"kind": "eagle", "norms": "full", "first_token": "skip"},
            [
                "layout=sglang,trtllm: each has no class that applies both the first layer's input norm and the final "
                "one, and this draft has them (draft.norms=full); for it, train with draft.norms=eagle1"
            ],
        ),
        (
            {"kind": "eagle", "mlp_bias": True, "o_bias": True, "vocab_size": 9, "first_token": "skip"},
            [
                "layout=vllm,trtllm: each proposes from the target's whole vocabulary, and this draft has a part of it "
                "(draft.vocab_size); for it, train with draft.vocab_size=null",
                "layout=sglang: SGLang drops the biases of the feed-forward, and this draft has them (draft.mlp_bias); "
                "for it, train with draft.mlp_bias=false",
            ],
        ),
        ({**EAGLE3, "window": 64}, []),
        (
            {"kind": "eagle", "first_token": "skip", "rope_parameters": HALF},
            ["layout=sglang,trtllm: each rotates whole heads, and this draft's partial_rotary_factor is 0.5"],
        ),
        (
            {**EAGLE3, "rope_parameters": HALF},
            ["layout=sglang: SGLang rotates whole heads, and this draft's partial_rotary_factor is 0.5"],
        ),
        (
            {**EAGLE3, "layers": [1, 2], "sink": True},
            [
                "layout=vllm,sglang,speculators: each has no sinks in its Llama layers, and this draft has them "
                "(draft.sink); for it, train with draft.sink=false"
            ],
        ),
        (
            {**MTP, "first_token": "self_fusion"},
            [
                "layout=vllm,sglang,trtllm,speculators: each loads MTP modules of certain families alone, none of "
                "which computes what this draft does",
                "layout=target: the target has no slot for the first token, and accepts fewer tokens than our engine "
                "(draft.first_token); for it, train with draft.first_token=skip",
            ],
        ),
        (
            {**MTP, "window": 64, "first_token": "skip"},
            [
                "layout=vllm,sglang,trtllm,speculators: each loads MTP modules of certain families alone, none of "
                "which computes what this draft does",
                "layout=target: the target has no window in its own module (draft.window); for it, train with "
                "draft.window=null",
            ],
        ),
        (
            {**MTP, "vocab_size": 9, "first_token": "skip"},
            [
                "layout=vllm,sglang,trtllm,speculators: each loads MTP modules of certain families alone, none of "
                "which computes what this draft does",
                "layout=target: the target proposes from its whole vocabulary by its own module (draft.vocab_size); "
                "for it, train with draft.vocab_size=null",
            ],
        ),
    ],
    ids=[
        "first token",
        "plain",
        "norms",
        "two reasons",
        "eagle3, window",
        "eagle, half",
        "eagle3, half",
        "eagle3, sink",
        "mtp, first token",
        "mtp, window",
        "mtp, few tokens",
    ],
)
def test_what_engines_cannot_run_is_known_before_training(settings, lines):
    settings = settings | ({"layers": [1, 2]} if settings["kind"] == "eagle3" else {})  # SGLang leaves one alone out
    assert unserved(planned_config(shared_target().config, settings)) == lines


def test_a_kind_that_is_none():
    with pytest.raises(UserError, match=r"^draft\.kind='eagle4': must be one of eagle, eagle3, medusa, mtp, peagle$"):
        planned_config(shared_target().config, {"kind": "eagle4"})
