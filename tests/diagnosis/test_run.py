"""Each cause is planted in a real draft and found, before any other; healthy drafts raise no alarm."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from eagle_train.artifacts.convert import Source
from eagle_train.artifacts.format import load_draft, read_artifact, save_draft
from eagle_train.diagnosis import learning, own_variants, reading, replay, run
from eagle_train.diagnosis.files import file_findings
from eagle_train.diagnosis.report import summary
from eagle_train.drafts import planned_config
from eagle_train.inference.cache.block_ends import LastStates
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.inference.drafters.growing import Nodes
from eagle_train.models.loading import TargetConfig, load_target
from tests.support.doctor_models import PLACE
from tests.support.inside import pool_of
from tests.support.planted import TARGET, causes, edited, examined, exported, native, rewritten

HALF = 64  # columns of fc for the embedding: the width of hidden states


def as_it_is(draft) -> None:
    """No change of the module."""


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp"])
def test_a_healthy_draft_raises_no_alarm(name):
    found = examined(PLACE / name)
    assert causes(found) == []
    assert found.is_healthy
    assert found.figures["rounds_that_differ"] == 0
    assert found.figures["after_every_token"] > 2.5


@pytest.mark.parametrize(("name", "layout"), [("eagle", "vllm"), ("eagle", "trtllm"), ("eagle3", "speculators")])
def test_a_healthy_export_raises_no_alarm(tmp_path, name, layout):
    found = examined(exported(tmp_path / "out", name, layout), trained=str(PLACE / name))
    assert causes(found) == []
    figures = found.figures
    assert figures["after_every_token_as_trained"] == pytest.approx(figures["after_every_token"], abs=0.05)


def test_an_export_whose_vocabulary_lies_beside_it_raises_no_alarm(tmp_path):
    """SGLang's; without the file SGLang proposes all tokens."""
    few = list(range(2, 90))
    native(tmp_path / "few", "eagle", as_it_is, vocab_size=len(few), vocabulary=few)
    out = exported(tmp_path / "out", str(tmp_path / "few"), "sglang")
    assert causes(examined(out)) == []
    (out / "token_map.pt").unlink()
    assert causes(examined(out)) == ["vocabulary"]


# --- in a draft alone: a change of the convention gains


def swapped(draft) -> None:
    draft.fc.weight.copy_(draft.fc.weight.roll(HALF, 1))


def transposed(draft) -> None:
    weight = draft.layers[0].self_attn.o_proj.weight
    weight.copy_(weight.t().clone())


def scaled(draft) -> None:
    draft.fc.weight[:, :HALF] *= 8


NATIVE: dict[str, tuple[str, str, Callable, dict]] = {
    "rope": ("rope", "eagle", as_it_is, {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}}),
    "rope scaling": (
        "rope",
        "mtp",
        as_it_is,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0}},
    ),
    "layers": ("layer", "eagle3", as_it_is, {"layers": [2, 3]}),
    "embedding": ("embedding", "eagle", scaled, {}),
    "fc": ("tensor", "eagle", swapped, {}),
    "o_proj": ("tensor", "eagle3", transposed, {}),
}


@pytest.mark.parametrize("planted", NATIVE)
def test_a_wrong_convention_is_found_without_another_draft(tmp_path, planted):
    cause, name, change, config = NATIVE[planted]
    found = examined(native(tmp_path / "draft", name, change, **config))
    assert causes(found) == [cause]
    assert found.findings[0].costs > 0.5


def test_a_shifted_vocabulary_is_found_without_another_draft(tmp_path):
    tokens = load_draft(PLACE / "eagle3").config.vocabulary
    place = native(tmp_path / "draft", "eagle3", as_it_is)
    path = place / "config.json"
    values = json.loads(path.read_text())
    values["eagle_train"]["draft"]["vocabulary"] = [token + 1 for token in tokens]
    path.write_text(json.dumps(values))
    found = examined(place)
    assert causes(found) == ["vocabulary"]
    assert "every token one lower" in found.findings[0].measured


@pytest.mark.parametrize(("name", "cause"), [("own_states", "positions"), ("before_norm", "norm")])
def test_a_draft_that_was_trained_with_another_convention_is_found(name, cause):
    assert causes(examined(PLACE / name)) == [cause]


@pytest.mark.parametrize(("training", "found"), [({"steps": 120}, False), ({}, True)])
def test_a_gain_is_no_wrong_convention_of_a_draft_that_agrees_with_its_run(tmp_path, training, found):
    """As of a draft of few steps that is better with embeddings of another scale. Who trained it otherwise, with what
    conventions, is not known: a gain counts."""
    about = read_artifact(PLACE / "own_states")
    place = save_draft(load_draft(PLACE / "own_states"), tmp_path, about.target, training, torch.float32)
    diagnosis = examined(place, trained=str(place))
    assert max(each["gain"] for each in diagnosis.figures["changes"]) > 0.1
    assert ("positions" in causes(diagnosis)) == found


def test_a_gain_on_answers_that_repeat_themselves_is_no_wrong_convention(monkeypatch):
    """A draft of a short run continues a loop better with a norm left out, say."""
    monkeypatch.setattr(learning, "MOST_OF_TABLE", 0.0)  # these texts are none
    found = examined(PLACE / "own_states", limit=8)
    assert max(each["gain"] for each in found.figures["changes"]) > 0.1
    assert "positions" not in causes(found)
    (reason,) = [each.reason for each in found.not_checked if each.check == "conventions"]
    assert reason.endswith("of the tokens: texts repeat themselves; give other data")


def test_a_gain_is_no_wrong_convention_of_a_run(tmp_path, monkeypatch):
    """Its conventions are known without `trained`."""
    place = PLACE / "own_states"
    made = Source(load_draft(place), read_artifact(place), place)
    monkeypatch.setattr(run, "draft_directory", lambda *_: tmp_path)  # a run has no config.json
    monkeypatch.setattr(reading, "trained_draft", lambda _: made)
    found = examined(tmp_path, limit=8)
    assert max(each["gain"] for each in found.figures["changes"]) > 0.1
    assert "positions" not in causes(found)


def test_a_slot_that_training_left_out_is_found(tmp_path):
    """Its keys are seen by all that follow."""
    found = examined(native(tmp_path / "draft", "eagle", as_it_is, first_token="self_fusion"), limit=24)
    assert causes(found) == ["first_token"]
    assert "first_token=skip" in found.findings[0].measured


def test_a_slot_that_the_run_left_out_is_found(tmp_path):
    """Whose conventions are known, so that no change of them is tried."""
    about, made = read_artifact(PLACE / "eagle"), load_draft(PLACE / "eagle")
    trained = save_draft(made, tmp_path / "trained", about.target, {"steps": 5}, torch.float32)
    served = native(tmp_path / "served", "eagle", as_it_is, first_token="self_fusion")
    found = examined(served, trained=str(trained), limit=24)
    assert causes(found) == ["first_token"]
    assert found.findings[0].measured.startswith("It was trained with first_token=skip, and is served with self_fusion")
    assert found.findings[0].costs > 0.1


# --- in an export: what its files say, and what they hold


def with_theta(values: dict) -> None:
    values["rope_theta"] = values["rope_parameters"]["rope_theta"] = 20.0


def with_layers(values: dict) -> None:
    values["eagle_aux_hidden_state_layer_ids"] = [2, 3]


def with_residual(values: dict) -> None:
    values["norm_before_residual"] = True


def short_context(values: dict) -> None:
    values["max_position_embeddings"] = 32


def ids(tensors: dict) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def shifted(tensors: dict) -> None:
    tensors["d2t"] += 1


def zeroed(tensors: dict) -> None:
    tensors["layers.0.self_attn.o_proj.weight"].zero_()


def infinite(tensors: dict) -> None:
    tensors["fc.weight"][0, 0] = float("inf")


def other_embedding(tensors: dict) -> None:
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].roll(1, 0)


def louder_embedding(tensors: dict) -> None:
    tensors["embed_tokens.weight"] *= 8


EXPORTED = {
    "theta": ("rope", "eagle", "vllm", edited, with_theta, "rope_theta"),
    "ids": ("layer", "eagle3", "vllm", edited, with_layers, "eagle_aux_hidden_state_layer_ids"),
    "residual": ("norm", "eagle3", "vllm", edited, with_residual, "norm_before_residual"),
    "context": ("context", "eagle", "vllm", edited, short_context, "max_position_embeddings"),
    "d2t as ids": ("vocabulary", "eagle3", "vllm", rewritten, ids, "token ids"),
    "d2t shifted": ("vocabulary", "eagle3", "vllm", rewritten, shifted, "+1"),
    "zeros": ("tensor", "eagle", "vllm", rewritten, zeroed, "is zero throughout"),
    "infinity": ("precision", "eagle", "vllm", rewritten, infinite, "not finite"),
    "embedding": ("embedding", "eagle", "trtllm", rewritten, other_embedding, "off the embedding"),
    "embedding scaled": ("embedding", "eagle", "trtllm", rewritten, louder_embedding, "times 8"),
}


@pytest.mark.parametrize("planted", EXPORTED)
def test_a_broken_export_is_found_by_itself(tmp_path, planted):
    cause, name, layout, how, change, said = EXPORTED[planted]
    found = examined(how(exported(tmp_path / "out", name, layout), change))
    assert causes(found) == [cause]
    assert said in found.findings[0].measured


def test_zeros_are_damage_but_where_training_begins_with_them():
    medusa = ["0.0.linear.weight", "layers.0.mlp.1.weight"]
    others = ["0.1.weight", "layers.0.mlp.gate_proj.weight", "layers.0.mlp.experts.down_proj"]
    tensors = {name: torch.zeros(2, 3) for name in medusa + others}
    found = file_findings({}, tensors, load_target(copy.copy(TARGET), "cpu"), None)
    assert [each.measured for each in found] == [f"{name} [2, 3] is zero throughout." for name in others]


def of_others(values: dict) -> None:
    """As engines know it, without our description."""
    del values["eagle_train"]


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_a_healthy_draft_of_others_raises_no_alarm(tmp_path, name):
    found = examined(edited(exported(tmp_path / "out", name, "vllm"), of_others), trained=str(PLACE / name))
    assert causes(found) == []


def test_a_draft_of_others_is_examined_by_its_files_and_conventions(tmp_path):
    place = edited(exported(tmp_path / "ids", "eagle3", "vllm"), of_others)
    found = examined(rewritten(place, ids))
    assert causes(found) == ["vocabulary"]
    assert "d2t holds token ids" in found.findings[0].measured

    def without_our_name(values: dict) -> None:
        of_others(values)
        with_theta(values)

    assert causes(examined(edited(exported(tmp_path / "theta", "eagle", "vllm"), without_our_name))) == ["rope"]


# --- against the draft that was trained: the first module that differs


def halves(tensors: dict) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].roll(HALF, 1)


def turned(tensors: dict) -> None:
    tensors["layers.0.self_attn.o_proj.weight"] = tensors["layers.0.self_attn.o_proj.weight"].t().contiguous()


def other_norm(tensors: dict) -> None:
    tensors["layers.0.post_attention_layernorm.weight"].mul_(6.0)


def half_scales(tensors: dict) -> None:
    for name in [each for each in tensors if each.endswith("weight_scale")]:
        tensors[name] = tensors[name].roll(1, 0)


def coarse(tensors: dict) -> None:
    weight = tensors["layers.0.mlp.down_proj.weight"].float()
    step = weight.abs().max() / 2
    tensors["layers.0.mlp.down_proj.weight"] = ((weight / step).round() * step).bfloat16()


AGAINST = {
    "halves": ("tensor", "none", halves, "at fc, token 0"),
    "turned": ("tensor", "none", turned, "the weight is transposed"),
    "norm": ("norm", "none", other_norm, "layers.0.post_attention_layernorm"),
    "fp8 scales": ("precision", "fp8", half_scales, "fp8 codes and scales"),
    "coarse": ("precision", "none", coarse, "coarse rounding"),
}


@pytest.mark.parametrize("planted", AGAINST)
def test_the_first_divergence_is_named(tmp_path, planted):
    cause, quant, change, said = AGAINST[planted]
    place = rewritten(exported(tmp_path / "out", "eagle", "vllm", quant), change)
    found = examined(place, trained=str(PLACE / "eagle"))
    assert causes(found)[0] == cause
    assert "First divergence at " in found.findings[0].measured
    assert said in found.findings[0].measured
    assert found.findings[0].costs == pytest.approx(
        found.figures["after_every_token_as_trained"] - found.figures["after_every_token"]
    )


def test_a_head_of_which_another_part_is_turned_is_told(tmp_path):
    """As where a converter loses partial_rotary_factor."""
    rope = {"rope_type": "default", "rope_theta": 1000.0}
    half = {"rope_parameters": rope | {"partial_rotary_factor": 0.5}}
    trained, served = (native(tmp_path / name, "eagle", as_it_is, **given) for name, given in (("a", half), ("b", {})))
    (first, *_) = examined(served, trained=str(trained)).findings
    assert (first.cause, first.measured.startswith("16 numbers of each head are turned, and 8 were")) == ("rope", True)


def test_heads_that_are_divided_otherwise_are_told(tmp_path):
    """Of matrices of the same sizes."""
    other = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 8}
    trained, served = (native(tmp_path / name, "eagle", as_it_is, **given) for name, given in (("a", {}), ("b", other)))
    told = {each.cause: each.measured for each in examined(served, trained=str(trained)).findings}
    assert told["tensor"].startswith("The engine reads num_heads 8; it was trained with 4.")


def peagle(place: Path, **changes) -> Path:
    target = load_target(copy.copy(TARGET), "cpu")
    config = planned_config(target.config, {"kind": "peagle", "layers": [1, 2], "num_layers": 1, **changes})
    return save_draft(config.module().init_weights(0, target.lm_head), place, target.identity, dtype=torch.float32)


def test_another_mask_token_is_told(tmp_path):
    trained, served = peagle(tmp_path / "a"), peagle(tmp_path / "b", mask_token=5)
    told = {each.cause: each.measured for each in examined(served, trained=str(trained)).findings}
    assert told["embedding"] == "The engine reads mask_token 5; it was trained with 95."


def test_a_mask_token_that_was_edited_is_told(tmp_path):
    peagle(tmp_path / "own")

    def other(values: dict) -> None:
        values["pard_token"] = 5

    found = examined(edited(exported(tmp_path / "out", str(tmp_path / "own"), "vllm"), other))
    assert "config.json says pard_token 5 to the engine; it was trained with 95." in found.findings[0].measured


def test_heads_that_were_edited_are_told(tmp_path):
    def other(values: dict) -> None:
        values |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}

    found = examined(edited(exported(tmp_path / "out", "eagle", "vllm"), other))
    assert causes(found)[0] == "tensor"
    assert "config.json says num_attention_heads 8 to the engine" in found.findings[0].measured


def test_a_targets_rotary_positions_that_the_draft_cannot_have_are_not_tried(tmp_path, monkeypatch):
    """Factors for heads of another width, and none at all."""
    target, draft = load_target(copy.copy(TARGET), "cpu"), load_draft(PLACE / "eagle")
    factors = {name: [1.0] * 3 for name in ("short_factor", "long_factor")}
    longrope = {"rope_type": "longrope", "rope_theta": 20.0, "original_max_position_embeddings": 9, **factors}
    for settings in ({}, longrope):
        monkeypatch.setattr(own_variants, "rope_parameters_of", lambda _, given=settings: given)
        told = [each.said for each in own_variants.own_variants(target, draft) if each.cause == "rope"]
        assert [said.partition(" rotary")[0] for said in told] == ["the plain"]


def test_a_quantised_export_raises_no_alarm(tmp_path):
    assert causes(examined(exported(tmp_path / "out", "eagle", "vllm", "fp8"), trained=str(PLACE / "eagle"))) == []


# --- in the engine: what it computes otherwise than the training graph


def shift_level(patch: pytest.MonkeyPatch) -> None:
    """Chains one position too far."""
    own = Nodes.next_level

    def next_level(self, active, level):
        positions, attend = own(self, active, level)
        return positions + 1, attend

    patch.setattr(Nodes, "next_level", next_level)


def shift_pending(patch: pytest.MonkeyPatch) -> None:
    """Committed tokens one position too far."""
    own = Eagle.forward_at

    def forward_at(self, tokens, hidden, positions, wanted, attend):
        return own(self, tokens, hidden, positions + (wanted.numel() > 0), wanted, attend)

    patch.setattr(Eagle, "forward_at", forward_at)


def other_hidden(patch: pytest.MonkeyPatch) -> None:
    """Hidden states of a norm too many."""
    own = Eagle.forward_at
    patch.setattr(Eagle, "forward_at", lambda self, tokens, hidden, *rest: own(self, tokens, 3 * hidden, *rest))


FAULTS = {
    "chain": (shift_level, "positions", "is given position"),
    "pending": (shift_pending, "positions", "the engine has position"),
    "hidden": (other_hidden, "layer", "hidden state"),
}


@pytest.mark.parametrize("planted", FAULTS)
def test_a_fault_of_the_engine_is_found(monkeypatch, planted):
    fault, cause, said = FAULTS[planted]
    fault(monkeypatch)
    found = examined(PLACE / "eagle")
    assert causes(found)[0] == cause
    assert said in found.findings[0].measured


def chained(place: Path, change: Callable = as_it_is) -> Path:
    """A draft of two modules, which are the same one."""
    one = load_draft(PLACE / "mtp")
    made, own = replace(one.config, modules=2).module(), one.state_dict()
    for name, tensor in one.state_dict().items():
        own[name.replace("layers.0", "layers.1") if name.startswith("layers") else f"further.0.{name}"] = tensor
    made.load_state_dict(own)
    with torch.no_grad():
        change(made.further[0])
    return save_draft(made, place, read_artifact(PLACE / "mtp").target, dtype=torch.float32)


def test_a_wrong_convention_of_a_later_module_is_found(tmp_path):
    found = examined(chained(tmp_path / "draft", swapped))
    assert causes(found) == ["tensor"]
    assert "With the parts of further.0.fc in the reverse order" in found.findings[0].measured


def test_an_embedding_of_a_later_module_is_told_by_the_columns(tmp_path):
    def louder(tensors: dict) -> None:
        tensors["further.0.fc.weight"][:, :HALF] *= 8

    trained = chained(tmp_path / "trained")
    broken = rewritten(shutil.copytree(trained, tmp_path / "broken"), louder)
    assert causes(examined(broken, trained=str(trained)))[0] == "embedding"


def test_a_fault_of_the_engine_in_a_later_module_is_found(tmp_path, monkeypatch):
    """States of the module before that are not those at the token before."""
    own = LastStates.before
    monkeypatch.setattr(LastStates, "before", lambda self, prefix: torch.ones_like(own(self, prefix)))
    (first, *_) = examined(chained(tmp_path / "draft")).findings
    assert first.cause == "engine"
    assert re.search(r"First divergence at token \d+ \(id \d+\), module 2, hidden state: \d+% off", first.measured)


@pytest.mark.parametrize("batch_size", [2, 64])
def test_engines_have_room_for_their_answers_alone(monkeypatch, batch_size):
    """And no graphs: on a GPU there is more than one, beside vLLM's."""
    made = []

    def noted(target, drafter, tree, config):
        made.append((own(target, drafter, tree, config), config))
        return made[-1][0]

    own = replay.Engine
    monkeypatch.setattr(replay, "Engine", noted)
    shift_pending(monkeypatch)  # so that one answer is traced
    examined(PLACE / "eagle", batch_size=batch_size)
    assert len(made) == 2
    for engine, config in made:
        assert config.graphs is False
        assert config.max_batch_size <= batch_size
        pool = pool_of(engine)
        assert pool.available == pool.total == config.kv_tokens // BLOCK


# --- in what it has learnt


def test_a_draft_of_few_steps_is_found():
    assert causes(examined(PLACE / "few_steps")) == ["undertrained"]


def test_a_fresh_draft_is_found(tmp_path):
    def fresh(draft) -> None:
        draft.init_weights(1)

    assert causes(examined(native(tmp_path / "draft", "mtp", fresh))) == ["undertrained"]


@pytest.mark.parametrize("kind", [{"kind": "medusa"}, {"kind": "peagle", "layers": [1, 2]}])
def test_kinds_that_draft_all_levels_at_once_are_examined_too(tmp_path, kind):
    target = load_target(copy.copy(TARGET), "cpu")
    draft = planned_config(target.config, kind).module().init_weights(0, target.lm_head)
    found = examined(save_draft(draft, tmp_path / "draft", target.identity, dtype=torch.float32))
    assert causes(found) == ["undertrained"]
    assert found.figures["rounds_that_differ"] == 0


def test_texts_of_others_are_found():
    found = examined(PLACE / "others_texts", questions="others")
    assert causes(found) == ["off_policy"]
    # Without the texts that it knows it is a draft that might be better, and no more can be said.
    assert causes(examined(PLACE / "others_texts")) == []


def test_another_template_is_found():
    found = examined(PLACE / "eagle", target=replace(TARGET, template_kwargs={"shout": True}))
    assert causes(found) == ["template"]
    assert "shout=false" in found.findings[0].measured


def test_contexts_that_are_too_long_are_found():
    found = examined(PLACE / "short_texts")
    assert causes(found) == ["context"]


def test_another_target_is_found(tmp_path):
    target = load_target(copy.copy(TARGET), "cpu")
    model, place = copy.deepcopy(target.model), tmp_path / "target"
    with torch.no_grad():
        nn.init.normal_(model.model.layers[0].mlp.down_proj.weight, std=1e-4)
    model.save_pretrained(place)
    target.tokenizer.save_pretrained(place)
    found = examined(PLACE / "eagle3", target=TargetConfig(str(place), dtype="float32"))
    assert causes(found)[0] == "target"


def test_an_overflow_is_found(tmp_path):
    def loud(draft) -> None:
        draft.layers[0].mlp.up_proj.weight *= 1e5
        draft.layers[0].mlp.down_proj.weight /= 1e5

    place = native(tmp_path / "draft", "eagle", loud)
    assert causes(examined(place, serving_dtype="bfloat16")) == []
    found = examined(place, serving_dtype="float16")
    assert causes(found) == ["precision"]
    assert "layers.0.mlp.up_proj" in found.findings[0].measured
    assert [each.check for each in examined(place).not_checked].count("overflow") == 1


def test_few_prompts_say_nothing():
    """Of a draft whose wrong convention sixteen prompts show."""
    found = examined(PLACE / "own_states", limit=5)
    assert "positions" not in causes(found)
    assert max(each["gain"] for each in found.figures["changes"]) > 0.1
    reasons = {each.check: each.reason for each in found.not_checked}
    few = "5 prompts are too few, and 6 the least; raise limit"
    assert reasons["conventions"] == few
    assert reasons["template, off-policy data, long contexts, a chain's second token"] == few
    assert (found.figures["tpc_interval"], found.figures["after_every_token_interval"]) == (None, None)
    assert " tokens per call (TPC) over 5 answers; contexts of up to " in summary(found)


def test_how_the_run_was_trained_counts_for_what_others_made_of_it(tmp_path, monkeypatch):
    """The run's own variables of the template are the first that are tried."""
    training = {"steps": 5, "data": {"template_kwargs": {"shout": True}}}
    about, made = read_artifact(PLACE / "eagle"), load_draft(PLACE / "eagle")
    source = save_draft(made, tmp_path / "run", about.target, training)
    seen: list[dict] = []
    monkeypatch.setattr(run, "other_templates", lambda *given: seen.append(given[3]) or learning.Learnt([], [], {}))
    place = edited(exported(tmp_path / "out", "eagle", "vllm"), of_others)
    examined(place, trained=str(source), limit=6, max_tokens=16)
    assert seen == [training]


def test_what_comes_after_is_not_checked_in_a_broken_draft(tmp_path):
    found = examined(native(tmp_path / "draft", "eagle", swapped))
    assert any(each.reason.startswith("first repair") for each in found.not_checked)


def test_a_file_that_cannot_be_read_is_a_finding_and_no_mistake(tmp_path):
    place = rewritten(exported(tmp_path / "out", "eagle", "vllm"), lambda tensors: tensors.pop("fc.weight"))
    found = examined(place)
    assert causes(found) == ["tensor"]
    assert "fc.weight" in found.findings[0].measured
