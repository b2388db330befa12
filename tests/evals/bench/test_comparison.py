"""Rows of a comparison against counts by hand, turns, and the tables and the picture of the report."""

import json
from types import SimpleNamespace

import pytest
from matplotlib.axes import Axes

from eagle_train.inference import Engine, Output, Requests, SamplingParams, Stats
from eagle_train.models.loading import TargetConfig, load_target
from evals.bench import comparison, study_plot
from evals.bench.comparison import ask, row_of
from evals.bench.comparison_report import (
    categories,
    expectations,
    expected_speedups,
    measures,
    speedups,
    title,
    without_mean,
)
from evals.bench.page.decoding_blocks import speedups as shown_speedups
from evals.bench.page.figures import figures_of
from evals.bench.page.gather import Source
from evals.bench.pareto import front, plot_pareto, points
from evals.bench.report import BY_DEPTH
from evals.bench.requests import PromptSource
from evals.bench.tasks import read_tasks
from tests.support.eval_inputs import make_home, write_rows
from tests.support.measuring import answer

# Two questions, plain decoding: 4 and 2 tokens after the first, a second each.
PLAIN = [
    [answer([1, 2, 3, 4, 5], "rag", line=1, calls=4, tokens=4, ttft_s=1.0, intervals_s=[1.0] * 4)],
    [answer([1, 2, 3], "writing", line=2, calls=2, tokens=2, ttft_s=1.0, intervals_s=[1.0] * 2)],
]
# With drafts, of four calls three draft two tokens each, and accept 1, 1 and 0 of them.
DRAFTED = [
    [
        answer(
            [1, 2, 3, 4, 5],
            "rag",
            line=1,
            calls=2,
            tokens=4,
            ttft_s=1.0,
            intervals_s=[0.5] * 4,
            accepted_per_depth=[2, 0],
            drafted_per_depth=[2, 2],
        )
    ],
    [
        answer(
            [1, 2, 9],
            "writing",
            line=2,
            calls=2,
            tokens=2,
            ttft_s=1.0,
            intervals_s=[1.25] * 2,
            accepted_per_depth=[0, 0],
            drafted_per_depth=[1, 1],
        )
    ],
]
STAGES = {"plain": {"validation": 10.0, "sampling": 1.0}, "own": {"drafting": 3.0, "validation": 12.0}}


def cell_of(tmp_path):
    rows = [
        {"question_id": 1, "category": "rag", "turns": ["a"]},
        {"question_id": 2, "category": "writing", "turns": ["b"]},
    ]
    (task,) = read_tasks({"bench": str(write_rows(tmp_path / "q.jsonl", rows))})
    plain = SimpleNamespace(target=SimpleNamespace(max_positions=256))
    return SimpleNamespace(task=task, batch_size=1, plain=plain, sides={"own": None}, baselines={"transformers": None})


def config_of(temperature=0.0, drafting="greedy"):
    return SimpleNamespace(temperature=temperature, max_tokens=9, options=SimpleNamespace(drafting=drafting))


@pytest.fixture
def row(tmp_path, few) -> dict:
    cell = cell_of(tmp_path)
    found = row_of(cell, "own", PLAIN, DRAFTED, config_of())
    memory = {"bytes": 2_500_000}
    return found | comparison._costs("own", STAGES, DRAFTED, found) | {"memory": memory, "made_s": 0.25}


def test_a_row_is_what_is_counted_by_hand(row):
    assert row["tpc"] == 6 / 4
    assert row["acceptance_per_depth"] == [2 / 3, 0]
    # 6 seconds over 6 tokens, against 4 * 0.5 + 2 * 1.25 over 6.
    assert row["speedup"] == pytest.approx(6 / 4.5)
    # Of both questions twice, or one of them twice: the speed-ups of the questions are the ends.
    assert row["speedup_interval"] == pytest.approx((0.8, 2.0))
    assert row["ttit_p50_s"] == 0.5
    assert row["tokens_per_s"] == pytest.approx((5 / 3 + 3 / 3.5) / 2)
    assert (row["answers"], row["equal_answers"]) == (2, 1)
    parts = [(each["category"], each["answers"], each["tpc"], each["speedup"]) for each in row["by_category"]]
    assert parts == [("rag", 1, 2.0, 2.0), ("writing", 1, 1.0, 0.8)]
    assert [each["category"] for each in row["by_group"]] == ["mt_bench", "rag"]


def test_what_is_expected_of_acceptance_and_cost(row):
    """3 of 4 rounds draft two tokens: 1.5 a round, for 3 of plain decoding's 10 ms."""
    found, alpha = row["expected"], 2 / 3
    tpc = 0.25 + 0.75 * (1 + alpha + alpha**2)
    assert row["drafting_share"] == pytest.approx(3 / 15)
    assert (found["alpha"], found["depth"]) == (alpha, 1.5)
    assert found["cost_ratio"] == pytest.approx(0.3 / 1.5)
    assert found["tpc"] == pytest.approx(tpc)
    assert found["speedup"] == pytest.approx(tpc / 1.3)


def test_what_may_be_another_sample_is_not_compared(tmp_path):
    cell = cell_of(tmp_path)
    given = [("own", 1.0, "greedy"), ("own", 1.0, "multinomial"), ("transformers", 1.0, "greedy")]
    given += [("transformers", 0.0, "greedy"), ("own", 0.0, "multinomial")]
    rows = [row_of(cell, name, PLAIN, DRAFTED, config_of(*how)) for name, *how in given]
    assert [row["equal_answers"] for row in rows] == [1, None, None, 1, 1]


def test_the_tables(row):
    plain = {**row, "decoding": "plain", "memory": None, "expected": None, "drafting_share": None}
    header, _, first, second = measures([plain, row]).splitlines()
    columns = dict(zip(header.split(" | "), second.split(" | "), strict=True))
    assert (columns["TPC"], columns["TPC, 95 %"]) == ("1.50", "1.00 to 2.00")
    assert columns[BY_DEPTH] == "0.67 0.00"
    assert columns["speed-up"] == "1.33"
    assert columns["95 %"] == "0.80 to 2.00"
    assert columns["drafting"] == "20.0 %"
    assert columns["memory, MB"] == "2.500"
    assert columns["made in, s"] == "0.25"
    assert columns["equal answers |"] == "1 of 2 |"
    assert first.startswith("| plain | 1 |")
    assert expectations([plain]) == ""
    assert expectations([plain, row]).splitlines()[2:] == [
        "| own | 1 | 0.67 | 1.50 | 0.200 | 1.83 | 1.50 | 1.41 | 1.33 |"
    ]
    text = categories([plain, row], "batches of 1")
    assert text.splitlines()[2:4] == ["| mt_bench | 1 | 0.80, TPC 1.00 |", "| rag | 1 | 2.00, TPC 2.00 |"]
    spread = {**row["by_group"][0], "speedup_interval": (0.5, 1.0), "tpc_interval": (0.9, 1.1)}
    text = categories([{**row, "by_group": [spread, row["by_group"][1]]}], "batches of 1")
    assert text.splitlines()[2] == "| mt_bench | 1 | 0.80 (0.50 to 1.00), TPC 1.00 (0.90 to 1.10) |"


def test_later_turns_follow_plain_decodings_answers(tmp_path):
    home = make_home(tmp_path)
    target = load_target(TargetConfig(str(home / "target")), "cpu")
    requests, engine = Requests(target), Engine(target, max_batch_size=2)
    rows = [{"turns": ["a", "b", "c"]}, {"turns": ["d"]}]
    (task,) = read_tasks([str(write_rows(tmp_path / "q.jsonl", rows))])
    asked = []

    def other(batch):
        asked.append([each.prompt for each in batch])
        return [Output([1], "z", "stop", Stats(), []) for _ in batch]

    source = PromptSource(requests, task.questions, SamplingParams(max_tokens=5))
    everybody = {"plain": lambda batch: [engine.generate([b.prompt], b.params)[0] for b in batch], "other": other}
    batches, answered = ask(SimpleNamespace(everybody=everybody, task=task), source.batches(1, 2, None), requests)
    assert [len(batch) for batch in batches] == [2, 1, 1]
    turns = [[each.turn for each in batch] for batch in answered["other"]]
    assert turns == [[1, 1], [2], [3]]
    first, second = (answered["plain"][turn][0].output.text for turn in (0, 1))
    said = [("user", "a"), ("assistant", first), ("user", "b"), ("assistant", second), ("user", "c")]
    messages = [{"role": role, "content": text} for role, text in said]
    assert asked[2] == [requests.tokens_of(messages, "it")]


def found_of(*rows: tuple[str, str, int, float, float]) -> dict:
    names = dict.fromkeys(name for _, name, *_ in rows)
    return {
        "drafters": [{"name": name, "is_prepared": name == "eagle"} for name in names],
        "rows": [
            {"task": task, "decoding": name, "batch_size": size, "speedup": speedup, "memory": {"bytes": mb * 1e6}}
            | {"speedup_interval": (speedup - 0.1, speedup + 0.1), "acceptance_per_depth": [0.5], "tpc": 2.0}
            | {"expected": {"alpha": 0.5, "depth": 1.0, "cost_ratio": 0.2, "tpc": 1.5, "speedup": speedup / 2}}
            for task, name, size, speedup, mb in rows
        ],
    }


@pytest.mark.parametrize(
    ("speedups", "said"),
    [
        ((1.5, 0.9), "eagle is the fastest: 1.50 times plain decoding"),
        ((0.8, 0.9), "No drafter is faster than plain decoding: ngram, the best, has 0.90 times its speed"),
        (
            (1.5, 1.4),
            "eagle has the largest speed-up, 1.50 times plain decoding; not shown to be faster than ngram",
        ),
        (
            (1.05, 0.9),
            "No drafter is shown to be faster than plain decoding: eagle, the best, has 1.05 times its speed",
        ),
    ],
)
def test_the_title_says_what_pays(speedups, said):
    found = found_of(("a", "eagle", 1, speedups[0], 9), ("a", "ngram", 1, speedups[1], 0))
    found |= {"config": {"batch_sizes": [1]}}
    assert title(found) == said
    for row in found["rows"]:
        row["speedup_interval"] = None
    assert speedups[0] < 1 or title(found).startswith("eagle has the largest speed-up, without an interval: ")


def test_means_are_over_the_same_tasks_for_all(tmp_path):
    """The easy task's row alone would make ngram the fastest; its other one was left out."""
    found = found_of(("easy", "eagle", 1, 3.0, 9), ("hard", "eagle", 1, 1.5, 9), ("easy", "ngram", 1, 2.9, 0))
    found |= {"config": {"batch_sizes": [1]}}
    assert speedups(found, 1).keys() == expected_speedups(found, 1).keys() == {"eagle"}
    assert title(found) == "eagle is the fastest: 2.12 times plain decoding"
    assert without_mean(found).startswith(" Of ngram a row is left out at a batch size, ")
    plot_pareto(found, tmp_path / "p.png")
    whole = found_of(("easy", "eagle", 1, 3.0, 9))
    assert without_mean(whole) == ""
    found["rows"] = [row for row in found["rows"] if row["task"] == "hard" or row["decoding"] == "ngram"]
    assert title(found) == "No drafter could be measured on all tasks"


def test_a_drafter_that_drafted_nothing_is_plain_decoding(tmp_path):
    """By noise it has the largest speed-up, which is neither in the title nor in the picture nor a figure."""
    found = found_of(
        ("a", "eagle", 1, 1.5, 9), ("b", "eagle", 1, 1.5, 9), ("a", "none", 1, 9.0, 0), ("b", "no", 1, 9, 0)
    )
    for row in found["rows"][1:]:
        row |= {"acceptance_per_depth": [], "expected": None}
    found |= {"config": {"batch_sizes": [1]}}
    assert title(found) == "eagle is the fastest: 1.22 times plain decoding"
    assert speedups(found, 1).keys() == {"eagle"}
    assert speedups(found, 1)["eagle"][1:] == (1.0, 1.5)
    assert expected_speedups(found, 1) == {"eagle": pytest.approx((1.5 / 2) ** 0.5)}
    plot_pareto(found, tmp_path / "p.png")
    assert title({**found, "rows": found["rows"][1:]}) == "No drafter drafted anything"
    told = shown_speedups(found["rows"], "here")[0].numbers.rows
    assert [name for name, _ in told] == ["eagle"]
    times = {"tpc": 1.0, "ttit_s": 0.1, "ttft_s": 0.1}
    rows = [{**row, **times} for row in found["rows"][:3]]
    plain = [{"task": task, "decoding": "plain", "batch_size": 1, **times} for task in "ab"]
    figures = figures_of(Source("x", "compare", {"rows": [*plain, *rows]}))
    assert [each.of for each in figures if each.name == "speed-up"] == ["eagle, a, batch size 1"]


def test_what_was_expected_is_drawn_beside_what_was_measured(row, tmp_path, monkeypatch):
    """A cross at the formulas' speed-up above each drafter's memory, and in the page's plots."""
    drawn = []
    monkeypatch.setattr(Axes, "plot", lambda axes, *given, **look: drawn.append((given, look)) or [])
    plot_pareto(found_of(("a", "eagle", 1, 3.0, 9), ("a", "ngram", 1, 1.2, 2)), tmp_path / "p.png")
    crosses = [(*x, *y) for (x, y, *_), look in drawn if look.get("marker") == "x"]
    assert sorted(crosses) == [(2, 0.6), (9, 1.5)]
    monkeypatch.undo()
    assert "expected" not in shown_speedups([{**row, "expected": None}], "here")[0].svg
    plots = shown_speedups([row, {**row, "decoding": "transformers", "expected": None}], "here")
    assert [each.title for each in plots] == ["Speed-up, here", "TPC, expected and measured, here"]
    assert all(">expected</text>" in each.svg for each in plots)
    assert plots[1].numbers.rows == [["own", "0.67", "1.50", "0.200", "1.83", "1.50", "1.41", "1.33"]]


def test_points_and_their_front(tmp_path):
    rows = [("a", "eagle", 1, 4.0, 9), ("b", "eagle", 1, 1.0, 9)]
    rows += [(task, name, 1, *of) for task in "ab" for name, of in {"ngram": (1.5, 0), "slow": (1.2, 3)}.items()]
    found = found_of(*rows, ("a", "eagle", 2, 267 / 97, 18))  # whose geometric mean is less, by rounding
    assert speedups(found, 1)["eagle"] == (2.0, 1.0, 4.0)
    first, second, third = points(found, 1)
    assert [first[:3], second[:3], third[:3]] == [("ngram", 0, 1.5), ("slow", 3, 1.2), ("eagle", 9, 2.0)]
    assert front(points(found, 1)) == [first, third]
    plot_pareto(json.loads(json.dumps(found)), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_more_drafters_than_colors_are_told_apart(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Axes, "errorbar", lambda axes, *_, **look: drawn.append((look["color"], look["fmt"])))
    plot_pareto(found_of(*(("a", f"d{place}", 1, 1.5, 9) for place in range(23))), tmp_path / "p.png")
    assert len(set(drawn)) == 23


def test_names_with_dollar_signs_are_no_formulas(tmp_path):
    name, tpc = r"$\foo$", {"tpc": 2.0, "low": 1.9, "high": 2.1}
    plot_pareto(found_of(("a", name, 1, 1.5, 9)), tmp_path / "p.png")
    part = {"equal": "time", "steps": 9, "variants": {name: {"tpc": {name: tpc}}}}
    study = {"trees": [name], "equal": ["time"], "steps": [9]}
    study_plot.plot({"parts": [part], "config": {"study": study}}, tmp_path / "s.png")
    assert all((tmp_path / each).read_bytes().startswith(b"\x89PNG") for each in ("p.png", "s.png"))
