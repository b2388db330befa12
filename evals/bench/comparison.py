"""Drafters, tasks and batch sizes: what each drafter brings, and what it costs. A row for each cell and decoding.

All take their turns on every batch, with the same prompts: later turns of a question follow plain decoding's answers.
Knows nothing of reports. DESIGN sections 3.8 and 3.10.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

from eagle_train.errors import UserError, check
from eagle_train.inference import Drafter, Engine, Requests
from eagle_train.models.target import Target
from eagle_train.progress import progress
from evals.bench import statistics
from evals.bench.answering import TURN_SEEDS, Answering, backwards, serve, take_turns
from evals.bench.baselines import Transformers, check_has, stock_model
from evals.bench.config import RelaxedConfig, check_decodes, check_least, check_sizes
from evals.bench.contestants import Contestant
from evals.bench.contexts import by_context
from evals.bench.expected import depth_shares, expected_speedup, expected_tpc, mean_depth
from evals.bench.footprint import cache_bytes_per_token, file_bytes, traced_bytes, weight_bytes
from evals.bench.questions import Question
from evals.bench.requests import PromptSource, TimedRequest, check_fit, fits, turn_tokens
from evals.bench.session import Session
from evals.bench.stage_clock import breakdown, runs_ahead
from evals.bench.statistics import AnswerBatch
from evals.bench.sweep import LOOKUP, PLAIN, TRANSFORMERS, threads_of, with_rounds
from evals.bench.tasks import Task
from evals.bench.trees import tree_names

ASSISTED = "transformers, assisted"
Row = dict[str, Any]
Batches = list[list[TimedRequest]]
Talk = tuple[TimedRequest, list[dict[str, Any]]]
"""What is asked, and the messages before it."""


@dataclass(kw_only=True)
class ComparisonConfig(RelaxedConfig):
    """The keys of conf/commands/compare.yaml that say how is measured. Raises UserError for values that cannot be."""

    batch_sizes: list[int]
    repeats: int | None
    ignore_eos: bool
    prompt_lookup: int
    too_long: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "prompt_lookup", *([] if self.repeats is None else ["repeats"]))
        check_decodes(self.max_tokens)
        check_sizes("batch_sizes", self.batch_sizes)
        known = self.too_long in ("refuse", "leave_out")
        check(known, f"too_long={self.too_long}: must be refuse or leave_out")
        check_has(self.params)
        self.params = replace(self.params, ignore_eos=self.ignore_eos)


@dataclass(frozen=True)
class Side:
    """A drafter with its engine at a batch size. `made_s`: how long the drafter took to make."""

    contestant: Contestant
    drafter: Drafter
    engine: Engine
    made_s: float


@dataclass(frozen=True)
class Cell:
    """What is compared on one task at one batch size."""

    task: Task
    batch_size: int
    plain: Engine
    sides: Mapping[str, Side]
    baselines: Mapping[str, Transformers]

    @property
    def engines(self) -> dict[str, Engine]:
        """Plain decoding's and the drafters'."""
        return {PLAIN: self.plain, **{name: side.engine for name, side in self.sides.items()}}

    @property
    def everybody(self) -> dict[str, Answering]:
        """Who answers, by name."""
        return {**{name: partial(serve, engine) for name, engine in self.engines.items()}, **self.baselines}


def asked_of(task: Task, requests: Requests, config: ComparisonConfig) -> Task:
    """The task without questions that are too long, if these are left out. Raises UserError where none remains."""
    if config.too_long == "refuse":
        return task
    questions = [each for each in task.questions if fits(requests, each, config.max_tokens)]
    check(len(questions) > 0, f"task {task.name}: no question fits the context of {requests.target.name}")
    return replace(task, questions=questions, too_long=len(task.questions) - len(questions))


def compare(
    session: Session[Any], drafters: Sequence[Contestant], tasks: Sequence[Task]
) -> Iterator[tuple[list[Row], list[str]]]:
    """After each cell, all rows so far, and what was left out since its timing cannot be right.

    Raises UserError, before anything is answered, for prompts that do not fit."""
    config, requests = session.config, session.requests
    longest = max(check_fit(requests, task.questions, config.max_tokens) for task in tasks)
    sources = [PromptSource(requests, task.questions, config.params) for task in tasks]
    rows, wrong = list[Row](), list[str]()
    bar, done = progress(len(config.batch_sizes) * len(tasks), "task"), 0
    for size in config.batch_sizes:
        plain = session.engine(max_batch_size=size, longest=longest)
        sides = {each.name: _side(session, each, size, longest) for each in drafters}
        baselines = _baselines(session, sides, size)
        footprints: dict[str, Row] = {}
        for task, source in zip(tasks, sources, strict=True):
            cell = Cell(task, size, plain, sides, baselines)
            batches = source.batches(_count(config.repeats, len(task.questions), size), size, None)
            footprints = footprints or _prepared(cell, batches[0])
            found, refused = measured(cell, batches, session)
            rows += [{**row, "memory": footprints.get(row["decoding"])} for row in found]
            wrong += refused
            done += 1
            bar.update(done)
            yield rows, wrong
    bar.close()


def _count(repeats: int | None, questions: int, size: int) -> int:
    """How many batches: no question is asked twice, as far as batches can be filled, since a drafter may remember its
    answer."""
    most = max(1, questions // size)
    return most if repeats is None else min(repeats, most)


def _side(session: Session[Any], contestant: Contestant, size: int, longest: int) -> Side:
    drafter, made_s = contestant.made(session.target)
    return Side(
        contestant,
        drafter,
        session.engine(drafter, contestant.tree, max_batch_size=size, longest=longest),
        made_s,
    )


def _baselines(session: Session[Any], sides: Mapping[str, Side], size: int) -> dict[str, Transformers]:
    """transformers.generate, and for single prompts its ways to draft."""
    model, stops, together = stock_model(session.target), session.requests.stop_ids, session.target.together
    made = {TRANSFORMERS: Transformers(model, stops, together=together)}
    if size == 1:
        made[LOOKUP] = Transformers(model, stops, session.config.prompt_lookup, together=together)
        own = [getattr(side.drafter, "model", None) for side in sides.values()]
        vocab_size = session.target.identity.vocab_size
        fitting = [each for each in own if isinstance(each, Target) and each.identity.vocab_size == vocab_size]
        if fitting:
            made[ASSISTED] = Transformers(model, stops, assistant=stock_model(fitting[0]), together=together)
    return made


def _prepared(cell: Cell, batch: list[TimedRequest]) -> dict[str, Row]:
    """Warms up everybody, on other prompts than are measured, and counts the drafters' memory meanwhile."""
    other = backwards(batch)
    for baseline in cell.baselines.values():
        baseline.tune(other)
    for answer in cell.everybody.values():
        answer(other)
    return {name: _footprint(side, cell.plain, other) for name, side in cell.sides.items()}


def _footprint(side: Side, plain: Engine, batch: list[TimedRequest]) -> Row:
    """Bytes of a drafter, on this rank. `host_bytes`: its own `nbytes` if it has one; else files that are read as
    memory, and what Python allocates, see `_allocated`."""
    target = plain.target
    weights, per_token = weight_bytes(side.drafter, target), cache_bytes_per_token(side.drafter)
    host = getattr(side.drafter, "nbytes", None)
    if host is None:
        host = file_bytes(side.drafter) + _allocated(side, plain, batch, made=not weights)
    caches = per_token * (side.engine.config.kv_tokens or 0)
    return {
        "weight_bytes": weights,
        "kv_bytes_per_token": per_token,
        "kv_bytes": caches,
        "host_bytes": host,
        "bytes": weights + caches + host,
    }


def _allocated(side: Side, plain: Engine, batch: list[TimedRequest], made: bool) -> int:
    """Bytes that Python allocates while the drafter is made, if `made`, and while a batch is decoded, beyond plain
    decoding. 0 on ranks that hold the target together, see `traced_bytes`."""
    if plain.target.together is not None:
        return 0
    own, other = (traced_bytes(partial(serve, engine, batch)) for engine in (side.engine, plain))
    return max(0, own - other) + (traced_bytes(lambda: side.contestant.made(plain.target)) if made else 0)


def measured(cell: Cell, batches: Batches, session: Session[Any]) -> tuple[list[Row], list[str]]:
    """A row for each decoding, and why rows are left out. Raises UserError where nothing was decoded."""
    for engine in cell.engines.values():
        engine.stage_times.clear()
    asked, answered = ask(cell, batches, session.requests)
    decoded = any(statistics.intervals(batch) for batch in answered[PLAIN])
    check(decoded, f"task {cell.task.name}: {statistics.no_decoding(session.config.max_tokens)}")
    stages = {name: stage_ms(engine, asked, answered[PLAIN]) for name, engine in cell.engines.items()}
    threads, rows, wrong = threads_of(cell.baselines), list[Row](), list[str]()
    for name, theirs in answered.items():
        row = row_of(cell, name, answered[PLAIN], theirs, session.config)
        row |= {"threads": threads.get(name), **_costs(name, stages, theirs, row)}
        if name in cell.sides:
            dispatcher = cell.sides[name].engine.dispatcher
            row |= {"made_s": cell.sides[name].made_s, "tree": tree_names(dispatcher, cell.batch_size)}
            row = session.world.agreed(row)  # ranks' clocks differ, and a row is left out on all of them or on none
            if cell.batch_size == 1 and row["acceptance_per_depth"]:
                try:
                    statistics.check_timing(row)
                except UserError as error:  # the other rows stand, and took long to measure
                    wrong.append(f"{cell.task.name}, {name}: {error}")
                    continue
        rows.append(row)
    return rows, wrong


def ask(cell: Cell, batches: Batches, requests: Requests) -> tuple[Batches, dict[str, list[AnswerBatch]]]:
    """The batches of all turns, and everybody's answers to them."""
    everybody, asked, turn = cell.everybody, list[list[TimedRequest]](), 1
    answered: dict[str, list[AnswerBatch]] = {name: [] for name in everybody}
    talks = [[(each, each.question.history) for each in batch] for batch in batches]
    while talks:
        now = [[request for request, _ in batch] for batch in talks]
        found = take_turns(everybody, now, 0)
        for name, theirs in found.items():
            answered[name] += [[replace(answer, turn=turn) for answer in batch] for batch in theirs]
        asked += now
        pairs = zip(talks, found[PLAIN], strict=True)
        talks = [more for batch, plain in pairs if (more := _next_turn(requests, batch, plain, turn))]
        turn += 1
    return asked, answered


def _next_turn(requests: Requests, talks: list[Talk], plain: AnswerBatch, turn: int) -> list[Talk]:
    """What is asked after `turn`, of the questions that have more turns, after plain decoding's answers."""
    found = []
    for (request, before), answer in zip(talks, plain, strict=True):
        question = request.question
        if len(question.turns) > turn:
            asked, following = ({"role": "user", "content": text} for text in question.turns[turn - 1 : turn + 1])
            messages = [*before, asked, {"role": "assistant", "content": answer.output.text}]
            prompt = turn_tokens(requests, question, turn + 1, [*messages, following])
            params = request.params.with_seed_after(TURN_SEEDS)
            found.append((replace(request, prompt=prompt, params=params), messages))
    return found


def stage_ms(engine: Engine, asked: Batches, plain: list[AnswerBatch]) -> dict[str, float]:
    """Milliseconds of each stage in a round: on a CPU of the measured rounds themselves.

    On a GPU a stage ends on the host before its work does. There some batches are answered again with waits; drafters
    that remember answers may then draft more."""
    if runs_ahead(engine.target.device):
        found: dict[str, float] = breakdown(engine, with_rounds(asked, plain))["stages_ms"]
        return found
    times = engine.stage_times
    own: dict[str, float] = statistics.stages(times.seconds, times.runs, len(asked))["stage_ms_per_round"]
    return own


def row_of(cell: Cell, name: str, plain: list[AnswerBatch], theirs: list[AnswerBatch], config: ComparisonConfig) -> Row:
    """The figures of one decoding in a cell, in seconds unless a name says otherwise."""
    answers = list(chain.from_iterable(theirs))
    compared = statistics.compare(plain, theirs, config.max_tokens)
    differing = compared.pop("differing_answers")
    draws = config.options.drafting != "greedy" if name in cell.sides else name in cell.baselines
    is_same = config.temperature == 0 or not draws  # else two samples may well differ
    by_category, by_group = (_parts(key, plain, theirs) for key in (_category, cell.task.group))
    return {
        "task": cell.task.name,
        "batch_size": cell.batch_size,
        "decoding": name,
        "tpc": statistics.tpc(answers),
        "tpc_interval": statistics.question_interval(statistics.by_question(answers)),
        "acceptance_per_depth": statistics.acceptance(answers),
        **compared,
        "speedup_interval": statistics.speedup_interval(plain, theirs),
        **statistics.times(answers),
        "tokens_per_s": median(statistics.tokens_per_s(batch, [0.0] * len(batch)) for batch in theirs),
        "answers": len(answers),
        "distinct_prompts": statistics.distinct_prompts(answers),
        "looping_answers": statistics.looping(statistics.token_ids(answers)),
        "lossy": name in cell.sides and any(answer.output.is_lossy for answer in answers),
        "equal_answers": len(answers) - differing if is_same else None,
        "by_context": by_context(answers, cell.plain.target.max_positions),
        "by_category": by_category,
        "by_group": by_group if by_group != by_category else [],
    }


def _category(question: Question) -> str | None:
    return question.category


def _parts(key: Callable[[Question], str | None], plain: list[AnswerBatch], theirs: list[AnswerBatch]) -> list[Row]:
    """TPC, acceptance and speed-up for each value of `key`; of questions that have none, nothing."""
    values = {key(answer.question) for answer in chain.from_iterable(theirs)}
    rows = []
    for value in sorted(each for each in values if each is not None):
        own, before = ([[a for a in batch if key(a.question) == value] for batch in side] for side in (theirs, plain))
        found = statistics.group(own, before)
        rows.append({"category": value, "answers": found.pop("prompts"), **found})
    return rows


def _costs(name: str, stages: Mapping[str, dict[str, float]], theirs: list[AnswerBatch], row: Row) -> Row:
    """The share of a round that is spent drafting, and what the formulas expect of acceptance and cost."""
    own = stages.get(name)
    if own is None or name == PLAIN:
        return {"stage_ms_per_round": own, "drafting_share": None, "expected": None}
    drafting, shares = own.get("drafting", 0.0), depth_shares(theirs)
    depth, accepted, expected = mean_depth(shares), row["acceptance_per_depth"], None
    if accepted:
        cost = drafting / stages[PLAIN]["validation"] / depth
        tpc = expected_tpc(accepted[0], shares)
        speedup = expected_speedup(tpc, depth, cost)
        expected = {"alpha": accepted[0], "depth": depth, "cost_ratio": cost, "tpc": tpc, "speedup": speedup}
    return {"stage_ms_per_round": own, "drafting_share": drafting / sum(own.values()), "expected": expected}
