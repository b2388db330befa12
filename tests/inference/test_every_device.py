"""Engines on each device that is there, the CPU and a GPU: what few other tests run on a GPU changes no answer."""

import pytest
import torch

from eagle_train.drafts import Draft
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.cache.prefix_cache import HostKV
from eagle_train.models.draft_quantisation import Quant, quant_of, quantise_draft
from eagle_train.models.target import Target
from eagle_train.ops.linear import Fp8Linear, Int4Linear
from tests.support.inside import drafter_of
from tests.support.reference_answers import GREEDY, PROMPTS, token_ids
from tests.support.tiny import tiny_draft, tiny_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def a_target(device: str, **changes) -> Target:
    return Target(tiny_model("llama", **changes).to(device), name="tiny-llama")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tree", ["chain3", "n8"])
@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_a_quantised_draft_changes_no_answer(device, scheme, tree):
    """By the device's own products, of widths that its kernels take."""
    target, draft = a_target(device, **WIDE), a_quantised_draft(scheme)
    wanted = token_ids(Engine(target, max_batch_size=3).generate(PROMPTS, GREEDY))
    engine = Engine(target, draft, tree, max_batch_size=3)
    for _ in range(2):  # at first recorded
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == wanted


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_the_devices_products_draft_what_their_twins_do(device, scheme, monkeypatch):
    target = a_target(device, **WIDE)
    own = drafted(Engine(target, a_quantised_draft(scheme), graphs=False))
    for module in (Int4Linear, Fp8Linear):
        monkeypatch.setattr(module, "use_kernel", lambda self, dtype: None)
    twins = drafted(Engine(target, a_quantised_draft(scheme), graphs=False))
    assert own.shape == twins.shape
    assert (own == twins).float().mean() > 0.9  # the products' activations are bf16, and tokens may be as likely


def a_quantised_draft(scheme: str) -> Draft:
    draft = quantise_draft(tiny_draft(a_target("cpu", **WIDE), intermediate_size=256), Quant(scheme, "all_linear"))
    assert quant_of(draft).scheme == scheme
    return draft


def drafted(engine: Engine) -> torch.Tensor:
    """The first drafts of all prompts, one after the other: int64 [prompts, 3]."""
    found, propose = [], drafter_of(engine).propose
    drafter_of(engine).propose = lambda round: (found.append(propose(round)), found[-1])[1]
    for prompt in PROMPTS:
        engine.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True))
    return torch.cat([each.tokens[:, 1:] for each in found]).cpu()  # without the pending token


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_come_back_from_host_memory(device, overlap, monkeypatch):
    """Of a store that is too small for all prompts; twice the same answers, the second time by what was kept."""
    brought, get = [], HostKV.get
    monkeypatch.setattr(HostKV, "get", lambda self, names, blocks: (brought.extend(blocks), get(self, names, blocks)))
    target = a_target(device)
    wanted = token_ids(Engine(target).generate(PROMPTS, GREEDY))
    options = {"kv_tokens": 6 * BLOCK, "prefix_cache": True, "host_kv_tokens": 60 * BLOCK, "overlap": overlap}
    engine = Engine(target, tiny_draft(target), "chain3", **options)
    for _ in range(2):
        assert token_ids(engine.generate(PROMPTS, GREEDY)) == wanted
    assert brought
