"""evals.report compare=[OLD,NEW]: better, worse or noise, by intervals; and nothing of other hardware or load."""

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle_train.fields import defaults_of
from eagle_train.settings import CONF_DIR
from evals import report
from evals.bench.page.figures import figures_of
from evals.bench.page.gather import Source, gather
from evals.bench.page.guard import COLUMNS, OF_ANSWERS, paired_columns, paired_interval
from evals.bench.page.pairing import added, different
from tests.support.command_line import call, write_jsonl

PUBLISHED = Path(report.__file__).parent / "results"
PROMPTS = 60


def answers(seed: int, calls: float = 1.0, seconds: float = 1.0) -> list[dict]:
    """Rows of answers.jsonl: the same prompts for each seed, with other small chance. `calls`, `seconds`: times as
    many."""
    prompts, chance = random.Random(0), random.Random(seed)
    rows = []
    for number in range(PROMPTS):
        tokens = prompts.randint(20, 90)
        rounds = tokens / prompts.uniform(1.5, 3.5)
        row = {"question_id": number, "line": number + 1, "turn": 1, "tokens": tokens, "plain_tokens": tokens}
        row["calls"] = max(1, round(rounds * calls))
        row["decode_s"] = 0.01 * rounds * seconds * chance.gauss(1, 0.03)
        row["plain_decode_s"] = 0.006 * tokens * chance.gauss(1, 0.03)
        rows.append(row)
    return rows


def result(directory: Path, rows: list[dict], size: int = 1, **changes) -> Path:
    """An evals.mt_bench result of these answers, in batches of `size`; `changes`: of the provenance."""
    directory.mkdir()
    found = json.loads((PUBLISHED / "quickstart_avx512.json").read_text())
    sums = torch.tensor([[row[name] for name in COLUMNS] for row in rows], dtype=torch.float64).sum(0)
    found["tpc"], found["speedup"] = (OF_ANSWERS[name](sums).item() for name in ("TPC", "speed-up"))
    found["ttit_s"] = OF_ANSWERS["TTIT, ms"](sums).item() / 1e3
    found["plain_ttit_s"] = (sums[4] / sums[3]).item()
    found["tokens"], found["calls"] = (sum(row[key] for row in rows) for key in ("tokens", "calls"))
    found["provenance"] |= changes
    found["batch_size"] = found["config"]["batch_size"] = size
    write_jsonl(directory / "answers.jsonl", rows)
    (directory / "results.json").write_text(json.dumps(found))
    return directory


def verdicts(out: Path, old: Path, new: Path, *more: str, status: int = 0) -> dict[str, tuple[str, str]]:
    """What is said of each figure, and why."""
    assert call(report.main, f"compare=[{old},{new}]", f"out={out}", *more) == status
    found = json.loads((out / "comparison.json").read_text())
    return {each["new"]["name"]: (each["verdict"], each["why"]) for each in found}


def published(path: Path, name: str, change: Callable[[list[dict]], object] = len) -> Path:
    """A published result as if nothing else had run beside it, in a file; `change`: of its rows."""
    found = json.loads((PUBLISHED / f"{name}.json").read_text())
    found["provenance"]["load_average"] = [0.0] * 3
    change(found["rows"])
    path.write_text(json.dumps(found))
    return path


def test_a_slower_and_worse_run_is_called_worse_and_fails(tmp_path, capsys):
    old, new = result(tmp_path / "old", answers(1)), result(tmp_path / "new", answers(2, calls=1.1, seconds=1.1))
    found = verdicts(tmp_path / "out", old, new, "fail_on_worse=true", status=1)
    assert {name: found[name][0] for name in OF_ANSWERS} == dict.fromkeys(OF_ANSWERS, "worse")
    assert "paired by question" in found["TPC"][1]
    assert "Worse: mt_bench, chain3, batch size 1: TPC; " in capsys.readouterr().out
    found = verdicts(tmp_path / "back", new, old, "fail_on_worse=true")
    assert {name: found[name][0] for name in OF_ANSWERS} == dict.fromkeys(OF_ANSWERS, "better")


def test_chance_is_called_noise(tmp_path):
    old = result(tmp_path / "old", answers(1))
    found = verdicts(tmp_path / "out", old, result(tmp_path / "new", answers(2)), "fail_on_worse=true")
    assert found["TTIT, ms"][0] == found["speed-up"][0] == "noise"
    assert found["TPC"] == ("noise", "the same value")


def test_pairs_see_what_intervals_of_their_own_do_not(tmp_path):
    """3 % more calls are within the interval of either TPC, and beyond that of their difference."""
    old, new = result(tmp_path / "old", answers(1)), result(tmp_path / "new", answers(1, calls=1.03))
    assert verdicts(tmp_path / "out", old, new)["TPC"][0] == "worse"
    write_jsonl(new / "answers.jsonl", [row | {"turn": 2} for row in answers(1, calls=1.03)])
    assert verdicts(tmp_path / "alone", old, new)["TPC"] == ("noise", "intervals overlap")


def test_times_of_a_batch_are_not_paired_by_question(tmp_path):
    """Its questions have their rounds' times in common. TPC is each one's own."""
    old, new = (result(tmp_path / name, answers(1, 1.0 + 0.1 * n, 1.0 + 0.1 * n), 8) for n, name in enumerate("ab"))
    found = verdicts(tmp_path / "out", old, new)
    assert found["TTIT, ms"] == ("cannot tell", "no interval")
    assert found["speed-up"][1].startswith("intervals ")
    assert found["TPC"][0] == "worse"
    assert "paired by question" in found["TPC"][1]


def test_other_hardware_and_other_load_are_never_the_code(tmp_path):
    old, rows = result(tmp_path / "old", answers(1)), answers(2, calls=1.1, seconds=1.5)
    found = verdicts(tmp_path / "a", old, result(tmp_path / "gpu", rows, gpu="NVIDIA H100"))
    assert {verdict for verdict, _ in found.values()} == {"cannot tell", "noise"}
    assert found["TPC"] == ("cannot tell", "other hardware: gpu None, now NVIDIA H100")
    busy = result(tmp_path / "busy", rows, load_average=[7.0, 6.0, 6.0])
    found = verdicts(tmp_path / "b", old, busy)
    assert found["speed-up"][0] == found["TTIT, ms"][0] == "cannot tell"
    assert found["speed-up"][1] == "other work on the machine: 0.0 other processes, now 5.0"
    assert found["TPC"][0] == "worse"  # which no load changes
    both = result(tmp_path / "as busy", answers(1), load_average=[6.0, 6.0, 6.0])
    found = verdicts(tmp_path / "c", both, tmp_path / "busy")
    assert found["speed-up"][0] == found["TTIT, ms"][0] == "cannot tell", "the same load is no reason to trust times"


def test_what_else_changed_is_told(tmp_path):
    """The target on more ranks takes other times; a library, or a new draft at the same place, may be the reason."""
    old, new = (result(tmp_path / name, rows) for name, rows in (("old", answers(1)), ("new", answers(2, 1.1, 1.1))))
    file = new / "results.json"
    found = json.loads(file.read_text())
    file.write_text(json.dumps(found | {"ranks": 2}))
    said = verdicts(tmp_path / "ranks", old, new)
    assert said["speed-up"] == said["TTIT, ms"] == ("cannot tell", "ranks that hold the target together: 1, now 2")
    assert said["TPC"][0] == "worse"
    file.write_text(json.dumps(found | {"draft_source": "another", "provenance": found["provenance"] | {"torch": "9"}}))
    said = verdicts(tmp_path / "torch", old, new)
    assert said["TPC"][1].endswith(f"; another draft; torch {found['provenance']['torch']}, now 9")


def test_a_comparisons_tpc_has_an_interval_and_its_own_draft(tmp_path):
    def change(least: float) -> Callable[[list[dict]], object]:
        return lambda rows: [row.update(tpc=least + 0.1, tpc_interval=[least, least + 0.2]) for row in rows[1:]]

    old, new = (published(tmp_path / f"{least}.json", "compare", change(least)) for least in (3.0, 2.0))
    found = json.loads(new.read_text())
    next(each for each in found["drafters"] if each["name"] == "chain3")["draft_source"] = "another"
    new.write_text(json.dumps(found))
    assert call(report.main, f"compare=[{old},{new}]", f"out={tmp_path}/out") == 0
    told = [each for each in json.loads((tmp_path / "out/comparison.json").read_text()) if each["new"]["name"] == "TPC"]
    assert {each["verdict"] for each in told} == {"worse"}
    assert {each["why"].partition("; ")[2] for each in told if each["new"]["of"].startswith("chain3, ")} == {
        "another draft"
    }
    assert {each["why"] for each in told if not each["new"]["of"].startswith("chain3, ")} == {
        "intervals do not overlap"
    }


def test_cores_that_are_idle_leave_times_alone_and_a_processor_without_a_name_is_unknown(tmp_path):
    old, rows = result(tmp_path / "old", answers(1), cores=64, threads=1), answers(2, calls=1.1, seconds=1.5)
    found = verdicts(tmp_path / "a", old, result(tmp_path / "new", rows, cores=64, threads=1, load_average=[5.0] * 3))
    assert "other work" not in found["speed-up"][1]
    found = verdicts(tmp_path / "b", old, result(tmp_path / "arm", rows, cores=64, threads=1, cpu=""))
    assert found["TPC"] == ("cannot tell", "hardware was not written")


def test_times_are_not_compared_where_plain_decoding_changed_too(tmp_path):
    """All times 1.2 as long: the speed-up is the same, and TTIT says nothing of drafting."""
    slower = [row | {key: 1.2 * row[key] for key in ("decode_s", "plain_decode_s")} for row in answers(2)]
    found = verdicts(tmp_path / "out", result(tmp_path / "old", answers(1)), result(tmp_path / "new", slower))
    assert found["speed-up"][0] == "noise"
    assert found["TTIT, ms"][0] == "cannot tell"
    assert "plain decoding's own changed by +20 %" in found["TTIT, ms"][1]


def test_what_plain_decoding_changed_by_is_no_change_of_the_speed_up(tmp_path):
    """Plain decoding alone 4 % slower: beyond the interval of the pairs, and no more than the machine's own drift."""
    slower = [row | {"plain_decode_s": 1.04 * row["plain_decode_s"]} for row in answers(1)]
    old, new = result(tmp_path / "old", answers(1)), result(tmp_path / "new", slower)
    verdict, why = verdicts(tmp_path / "out", old, new)["speed-up"]
    assert verdict == "noise"
    assert why.endswith("paired by question; plain decoding's own changed by as much")
    faster = [row | {"decode_s": 0.8 * row["decode_s"]} for row in slower]
    assert verdicts(tmp_path / "more", old, result(tmp_path / "faster", faster))["speed-up"][0] == "better"


def test_of_five_questions_nothing_is_told(tmp_path):
    rows = {name: answers(1, calls)[:count] for name, calls, count in (("old", 1, 5), ("new", 1.5, 5), ("six", 1, 6))}
    old, new = (result(tmp_path / name, rows[name]) for name in ("old", "new"))
    assert verdicts(tmp_path / "out", old, new)["TPC"] == ("cannot tell", "no interval")
    assert paired_columns(rows["old"], rows["new"]) is None
    assert paired_columns(rows["six"], rows["six"]) is not None


def test_an_old_interval_of_two_questions_tells_nothing(tmp_path):
    for name, ends in (("old", [0.8, 0.9]), ("new", [1.5, 1.6])):
        change = {"answers": 2, "distinct_prompts": 2, "speedup": sum(ends) / 2, "speedup_interval": ends}
        published(tmp_path / f"{name}.json", "compare", lambda rows, own=change: rows[1].update(own))
    assert call(report.main, f"compare=[{tmp_path}/old.json,{tmp_path}/new.json]", f"out={tmp_path}/out") == 0
    judged = json.loads((tmp_path / "out/comparison.json").read_text())
    assert {(e["verdict"], e["why"]) for e in judged if e["old"]["value"] != e["new"]["value"]} == {
        ("cannot tell", "of 2 questions, and an interval needs 6")
    }


def test_without_intervals_nothing_is_told(tmp_path):
    old = published(tmp_path / "old.json", "latency_profile")
    new = published(tmp_path / "new.json", "latency_profile", lambda rows: rows[1].update(speedup=0.5))
    verdicts(tmp_path / "out", old, new)
    judged = json.loads((tmp_path / "out/comparison.json").read_text())
    assert [each["why"] for each in judged if each["verdict"] == "cannot tell"] == ["no interval"]
    assert {each["verdict"] for each in judged} == {"cannot tell", "noise"}


def test_intervals_that_do_not_overlap(tmp_path):
    def change(rows: list[dict]) -> None:
        for row, ends in ((rows[1], [0.8, 0.9]), (rows[2], [1.5, 1.6])):
            row |= {"speedup": sum(ends) / 2, "speedup_interval": ends}

    old, new = published(tmp_path / "old.json", "compare"), published(tmp_path / "new.json", "compare", change)
    assert call(report.main, f"compare=[{old},{new}]", f"out={tmp_path}/out") == 0
    judged = json.loads((tmp_path / "out/comparison.json").read_text())
    said = {each["new"]["of"]: each["verdict"] for each in judged if each["verdict"] in ("better", "worse")}
    assert said == {"chain3, heldout, batch size 1": "worse", "chain2, heldout, batch size 1": "better"}


def test_another_config_is_not_compared_and_named(tmp_path):
    old = result(tmp_path / "old", answers(1))
    new = json.loads((old / "results.json").read_text())
    other = copy.deepcopy(new)
    other["config"]["max_tokens"], other["config"]["out"] = 5, "elsewhere"
    (tmp_path / "new.json").write_text(json.dumps(other))
    assert call(report.main, f"compare=[{old},{tmp_path}/new.json]", f"out={tmp_path}/out") == 0
    said = (tmp_path / "out/report.md").read_text()
    assert "made with another config than" in said
    assert f"{old}/results.json: max" in said.replace("\\", "")  # and `out` is none
    assert json.loads((tmp_path / "out/comparison.json").read_text()) == []


def changed(path: Path, new: Path, **changes) -> Path:
    """A copy of a result with other values in its config, by dotted keys with __ for dots; None: without the key."""
    found = json.loads(path.read_text())
    for key, value in changes.items():
        *above, last = key.split("__")
        place = found["config"]
        for name in above:
            place = place[name]
        if value is None:
            place.pop(last)
        else:
            place[last] = value
    new.write_text(json.dumps(found))
    return new


def test_a_setting_that_old_does_not_know_is_as_today_unless_it_is_told(tmp_path):
    """A commit that adds one can be compared with the one before; what is taken as equal is named."""
    now = result(tmp_path / "now", answers(1)) / "results.json"
    now = changed(now, tmp_path / "now.json", too_long="refuse", engine__gate=False)
    old = changed(now, tmp_path / "old.json", too_long=None, engine__gate=None)
    assert len(verdicts(tmp_path / "out", old, now)) == 4
    said = (tmp_path / "out/report.md").read_text().replace("\\", "")
    assert f"{now}: OLD's config has no engine.gate=false, too_long=refuse: today's default" in said

    other = changed(now, tmp_path / "other.json", engine__gate=True)
    for before, after, key in ((old, other, "engine.gate"), (now, old, "engine.gate, too_long")):
        assert verdicts(tmp_path / "out", before, after) == {}
        said = (tmp_path / "out/report.md").read_text().replace("\\", "")
        assert f"made with another config than {before}: {key}." in said


def test_new_settings_of_a_suite_and_of_a_drafter_are_known_too(tmp_path):
    path = PUBLISHED / "mt_bench.json"
    new = changed(path, tmp_path / "new.json", suite__size=80)
    (old,), (now,) = gather([str(path)]), gather([str(new)])
    assert added(old, now) == ["suite.size"]
    assert different(old, now) == []
    ngram = {"drafter": "ngram", "config": {"drafter": {"max_draft_len": 7, "is_keep_all": True}}}
    now, old = (Source("x", "mt_bench", ngram | change) for change in ({}, {"config": {"drafter": {}}}))
    assert (added(old, now), different(old, now)) == (["drafter.is_keep_all"], ["drafter.max_draft_len"])
    kind = {"draft": {"kind": "eagle3", "steps": 7}, "train": {"minutes": None}}
    now, old = (Source("x", "training", {"config": each}) for each in (kind, {"draft": {"kind": "eagle3"}}))
    assert different(old, now) == ([] if defaults_of("draft", "fields_eagle3")["steps"] == 7 else ["draft.steps"])


@pytest.mark.parametrize("evaluation", [*sorted(path.stem for path in (CONF_DIR / "commands").glob("*.yaml")), "other"])
def test_every_commands_defaults_are_known(evaluation):
    """But for `command`, which others begin with."""
    now = Source("x", evaluation, {"config": {"a": 1}})
    assert different(Source("x", evaluation, {"config": {}}), now) == ["a"]


def test_a_guard_that_compared_nothing_fails(tmp_path, capsys):
    old = result(tmp_path / "old", answers(1))
    other = json.loads((old / "results.json").read_text())
    other["config"]["max_tokens"] += 1
    (tmp_path / "other.json").write_text(json.dumps(other))
    given = [f"compare=[{old},{tmp_path}/other.json]", f"out={tmp_path}/out"]
    assert call(report.main, *given) == 0
    assert call(report.main, *given, "fail_on_worse=true") == 2
    assert "error: fail_on_worse=true: nothing was compared" in capsys.readouterr().err
    elsewhere = result(tmp_path / "elsewhere", answers(2, calls=1.1), cpu="another")
    assert call(report.main, f"compare=[{old},{elsewhere}]", f"out={tmp_path}/out", "fail_on_worse=true") == 2
    assert "error: fail_on_worse=true: of 3 figures that changed none can be told" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: {"decoding": "renamed"}, "TPC; speed-up; TTIT, ms; TTFT, ms"),
        (lambda row: {"tpc": None, "speedup": None}, "TPC; speed-up"),
    ],
)
def test_a_figure_that_has_vanished_fails(tmp_path, capsys, change, said):
    found = json.loads((PUBLISHED / "compare.json").read_text())
    found["rows"] = [row | change(row) if row["decoding"] == "chain3" else row for row in found["rows"]]
    (tmp_path / "new.json").write_text(json.dumps(found))
    given = [f"compare=[{PUBLISHED}/compare.json,{tmp_path}/new.json]", f"out={tmp_path}/out"]
    assert call(report.main, *given) == 0
    assert "Nothing is shown to be worse. Figures of OLD are missing in NEW" in capsys.readouterr().out
    assert call(report.main, *given, "fail_on_worse=true") == 2
    lost = f"compare, chain3, heldout, batch size 1: {said} (not in NEW)"
    assert (
        f"error: fail_on_worse=true: figures of OLD are missing in NEW: {lost}, and 2 more" in capsys.readouterr().err
    )
    listed = (tmp_path / "out/report.md").read_text().partition("Not compared")[2]
    assert listed.replace("\\", "").count(f"{said} (not in NEW)") == 3  # at each batch size
    assert ("renamed, heldout" in listed) == ("renamed" in str(found))


def test_a_result_that_has_vanished_fails_where_it_has_figures(tmp_path, capsys):
    for name, kept in (
        ("old", ("compare", "latency", "load_memory")),
        ("new", ("compare", "latency")),
        ("less", ("compare",)),
    ):
        (tmp_path / name).mkdir()
        for each in kept:
            shutil.copy(PUBLISHED / f"{each}.json", tmp_path / name)
    given = [f"out={tmp_path}/out", "fail_on_worse=true"]
    assert call(report.main, f"compare=[{tmp_path}/old,{tmp_path}/new]", *given) == 0
    assert call(report.main, f"compare=[{tmp_path}/old,{tmp_path}/less]", *given) == 2
    assert f"missing in NEW: {tmp_path}/old/latency.json: nothing in NEW" in capsys.readouterr().err


def with_prompts(rows: list[dict], text: str = "") -> list[dict]:
    return [row | {"prompt": f"{text}{row['question_id']}"} for row in rows]


def test_other_questions_at_the_same_place_are_never_the_code(tmp_path, capsys):
    """Their lines, names and turns are the same; and so are those of another target's weights."""
    old = result(tmp_path / "old", with_prompts(answers(1)))
    rows = with_prompts(answers(2, calls=1.1, seconds=1.1))
    assert verdicts(tmp_path / "same", old, result(tmp_path / "alike", rows))["TPC"][0] == "worse"
    others = [*rows[:40], *with_prompts(rows[40:], "another ")]
    found = verdicts(tmp_path / "out", old, result(tmp_path / "new", others), "fail_on_worse=true", status=2)
    assert set(found.values()) == {
        ("noise", "the same value"),
        ("cannot tell", "other questions at the same place: 40 of 60 prompts are among 60 now"),
    }
    assert "of 3 figures that changed none can be told" in capsys.readouterr().err
    found = verdicts(tmp_path / "none", old, result(tmp_path / "before", answers(2, calls=1.1)))
    assert found["TPC"][0] == "worse", "an older version wrote no prompts"
    assert "paired by question" in found["TPC"][1]


def test_another_target_at_the_same_place_is_never_the_code(tmp_path):
    old, new = result(tmp_path / "old", answers(1)), result(tmp_path / "new", answers(2, calls=1.1))
    for place, source in ((old, "ab"), (new, "cd")):
        found = json.loads((place / "results.json").read_text())
        assert "target_source" not in found, "published results have none"
        (place / "results.json").write_text(json.dumps(found | {"target_source": source}))
    told = ("cannot tell", "another target at the same place: weights ab, now cd")
    assert verdicts(tmp_path / "out", old, new)["TPC"] == told


def test_answers_of_another_run_are_not_paired(tmp_path, caplog):
    """They may be left of a run that was refused, or stand beside another evaluation's result."""
    old, new = result(tmp_path / "old", answers(1)), result(tmp_path / "new", answers(1, calls=1.03))
    assert len(gather([str(new)])[0].answers) == PROMPTS
    write_jsonl(new / "answers.jsonl", answers(1))
    assert gather([str(new)])[0].answers == []
    assert f"left out: {new}/answers.jsonl: " in caplog.text
    assert "of another run than" in caplog.text
    assert verdicts(tmp_path / "out", old, new)["TPC"] == ("cannot tell", "no interval")
    shutil.copy(PUBLISHED / "latency.json", old / "latency.json")
    assert [len(each.answers) for each in gather([str(old)])] == [0, PROMPTS]


DOCTOR = {
    "evaluation": "doctor",
    "problems": [],
    "prompts": 40,
    "tpc": 2.5,
    "tpc_interval": [2.4, 2.6],
    "after_every_token": 2.2,
    "after_every_token_interval": [2.1, 2.3],
    "rounds": 200,
    "rounds_that_differ": 0,
    "config": {"draft": {"path": "a"}},
    "provenance": {"cpu": "one"},
}


def test_a_draft_that_is_healthy_no_more_is_worse(tmp_path, capsys):
    ill = {"problems": [{}, {}], "tpc": 1.5, "tpc_interval": [1.4, 1.6], "rounds_that_differ": 100}
    for name, change in (("old", {}), ("new", ill), ("unread", {"problems": None})):
        (tmp_path / f"{name}.json").write_text(json.dumps(DOCTOR | change))
    found = verdicts(tmp_path / "out", tmp_path / "old.json", tmp_path / "new.json", "fail_on_worse=true", status=1)
    assert found == {
        "problems": ("worse", "a count"),
        "TPC (99 %)": ("worse", "intervals do not overlap"),
        "1 + drafts accepted after every token (99 %)": ("noise", "the same value"),
        "rounds in which engine and training graph agree, share": ("cannot tell", "no interval"),
    }
    assert "Worse: doctor, the draft: problems; doctor, the draft: TPC (99 %)." in capsys.readouterr().out
    given = [f"compare=[{tmp_path}/old.json,{tmp_path}/unread.json]", f"out={tmp_path}/lost", "fail_on_worse=true"]
    assert call(report.main, *given) == 2


def test_a_gate_that_chooses_worse_is_worse(tmp_path):
    def change(rows: list[dict]) -> None:
        rows[0]["gate"] = {"best": "plain", "share": 0.5, "interval": [0.4, 0.6]}

    old, new = published(tmp_path / "old.json", "gating"), published(tmp_path / "new.json", "gating", change)
    assert call(report.main, f"compare=[{old},{new}]", f"out={tmp_path}/out", "fail_on_worse=true") == 1
    judged = json.loads((tmp_path / "out/comparison.json").read_text())
    assert [each["new"]["of"] for each in judged if each["verdict"] == "worse"] == ["gate, noise, batch size 1"]
    assert len(judged) == 16


def test_a_pair_without_figures_is_told(tmp_path, capsys):
    """Alone it is no comparison, and beside others it is named."""
    path = PUBLISHED / "load_memory.json"
    given = [f"compare=[{path},{path}]", f"out={tmp_path}/out"]
    assert call(report.main, *given) == 0
    assert "Nothing was compared, though results of the same evaluation and config" in capsys.readouterr().out
    said = (tmp_path / "out/report.md").read_text().replace("\\", "")
    assert f"{path}: evals.load_memory has no figures that are compared" in said
    assert call(report.main, *given, "fail_on_worse=true") == 2


@pytest.mark.parametrize("drafters", [{"ngram": {}}, ["ngram"], "ngram", 5])
def test_a_foreign_list_of_drafters_does_not_end_a_comparison(tmp_path, drafters):
    rows = {"old": answers(1), "new": answers(2, calls=1.1)}
    old, new = (result(tmp_path / name, each) for name, each in rows.items())
    found = json.loads((new / "results.json").read_text())
    (new / "results.json").write_text(json.dumps(found | {"drafters": drafters}))
    assert verdicts(tmp_path / "out", old, new)["TPC"][0] == "worse"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_as_null(tmp_path, number):
    """JSON has none; what another program wrote is neither better nor worse."""
    old, new = result(tmp_path / "old", answers(1)), result(tmp_path / "new", answers(1))
    found = json.loads((new / "results.json").read_text())
    found |= {"tpc": "X", "plain_ttit_s": "X", "speedup": 0.1, "speedup_interval": ["X", "X"], "ttft_s": "X"}
    (new / "results.json").write_text(json.dumps(found).replace('"X"', number))
    rows = [row | {"decode_s": "X"} for row in answers(1)]
    write_jsonl(new / "answers.jsonl", rows)
    (new / "answers.jsonl").write_text((new / "answers.jsonl").read_text().replace('"X"', number))
    assert verdicts(tmp_path / "out", old, new) == {
        "speed-up": ("cannot tell", "no interval"),
        "TTIT, ms": ("noise", "the same value"),
    }
    said = (tmp_path / "out/report.md").read_text().replace("\\", "")
    assert "mt_bench, chain3, batch size 1: TPC; TTFT, ms (not in NEW)" in said


def test_turns_of_a_question_are_one(tmp_path):
    """Each question asked twice alike has the interval that it has once, in both intervals."""
    rows = answers(1)
    twice = [row | {"turn": turn} for row in rows for turn in (1, 2)]
    once, both = (result(tmp_path / name, own) for name, own in (("once", rows), ("both", twice)))
    found = [figures_of(gather([str(place)])[0]) for place in (once, both)]
    first, second = (next(each.interval for each in own if each.name == "TPC") for own in found)
    assert first == second
    more = [{**row, "calls": row["calls"] * 1.01} for row in twice]
    assert paired_columns(twice, more)[0].shape == (PROMPTS, len(COLUMNS))
    assert paired_columns(twice, more[:-1]) is None
    assert paired_columns(rows[:1], rows[:1]) is None, "of one question nothing is known of others"
    silent = rows[0] | dict.fromkeys(("tokens", "calls", "decode_s"), 0)
    assert len(paired_columns([silent, *rows[1:]], rows)[0]) == PROMPTS - 1


def test_where_results_are_written_does_not_matter(tmp_path):
    old = result(tmp_path / "old", answers(1))
    new = json.loads((old / "results.json").read_text())
    new["config"]["out"] = "elsewhere"
    (tmp_path / "new.json").write_text(json.dumps(new))
    assert len(verdicts(tmp_path / "out", old, tmp_path / "new.json")) == 4


def test_the_paired_interval_is_that_of_the_difference():
    """Of prompts whose TPC differs by the same factor the difference depends on the prompts alone."""
    rows = torch.tensor([[row[name] for name in COLUMNS] for row in answers(1)], dtype=torch.float64)
    more = rows * torch.tensor([1, 1.25, 1, 1, 1], dtype=torch.float64)
    low, high = paired_interval(rows, more, OF_ANSWERS["TPC"])
    tpc = OF_ANSWERS["TPC"](rows.sum(0)).item()
    assert low < tpc / 1.25 - tpc < high < 0
    assert high - low < 0.2 * tpc


@pytest.mark.parametrize("name", ["compare", "latency", "tune_trees", "switches", "draft_kinds", "train_throughput"])
def test_a_result_against_itself_is_the_same_value(tmp_path, name):
    path = PUBLISHED / f"{name}.json"
    found = verdicts(tmp_path, path, path, "fail_on_worse=true")
    assert set(found.values()) == {("noise", "the same value")}
    assert len(gather([str(path)])) == 1
