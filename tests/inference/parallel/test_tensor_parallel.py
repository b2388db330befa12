"""Ranks that share one target give the answers of one process, whatever the batch. Paper section 3.2."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from eagle_train import generate
from eagle_train.artifacts.format import save_draft
from eagle_train.distributed import World
from eagle_train.errors import UserError
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.models.loading import TargetConfig, load_target
from tests.support.command_line import call
from tests.support.processes import run, start_ranks
from tests.support.tensor_parallel_job import outcome
from tests.support.tiny import tiny_model, tiny_tokenizer, trained_draft

FAMILIES = {"llama": {}, "qwen3": {}, "mixtral": {}, "llama4": {}}
OTHERS = {
    "qwen3_moe": {},
    "gemma2": {},
}  # gpt-oss's plan leaves a tiny model nearly whole on each rank, which is refused
DRAFTS = {"qwen3": {"first_token": "skip", "window": 6, "sink": True}}
# Llamas: with heads that three ranks can share, and one of which graphs are soon compiled.
LLAMAS = {"three": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}}
LLAMAS |= {"shallow": {"num_hidden_layers": 1}}


DIVIDED = {"divide_draft": True, "divide_lm_head": True}
EVERYTHING = {"overlap": True, "prefix_cache": True, "host_kv_tokens": 160, "kv_tokens": 80, "prefill_tokens": 5}


def case(
    family: str,
    count: int,
    sampled: bool,
    drafts_differ: bool = False,
    logits_differ: bool = False,
    guided: bool = False,
    short: bool = False,
    recorded: bool = False,
    changed: bool = False,
    backend: str = "eager",
    **engine,
) -> dict:
    """`backend`: of torch.compile, if the engine compiles."""
    told = {"drafts_differ": drafts_differ, "guided": guided, "short": short, "recorded": recorded}
    told |= {"changed": changed, "logits_differ": logits_differ, "backend": backend}
    return {"family": family, "count": count, "sampled": sampled, **told, "engine": engine}


# Each option with each that it could disturb, and each family with none and with all; not all with all.
CASES = {
    2: [
        *(case(family, 3, True, tree="n8") for family in ("qwen3", "llama4")),  # a row of which is at temperature 0
        *(case("llama", count, sampled, tree="chain3") for count, sampled in ((1, True), (5, False))),
        case("llama", 5, True, tree="n8", drafting="multinomial"),
        case("llama", 5, True, tree="n8", max_batch_size=3, kv_tokens=80, prefill_tokens=5),
        case("llama", 5, False, drafts_differ=True, tree="n8"),
        case("llama", 5, True, drafts_differ=True, tree="n8", drafting="multinomial_without_replacement"),
        *(case(family, 5, True, tree="n8", max_batch_size=3, **EVERYTHING) for family in FAMILIES | OTHERS),
        case("llama", 5, True, short=True, tree="n8", max_batch_size=3),
        # a row alone has the fewest graphs, and torch's own compiler takes many seconds for each
        case("shallow", 1, True, tree="chain3", compile=True, max_batch_size=1),
        case("shallow", 3, True, tree="chain3", compile=True, **DIVIDED),
        case("shallow", 1, True, backend="inductor", tree="chain3", compile=True, max_batch_size=1, **DIVIDED),
        *(case(family, count, count > 1, tree="n8", **DIVIDED) for family, count in (("llama", 1), ("qwen3", 5))),
        *(case("llama", 5, True, tree="chain3", drafting=mode, **DIVIDED) for mode in ("greedy", "multinomial")),
        case("llama", 5, True, guided=True, tree="n8", max_batch_size=3, **EVERYTHING, **DIVIDED),
        case("llama", 5, True, tree="n8", divide_sampling=False, **DIVIDED),
        *(
            case("llama", 5, sampled, logits_differ=True, tree="n8", divide_sampling=False, divide_lm_head=False)
            for sampled in (False, True)
        ),
        case("mixtral", 3, True, recorded=True, tree="n8", max_batch_size=3),
        case("llama", 5, True, drafts_differ=True, recorded=True, tree="chain3", max_batch_size=2),
        case("llama", 3, True, recorded=True, tree="n8", max_batch_size=3, **DIVIDED),
        case("llama", 5, True, guided=True, tree="n8", max_batch_size=3),
        *(
            case("llama", count, True, changed=True, guided=count == 3, tree="n8", max_batch_size=3, **options)
            for count, options in ((5, EVERYTHING), (3, DIVIDED), (5, {"divide_sampling": False}))
        ),
        case("llama", 5, True, changed=True, drafts_differ=True, tree="chain3", drafting="multinomial"),
    ],
    3: [
        *(case("three", count, True, tree=tree) for count, tree in ((1, "chain3"), (4, "n8"), (5, "n8"))),
        case("three", 4, False, tree="chain3"),
        *(case("three", count, True, tree="n8", divide_lm_head=True, divide_draft=count == 4) for count in (1, 4)),
    ],
}


@pytest.fixture(scope="module", params=[pytest.param(size, marks=pytest.mark.ranks) for size in CASES])
def ranks(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A directory with a target and a trained draft for each family."""
    root = tmp_path_factory.mktemp("ranks")
    for name, changes in (FAMILIES | OTHERS | LLAMAS).items():
        tiny_model("llama" if name in LLAMAS else name, **changes).save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
        target = load_target(TargetConfig(str(root / name)), "cpu")
        draft = trained_draft(target, steps=60, **DRAFTS.get(name, {}))
        save_draft(draft, root / f"{name}-draft", target.identity, dtype=torch.float32)
    return root


@pytest.fixture(scope="module")
def found(root, ranks) -> list[list[dict]]:
    """What each rank reports for each case."""
    start_ranks(ranks, "tensor_parallel_job", root, CASES[ranks])
    return [json.loads((root / f"found-{ranks}-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def alone(root, ranks) -> list[dict]:
    """What one process reports, which compiles nothing."""
    targets = {name: load_target(TargetConfig(str(root / name)), "cpu") for name in FAMILIES | OTHERS | LLAMAS}
    cases = [case | {"engine": case["engine"] | {"compile": False}} for case in CASES[ranks]]
    return [outcome(case, targets[case["family"]], root / f"{case['family']}-draft") for case in cases]


def assert_alike(ours: list | None, theirs: list | None) -> None:
    """Log-probabilities, which ranks compute in another order of sums; ours come from JSON."""
    assert (ours is None) == (theirs is None)
    for (token, number, top), (other, expected, best) in zip(ours or [], theirs or [], strict=True):
        assert token == other
        assert [each for each, _ in top] == [each for each, _ in best]
        numbers = [number, *(each for _, each in top)]
        assert numbers == pytest.approx([expected, *(each for _, each in best)], abs=1e-4)


def test_they_answer_as_one_process_does(ranks, found, alone):
    for number, (case, expected) in enumerate(zip(CASES[ranks], alone, strict=True)):
        for of_rank in found:
            assert of_rank[number]["free"], case
            assert of_rank[number]["compiled"] or not case["engine"].get("compile"), case
            assert of_rank[number]["tokens"] == expected["tokens"], case
            assert of_rank[number]["rounds"] == expected["rounds"], case
            assert of_rank[number]["blocks"] == expected["blocks"], case
            assert of_rank[number]["replays"] == expected["replays"], case
            for ours, theirs in zip(of_rank[number]["logprobs"], expected["logprobs"], strict=True):
                assert_alike(ours, theirs)
            assert of_rank[number]["random"] == found[0][number]["random"], case
            assert len({*map(tuple, found[0][number]["random"])}) == (3 if case["changed"] else 0), case
            assert len(set(expected["replays"])) == int(case["recorded"]), case  # all of a round, or nothing
            assert of_rank[number]["heads"] * ranks == expected["heads"]
            parts = ranks if case["engine"].get("divide_draft") else 1
            for name in ("draft_heads", "draft_size"):
                assert of_rank[number][name] * parts == expected[name], case
    assert {count for one in alone for rounds in one["rounds"] for count in rounds} >= {1, 2, 3}, "accepted and not"


def test_each_rank_computes_the_logits_of_its_rows(ranks, found, alone):
    for number, (case, expected) in enumerate(zip(CASES[ranks], alone, strict=True)):
        if case["engine"].get("divide_lm_head") or not case["engine"].get("divide_sampling", True):
            continue
        counts = [-(-rows // ranks) for rows in expected["rows"]]
        assert all(of_rank[number]["rows"] == counts for of_rank in found)


class Several(Ranks):
    """One of several ranks, without the others."""

    def __init__(self, rank: int, size: int):
        self.group, self.rank, self.size, self.divided = "others", rank, size, True


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8])
def test_shares_are_of_one_size_and_make_up_the_batch(batch, size):
    rows = torch.arange(batch)
    parts = [Several(rank, size).own(rows) for rank in range(size)]
    assert {len(part) for part in parts} == {-(-batch // size)}
    assert torch.equal(torch.cat(parts)[:batch], rows)


@pytest.mark.ranks
@pytest.mark.parametrize("draft", [["draft=ROOT/llama-draft"], ["drafter=draft_model", "drafter.path=ROOT/llama"]])
def test_the_command_divides_the_target_over_its_processes(root, capsys, draft):
    """A draft model is whole on each of them."""
    draft = [each.replace("ROOT", str(root)) for each in draft]
    arguments = [f"target={root}/llama", *draft, "prompt=abc", "max_tokens=12", "device=cpu"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run([*launcher, "-m", "eagle_train.generate", *arguments], env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert call(generate.main, *arguments) == 0
    assert done.stdout == capsys.readouterr().out


def test_heads_that_cannot_be_divided_are_refused(root):
    message = "parallel.target=tensor: 2 key/value heads cannot be divided between 3 processes"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        load_target(TargetConfig(str(root / "llama")), "cpu", "tensor", World(0, 3, 3))
