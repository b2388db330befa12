"""vLLM as a program: a stand-in takes its place, whose counts are read and whose failures are one line."""

import fcntl
import json
import sys
from pathlib import Path

import pytest
import torch

from eagle_train import doctor
from eagle_train.diagnosis import Diagnosis, served_by_vllm
from eagle_train.diagnosis.vllm import VLLM, Counts, dtype_for, run_job, share_of_free, version_of
from eagle_train.errors import UserError
from tests.support.command_line import call
from tests.support.doctor_models import PLACE
from tests.support.fake_vllm import GOOD, counts, giving, interpreter
from tests.support.planted import causes, edited, examined, exported, native


def served(directory: Path, answering: str, timeout_s: float = 60) -> Counts:
    job = {"llm": {"speculative_config": {"num_speculative_tokens": 3}}, "prompts": [[1], [2]]}
    vllm = VLLM(str(interpreter(directory, answering)), timeout_s, 1, None)
    return run_job(job | {"answer": str(directory / "vllm_answer.json")}, vllm, directory)


def test_counts_by_hand():
    counts = Counts(4, [3, 1, 0], [[5] * 6, [7] * 4])
    assert (counts.acceptance_length, counts.acceptance) == (2.0, [3 / 4, 1 / 4, 0])
    assert counts.tpc == (5 + 3) / 4
    assert counts.figures["accepted_tokens"] == 4


def test_an_answer_is_read(tmp_path):
    (tmp_path / "vllm_answer.json").write_text("of an earlier run")
    assert served(tmp_path, f"print('loaded')\n{giving(GOOD)}") == Counts(4, [3, 1, 0], [[5] * 6, [7] * 4])
    assert (tmp_path / "vllm.log").read_text() == "loaded\n"


@pytest.mark.parametrize(
    ("answering", "message"),
    [
        ("print('loading')\nraise ValueError('no such draft')", "failed with status 1: ValueError: no such draft (all"),
        ("sys.exit(3)", "vLLM failed with status 3: it said nothing (all"),
        ("import os\nos.abort()", "vLLM failed with status -6: it said nothing (all"),
        ("", "vLLM ended without an answer"),
        (giving("0 drafts"), "no answer to the job: JSONDecodeError"),
        (giving("[]"), "no answer to the job: TypeError"),
        (giving({key: GOOD[key] for key in GOOD if key != "drafts"}), "no answer to the job: KeyError 'drafts'"),
        (giving(GOOD | {"token_ids": [[5]]}), "no answer to the job: 2 prompts, 3 tokens a draft"),
        (giving(GOOD | {"accepted_tokens_per_pos": [3, 1]}), "no answer to the job: 2 prompts, 3 tokens a draft"),
        (giving(GOOD | {"accepted_tokens": 5}), "no answer to the job: 2 prompts, 3 tokens a draft"),
        (giving(GOOD | {"drafts": 0}), "vLLM drafted nothing"),
    ],
)
def test_a_failure_is_one_line(tmp_path, answering, message):
    (tmp_path / "vllm_answer.json").write_text(json.dumps(GOOD))  # of an earlier run
    with pytest.raises(UserError, match=r"^[^\n]*$") as error:
        served(tmp_path, answering)
    assert message in str(error.value)
    assert (tmp_path / "vllm.log").is_file()


def test_vllm_and_its_children_are_ended_after_the_timeout(tmp_path):
    """A child holds a lock and would sleep for ten minutes: the lock is free at once."""
    child = (
        "import fcntl, time; fcntl.flock(open('FILE', 'w'), fcntl.LOCK_EX); print('there', flush=True); time.sleep(600)"
    )
    child = child.replace("FILE", str(tmp_path / "lock"))
    hanging = f"import subprocess\nsubprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(UserError, match=r"vLLM took longer than vllm\.timeout_s=3 and was ended"):
        served(tmp_path, hanging, timeout_s=3)
    assert (tmp_path / "vllm.log").read_text() == "there\n"
    with open(tmp_path / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_a_python_without_vllm_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"cannot import vllm: ModuleNotFoundError: No module named 'vllm'; `bash"):
        version_of(sys.executable)


def test_the_doctor_asks_vllm_where_it_is(tmp_path):
    place = exported(tmp_path / "draft", "eagle3", "vllm")
    given = {"out": str(tmp_path / "out"), "limit": 4}
    (tmp_path / "out").mkdir()

    def asked(answering: str) -> Diagnosis:
        return examined(place, vllm=VLLM(str(interpreter(tmp_path, answering)), 60.0, 1, None), **given)

    found = asked(counts(10, 10, 10))
    assert causes(found) == []
    assert found.figures["vllm"]["version"] == "0.32.0"
    found = asked(counts(3, 1, 0))
    assert causes(found) == ["engine"]
    assert "by depth 0.30 for " in found.findings[0].measured
    assert "0 of 4 answers are the same; the first other token is number 1 of answer 1" in found.findings[0].measured
    job = json.loads((tmp_path / "out" / "vllm_job.json").read_text())
    assert len(job["prompts"]) == 4
    assert job["llm"]["speculative_config"] == {"method": "eagle3", "model": str(place), "num_speculative_tokens": 3}


def test_the_other_checks_are_reported_where_vllm_fails(tmp_path, capsys):
    place = exported(tmp_path / "draft", "eagle3", "vllm")
    python = interpreter(tmp_path, "print('no such product')\nsys.exit(1)")
    small = ["limit=2", "max_tokens=24", "device=cpu", f"data.path={PLACE}/questions.jsonl", f"target={PLACE}/target"]
    assert call(doctor.main, *small, f"draft={place}", f"vllm.python={python}", f"out={tmp_path}/out") == 2
    told = capsys.readouterr()
    said = f"vLLM failed with status 1: no such product (all of it in {tmp_path}/out/vllm.log)"
    assert f"not checked: the same prompts in vLLM: {said}" in told.out
    assert told.out.startswith("nothing was found, but a check failed\n")
    assert "tokens per call" in told.out
    assert told.err.endswith(f"error: {said}\n")
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert not found["healthy"]
    assert {"changes", "rounds"} <= found.keys()
    edited(place, lambda values: values.update(eagle_aux_hidden_state_layer_ids=[2, 3]))
    assert call(doctor.main, *small, f"draft={place}", f"vllm.python={python}", f"out={tmp_path}/out") == 1


@pytest.mark.parametrize(
    ("scheme", "device", "computes_in"),
    [("int4", "cpu", torch.bfloat16), ("int4", "cuda", torch.float16), ("fp8", "cpu", torch.float16)],
)
def test_what_vllm_computes_in(scheme, device, computes_in):
    assert dtype_for(torch.float16, scheme, torch.device(device)) == computes_in


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_drafts_of_others_are_asked_too(tmp_path, name):
    """Which do not say for which engine they are."""
    place = edited(exported(tmp_path / "draft", name, "vllm"), lambda values: values.pop("eagle_train"))
    (tmp_path / "out").mkdir()
    vllm = VLLM(str(interpreter(tmp_path, counts(3, 1, 0))), 60.0, 1, None)
    found = examined(place, vllm=vllm, out=str(tmp_path / "out"), limit=2)
    assert causes(found)[0] == "engine"
    job = json.loads((tmp_path / "out" / "vllm_job.json").read_text())
    assert job["llm"]["speculative_config"] == {"method": name, "model": str(place), "num_speculative_tokens": 3}


def test_vllm_takes_what_is_free_of_a_gpu(monkeypatch):
    """Beside our target, which stays there."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (30 * 2**30, 80 * 2**30))
    assert share_of_free(torch.device("cuda")) == {"gpu_memory_utilization": 0.337}
    assert share_of_free(torch.device("cpu")) == {}


def test_what_a_user_says_of_memory_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(served_by_vllm, "share_of_free", lambda device: {"gpu_memory_utilization": 0.3})
    place = exported(tmp_path / "draft", "eagle3", "vllm")
    (tmp_path / "out").mkdir()
    for arguments, wanted in ((None, 0.3), ({"gpu_memory_utilization": 0.2}, 0.2)):
        vllm = VLLM(str(interpreter(tmp_path, counts(10, 10, 10))), 60.0, 1, arguments)
        examined(place, vllm=vllm, out=str(tmp_path / "out"), limit=2, max_tokens=16)
        job = json.loads((tmp_path / "out" / "vllm_job.json").read_text())
        assert job["llm"]["gpu_memory_utilization"] == wanted


def test_why_vllm_is_not_asked(tmp_path):
    def reason(draft: Path) -> str:
        (found,) = [each for each in examined(draft, limit=2).not_checked if each.check.endswith("vLLM")]
        return found.reason

    assert "not in vLLM's layout" in reason(PLACE / "eagle3")
    assert "no such program" in reason(exported(tmp_path / "draft", "eagle3", "vllm"))
    few = list(range(2, 90))
    native(tmp_path / "few", "eagle", lambda draft: None, vocab_size=len(few), vocabulary=few)
    theirs = exported(tmp_path / "theirs", str(tmp_path / "few"), "sglang")
    told = reason(edited(theirs, lambda values: values.pop("eagle_train")))
    assert told.startswith("vLLM proposes from the target's whole vocabulary, and this draft has a part of it")
