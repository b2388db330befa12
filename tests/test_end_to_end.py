"""The whole road on chat data as today's models are served: multi-turn, reasoning dropped from history, tools."""

import json
import random
from pathlib import Path

import pytest
from transformers import GenerationConfig

from eagle_train import export, train
from evals import mt_bench
from tests.support import chat_templates
from tests.support.command_line import call, read_jsonl, write_jsonl
from tests.support.tiny import tiny_model


def talk(rng: random.Random) -> dict:
    """Two or three turns, some thought about, some with a call, some answered at once."""
    messages: list[dict] = []
    for turn in range(rng.randint(2, 3)):
        start = rng.randrange(20)
        messages.append(chat_templates.user(f"count from {start}"))
        answer = chat_templates.said(" ".join(str(start + step) for step in range(4)))
        kind = rng.choice(("plain", "reasoning", "tool"))
        if kind == "reasoning":
            answer["reasoning_content"] = f"start at {start}"
        if kind == "tool" and turn == 0:
            messages.append(chat_templates.said("", tool_calls=[chat_templates.CALL]))
            messages.append({"role": "tool", "content": str(start)})
        messages.append(answer)
    return {"messages": messages, "tools": chat_templates.TOOLS}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A random Qwen3 with Qwen3's way to render, chats and questions."""
    home, rng = tmp_path_factory.mktemp("road"), random.Random(0)
    tokenizer = chat_templates.tokenizer_of("qwen3")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=1024, eos_token_id=end)
    model.generation_config = GenerationConfig(eos_token_id=[end], do_sample=False)
    model.save_pretrained(home / "target")
    tokenizer.save_pretrained(home / "target")
    for name, count in (("train", 60), ("heldout", 8)):
        write_jsonl(home / f"{name}.jsonl", [talk(rng) for _ in range(count)])
    questions = [{"question_id": n, "category": "count", "turns": [f"count from {n}", "again"]} for n in range(3)]
    write_jsonl(home / "questions.jsonl", questions)
    return home


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp", "medusa", "peagle"])
def test_a_gpu_trains_and_measures_a_draft_of_each_kind(home, tmp_path, kind):
    """Compiled and in bf16, as on a GPU by default: what is compiled without gradients is not what steps compile."""
    layers = ["draft.layers=[1,2]"] if kind in ("eagle3", "peagle") else []
    given = [f"target={home}/target", "data=messages", f"data.path={home}/train.jsonl", "data.row_tokens=512", *layers]
    given += [f"data.heldout={home}/heldout.jsonl", f"out={tmp_path}/run", "device=cuda", "target.dtype=bfloat16"]
    given += [f"draft={kind}", "train.micro_batch_rows=2", "optim.tokens_per_step=1024", "train.steps=3"]
    given += ["draft.first_token=skip"] if kind != "medusa" else []
    assert call(train.main, *given) == 0
    assert read_jsonl(tmp_path / "run/metrics.jsonl")[-1]["heldout_simulated_tpc"] >= 1


@pytest.mark.slow
def test_multi_turn_chats_of_qwen3_from_preview_to_evaluation(home, capsys):
    given = [f"target={home}/target", "data=messages", f"data.path={home}/train.jsonl", "data.row_tokens=512"]
    given += [f"data.heldout={home}/heldout.jsonl", f"out={home}/run", "device=cpu", "draft.first_token=skip"]
    given += ["train.micro_batch_rows=2", "optim.tokens_per_step=1024", "train.steps=12", "optim.lr=1e-3"]
    assert call(train.main, *given, "preview=60", f"preview_out={home}/preview.jsonl") == 0
    assert "60 rows divided into a document for each turn, 0 refused" in capsys.readouterr().out
    rows = [json.loads(line)["messages"] for line in (home / "train.jsonl").read_text().splitlines()]
    documents = read_jsonl(home / "preview.jsonl")
    answers = [message for row in rows for message in row if message["role"] == "assistant"]
    learnt = [text for document in documents for text in document["supervised_text"]]
    assert len(learnt) == len(answers)
    for message, text in zip(answers, learnt, strict=True):
        assert text.startswith("<think>\n")
        assert text.endswith("<|im_end|>")
        assert message["content"] in text
        assert message.get("reasoning_content", "") in text
        assert ("<tool_call>" in text) == ("tool_calls" in message)

    with pytest.warns(UserWarning, match=r"are divided into a document for each of the assistant's turns"):
        assert call(train.main, *given) == 0
    records = read_jsonl(home / "run/metrics.jsonl")
    assert records[-1]["step"] == 12
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["heldout_simulated_tpc"] >= 1
    told = capsys.readouterr().out
    assert " 0 malformed" in told

    made = [f"checkpoint={home}/run", f"out={home}/draft", f"target={home}/target"]
    assert call(export.main, *made, "layout=vllm") == 0
    asked = [f"target={home}/target", f"draft={home}/draft", f"questions={home}/questions.jsonl", "max_tokens=16"]
    assert call(mt_bench.main, *asked, f"out={home}/eval", "device=cpu") == 0
    results = json.loads((home / "eval/results.json").read_text())
    assert results["tpc"] >= 1
    assert len(read_jsonl(home / "eval/answers.jsonl")) > 0
