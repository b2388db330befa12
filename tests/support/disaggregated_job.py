"""What test_disaggregated.py starts: the first ranks decode, the others prefill for them, some with faults."""

import json
import os
import random
import time
import warnings
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest

from eagle_train import distributed
from eagle_train.artifacts.format import load_draft
from eagle_train.inference import Engine, PrefillServer, RemotePrefill, SamplingParams, connect
from eagle_train.inference.parallel.lines import Line, Outbox
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.ops.torch_private import default_store
from tests.support.inside import pool_of
from tests.support.reference_answers import LENGTH, PROMPTS

TEXTS = [*PROMPTS, *PROMPTS]
ARRIVED = "a piece"


def params_of(sampled: bool) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=float(sampled), seed=i, max_tokens=LENGTH - i % 5, ignore_eos=True)
        for i in range(len(TEXTS))
    ]


def answers(engine: Engine, stage: dict) -> tuple[list[list[int]], list[list[int]]]:
    """Requests that come one by one; some are cancelled, which then have fewer tokens. Their tokens, and rounds."""
    rng, requests = random.Random(0), []
    for text, params in zip(TEXTS, params_of(stage["sampled"]), strict=True):
        requests.append(engine.add(text, params))
        engine.step()
        if stage["cancelling"] and rng.random() < 0.4:
            engine.cancel(rng.choice(requests))
    while engine.has_unfinished:
        engine.step()
    return [request.generated for request in requests], [request.rounds for request in requests]


def break_down(server: PrefillServer, fault: str, rng: random.Random) -> None:
    """Let a prefill process fail at random after its prefill, or always before it; be too late with the first message
    that it sends, or with an answer of which each part comes in time; die instead of a message; be a little late with
    every answer; answer another request; or wait in its last layer until the decode process has a piece."""
    prefiller = server._parts.prefiller
    first_tokens, send, messages = prefiller.first_tokens, Line.send_tensor, count()

    def raising(sequences):
        if fault == "is late":
            time.sleep(0.02 * rng.random())
        tokens = first_tokens(sequences)
        if fault == "raises" and rng.random() < 0.5:
            raise RuntimeError("out of memory")
        return tokens

    def missing(*_, **__):
        raise RuntimeError("out of memory")

    def faulty(line, tensor):
        message = next(messages)
        if fault == f"dies at {message}":
            os._exit(1)
        time.sleep(600 if fault == "is slow" and message == 0 else 0.5 if fault == "drips" else 0)
        send(line, tensor)

    def late_in_the_end(prefix, positions):
        attend, last = extend(prefix, positions), max(cache.layers)

        def waiting(layer, *arguments):
            if layer == last:
                default_store().wait([ARRIVED], timedelta(seconds=60))
            return attend(layer, *arguments)

        return waiting

    if fault == "answers another":
        put = Outbox.put
        Outbox.put = lambda outbox, number, *part: put(outbox, number + 1, *part)
    cache = server._parts.runner.cache
    extend = cache.extend
    if fault == "waits for a piece":
        cache.extend = late_in_the_end
    prefiller.first_tokens, Line.send_tensor = raising, faulty
    if fault == "raises early":
        prefiller.prefill = missing


def tell_of_pieces() -> None:
    """The decode process says when a piece is announced."""
    receive = Line.recv_header

    def telling(line, timeout):
        header = receive(line, timeout)
        if header.what >= 0:
            default_store().set(ARRIVED, "")
        return header

    Line.recv_header = telling


def decode(target, draft, stage: dict, lines) -> dict:
    """What came of a stage; `here`: how many texts this process prefilled itself."""
    options = dict(stage["engine"])
    prefill = RemotePrefill(lines, **({"timeout_s": options.pop("timeout_s")} if "timeout_s" in options else {}))
    engine, here = Engine(target, draft, prefill=prefill, **options), []
    local = prefill._local
    run = local.prefill

    def noting(chunks, is_decoding):
        here.extend(chunks)
        return run(chunks, is_decoding)

    local.prefill = noting
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        start = time.perf_counter()
        tokens, rounds = answers(engine, stage)
        seconds = time.perf_counter() - start
        left = len(prefill._tasks)
        prefill.close()
    pool = pool_of(engine)
    told = [str(warning.message) for warning in warned if warning.category is UserWarning]  # not torch's own
    return {
        "tokens": tokens,
        "rounds": rounds,
        "here": len(here),
        "free": len(pool.free) == pool.total,
        "seconds": seconds,
        "left": left,
        "warned": told,
    }


def main(root: Path, job: dict) -> None:
    """`job`: {"stages": [...], "faults": {"2": "raises"}, "shard_size": 1, "server": {...}}."""
    world = distributed.start("cpu", job["shard_size"])
    placement = "tensor" if world.shard_size > 1 else "replicated"
    target = load_target(TargetConfig(str(root / "target")), "cpu", placement, world)
    draft = load_draft(root / "draft", target.identity)
    lines = connect(world)
    if world.rank < world.shard_size:
        tell_of_pieces()
        found = [decode(target, draft, stage, lines) for stage in job["stages"]]
        (root / f"found-{world.rank}.json").write_text(json.dumps(found))
        if "answers another" in job["faults"].values():
            default_store().wait(["refused"], timedelta(seconds=60))  # it ends although this process goes on
        default_store().set(f"found/{world.rank}", "")  # one that ends may break what another still receives
        default_store().wait([f"found/{rank}" for rank in range(world.shard_size)])
        os._exit(0)  # whatever became of the others
    server = PrefillServer(target, draft, prefill_tokens=8, **job["server"])
    if fault := job["faults"].get(str(world.rank)):
        break_down(server, fault, random.Random(world.rank))
    for _ in job["stages"]:
        if fault == "answers another":
            with pytest.raises(RuntimeError):
                server.serve(lines)
            default_store().set("refused", "")
        else:
            server.serve(lines)
        pool = server._parts.scheduler.pool
        assert len(pool.free) == pool.total
    os._exit(0)
