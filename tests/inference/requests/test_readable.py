"""Every command that prompts a target refuses one that cannot be prompted before its weights are read."""

import json
import shutil
from pathlib import Path

import pytest

from eagle_train import generate
from eagle_train.artifacts.format import save_draft
from eagle_train.models import loading
from evals import latency, mt_bench, switches
from tests.support.command_line import call, save_target, write_jsonl
from tests.support.tiny import tiny_draft, tiny_target

NEXT = "give a chat template, target.chat_template=FILE"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    root, target = tmp_path_factory.mktemp("checkpoints"), tiny_target()
    save_target(root / "target")
    save_draft(tiny_draft(target), root / "draft", target.identity)
    write_jsonl(root / "questions.jsonl", [{"question_id": 1, "category": "x", "turns": ["abc"]}])
    return root


def without_tokenizer(target: Path) -> None:
    for file in (*target.glob("tokenizer*"), target / "chat_template.jinja"):
        file.unlink()


def template(text: str | None):
    def edit(target: Path) -> None:
        (target / "chat_template.jinja").unlink()
        if text is not None:
            (target / "chat_template.jinja").write_text(text)

    return edit


def in_tokenizer(**changes):
    def edit(target: Path) -> None:
        template(None)(target)
        file = target / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def of_few_tokens(target: Path) -> None:
    """A target with 60 tokens; `a`, which every prompt has, is token 67 of its tokenizer."""
    shutil.rmtree(target)
    save_target(target, "{{ messages[0]['content'] + 'a' }}", vocab_size=60)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (without_tokenizer, "no tokenizer there, and the prompt is text; copy tokenizer.json and "),
        (template(None), f"no chat template there, and a question is a user's turn in a chat; {NEXT}"),
        (template(""), f"the chat template leaves out what a user says; {NEXT}"),
        (template("hello"), f"the chat template leaves out what a user says; {NEXT}"),
        (template("{% for m in messages %}"), "the chat template, line 1: Unexpected end of template"),
        (template("{{ messages | frob }}"), f"the chat template, line 1: No filter named 'frob'.; {NEXT}"),
        (template("{{ raise_exception('no') }}"), f"the chat template refuses the conversation: no; {NEXT}"),
        (in_tokenizer(chat_template=3), "its tokenizer has chat_template=3; it must be a text"),
        (of_few_tokens, "every prompt holds token 67 ('a'), beyond the 60 embeddings of the target; give it the "),
    ],
)
@pytest.mark.parametrize("command", ["generate", "mt_bench", "latency", "switches"])
def test_what_no_prompt_can_be_put_to(checkpoints, tmp_path, edit, said, command, monkeypatch, capsys, recwarn):
    target = Path(shutil.copytree(checkpoints / "target", tmp_path / "target"))
    edit(target)
    monkeypatch.setattr(loading, "placed", lambda *_: pytest.fail("its weights are read"))
    draft = checkpoints / "draft"
    if edit is of_few_tokens:
        few = tiny_target(vocab_size=60)
        draft = save_draft(tiny_draft(few), tmp_path / "draft", few.identity)
    asked = (
        f"draft={draft}",
        f"questions={checkpoints / 'questions.jsonl'}",
        f"out={tmp_path / 'out'}",
    )
    main, *given = {
        "generate": (generate.main, "prompt=abc"),
        "mt_bench": (mt_bench.main, *asked),
        "latency": (latency.main, *asked),
        "switches": (switches.main, *asked, "switches=[speculation]"),
    }[command]
    capsys.readouterr()
    assert call(main, *given, f"target={target}", "device=cpu") == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error: ")]
    assert line.startswith(f"error: target.path={target}: {said}")


def test_a_prompt_that_is_gone_on_from_needs_no_template(checkpoints, tmp_path, capsys):
    target = Path(shutil.copytree(checkpoints / "target", tmp_path / "target"))
    template(None)(target)
    assert call(generate.main, f"target={target}", "prompt=abc", "chat=false", "max_tokens=2", "device=cpu") == 0


def test_another_template_is_told_of_by_its_file(checkpoints, tmp_path, capsys):
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages | frob }}")
    given = (f"target={checkpoints / 'target'}", f"target.chat_template={file}", "prompt=abc", "device=cpu")
    assert call(generate.main, *given) == 2
    assert f"error: target.chat_template={file}: the chat template, line 1: No filter" in capsys.readouterr().err
