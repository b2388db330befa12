"""Several ranks: each backend computes what one process computes, and goes on from any other's checkpoint."""

import importlib.util
import itertools
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.ops.attention import packed_attention
from eagle_train.training.checkpoint.format import Checkpoint, checkpoints
from eagle_train.training.checkpoint.verify import open_checkpoint
from tests.support.command_line import chats, metrics_without_times, write_jsonl
from tests.support.processes import start_ranks
from tests.support.ranks_job import a_row, leave_out, spoil
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.trainers import a_target, assert_same, make_trainer, run_training

pytestmark = pytest.mark.ranks

STEPS, SAVED = 8, 4
TRAIN = {"steps": STEPS, "rows": 1, "rows_per_step": 6, "save_every": SAVED, "eval_every": SAVED, "keep": 0}
CASES = {
    "ddp": {"backend": "ddp"},
    "fsdp2": {"backend": "fsdp2"},
    "fsdp2-recomputed": {"backend": "fsdp2", "activation_checkpointing": True},
    "fsdp2-kept-whole": {"backend": "fsdp2", "reshard_after_forward": False},
    "fsdp2-offloaded": {"backend": "fsdp2", "offload_optimizer": True},
}
BEYOND = TRAIN | {"unroll": 3, "logits_loss": "lk", "l1_weight_end": 0.1}
EAGLE3 = TRAIN | {"shape": {"kind": "eagle3", "layers": [1], "num_layers": 2, "steps": 3, "vocab_size": 40}}
EAGLE3["shape"]["vocabulary"] = list(range(10, 90, 2))
MEDUSA = TRAIN | {"shape": {"kind": "medusa", "heads": 3, "num_layers": 2, "loss": "lk", "own_head": True}}
MTP = TRAIN | {"shape": {"kind": "mtp", "steps": 3, "modules": 2, "window": 7, "sink": True}}
PEAGLE = TRAIN | {"shape": EAGLE3["shape"] | {"kind": "peagle"}}
MUON = TRAIN | {"optim": {"name": "muon", "lr": 1e-3}}
LEFT_OUT = [2, 6, 7]  # steps
SPOILT = [4]  # steps whose gradients are no numbers
DROPPED = [1, 3, 6]  # steps that begin with gradients that are dropped
TOLD = [1, 6, 1]  # rank 1 to stop, after the first of step 7's three micro-batches
BF16_NOISE = 1e-3  # relative; FSDP2 rounds elsewhere than autocast, and 20 steps differ by 1e-4 at most
DEEPSPEED = {f"zero{stage}": {"backend": "deepspeed", "zero": {"stage": stage}} for stage in (1, 2, 3)}
DEEPSPEED |= {f"{name}-offloaded": {**DEEPSPEED[name], "offload_optimizer": True} for name in ("zero2", "zero3")}
if importlib.util.find_spec("deepspeed") and shutil.which("c++"):  # it compiles a small operation the first time
    CASES |= DEEPSPEED
FEW = [name for name in CASES if name not in ("fsdp2", "fsdp2-offloaded")]

WITH_MUON = ["ddp", "fsdp2"]
OF_KINDS = ["eagle3-", "medusa-", "mtp-", "peagle-"]
TWO = [name for name in ("fsdp2-recomputed", "zero2") if name in CASES]  # the others have the same backends under them
UNROLLED = [name for name in FEW if name != "zero1" and "offloaded" not in name]  # where states lie is not of a loss
NAMES = {"beyond-": UNROLLED, "low-": FEW, "muon-": WITH_MUON, "resumed-muon-": WITH_MUON, "told-": ["fsdp2"]}
NAMES |= {"eagle3-": UNROLLED} | dict.fromkeys(OF_KINDS[1:], TWO)  # by kind; of others all
MUON_NOISE = 5e-4  # relative; its products are in bf16 where the CPU has them, and 20 steps differ by 5e-5 at most


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    for seed, (name, count) in enumerate({"train": 60, "heldout": 12}.items()):
        write_jsonl(directory / f"{name}.jsonl", chats(count, seed))
    return directory


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory) -> tuple[Path, list[dict]]:
    """One process's run, and its metrics."""
    directory = tmp_path_factory.mktemp("alone")
    return directory, run_training(make_trainer(directory, data, **TRAIN))


@pytest.fixture(scope="module")
def alone_with_muon(data, tmp_path_factory) -> tuple[Path, list[dict]]:
    directory = tmp_path_factory.mktemp("alone_with_muon")
    return directory, run_training(make_trainer(directory, data, **MUON))


def first_half(source: Path, directory: Path) -> Path:
    """A copy of a run as it was at its first checkpoint."""
    shutil.copytree(source, directory)
    shutil.rmtree(directory / f"step-{STEPS:08d}")
    return directory


KINDS = {"": TRAIN, "resumed-": TRAIN, "beyond-": BEYOND, "low-": TRAIN, "muon-": MUON, "resumed-muon-": MUON}
KINDS |= {"eagle3-": EAGLE3, "medusa-": MEDUSA, "mtp-": MTP, "peagle-": PEAGLE}


def case_of(kind: str, name: str, out: Path) -> dict:
    """What two ranks do: CASE from the start, resumed-CASE from one process's checkpoint, beyond-CASE with options
    beyond the paper, low-CASE in bf16; muon-CASE and resumed-muon-CASE; told-CASE, which is left in a step.

    In beyond- and low-CASE steps are left out, some for what their gradients are; in CASE and low-CASE parts of steps
    are dropped. Of DeepSpeed's, CASE-RANK tells what a checkpoint's tensors took, and low-CASE-begins-RANK has the
    weights before the first step.
    """
    case = {"out": str(out), "parallel": CASES[name], "train": KINDS.get(kind, TRAIN)}
    case |= {"dtype": "bfloat16" if kind == "low-" else "float32"}
    case |= {"left_out": LEFT_OUT, "spoilt": SPOILT} if kind in ("beyond-", "low-") else {}
    case |= {"dropped": DROPPED} if kind in ("", "low-") else {}
    case |= {"told": TOLD} if kind == "told-" else {}
    told = {"": {"gathered": str(out)}, "low-": {"begins": str(out)}}
    return case | (told.get(kind, {}) if name in DEEPSPEED else {})


@pytest.fixture(scope="module")
def together(data, alone, alone_with_muon, tmp_path_factory) -> Callable[..., Path]:
    """Two ranks' runs by kind and name (`case_of`); those of a kind are made in one start when one is asked for."""
    root = tmp_path_factory.mktemp("together")

    @cache
    def start(kind: str) -> None:
        cases = []
        for name in NAMES.get(kind, CASES):
            out = root / f"{kind}{name}"
            if kind.startswith("resumed-"):
                first_half((alone_with_muon if "muon" in kind else alone)[0], out)
            cases.append(case_of(kind, name, out))
        start_ranks(2, "ranks_job", data, cases)

    def made(name: str, kind: str = "") -> Path:
        start(kind)
        return root / f"{kind}{name}"

    return made


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory) -> Callable[[str], list[dict]]:
    """What one process reports of a kind's run."""

    @cache
    def made(kind: str) -> list[dict]:
        target = a_target(dtype=torch.bfloat16) if kind == "low-" else None
        trainer = make_trainer(tmp_path_factory.mktemp("expected"), data, target=target, **KINDS[kind])
        if kind in ("beyond-", "low-"):
            leave_out(trainer, LEFT_OUT)
            spoil(trainer, SPOILT)
        return run_training(trainer)

    return made


def known(rows: list[dict]) -> list[dict]:
    """Rows without the values that are no numbers."""
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def continuous(rows: list[dict]) -> list[dict]:
    """What changes little with a rounding; which token is best may depend on one."""
    return [{name: row[name] for name in ("loss", "l1", "ce", "grad_norm", "skipped") if name in row} for row in rows]


def assert_same_run(found: list[dict], expected: list[dict], tolerance: float = 1e-5) -> None:
    assert len(found) == len(expected) == STEPS
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other, tolerance)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process_does(alone, together, name):
    assert_same_run(metrics_without_times(together(name)), alone[1])


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_go_on_from_one_processs_checkpoint(alone, together, name):
    assert_same_run(metrics_without_times(together(name, "resumed-")), alone[1])


@pytest.mark.parametrize("name", UNROLLED)
def test_two_ranks_train_beyond_the_paper_as_one_process_does(expected, together, name):
    assert_same_run(known(metrics_without_times(together(name, "beyond-"))), known(expected("beyond-")))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in OF_KINDS for name in NAMES[kind]])
def test_two_ranks_train_a_draft_of_another_kind_as_one_process_does(expected, together, kind, name):
    assert_same_run(metrics_without_times(together(name, kind)), expected(kind))


@pytest.mark.parametrize("name", FEW)
def test_two_ranks_train_in_bf16_as_one_process_does(expected, together, name):
    found, alone = (
        continuous(known(rows)) for rows in (metrics_without_times(together(name, "low-")), expected("low-"))
    )
    assert_same_run(found, alone, BF16_NOISE)


@pytest.mark.parametrize("name", [name for name in FEW if name in DEEPSPEED])
def test_deepspeed_begins_in_bf16_with_the_fp32_weights_it_is_given(together, data, tmp_path, name):
    """And not with what its copies in bf16 are."""
    low = a_target(dtype=torch.bfloat16)
    given = dict(make_trainer(tmp_path, data, target=low, **TRAIN).draft.named_parameters())
    out = together(name, "low-")
    for rank in (0, 1):
        assert_same(torch.load(f"{out}-begins-{rank}", weights_only=True), given, 0.0)


@pytest.mark.parametrize("name", WITH_MUON)
def test_two_ranks_train_with_muon_as_one_process_does(alone_with_muon, together, data, tmp_path, name):
    """From the start, from one process's checkpoint, and one process from theirs."""
    expected = continuous(alone_with_muon[1])
    for kind in ("muon-", "resumed-muon-"):
        assert_same_run(continuous(metrics_without_times(together(name, kind))), expected, MUON_NOISE)
    trainer = make_trainer(first_half(together(name, "muon-"), tmp_path / "run"), data, **MUON)
    assert trainer.resume()
    assert_same_run(continuous(run_training(trainer, resumed=True)), expected, MUON_NOISE)


@pytest.mark.parametrize("name", CASES)
def test_one_process_goes_on_from_two_ranks_checkpoint(alone, together, data, tmp_path, name):
    directory = first_half(together(name), tmp_path / "run")
    trainer = make_trainer(directory, data, **TRAIN)
    assert trainer.resume()
    assert trainer.state.step == SAVED
    assert_same_run(run_training(trainer, resumed=True), alone[1])


def test_a_rank_that_is_told_to_stop_stops_both_in_their_step(alone, together, data, tmp_path):
    """One process goes on from their checkpoint as if it had not been."""
    told = together("fsdp2", "told-")
    assert [path.name for path in checkpoints(told)] == [f"step-{step:08d}" for step in (SAVED, TOLD[1])]
    assert len(metrics_without_times(told)) == TOLD[1]
    trainer = make_trainer(shutil.copytree(told, tmp_path / "run"), data, **TRAIN)
    assert trainer.resume()
    assert trainer.state.step == TOLD[1]
    assert_same_run(run_training(trainer, resumed=True), alone[1])


@pytest.mark.parametrize("name", [name for name in CASES if name in DEEPSPEED])
def test_deepspeed_gathers_a_checkpoint_tensor_by_tensor(together, name):
    """The first rank keeps the draft, each a half of the optimiser's, and nobody what is the other's."""
    out = together(name)
    first, second = (torch.load(out.with_name(f"{name}-{rank}"), weights_only=True) for rank in (0, 1))
    assert first["most"] == second["most"] == 1
    assert first["left"] == second["left"] == 0
    weights = len(load_file(out / f"step-{STEPS:08d}" / "draft.safetensors"))
    assert (first["draft"], second["draft"]) == (weights, 0)
    assert first["optimizer"] + second["optimizer"] == 3 * weights
    assert abs(first["optimizer"] - second["optimizer"]) <= 1


def test_three_ranks_go_on_from_two_ranks_checkpoint(alone, together, data, tmp_path):
    directory = first_half(together("fsdp2"), tmp_path / "run")
    start_ranks(3, "ranks_job", data, [{"out": str(directory), "parallel": CASES["fsdp2"], "train": TRAIN}])
    assert_same_run(metrics_without_times(directory), alone[1])


NODES = {
    "world": {"backend": "fsdp2"},
    "copied": {"backend": "fsdp2", "draft_shard_size": 2},
    "chosen": {"backend": "fsdp2"},  # copied, and kept whole until a step's end
}
ON_FOUR = TRAIN | {"rows_per_step": 8}


@pytest.fixture(scope="module")
def four(data, tmp_path_factory) -> tuple[Path, list[dict]]:
    """Runs of four ranks in a directory, by the names of NODES, from the start and (resumed-) from one process's
    checkpoint, and the metrics of that process."""
    root = tmp_path_factory.mktemp("four")
    expected = run_training(make_trainer(root / "alone", data, **ON_FOUR))
    outs = {name: root / name for name in NODES}
    outs |= {f"resumed-{name}": first_half(root / "alone", root / f"resumed-{name}") for name in NODES}
    cases = []
    for name, out in outs.items():
        kind, marred = name.removeprefix("resumed-"), {"dropped": DROPPED} if name in NODES else {}
        case = {"out": str(out), "parallel": NODES[kind], "train": ON_FOUR, "chosen": kind == "chosen"}
        cases.append(case | {"ranks_of_a_node": 2, "shard_size": 1} | marred)
    start_ranks(4, "ranks_job", data, cases)
    return root, expected


@pytest.mark.parametrize("name", [*NODES, *(f"resumed-{name}" for name in NODES)])
def test_two_nodes_that_hold_a_draft_each_train_as_one_process_does(four, name):
    """Also the weights and the optimiser's state that they write, of which there is one copy."""
    root, expected = four
    assert_same_run(metrics_without_times(root / name), expected)
    ours, theirs = (checkpoint_of(root / each) for each in (name, "alone"))
    assert_same(ours, theirs, 1e-4)


def checkpoint_of(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of a run's last checkpoint; raises where a part is in it twice."""
    found = open_checkpoint(run / f"step-{STEPS:08d}")
    held = sum(
        tensor.numel() for file in run.glob(f"step-{STEPS:08d}/*.safetensors") for tensor in load_file(file).values()
    )
    tensors = {name: torch.full(shape, torch.nan) for name, shape in shapes_in(found).items()}
    assert held == sum(tensor.numel() for tensor in tensors.values())
    found.read_into(tensors)
    return tensors


def shapes_in(found: Checkpoint) -> dict[str, torch.Size]:
    return {name: meta.size for name, meta in found._reader.read_metadata().state_dict_metadata.items()}


@pytest.mark.parametrize("name", NODES)
def test_one_process_goes_on_from_what_two_nodes_wrote(four, data, tmp_path, name):
    root, expected = four
    trainer = make_trainer(first_half(root / name, tmp_path / "run"), data, **ON_FOUR)
    assert trainer.resume()
    assert_same_run(run_training(trainer, resumed=True), expected)


def test_a_step_casts_weights_that_are_kept_whole_once(data, tmp_path):
    """And the others for each forward and each backward pass, but for what is in no layer, which stays between them."""
    cases = {False: {1}, True: {3, 2 * 3}}
    train, places = TRAIN | {"rows_per_step": 6}, {kept: tmp_path / str(kept) for kept in cases}
    start_ranks(
        2,
        "ranks_job",
        data,
        [
            {"out": str(out), "train": train, "casts": True, "dtype": "bfloat16"}
            | {"parallel": {"backend": "fsdp2", "reshard_after_forward": reshard}}
            for reshard, out in places.items()
        ],
    )
    for reshard, out in places.items():
        for rank in (0, 1):
            assert torch.load(f"{out}-{rank}") == cases[reshard]


def test_two_nodes_train_with_muon_as_one_process_does(data, tmp_path):
    few = MUON | {"steps": 6, "rows_per_step": 8}
    expected = run_training(make_trainer(tmp_path / "alone", data, **few))
    start_ranks(4, "ranks_job", data, [{"out": str(tmp_path / "four"), "parallel": NODES["copied"], "train": few}])
    found = metrics_without_times(tmp_path / "four")
    for one, other in zip(continuous(found), continuous(expected), strict=True):
        assert_same(one, other, MUON_NOISE)


FAMILIES = ("llama", "qwen3", "mixtral", "gpt_oss", "llama4")


@pytest.fixture(scope="module")
def divided(data, tmp_path_factory) -> Path:
    """A directory with what two ranks make of each family's target that they divide: FAMILY-PLACEMENT-RANK."""
    root = tmp_path_factory.mktemp("divided")
    for family in FAMILIES:
        tiny_model(family).save_pretrained(root / family)

    def case(family: str, placement: str) -> dict:
        return {"out": str(root / f"{family}-{placement}"), "target": str(root / family), "placement": placement}

    start_ranks(2, "ranks_job", data, [case(*each) for each in itertools.product(FAMILIES, ("fsdp2", "tensor"))])
    return root


def test_a_divided_tensors_sample_is_the_whole_ones(data):
    start_ranks(2, "ranks_job", data, [{"samples": True}])


DIVIDED = {
    "fsdp2": {"backend": "ddp", "target": "fsdp2"},
    "tensor": {"backend": "fsdp2", "target": "tensor"},
}


@pytest.mark.parametrize("family", ["llama", "llama4"])
def test_a_divided_target_trains_as_a_whole_one_does(data, tmp_path, family):
    """From the start, and from one process's checkpoint; with cores for a target's own thread, which it must not get:
    two threads would talk in one group."""
    tiny_model(family).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    whole = load_target(TargetConfig(str(tmp_path / "target")), "cpu")
    expected, cases = run_training(make_trainer(tmp_path / "whole", data, target=whole, **TRAIN)), []
    for name, parallel in DIVIDED.items():
        for out in (tmp_path / name, first_half(tmp_path / "whole", tmp_path / f"resumed-{name}")):
            case = {"out": str(out), "weights": str(tmp_path / "target"), "parallel": parallel, "train": TRAIN}
            cases.append({**case, "shard_size": 2})
    start_ranks(2, "ranks_job", data, cases, threads=2)
    for case in cases:
        assert_same_run(metrics_without_times(Path(case["out"])), expected)


WHOLE = ("gpt_oss", "tensor")  # whose plan divides next to nothing


@pytest.mark.parametrize(
    ("family", "placement"),
    [case for case in itertools.product(FAMILIES, ("fsdp2", "tensor")) if case != WHOLE],
)
def test_a_divided_target_gives_the_whole_ones_hidden_states(divided, family, placement):
    target = load_target(TargetConfig(str(divided / family)), "cpu")
    size = sum(parameter.numel() for parameter in target.model.parameters())
    for rank in (0, 1):
        found = torch.load(divided / f"{family}-{placement}-{rank}", weights_only=True)
        with FlopCounterMode(display=False) as counter:
            expected = target.hidden_states(*a_row(rank), packed_attention([[9, 11]]))
        torch.testing.assert_close(found["hidden"], expected, rtol=1e-5, atol=1e-5)
        assert found["fingerprint"] == target.identity.fingerprint
        assert found["own"] < 0.75 * size
        assert found["flops"] <= 1.1 * counter.get_total_flops()  # experts that no token chose are left, here as there


def test_a_target_may_be_held_by_a_part_of_the_ranks(data, tmp_path):
    """Four ranks, two copies of the target, each divided between two neighbours."""
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    cases = [
        {"out": str(tmp_path / placement), "target": str(tmp_path / "llama"), "placement": placement, "shard_size": 2}
        for placement in ("fsdp2", "tensor")
    ]
    start_ranks(4, "ranks_job", data, cases)
    target = load_target(TargetConfig(str(tmp_path / "llama")), "cpu")
    size = sum(parameter.numel() for parameter in target.model.parameters())
    for placement, rank in itertools.product(("fsdp2", "tensor"), range(4)):
        found = torch.load(tmp_path / f"{placement}-{rank}", weights_only=True)
        expected = target.hidden_states(*a_row(rank), packed_attention([[9, 11]]))
        torch.testing.assert_close(found["hidden"], expected, rtol=1e-5, atol=1e-5)
        assert found["fingerprint"] == target.identity.fingerprint
        assert 0.4 * size < found["own"] < 0.75 * size


def test_a_plan_that_divides_next_to_nothing_is_refused(divided):
    found = torch.load(divided / "-".join((*WHOLE, "0")), weights_only=True)
    assert re.match(r"parallel\.target=tensor: the plan of gpt_oss leaves 98% of the weights on each", found["refused"])
