"""evals/report.py: the published results on one page, which everyone can read and which loads nothing."""

import json
import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.textpath import TextPath
from omegaconf import OmegaConf

from eagle_train.cli import as_overrides, compose
from evals import report
from evals.bench.page import decoding, plots
from evals.bench.page.canvas import SERIES
from evals.bench.page.cautions import cautions
from evals.bench.page.decoding_blocks import along_context, tpc_against_ttit
from evals.bench.page.gather import Source, gather
from evals.bench.page.overview import labels_of
from evals.bench.page.sections import KINDS
from evals.bench.page.shown import command
from tests.support.command_line import call, write_jsonl
from tests.support.html_structure import Element, contrast, page, schemes

PUBLISHED = Path(report.__file__).parent / "results"
HEADINGS = ("h1", "h2", "h3", "h4")
STEPS = [{"step": n, "loss": 2 / n, "l1": 1 / n, "ce": 10 / n} for n in range(1, 500)]
STEPS[-1] |= {
    "heldout_l1": 0.1,
    "heldout_ce": 0.4,
    "heldout_simulated_tpc": 2.5,
    "heldout_acceptance_per_depth": [0.7, 0.4],
}
PROBLEM = {"cause": "<the rope> & base", "measured": "depth 1: 0.12", "remedy": "export again"}
DOCTOR = {"evaluation": "doctor", "verdict": "The draft is served otherwise than trained.", "problems": [PROBLEM]}
DOCTOR |= {
    "not_checked": [{"check": "vLLM", "reason": "it is not installed"}],
    "tpc": 2.25,
    "healthy": False,
}


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """The report on all published results, a training run and a doctor's findings."""
    home = tmp_path_factory.mktemp("report")
    (home / "run").mkdir()
    write_jsonl(home / "run/metrics.jsonl", STEPS)
    (home / "run/config.yaml").write_text("draft: {kind: eagle}\ntrain: {steps: 499}\nhub: {token: abc}\n")
    (home / "doctor.json").write_text(json.dumps(DOCTOR))
    places = f"results=[{PUBLISHED},{home}/run,{home}/doctor.json]"
    assert call(report.main, places, f"out={home}/out") == 0
    return home / "out"


@pytest.fixture(scope="module")
def text(out) -> str:
    return (out / "report.html").read_text("utf-8")


@pytest.fixture(scope="module")
def root(text) -> Element:
    return page(text)


def test_an_answer_without_drafts_has_its_times_and_no_acceptance():
    """As with tree=auto, where drafts are not expected to pay."""
    found = json.loads((PUBLISHED / "quickstart_avx512.json").read_text()) | {"acceptance_per_depth": []}
    blocks = decoding.mt_bench(Source("x", "mt_bench", found, []))
    drafted = decoding.mt_bench(Source("x", "mt_bench", found | {"acceptance_per_depth": [0.7]}, []))
    assert len(blocks) == len(drafted) - 1


def test_a_category_without_decoding_has_its_row():
    """Its cells are empty, and the others stand below their headers."""
    found = json.loads((PUBLISHED / "quickstart_avx512.json").read_text())
    group = {"turn": None, "prompts": 2, "tpc": 2.0, "tpc_interval": None, "speedup": 1.5, "speedup_interval": None}
    groups = [group | {"category": "a", "tpc": None, "speedup": None}, group | {"category": "b"}]
    blocks = decoding.mt_bench(Source("x", "mt_bench", found | {"per_category_and_turn": groups}, []))
    (table,) = (block for block in blocks if getattr(block, "caption", "") == "By category")
    assert table.header == ["category", "prompts", "TPC", "speed-up"]
    assert table.rows == [["a", "2", "", ""], ["b", "2", "2.00", "1.50"]]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("compare", {"left_out": ["heldout, a: too fast"]}, ["Left out: heldout, a: too fast."]),
        ("compare", {"cells": {"measured": 2, "of": 8}}, ["Unfinished: 2 of 8 cells were measured, and the others "]),
        ("switches", {"left": 3}, ["Unfinished: 3 rows of this result are still to come."]),
        ("quantisation", {"left_out": {"int4": "too narrow"}}, ["Left out: int4: too narrow."]),
    ],
)
def test_what_a_result_lacks_is_told(name, change, said):
    found = json.loads((PUBLISHED / f"{name}.json").read_text())
    before = cautions(Source("x", name, found))
    told = [each for each in cautions(Source("x", name, found | change)) if each not in before]
    assert len(told) == len(said)
    assert all(one.startswith(other) for one, other in zip(told, said, strict=True))
    assert not [each for each in before if each.startswith(("Left out", "Unfinished"))]


def test_every_published_result_has_a_date():
    """Its file has one, and each result within."""
    for path in PUBLISHED.glob("*.json"):
        assert json.loads(path.read_text())["date"], path
        assert all(each.found["date"] for each in gather([str(path)])), path


def ids_of(root: Element) -> list[str]:
    return [each.attributes["id"] for each in root.all() if "id" in each.attributes]


def test_every_published_result_has_its_place(out, root):
    titles = {each.text for each in root.all("h3")}
    for path in PUBLISHED.glob("*.json"):
        assert any(path.name in title for title in titles), path.name
    assert len({"none", "fp8"} & {title.rpartition(": ")[2] for title in titles if "target_fp8" in title}) == 2
    assert (out / "report.md").read_text().count("\n### ") >= len(titles) - 1


def test_the_page_is_small_and_loads_nothing(text, root):
    assert len(text.encode()) < 10**6
    assert re.findall(r"@import|src=|url\(['\"]?https?:", text) == []
    given = [value for each in root.all() for value in each.attributes.values()]
    assert [value for value in given if value and "http" in value] == []  # an address may be told, not followed
    links = [value for each in root.all() for name, value in each.attributes.items() if name.endswith(("href", "src"))]
    assert links
    assert [link for link in links if not link.startswith(("#", "data:"))] == []
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids_of(root))
    assert set(re.findall(r"url\(#?([^)]*)\)", text)) <= set(ids_of(root))


def test_headings_are_in_order(root):
    levels = [int(each.tag[1]) for each in root.all(*HEADINGS)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_ids_are_there_once(root):
    found = ids_of(root)
    assert len(found) == len(set(found))


def test_tables_tell_what_their_headers_are_of(root):
    tables = root.all("table")
    assert len(tables) > 50
    for table in tables:
        assert [each.tag for each in table.children[:1]] == ["caption"]
        assert table.children[0].text.strip()
        assert {each.attributes.get("scope") for each in table.all("th")} <= {"col", "row"}
        columns = len(table.all("thead")[0].all("th"))
        assert all(len(row.children) == columns for row in table.all("tr"))


def test_files_names_may_go_on_in_another_line(text, root):
    """Else a column of them makes the table wider than the page; they are told as they are."""
    assert '<th scope="row">results/<wbr>draft_<wbr>kinds_<wbr>gpu.json</th>' in text
    assert "results/draft_kinds_gpu.json" in [each.text for each in root.all("th")]


def test_what_scrolls_can_be_reached_by_keyboard(root):
    scrolls = [each for each in root.all("div") if "scroll" in each.attributes.get("class", "")]
    assert len(scrolls) == len(root.all("table"))
    assert all(each.attributes["tabindex"] == "0" and each.attributes["aria-labelledby"] for each in scrolls)
    assert root.all("a")[0].attributes["class"] == "skip"


def test_plots_have_a_text_and_their_numbers(root, text):
    figures, rules = root.all("figure"), dict(re.findall(r"^\.(p\d+) \{ (.*); \}$", text, re.MULTILINE))
    assert not re.search(r"#[0-9a-f]{6}\b", str(rules))
    assert len(figures) > 30
    for figure in figures:
        svg, ids = figure.all("svg")[0], ids_of(figure)
        assert svg.attributes["role"] == "img"
        title, description = svg.children[0], svg.children[1]
        assert (title.tag, description.tag) == ("title", "desc")
        assert svg.attributes["aria-labelledby"] == f"{title.attributes['id']} {description.attributes['id']}"
        assert len(description.text) > 20
        assert ids
        assert figure.all("details")[0].all("td")
        styles = [rules[each.attributes["class"]] for each in svg.all() if "class" in each.attributes]
        assert "var(--" in str(styles)
        assert not any("style" in each.attributes for each in svg.all())


def test_texts_are_read_in_both_schemes(text):
    found = schemes(text)
    assert set(found["light"]) == set(found["dark"])
    for name, colors in found.items():
        for ink in ("ink", "soft", "link"):
            for ground in ("paper", "panel"):
                assert contrast(colors[ink], colors[ground]) >= 4.5, (name, ink, ground)
        for series in range(1, SERIES + 1):
            assert contrast(colors[f"series-{series}"], colors["paper"]) >= 4.5, (name, series)


def test_the_contrast_is_that_of_wcag():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def compared() -> list[dict[str, Any]]:
    """The rows of the published comparison of drafters."""
    return json.loads((PUBLISHED / "compare.json").read_text())["rows"]


def named(row: dict[str, Any]) -> tuple[str, int]:
    return row["decoding"], row["batch_size"]


def test_the_verdict_is_of_the_newest_comparison(root):
    said = root.all("header")[0].text
    assert "ngram, heldout, batch size 1" in said
    low, high = next(row["speedup_interval"] for row in compared() if named(row) == ("ngram", 1))
    assert f"{low:.2f} to {high:.2f}" in said
    assert "From results/compare.json" in said


def test_a_run_and_the_doctor_are_told(text, root):
    found = {each.attributes["aria-labelledby"]: each for each in root.all("section")}
    assert "Cross-entropy by step" in found["training"].text
    assert "2.500" in found["training"].text
    assert "eagle-train draft=eagle train.steps=499" in found["training"].text
    assert "hub.token<redacted>" in found["training"].text.replace("\n", "")
    assert DOCTOR["verdict"] in found["doctor"].text
    assert "it is not installed" in found["doctor"].text
    assert "tpc2.25" in found["doctor"].text.replace("\n", "").replace(" ", "")
    assert PROBLEM["cause"] in found["doctor"].text
    assert "&lt;the rope&gt; &amp; base" in text


def test_published_figures_are_marked_as_of_other_targets(root):
    captions = [each.text for each in root.all("caption") if "TPC of a chain of 3" in each.text]
    assert len(captions) == 3  # one draft, latency, drafts trained otherwise
    assert all("of other targets on other machines" in caption for caption in captions)


def test_published_figures_stand_beside_those_of_the_same_kind(root):
    """Trees of 60 nodes, larger batches, tokens a second: none among those of another kind."""
    tables = {each.all("caption")[0].text: [row.text for row in each.all("tr")] for each in root.all("table")}
    kinds = {
        "TPC of 60 nodes": ("eagle, dynamic60", "6.13", "4.24"),
        "TPC of a chain of 7": ("eagle, chain7", "4.91", "3.72"),
        "plain decoding (published": ("ngram, heldout, batch size 1", "2.39", "3.42", "2.36"),
        "larger batches": ("chain3, heldout, batch size 8", "1.62", "1.38", "2.09", "1.39"),
        "Spec-Bench's own": ("REST (retrieval)", "1.82"),
        "A training step (": ("this step, tokens/s", "7,000.00"),
    }
    for caption, wanted in kinds.items():
        rows = next(rows for name, rows in tables.items() if caption in name)
        assert all(any(each in row for row in rows) for each in wanted), caption


def test_the_pareto_front_is_what_nothing_exceeds_in_both():
    """A tie in both is on it; less in one, and no more in the other, is not."""
    found = {"fast": (2.0, 1.0), "many": (3.0, 2.0), "as_many": (3.0, 2.0), "slower": (2.0, 1.5), "less": (1.9, 1.0)}
    rows = [{"decoding": name, "tpc": tpc, "ttit_s": ms / 1e3} for name, (tpc, ms) in found.items()]
    table = tpc_against_ttit(rows, "batch size 1").numbers
    assert {row[0] for row in table.rows if row[-1] == "yes"} == {"fast", "many", "as_many"}


def test_cautions_follow_from_the_results(root):
    by_title, title = {}, ""
    for each in root.all("h3", "li"):
        title = each.text if each.tag == "h3" else title
        by_title.setdefault(title, []).append(each.text)
    said = {name: " ".join(notes) for name, notes in by_title.items()}
    of = {name: next(notes for title, notes in said.items() if title.endswith(f"/{name}.json")) for name in NOTED}
    for name, expected in NOTED.items():
        assert expected in of[name], name
    assert "One seed" not in of["compare"]
    assert "busy with other work" not in of["latency_one_layer"]
    assert "prompts a figure" not in of["tune_trees"]


NOTED = {
    "compare": "Intervals overlap: chain1, heldout, batch size 8 is not shown to be faster than chain2",
    "draft_kinds": "One seed of training",
    "latency_growth": "2 prompts a figure",
    "latency_one_layer": "The target is the bundled one",
    "latency_profile": "Speed-ups without an interval",
    "draft_lm_head": "busy with other work: 2.77 running processes, where this evaluation has 1 thread.",
    "tune_trees": "The target is the bundled one",
}


def test_the_command_of_a_result_has_its_sampling():
    config = {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": 0.1, "logit_bias": {"5": 2.0}, "min_tokens": 0}
    told = command(Source("x", "mt_bench", {"config": config}, []))
    assert told == "python -m evals.mt_bench temperature=0.7 top_p=0.9 min_p=0.1 'logit_bias={5: 2.0}'"
    greedy = command(Source("x", "mt_bench", {"config": config | {"temperature": 0.0}}, []))
    assert greedy == "python -m evals.mt_bench temperature=0.0 'logit_bias={5: 2.0}'"


def arguments_of(source: Source, name: str) -> dict:
    """The config that a result's command makes."""
    words = shlex.split(command(source))
    assert words[:3] == ["python", "-m", f"evals.{name}"]
    return OmegaConf.to_container(compose(name, as_overrides(name, words[3:])))


@pytest.mark.parametrize("changed", [{}, {"template": None, "thinking": False, "columns": {"question": "ask"}}])
def test_the_command_of_a_suites_result_asks_that_suite(changed):
    """With what was given in the place of the suite's own."""
    given = ["suite=gsm8k", "suite.path=/my files/it's.jsonl", "draft.path=a"]
    config = OmegaConf.to_container(compose("mt_bench", as_overrides("mt_bench", given)))
    config["suite"] |= changed
    source = Source("x", "mt_bench", {"config": config, "drafter": "eagle"}, [])
    assert arguments_of(source, "mt_bench")["suite"] == config["suite"]
    assert ("suite.template=null" in command(source)) == bool(changed)
    published = Source("x", "mt_bench", json.loads((PUBLISHED / "spec_bench.json").read_text()), [])
    assert command(published).endswith(" suite=spec_bench suite.path=outputs/public/spec_bench.jsonl")


def test_the_command_of_a_comparison_has_its_drafters_and_tasks():
    values = {
        "drafters": {
            "a": {"drafter": "eagle", "draft": "my drafts/it's", "tree": "chain3"},
            "ngram": {"max_draft_len": 5},
        },
        "tasks": {"sums": {"suite": "gsm8k", "thinking": False}, "own": "questions.jsonl"},
    }
    made = arguments_of(Source("x", "compare", {"config": values | {"limit": None}}, []), "compare")
    assert {key: made[key] for key in values} == values


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.json")), ids=lambda path: path.stem)
def test_the_commands_of_published_results_can_be_typed(path):
    for source in gather([str(path)]):
        words = shlex.split(command(source))
        if words and words[2] in ("evals.mt_bench", "evals.compare", "evals.latency"):
            name = source.evaluation
            assert compose(name, as_overrides(name, words[3:]))


def test_what_is_lossy_or_simulated_or_loops_is_marked_and_no_headline(tmp_path):
    found = json.loads((PUBLISHED / "latency_one_layer.json").read_text())
    looping = [*found["rows"][:-1], found["rows"][-1] | {"looping_answers": 0.5}]
    changes = {"lossy": {"lossy": True}, "simulated": {"config": {"acceptance": [0.8]}}, "loops": {"rows": looping}}
    for name, change in changes.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found | change))
    assert call(report.main, f"results=[{tmp_path}]", f"out={tmp_path}/out") == 0
    said = (tmp_path / "out/report.md").read_text()
    assert "chain3, batch size 1 (LOSSY)" in said
    assert "chain3, batch size 1 (simulated)" in said
    assert "chain3, batch size 1 (loops)" in said
    assert "answers need not be the target's own" in said
    assert "Acceptance was simulated" in said
    assert "No result here measures a speed-up with real acceptance and answers that do not loop." in said


def test_a_result_is_named_by_as_much_of_its_path_as_tells_it_from_others():
    names = ["outputs/a/eval/results.json", "outputs/b/eval/results.json", "c/x.json: one", "c/x.json: two", "y.json"]
    ends = ["a/eval/results.json", "b/eval/results.json", "c/x.json: one", "c/x.json: two", "y.json"]
    assert labels_of(names) == dict(zip(names, ends, strict=True))
    assert labels_of(["eval/results.json", "a/eval/results.json"]) == {
        "eval/results.json": "eval/results.json",
        "a/eval/results.json": "a/eval/results.json",
    }
    assert labels_of(["a/y.json"] * 2) == {"a/y.json": "a/y.json"}


def test_what_a_short_run_lacks_is_left_out(tmp_path):
    """No draft accepted at all, no interval for want of repeats, null for NaN."""
    latency, switches = (json.loads((PUBLISHED / f"{name}.json").read_text()) for name in ("latency", "switches"))
    for row in latency["rows"]:
        row["acceptance_per_depth"] = []
    for row in switches["rows"]:
        row["ttit_speedup_interval"] = row["ttft_speedup_interval"] = row["wait_speedup_interval"] = None
    share = {"best": "chain3", "share": 0.93, "interval": None}
    rows = [{"batch_size": 1, "load": "half", "gate": share, "auto": share}]
    gating = {"evaluation": "gating", "rows": rows, "config": {"acceptance": 0.8}}
    empty = {"evaluation": "train_throughput", **json.loads((PUBLISHED / "train_throughput.json").read_text())}
    empty |= {"naive": None, "ours": empty["ours"] | {"peak_memory": None}}
    for name, found in {"latency": latency, "switches": switches, "gating": gating, "step": empty}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    assert call(report.main, f"results=[{tmp_path}]", f"out={tmp_path}/out") == 0
    text = (tmp_path / "out/report.html").read_text()
    assert "Acceptance by depth" not in text
    assert "0.930 of chain3" in text
    page(text)


def test_acceptance_by_context_is_drawn_where_there_are_several():
    rows = [
        {"to": end, "tpc": 2.0 + place, "tpc_interval": (1.5, 3.5), "acceptance_per_depth": [0.5 + place / 4, 0.1]}
        for place, end in enumerate((64, 128))
    ]
    (plot,) = along_context({"chain2": rows, "plain": [{**row, "acceptance_per_depth": []} for row in rows]})
    assert plot.numbers.header == ["decoding", "64", "128"]
    assert plot.numbers.rows == [["chain2", "50.0 %; TPC 2.00 (1.50 to 3.50)", "75.0 %; TPC 3.00 (1.50 to 3.50)"]]
    assert plot.svg.startswith("<svg")
    assert along_context({"chain2": rows[:1]}) == along_context({}) == []
    for name, change in {
        "quantisation": lambda found: found["schemes"]["none"].update(by_context=rows),
        "tune_trees": lambda found: [each.update(by_context=rows) for each in found["trees"]],
        "study_trees": lambda found: found["parts"][0]["variants"]["draft"].update(by_context={"chain3": rows}),
    }.items():
        found = json.loads((PUBLISHED / f"{name}.json").read_text())
        made, before = KINDS[found["evaluation"]].blocks, Source("x", found["evaluation"], found, [])
        assert not [block for block in made(before) if "Acceptance by context" in getattr(block, "title", "")]
        change(found)
        assert [block for block in made(before) if "Acceptance by context" in getattr(block, "title", "")]


LONG = [f"int4 (ffn), nearest, /home/user/exports/llama-3.1-8b/eagle-int4-{number}" for number in range(3)] + ["none"]


@pytest.mark.parametrize(
    "drawn",
    [
        plots.lines({name: [(1, 0.7), (2, 0.5)] for name in LONG}, "depth", "share"),
        plots.marked([(name, 2.0, 9.0) for name in LONG], [], "TPC", "TTIT"),
        plots.intervals([(name, 1.2, (1.0, 1.4)) for name in LONG], "speed-up", 1, [1.1] * 4),
        plots.stacked({name: dict.fromkeys(LONG, 1.0) for name in LONG}, "ms"),
        plots.heat(LONG, ["b1", "b8"], [[1.0, 2.0]] * 4, "batch"),
    ],
    ids=["lines", "marked", "intervals", "stacked", "heat"],
)
def test_long_names_are_within_their_plot(drawn):
    """The ends of a long one, by which it differs from others; and beside them the axes have room."""
    wide = float(re.search(r'viewBox="0 0 ([\d.]+)', drawn)[1])
    texts = re.findall(r'<text style="([^"]*)" x="([\d.]+)" y="[\d.]+">([^<]*)<', drawn)
    names = [(float(x), "end" in style, text) for style, x, text in texts if text[-8:] in {each[-8:] for each in LONG}]
    assert {text[-8:] for *_, text in names} == {each[-8:] for each in LONG}
    for x, ends_there, text in names:
        width = TextPath((0, 0), text, size=9).get_extents().width
        assert x - width >= 0 if ends_there else x + width <= wide
    assert min((wide - x for x, ends_there, _ in names if ends_there), default=wide) > 100


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["results=[nowhere]"], "results=nowhere: not there"),
        (["results=[.]"], "results=.: no evaluation's result is there"),
        (["compare=[nowhere,nowhere]"], "compare=nowhere: not there"),
        (["compare=[a]"], "compare=['a']: must be two directories or files"),
        (["fail_on_worse=true"], "fail_on_worse=true: needs compare=[OLD,NEW]"),
        (["compare=[a,b]", "results=[a]"], "leave out results"),
        ([], "results: nothing was found below outputs/ or evals/results"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert call(report.main, *arguments) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "content", [b'{"evaluation"', b'{"evaluation": "\xff"}', b'{"evaluation": 1}\n{"evaluation": 2}']
)
def test_a_broken_result_is_named(tmp_path, capsys, content):
    """One that the user names ends the report; one that lies beside others is left out."""
    broken = tmp_path / "found.json"
    broken.write_bytes(content)
    assert call(report.main, f"results=[{broken}]") == 2
    assert f"error: {broken}: no JSON: " in capsys.readouterr().err
    shutil.copy(PUBLISHED / "gating.json", tmp_path)
    assert call(report.main, f"results=[{tmp_path}]", f"out={tmp_path}/out") == 0
    assert f"left out: {broken}: no JSON: " in capsys.readouterr().err


def test_a_result_that_was_cut_off_is_named(tmp_path, capsys):
    """Also before its key `evaluation`, which stands near the end."""
    whole = (PUBLISHED / "gating.json").read_text()
    (tmp_path / "whole.json").write_text(whole)
    (tmp_path / "results.json").write_text(whole[: whole.index('"evaluation"')])
    assert call(report.main, f"results=[{tmp_path}]", f"out={tmp_path}/out") == 0
    assert f"left out: {tmp_path}/results.json: no JSON: " in capsys.readouterr().err


def test_what_another_version_wrote_is_told_as_it_is(tmp_path):
    found = {name: json.loads((PUBLISHED / f"{name}.json").read_text()) for name in ("latency", "compare")}
    del found["latency"]["rows"][0]["ttit_p99_s"]
    found["compare"]["rows"] = [row for row in found["compare"]["rows"] if row["decoding"] == "plain"]  # all left out
    for name, each in found.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(each))
    write_jsonl(tmp_path / "metrics.jsonl", STEPS)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 500, "lo')  # torn by a kill
    assert call(report.main, f"results=[{tmp_path}]", f"out={tmp_path}/out") == 0
    said = (tmp_path / "out/report.md").read_text()
    assert said.count("Written by another version of evals.latency") == 1
    assert "Written by another version of evals.compare" not in said
    assert "Loss by step" in said


def test_studies_tell_gains_and_how_length_helps(text, tmp_path):
    """Of more variants than a plot has lines, all stand in the tables."""
    found = json.loads((PUBLISHED / "study_recipe.json").read_text())
    (part,) = found["parts"]
    names = [f"v{place}" for place in range(16)]
    variants = {"paper": part["variants"]["paper"], **dict.fromkeys(names, part["variants"]["no_l1"])}
    found["parts"] = [part | {"steps": steps, "variants": variants} for steps in (140, 280)]
    found["speedups"] = {
        "paper": {"chain3": {"speedup": 1.5, "tpc": 2.0, "interval": [1.4, 1.6]}},
        "v0": {"chain3": None},
    }
    (tmp_path / "study.json").write_text(json.dumps(found))
    assert call(report.main, f"results=[{tmp_path}]", f"out={tmp_path}/out") == 0
    said = (tmp_path / "out/report.md").read_text()
    assert "TPC above paper, the same questions (95 %), 280 steps, equal tokens" in said
    gain = part["variants"]["no_l1"]["gain"]["chain3"]
    assert f"| v15 | {gain['tpc']:+.2f} ({gain['low']:.2f} to {gain['high']:.2f})" in said.replace("  ", "")
    assert "TPC with chain3 by steps of the reference, equal tokens (95 %)" in said
    assert all(len(re.findall(rf"^\| {name}, chain3 +\|", said, re.MULTILINE)) == 2 for name in names), "acceptance"
    assert "The largest speed-up is that of paper, chain3, and its interval lies above 1." in said
    assert "TPC above chain3, the same drafts and questions" in text


def test_names_with_dollar_signs_are_no_formulas():
    name = r"a$\foo$b"
    drawn = [
        plots.lines({name: [(1, 1), (2, 2)], "other": [(1, 2)]}, name, "y"),
        plots.marked([(name, 1, 2), ("other", 2, 1)], [], "x", "y"),
        plots.intervals([(name, 1, None)], "x", 1),
        plots.stacked({name: {"part": 1}}, "x"),
        plots.heat([name], [name], [[1.0]], "x"),
    ]
    assert all(f">{name}</text>" in each for each in drawn)


def test_no_two_marks_of_a_plot_are_alike():
    drawn = plots.marked([(f"n{place}", place, place) for place in range(36)], [(0, 0), (5, 5)], "x", "y")
    legend = re.findall(r'<use href="(\S+)" x="[^"]*" y="[^"]*" style="([^"]*)"/><text[^>]*>n\d+</text>', drawn)
    assert len(legend) == len(set(legend)) == 36


def test_the_tracker_is_given_the_figures_and_the_page(tmp_path, monkeypatch):
    kept = {}

    class Kept:
        def __init__(self, directory, config):
            kept["config"] = config

        def start(self, resumed):
            kept["resumed"] = resumed

        def log(self, step, record):
            kept["figures"] = record

        def show(self, name, page):
            kept["page"] = page

        def close(self, failed=False):
            kept["closed"] = not failed

    monkeypatch.setattr("eagle_train.training.metrics.NoTracker", Kept)
    assert call(report.main, f"results=[{PUBLISHED}/compare.json]", f"out={tmp_path}") == 0
    speedup = next(row["speedup"] for row in compared() if named(row) == ("ngram", 1))
    assert kept["figures"]["compare/ngram, heldout, batch size 1/speed-up"] == pytest.approx(speedup)
    assert kept["page"] == (tmp_path / "report.html").read_text()
    assert kept["closed"]


@pytest.mark.parametrize("at", ["log", "show", "close"])
def test_a_tracker_that_fails_is_one_line_and_the_report_is_there(tmp_path, monkeypatch, capsys, at):
    def fails(*given):
        raise ConnectionError("the service is gone")

    monkeypatch.setattr(f"eagle_train.training.metrics.NoTracker.{at}", fails)
    assert call(report.main, f"results=[{PUBLISHED}/compare.json]", f"out={tmp_path}") == 2
    told = f"error: the tracker failed: ConnectionError: the service is gone; the report is in {tmp_path}"
    assert capsys.readouterr().err.splitlines()[-1] == told
    assert (tmp_path / "report.html").is_file()
