"""Prefill and decoding in separate processes give the tokens of one engine, also when prefill processes fail.

With a divided target, both are done by groups of ranks.
"""

import json
import re
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from eagle_train.artifacts.format import save_draft
from eagle_train.distributed import World
from eagle_train.drafts import Draft
from eagle_train.errors import OptionError, UserError
from eagle_train.inference import Engine, EngineConfig, PrefillServer, RemotePrefill, SamplingParams, connect, parts
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.parallel import prefill_server
from eagle_train.inference.parallel.lines import as_bytes, from_bytes
from eagle_train.inference.parallel.prefill_server import layout_options
from tests.support.disaggregated_job import answers
from tests.support.inside import pool_of
from tests.support.local_prefill import LocalPrefill, a_draft
from tests.support.processes import start_ranks
from tests.support.prompt_lookup import Unread
from tests.support.reference_answers import GREEDY, PROMPTS, cut, token_ids
from tests.support.reference_answers import answers as answers_of
from tests.support.tiny import random_tokens, shared_target, trained_mtp

pytestmark = pytest.mark.filterwarnings("error:prefill process")  # none is dropped unless a test says so


def stage(sampled: bool = False, cancelling: bool = False, **engine) -> dict:
    return {"sampled": sampled, "cancelling": cancelling, "engine": engine}


ENDS = ("raises", "raises early", "answers another")  # faults after which a prefill process ends by itself
STAGES = [
    stage(tree="chain3"),
    stage(sampled=True, tree="n8", max_batch_size=3),
    stage(sampled=True, tree="chain3", max_batch_size=4, kv_tokens=5 * BLOCK),  # some lose their blocks on the way
    stage(cancelling=True, tree="n8"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A directory with a target and a draft."""
    root, target = tmp_path_factory.mktemp("disaggregated"), shared_target("gemma2")
    target.model.save_pretrained(root / "target")
    save_draft(a_draft(), root / "draft", target.identity, dtype=torch.float32)
    return root


def test_a_server_makes_nothing_for_rounds(monkeypatch):
    """It has none: recordings would take minutes, and most of a GPU's memory for good."""
    for name in ("warm_up", "record", "calibrated"):
        monkeypatch.setattr(parts, name, None)
    monkeypatch.setattr(parts, "_has_own_kernels", lambda target: True)
    config = PrefillServer(shared_target("gemma2"), a_draft(), gate=True, compile=True)._parts.config
    assert (config.graphs, config.compile, config.compile_sampling, config.gate) == (False,) * 4


def test_a_server_prefills_on_its_targets_gpu(monkeypatch):
    line, entered = LocalPrefill(), []
    line.open.set()

    @contextmanager
    def current(device):
        entered.append(device)
        yield
        entered.append(None)

    monkeypatch.setattr(prefill_server, "current", current)
    own = prefill_server.enqueue
    monkeypatch.setattr(prefill_server, "enqueue", lambda *given: entered.append("within") or own(*given))
    a_decoder(line).generate(PROMPTS[:1], GREEDY)
    assert entered == [shared_target("gemma2").device, "within", None]


def a_decoder(*lines: LocalPrefill, draft: Draft | None = None, **options) -> Engine:
    return Engine(shared_target("gemma2"), draft or a_draft(), prefill=RemotePrefill(list(lines)), **options)


def finish(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()
    assert len(pool_of(engine).free) == pool_of(engine).total


def chained() -> Draft:
    """Its modules go on from states of their own."""
    return trained_mtp(shared_target("gemma2"), 60, modules=3)


@pytest.mark.parametrize(
    ("stage", "made"),
    [*((stage, partial(a_draft, "self_fusion")) for stage in STAGES[:3]), (STAGES[1], partial(a_draft, "skip"))]
    + [(stage, chained) for stage in STAGES[:2]],
)
def test_what_is_sent_is_all_that_decoding_needs(stage, made):
    """Tokens and rounds are those of one engine."""
    draft = made()
    lines = [LocalPrefill(1, draft), LocalPrefill(2, draft)]
    for line in lines:
        line.open.set()
    alone = Engine(shared_target("gemma2"), draft, **stage["engine"])
    decoder = a_decoder(*lines, draft=draft, **stage["engine"])
    assert answers(decoder, stage) == (expected := answers(alone, stage))
    assert max(max(rounds) for rounds in expected[1]) > 1, "drafts must be accepted"


def test_what_was_sent_is_found_again():
    """By a prompt with the same beginning; its rounds are as without prefix caching."""
    stem, *tails = random_tokens(2 * BLOCK + 3, 4, 1, 7)
    prompts, target = [stem + tail for tail in tails], shared_target("gemma2")
    line = LocalPrefill(prefix_cache=True)
    line.open.set()
    engine, alone = a_decoder(line, prefix_cache=True), Engine(target, a_draft())
    found = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
    whole = [alone.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [output.stats.cached_tokens for output in found] == [0, 2 * BLOCK, 2 * BLOCK]
    assert token_ids(found) == token_ids(whole)
    assert [output.rounds for output in found] == [output.rounds for output in whole]


def test_who_decodes_does_not_wait_for_a_prompt():
    """One prompt is cancelled during its prefill, and one is not; meanwhile the first request decodes to its end."""
    line = LocalPrefill()
    engine, whole = a_decoder(line), cut(answers_of("gemma2"))
    line.open.set()
    first = engine.add(PROMPTS[0], GREEDY)
    while not first.generated:
        engine.step()
    line.open.clear()
    second, third = engine.add(PROMPTS[1], GREEDY), engine.add(PROMPTS[2], GREEDY)
    while not first.finish_reason:
        engine.step()
    assert (second.generated, third.generated) == ([], [])
    engine.cancel(second)
    line.open.set()
    finish(engine)
    assert (first.generated, second.generated, third.generated) == (whole[0], [], whole[2])


def test_blocks_that_are_lost_during_a_prefill():
    """A preemption takes the second request's blocks: what comes back for it is discarded, and it is prefilled
    again."""
    line, other = LocalPrefill(1), LocalPrefill(2)
    engine = a_decoder(line, other, kv_tokens=3 * BLOCK)
    line.open.set()
    first = engine.add(PROMPTS[4], SamplingParams(max_tokens=26, ignore_eos=True))
    second = engine.add(PROMPTS[3], GREEDY)
    engine.step()
    errand = second.remote_task
    while second.remote_task is errand is not None:
        engine.step()
    assert (second.remote_task, second.blocks) == (None, [])
    other.open.set()
    finish(engine)
    assert (first.generated, second.generated) == (answers_of("gemma2")[4], cut(answers_of("gemma2"))[3])


def test_a_prompt_that_its_drafter_cannot_read_is_prefilled_here():
    """The prefill process says that it failed, and is not dropped."""
    target, prompts = shared_target("gemma2"), random_tokens(9, 12, vocabulary=90)
    prompts[0][4] = 93
    line = LocalPrefill(server=PrefillServer(target, Unread(93)))
    line.open.set()
    engine = Engine(target, Unread(93), "chain3", prefill=RemotePrefill([line]))
    with pytest.warns(UserWarning, match="^drafter unread: cannot read this; request 0 goes on without drafts$"):
        outputs = engine.generate(prompts, GREEDY)
    assert token_ids(outputs) == token_ids(Engine(target).generate(prompts, GREEDY))
    assert not line.closed


def test_another_target_or_draft_prefills_nothing():
    server, target = LocalPrefill().server, shared_target("gemma2")
    request = {"number": 0, "target": "other", "texts": [[5, 6]], "starts": [0], "params": [{}], "layout": [7]}
    with pytest.raises(UserError, match=r"^target tiny-gemma2: the decode process has another$"):
        server.prefill(request, None)
    own = request | {"target": target.identity.fingerprint, "dtype": "torch.bfloat16"}
    wanted = r"^target tiny-gemma2: it is in torch.float32 here, and the decode process has it in torch.bfloat16$"
    with pytest.raises(UserError, match=wanted):
        server.prefill(own, None)
    own |= {"dtype": "torch.float32"}
    options = layout_options(server._parts)
    for name, there in (
        ("prefix_cache", not options["prefix_cache"]),
        ("divide_draft", True),
        ("draft", None),
        ("draft", options["draft"]),  # of other widths
    ):
        own["options"] = options | {name: there}
        said = f"{name}={options[name]}: the decode process has {there}; give both the same"
        with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
            server.prefill(own, None)


def start_job(number: int, root: Path, stages: list[dict], faults: dict, shard_size: int = 1, **more) -> None:
    server = {"divide_draft": stages[0]["engine"].get("divide_draft")}
    job = {"stages": stages, "faults": faults, "shard_size": shard_size, "server": server}
    start_ranks(number, "disaggregated_job", root, job, **more)


@cache
def of_one_engine(stage: str) -> tuple[list[list[int]], list[list[int]]]:
    """What a stage, in JSON, comes to if nothing is cancelled."""
    told = json.loads(stage)
    options = {key: value for key, value in told["engine"].items() if key not in ("timeout_s", "divide_draft")}
    return answers(Engine(shared_target("gemma2"), a_draft(), **options), told | {"cancelling": False})


def check_found(root: Path, stages: list[dict], rank: int = 0) -> list[dict]:
    """Every stage's tokens are those of one engine, and all blocks are free again. `rank`: which decode rank's."""
    found = json.loads((root / f"found-{rank}.json").read_text())
    for one, stage in zip(found, stages, strict=True):
        expected, rounds = of_one_engine(json.dumps(stage))
        assert one["free"]
        assert stage["cancelling"] or one["rounds"] == rounds
        for tokens, whole in zip(one["tokens"], expected, strict=True):
            assert tokens == (whole[: len(tokens)] if stage["cancelling"] else whole)
        assert (one["tokens"] != expected) == stage["cancelling"]
    return found


@pytest.mark.ranks
def test_prompts_are_prefilled_elsewhere(root):
    """By two prefill processes."""
    start_job(3, root, STAGES, {})
    for one in check_found(root, STAGES):
        assert (one["here"], one["left"], one["warned"]) == (0, 2, [])


@pytest.mark.ranks
def test_layers_leave_before_the_forward_ends(root):
    """The last layer of the first forward waits until a piece has arrived."""
    stages = [stage(tree="chain3")]
    start_job(2, root, stages, {"1": "waits for a piece"})
    assert check_found(root, stages)[0]["here"] == 0


@pytest.mark.ranks
def test_faults_of_prefill_processes(root):
    """One fails at random, one dies while it answers, and one exceeds the timeout."""
    stages = [stage | {"engine": stage["engine"] | {"timeout_s": 20.0}} for stage in STAGES[1:]]
    faults = {"1": "raises", "2": "dies at 5", "3": "is slow"}
    start_job(4, root, stages, faults, awaited=2)
    found = check_found(root, stages)
    assert found[0]["here"] > 0, "what was not read elsewhere is read here"
    assert found[0]["left"] == 1
    assert {warning.split(":")[0] for warning in found[0]["warned"]} == {
        "prefill process 2 is dropped",
        "prefill process 3 is dropped",
    }


@pytest.mark.ranks
def test_ranks_of_a_divided_target_agree_on_what_has_arrived(root):
    """Two decode and two prefill; one of these is always a little late."""
    stages = [stage | {"engine": stage["engine"] | {"divide_draft": True}} for stage in STAGES[2:]]
    start_job(4, root, stages, {"3": "is late"}, shard_size=2)
    found, other = check_found(root, stages), check_found(root, stages, rank=1)
    for one, same in zip(found, other, strict=True):
        assert (one["tokens"], one["rounds"]) == (same["tokens"], same["rounds"])
        for each in (one, same):
            assert (each["here"], each["left"], each["warned"]) == (0, 1, [])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("dies at 4", ".*Connection (closed|reset).*"),
        ("raises", "its prefill failed"),
        ("raises early", "its prefill failed"),  # while the other waits for it in the forward
        ("is slow", ".*[Tt]imed out.*"),
        ("drips", ".*[Tt]imed out.*"),  # each part in time, and the whole answer late
        ("answers another", "its answer is to another request"),
    ],
)
def test_a_fault_on_one_rank_drops_its_group(root, fault, reason):
    """Decoding goes on without it. The group's other rank ends, and so does one whose prefill failed."""
    stages = [stage(sampled=True, tree="chain3", max_batch_size=4, timeout_s=4.0, divide_draft=False)]
    start_job(4, root, stages, {"3": fault}, shard_size=2, awaited=4 if fault in ENDS else 3)
    for rank, told in enumerate(["(another rank of its group|its prefill) failed", reason]):
        (found,) = check_found(root, stages, rank)
        assert found["here"] > 0
        assert found["left"] == 0
        (warned,) = found["warned"]
        assert re.fullmatch(f"prefill process {2 + rank} is dropped: {told}", warned), warned


@pytest.mark.parametrize("grammar", [OmegaConf.create({"regex": "[a-c]{2}"}), MappingProxyType({"regex": "[a-c]{2}"})])
def test_a_grammar_in_a_mapping_of_any_kind(grammar):
    params = SamplingParams(grammar=grammar)
    assert SamplingParams(**from_bytes(as_bytes(vars(params)))) == SamplingParams(grammar={"regex": "[a-c]{2}"})


def test_what_cannot_be_disaggregated():
    with pytest.raises(UserError, match=r"^1 process was started: start at least 2, one for decoding and "):
        connect(World())
    with pytest.raises(
        UserError, match=r"^2 processes were started: start at least 4, 2 for decoding and 2 for prefill$"
    ):
        connect(World(size=2, shard_size=2))
    for timeout in (0, float("inf"), "1"):
        with pytest.raises(
            UserError, match=rf"^timeout_s={timeout!r}: must be above 0, and at most 1000000000 seconds$"
        ):
            RemotePrefill([LocalPrefill()], timeout_s=timeout)
    runner = SimpleNamespace(drafters=SimpleNamespace(by_name={"eagle": "a draft"}))
    unsure = SimpleNamespace(target=SimpleNamespace(together="a group"), runner=runner, config=EngineConfig())
    with pytest.raises(OptionError, match=r"^divide_draft=None: must be true or false with disaggregated prefill, the"):
        RemotePrefill([LocalPrefill()]).attach(unsure)
    with pytest.raises(UserError, match=r"^lines=\[\]: must be the lines to the prefill processes"):
        a_decoder()
