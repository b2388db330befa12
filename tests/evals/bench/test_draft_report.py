"""The report on a draft: tables, diagnosis and picture, from figures."""

import itertools
import re

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from eagle_train.artifacts import card
from eagle_train.errors import UserError
from evals.bench import draft_report, report, statistics
from evals.bench.diagnosis import diagnosis


def test_the_report_says_how_stages_were_timed():
    assert "GPU" not in draft_report.by_stage(found_figures())
    assert "Of a separate batch, in which the GPU is waited for" in draft_report.by_stage(found_figures(device="cuda"))


def found_figures(**changes) -> dict:
    """Figures of a good draft."""
    stages = {"drafting": 2.0, "validation": 5.0}
    latency = {f"{key}_{suffix}": 0.004 for key in ("ttft", "ttit") for suffix in ("s", "p50_s", "p99_s")}
    group = {"category": None, "turn": None, "prompts": 64, "tpc": 2.98, "acceptance_per_depth": [0.8, 0.64]}
    group |= {"tpc_interval": (2.9, 3.1), "speedup": 1.7, "speedup_interval": None}
    after = statistics.conditional(changes.get("acceptance_per_depth", [0.8, 0.64]))
    return {
        "tpc": 2.98,
        "speedup": 1.7,
        "speedup_batch_median": 1.72,
        "differing_answers": 0,
        "acceptance_per_depth": [0.8, 0.64],
        "acceptance_after_depth_before": after,
        **latency,
        **{f"plain_{name}": value for name, value in latency.items()},
        "stage_ms_per_round": stages,
        "plain_stage_ms_per_round": {"validation": 4.0},
        "prefill_ms_per_batch": 9.0,
        "plain_prefill_ms_per_batch": 8.0,
        "repeated_8grams": 0.042,
        **{"questions": 64, "prompts": 64, "tokens": 298, "calls": 100, "mean_answer_tokens": 40},
        "finish_reasons": {"stop": 60, "length": 4},
        "per_category_and_turn": [{**group, "turn": 1}, group],
        "by_context": [
            {"from": 1, "to": 64, "rounds": 9, "questions": 2, "tpc": 2.5, "tpc_interval": (2.25, 2.75)}
            | {"acceptance_per_depth": [0.7, 0.5]}
        ],
        **{"too_long": 0, "asked": "q.jsonl", "suite": None},
        "train_serve_check": {
            "depth_1_served": 0.8,
            "depth_1_as_trained": 0.8,
            "agreement_on_own_answers": 0.8,
            "agreement_on_reference_answers": 0.7,
        },
        **{
            "quant": "none",
            "tree": "chain2",
            "temperature": 0.0,
            "batch_size": 1,
            "target": "t",
            "dtype": "bfloat16",
            "device": "cpu",
        },
        "draft_training": {"tokens": 12345},
        "config": {"draft": {"path": "d"}, "questions": "q.jsonl", "seed": 0, "temperature": 0.0},
        "provenance": {"torch": "2", "gpu": None, "load_average": [1.0, 2.0]},
    } | changes


def test_summary():
    lines = draft_report.summary(found_figures()).splitlines()
    assert lines[0] == "TPC 2.98 (chain2, temperature 0, 64 prompts; repeated 8-grams 4.2 %)"
    assert lines[1] == "acceptance by depth 0.80 0.64"
    assert lines[-1] == "answers that differ from plain decoding's: 0 of 64"
    assert "differ" not in draft_report.summary(found_figures(differing_answers=None))


CHECK = found_figures()["train_serve_check"]


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({}, "Both ways agree."),
        ({"train_serve_check": {**CHECK, "depth_1_as_trained": 0.9}}, "They disagree"),
        ({"train_serve_check": {**CHECK, "depth_1_as_trained": None}}, "Train/serve check: left out"),
        ({"train_serve_check": {**CHECK, "agreement_on_reference_answers": 0.9}}, "train it on the target's answers"),
        ({"acceptance_per_depth": [0.5, 0.4]}, "trained on 12,345 tokens. Train it longer"),
        ({"acceptance_per_depth": [0.8, 0.4]}, "falls from 80.0 % to 50.0 %: its features drift"),
        ({"speedup": 0.9}, "slower here"),
        ({"stage_ms_per_round": {"drafting": 6.0, "validation": 4.0}}, "Drafting is 60.0 % of a round"),
        ({"repeated_8grams": 0.2}, "The target repeats itself"),
        ({"differing_answers": 3}, "3 answers differ from plain decoding's: rounding in bfloat16"),
        ({"differing_answers": 3, "dtype": "float32"}, "fp32 should not"),
        ({"finish_reasons": {"context": 2}}, "2 answers were cut short"),
    ],
)
def test_the_diagnosis_says_why(changes, finding):
    good, found = diagnosis(found_figures()), diagnosis(found_figures(**changes))
    assert finding in "\n".join(found)
    if changes:
        assert len(good) == 2
        assert found != good
        assert f"- {found[-1]}" in draft_report.markdown(found_figures(**changes))


def test_trees_of_several_depths_have_no_column_for_the_depth_before():
    """Their rounds are not the same at every depth."""
    one, several = found_figures(), found_figures(acceptance_per_depth=[0.8, 0.4], acceptance_after_depth_before=None)
    assert draft_report.by_depth(one).splitlines()[3] == "| 2 | 64.0 % | 80.0 % |"
    assert draft_report.by_depth(several).splitlines()[3] == "| 2 | 40.0 % |"
    assert "drift" not in "\n".join(diagnosis(several))


SPREADS = {"tpc_interval": None, "speedup": 1.5, "speedup_interval": (1.25, 1.75)}


def test_the_table_of_categories_and_turns():
    shares = {"acceptance_per_depth": [0.5], **SPREADS, "tpc_interval": (1.0, 4.0)}
    groups = [
        {"category": category, "turn": turn, "prompts": 4, "tpc": tpc, **shares}
        for category, values in {"maths": (3.0, None, 2.5), None: (2.0, 1.5, 1.75)}.items()
        for turn, tpc in zip((1, 2, None), values, strict=True)
    ]
    groups[1]["tpc_interval"] = None
    assert draft_report.by_category_and_turn(groups).splitlines() == [
        f"| category | prompts | TPC, turn 1 | TPC, turn 2 | TPC | {report.BY_DEPTH} | speed-up |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| maths | 4 | 3.00 (1.00 to 4.00) |  | 2.50 (1.00 to 4.00) | 0.50 | 1.50 (1.25 to 1.75) |",
        "| all | 4 | 2.00 (1.00 to 4.00) | 1.50 (1.00 to 4.00) | 1.75 (1.00 to 4.00) | 0.50 | 1.50 (1.25 to 1.75) |",
    ]


def test_any_category_stays_in_its_cell():
    """The table keeps its columns, whatever a category is called."""
    groups = [
        {"category": name, "turn": None, "prompts": 4, "tpc": 3.0, "acceptance_per_depth": [0.5], **SPREADS}
        for name in ("a|b", "c\\|d", "e\nf", "|", None)
    ]
    header, _, *rows = draft_report.by_category_and_turn(groups).splitlines()
    assert len(rows) == len(groups)
    cells = [re.split(r"(?<!\\)(?:\\\\)*\|", row) for row in (header, *rows)]
    assert {len(row) for row in cells} == {7}
    assert [row[1].strip() for row in cells[1:]] == [r"a\|b", r"c\\\|d", "e f", r"\|", "all"]
    assert card.table(["a"], [["b|c\nd"]]).splitlines()[2] == r"| b\|c d |"


def test_categories_differ_from_the_row_of_all_prompts():
    """Whatever they are called; prompts without a category are counted."""
    groups = [
        {"category": name, "turn": None, "prompts": count, "tpc": 3.0, "acceptance_per_depth": [0.5], **SPREADS}
        for name, count in {"all": 3, "*x* <b>": 2, "y" * 200: 1, None: 8}.items()
    ]
    _, _, *rows = draft_report.by_category_and_turn(groups).splitlines()
    names = [row.split(" | ")[0] for row in rows if row.startswith("| ")]
    assert names == ["| all", r"| \*x\* \<b>", "| " + "y" * 59 + "…", "| all prompts"]
    assert rows[-1] == "2 of the prompts have no category."


def test_a_report_tells_the_suite_and_acceptance_by_context():
    suite = {"title": "GSM8K", "place": "g.jsonl", "template": "{prompt}!", "thinking": False, "licence": "MIT"}
    text = draft_report.markdown(found_figures(suite=suite, too_long=2))
    told = "Suite GSM8K; read from `g.jsonl`; thinking off; template `{prompt}!`; licence MIT."
    assert told in text
    assert "64 prompts. 2 more questions too long." in text
    assert "All 9 rounds have contexts of 1 to 64 tokens." in text


def test_a_report_defines_its_terms():
    config = {**found_figures()["config"], "draft": {"path": "d|*"}}
    text = draft_report.markdown(found_figures(target="a`b", config=config, asked="q_"))
    assert "Target ``a`b``, bfloat16 on cpu; draft `d|*`; chain2;" in text
    assert all(f"{word}: " in text for word in ("TPC", "TTFT", "TTIT"))
    assert "Answers ended: 4 at max_tokens, 60 at a stop." in text
    assert "nan" not in text.lower()


@pytest.mark.parametrize(
    ("shares", "after", "text"),
    [([0.0, 0.0], [0.0, None], "| 2 | 0.0 % |  |"), ([0.9], [0.9], "| 1 | 90.0 % | 90.0 % |")],
)
def test_reports_of_drafts_that_are_never_or_always_accepted(shares, after, text, tmp_path):
    found = found_figures(acceptance_per_depth=shares, acceptance_after_depth_before=after, tpc=1.0)
    assert text in draft_report.markdown(found)
    report.plot_acceptance(found, tmp_path / "a.png")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"temperature": 0.0, "top_p": 0.9, "top_k": 3}, "temperature 0"),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": -1}, "temperature 0.7, top-p 0.9"),
        (
            {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 0},
            "temperature 0.7, top-p 1, min-p 0.1, repetition penalty 1.2",
        ),
        (
            {"temperature": 0.0, "top_p": 0.9, "top_k": 0, "min_p": 0.1, "logit_bias": {"5": 2}},
            "temperature 0, logit bias {'5': 2}",
        ),
        (
            {"temperature": 1.0, "top_p": 1.0, "top_k": 20, "engine": {"drafting": "multinomial_without_replacement"}},
            "temperature 1, top-p 1, top-k 20, multinomial without replacement drafts",
        ),
    ],
)
def test_reports_say_how_tokens_are_chosen(config, words):
    assert report.sampling(config) == words
    found = found_figures(config={**found_figures()["config"], **config})
    assert f"; {words}; batches of " in draft_report.markdown(found)
    assert f"(chain2, {words}, 64 prompts; " in draft_report.summary(found)
    assert f"(chain2, {words}, 1 prompt; " in draft_report.summary({**found, "prompts": 1})


@pytest.mark.parametrize("depth", [1, 2, 40])
def test_the_picture_shows_its_whole_legend(tmp_path, depth):
    """Nothing of the legend is outside the picture, and the curves have nearly all of its width."""
    shares = [0.8**d for d in range(1, depth + 1)]
    figure = report.figure_of(shares, [0.8] * depth)
    assert len(figure.axes[0].lines) == min(depth, 2)  # at depth 1 both would be the same
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    width, height = canvas.get_width_height()
    ticks = [label.get_window_extent() for label in figure.axes[0].get_xticklabels() if label.get_text()]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(ticks))
    for box in (figure.legends[0].get_window_extent(), figure.axes[0].get_tightbbox()):
        assert 0 <= box.x0 < box.x1 <= width
        assert 0 <= box.y0 < box.y1 <= height
    assert figure.axes[0].get_window_extent().width > 0.8 * width
    report.plot_acceptance(found_figures(), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "b.png").mkdir()
    with pytest.raises(UserError, match=r"b\.png: cannot be written: "):
        report.plot_acceptance(found_figures(), tmp_path / "b.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]
