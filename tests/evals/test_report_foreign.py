"""evals.report on what it cannot read: broken files, results of others under our names, odd values. None of them takes
the other results with it."""

import json
import re
import shutil
from pathlib import Path

import pytest

from eagle_train.errors import UserError
from evals import report
from evals.bench.page.comparison_page import comparison
from evals.bench.page.figures import figures_of
from evals.bench.page.gather import gather
from evals.bench.page.overview import page_of
from evals.bench.page.render import html, markdown
from tests.support.command_line import write_jsonl
from tests.support.html_structure import page

PUBLISHED = Path(report.__file__).parent / "results"
# Values of a result, and what is said of them.
FOREIGN = {
    "config": ({"config": "abc"}, "config='abc': must be a mapping"),
    "rows": ({"rows": 5}, "rows=5: must be a list of mappings"),
    "row": ({"rows": [1, 2]}, "rows=[1, 2]: must be a list of mappings"),
    "provenance": ({"provenance": "x"}, "provenance='x': must be a mapping"),
    "date": ({"date": 5}, "date=5: must be a text"),
}
# Results of which a page is made all the same; `latency` where they do not say.
ODD = {
    "load": {"provenance": {"load_average": 3.0}},
    "threads": {"provenance": {"load_average": [3.0], "threads": "two"}},
    "study": {"evaluation": "experiments", "config": {"study": "mine"}},
    "repeats": {"config": {"repeats": "x"}},
    "no_rows": {"evaluation": "compare", "rows": []},
    "texts": {"evaluation": "tune_trees", "table": [{"tree": "a", "batch_size": 1, "tpc": "high", "speedup": "fast"}]},
    "huge": {"evaluation": "quantisation", "schemes": {"int4": {"tpc": 10**400, "draft_latency_ms": 1}}},
    "name": {"evaluation": "x" * 300},
    "surrogate": {"evaluation": "other", "x\ud800": "\ud800"},
    "control": {"evaluation": "other", "x": "\x0b\x1b[2J\uffff"},
}


@pytest.fixture
def beside(tmp_path) -> Path:
    """A directory with a good result."""
    shutil.copy(PUBLISHED / "quickstart_avx512.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_result_is_left_out_unless_named(beside, caplog, name):
    values, said = FOREIGN[name]
    (beside / "foreign.json").write_text(json.dumps({"evaluation": "latency", **values}))
    assert [each.evaluation for each in gather([str(beside)])] == ["mt_bench"]
    assert f"left out: {beside}/foreign.json: {said}" in caplog.text
    with pytest.raises(UserError, match=re.escape(said)):
        gather([f"{beside}/foreign.json"])


@pytest.mark.parametrize(
    ("name", "content"), [("metrics.jsonl", "[1]\n"), ("deep.json", '{"evaluation": ' + "[" * 10**5), ("d.json", None)]
)
def test_a_broken_file_is_left_out(beside, name, content):
    if content is None:
        (beside / name).mkdir()
    else:
        (beside / name).write_text(content)
    assert [each.evaluation for each in gather([str(beside)])] == ["mt_bench"]


@pytest.mark.parametrize("config", ["a: [", "- 1\n- 2\n"])
def test_curves_are_shown_without_a_config_that_is_none(tmp_path, caplog, config):
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    (tmp_path / "config.yaml").write_text(config)
    (source,) = gather([str(tmp_path)])
    assert source.config == {}
    assert len(source.found["records"]) == 1
    assert f"left out: {tmp_path}/config.yaml: " in caplog.text


@pytest.mark.parametrize("answers", ['{"line":0,"tok', "[1]\n"])
def test_broken_answers_do_not_take_the_result_with_them(beside, caplog, answers):
    (beside / "answers.jsonl").write_text(answers)
    (source,) = gather([f"{beside}/quickstart_avx512.json"])
    assert list(source.answers) == []
    assert len(figures_of(source)) == 4
    assert f"left out: {beside}/answers.jsonl: " in caplog.text


@pytest.mark.parametrize("name", ODD)
def test_an_odd_result_does_not_take_the_others_with_it(beside, name):
    (beside / "odd.json").write_text(json.dumps({"evaluation": "latency", **ODD[name]}))
    sources = gather([str(beside)])
    made = page_of(sources)
    assert "From " in made.verdict
    assert len(made.sections) == 2
    text = html(made).encode().decode()
    page(text)
    assert not re.search("[\x0b\x1b\uffff]", text)
    assert "odd.json" in markdown(made).encode().decode()
    assert len(comparison(sources, sources)[1]) >= 4


def test_a_result_of_odd_hardware_is_not_compared(beside):
    found = json.loads((beside / "quickstart_avx512.json").read_text())
    found["provenance"] |= {"gpu": "NVIDIA H100", "threads": "two"}
    (beside / "quickstart_avx512.json").write_text(json.dumps(found))
    sources, later = gather([str(beside)]), gather([str(beside)])
    later[0].found["tpc"] += 1
    assert comparison(sources, later)[1] == []


def test_a_table_beside_published_figures_leaves_out_what_it_cannot_show(tmp_path):
    found = json.loads((PUBLISHED / "train_throughput.json").read_text())
    for name, change in (("good", {}), ("odd", {"config": {"layers": "x"}})):
        (tmp_path / f"{name}.json").write_text(json.dumps({"evaluation": "train_throughput"} | found | change))
    ((table,),) = (section.closing for section in page_of(gather([str(tmp_path)])).sections)
    assert sum("this step" in row[0] for row in table.rows) == 2


def test_names_with_control_characters_are_drawn(tmp_path):
    found = json.loads((PUBLISHED / "compare.json").read_text())
    found["rows"] = [row | {"task": "a\x0bb\ud800"} for row in found["rows"] if row["decoding"] in ("plain", "chain3")]
    (tmp_path / "found.json").write_text(json.dumps(found))
    said = markdown(page_of(gather([str(tmp_path)]))).replace("\\", "")
    assert "chain3, ax0bbud800, batch size 1" in said
    assert "Not read" not in said


def test_answers_of_another_version_are_not_paired(beside):
    file = beside / "quickstart_avx512.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokens": 12, "calls": 6}))
    write_jsonl(beside / "answers.jsonl", [{"line": line, "tokens": 2, "calls": 1} for line in range(6)])
    assert len(gather([str(beside)])[0].answers) == 6
    sources = gather([str(beside)])
    sources[0].found["tpc"] += 1
    assert {each.why for each in comparison(gather([str(beside)]), sources)[1]} >= {"intervals overlap"}
