"""corpus/preview.py and what commands do with it: first rows as they are learnt, checked before a weight is read."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from eagle_train import export, generate, train
from eagle_train.corpus import preview
from eagle_train.corpus.render import ChatRenderer
from eagle_train.corpus.source import DataConfig, check_found
from eagle_train.corpus.stream import Stream
from eagle_train.distributed import ALONE, CommonError, World
from eagle_train.errors import UserError
from eagle_train.inference import Requests
from eagle_train.models.loading import TargetConfig, load_config, load_target, load_tokenizer
from eagle_train.models.stops import load_stop_ids
from eagle_train.training import assembly
from evals import mt_bench
from tests.support import chat_templates
from tests.support.command_line import call, chats, read_jsonl, save_target, write_jsonl
from tests.support.tiny import tiny_model, tiny_tokenizer

# Each answer but the last loses its stop: earlier turns are rendered in another way.
FORGETFUL = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + ';' }}{% endfor %}"
    "{{ 'a:' if add_generation_prompt else '</s>' }}"
)
DATED = "{{ strftime_now('%d') + '|' }}" + FORGETFUL
TURNS = [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]


def row(*turns: tuple[str, str], **columns) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **columns}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A target whose template forgets, without a weight."""
    home = tmp_path_factory.mktemp("home")
    save_target(home / "target", FORGETFUL)
    (home / "target" / "model.safetensors").unlink()
    return home


def given(home: Path, rows: list[dict], *more: str) -> tuple[str, ...]:
    path = write_jsonl(home / "rows.jsonl", rows)
    return (f"target={home / 'target'}", "data=messages", f"data.path={path}", f"out={home / 'out'}", *more)


def test_a_preview_shows_what_is_learnt_and_reads_no_weight(home, capsys):
    rows = [row(*TURNS), row(("user", "x"), ("critic", "y")), row(*TURNS[:2], system="s"), row(*TURNS)]
    out = home / "out.jsonl"
    with pytest.warns(UserWarning, match=r"its column 'system' is not read \(data.columns.system=system reads it\)"):
        assert call(train.main, *given(home, rows, "preview=2", f"preview_out={out}")) == 0
    told = capsys.readouterr().out
    place = f"{home}/rows.jsonl"
    assert f"--- {place}:1: 9 tokens, 3 supervised\nu:q;a:[a;</s>]\n" in told
    assert "u:q;a:a;u:r;a:[b;</s>]" in told
    assert "2 rows shown: 3 documents" in told
    assert "1 rows divided into a document for each turn, 1 refused" in told
    assert f"refused: {place}:2: a turn's role must be one of" in told
    found = read_jsonl(out)
    assert [each["row"] for each in found] == [f"{place}:1", f"{place}:1", f"{place}:3"]
    assert [each["supervised_text"] for each in found] == [["a;</s>"], ["b;</s>"], ["a;</s>"]]
    tokenizer = load_tokenizer(TargetConfig(str(home / "target")))
    for each in found:
        ((start, end),) = each["supervised"]
        assert tokenizer.decode(each["tokens"]) == each["text"]
        assert tokenizer.decode(each["tokens"][start:end]) == each["supervised_text"][0]
    assert not (home / "out").exists()


def test_a_preview_goes_before_a_plan(home, capsys):
    assert call(train.main, *given(home, [row(*TURNS)], "preview=1", "plan=true", "data.row_tokens=64")) == 0
    told = capsys.readouterr().out
    assert told.index("1 rows shown") < told.index("memory on each of")


def test_a_plan_looks_at_what_is_here_and_names_what_is_not(home, monkeypatch):
    """As the default group names held-out data that nobody has made yet."""
    monkeypatch.chdir(home)  # the quickstart may have made it elsewhere
    missing = "data.heldout=outputs/stdlib_chat/heldout.jsonl"
    plan = ("plan=true", "data.row_tokens=64", "cluster.gpus=1")
    told = r"^data\.heldout is \S+/heldout\.jsonl; it is not here; .*; data\.heldout=null leaves it out; the first r"
    with pytest.warns(UserWarning, match=told):
        assert call(train.main, *given(home, [row(*TURNS)], missing, *plan)) == 0
    with pytest.raises(UserError, match=r"; there is no such file; .*; data\.heldout=null leaves it out$"):
        check_found(DataConfig(str(home / "rows.jsonl"), heldout="outputs/stdlib_chat/heldout.jsonl"))
    assert call(train.main, *given(home, [row(("user", "q"))], missing, *plan)) == 2
    mix = f"data.mix={{a: {{path: nowhere.jsonl}}, b: {{path: {home}/rows.jsonl}}}}"
    assert call(train.main, *given(home, [{}]), "data.path=null", mix, *plan) == 2


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["data.path={home}/none.jsonl"], "data.path"),
        (["data.path=none.jsonl"], "data.path"),
        (["data.path=./none"], "data.path"),
        (["data.heldout={home}/*.parquet"], "data.heldout"),
        (["data.path=null", "data.mix={{a: {{path: OWNER/NAME}}, b: {{path: none.json.gz}}}}"], "data.mix.b.path"),
    ],
)
def test_a_plan_for_this_machine_needs_its_files(home, capsys, overrides, field):
    """One for others (`cluster.gpus`) may lack them, and says so."""
    more = [text.format(home=home) for text in overrides]
    plan = given(home, [row(*TURNS)], "plan=true", "data.row_tokens=64", *more)
    assert call(train.main, *plan) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {field} is ")
    assert "; there is no such file; " in err
    assert err.endswith("; cluster.gpus=N plans for machines that have it\n")
    with pytest.warns(UserWarning, match=rf"^{field} is \S+; it is not here; .*the first rows were not looked at"):
        assert call(train.main, *plan, "cluster.gpus=1") == 0


def test_a_plan_does_not_ask_the_hub(home):
    plan = given(home, [row(*TURNS)], "plan=true", "data.row_tokens=64", "data.path=OWNER/NAME")
    with pytest.warns(UserWarning, match="^data.path is OWNER/NAME; it is not here; the first rows were not looked at"):
        assert call(train.main, *plan) == 0


def test_the_first_row_may_be_left_out_too(home, capsys):
    more = given(home, [row(*TURNS)], "data.malformed=skip", "preview=1", "plan=true", "data.row_tokens=64")
    path = home / "rows.jsonl"
    path.write_text("no JSON\n" + path.read_text())
    assert call(train.main, *more) == 0
    assert f"refused: {path}:1: not JSON" in capsys.readouterr().out
    config, target = DataConfig(str(path), row_tokens=64, malformed="skip"), TargetConfig(str(home / "target"))
    stream = Stream(config, assembly.renderer_of(target, config, load_config(target)), 1)
    next(stream)
    assert stream.counts["malformed"] > 0


@pytest.mark.parametrize("plan", ["false", "true"])
@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        ([row(("user", "q"), ("critic", "a"))], [], r"rows\.jsonl:1: a turn's role must be one of .*'critic'"),
        (
            [row(("user", "q"), ("critic", "a"))],
            ["data.malformed=skip"],
            "all of the first 1 rows are refused, for example .*'critic'",
        ),
        ([row(("user", "q"))] * 9, [], "the assistant says nothing in its first 9 rows"),
        ([row(*TURNS)], ["target.chat_template={home}/none.jinja"], r"target\.chat_template=.*cannot be read"),
        ([row(*TURNS)], ["target.chat_template={home}/bad.jinja"], "the chat template, line 1: Expected an expression"),
        (
            [row(*TURNS)],
            ["target.chat_template={home}/no.jinja", "data.malformed=skip"],
            "refuses the conversation: no; it does",
        ),
        (
            [row(*TURNS)],
            ["data.template_kwargs={{messages: 1}}"],
            r"data\.template_kwargs\.messages: is set for each rendering",
        ),
        ([row(*TURNS)], ["data.date=today"], r"data\.date=today: must be a date, as 2026-07-31"),
    ],
)
def test_what_cannot_be_learnt_is_refused_before_a_weight_is_read(home, capsys, rows, more, said, plan):
    (home / "bad.jinja").write_text("{% if %}")
    (home / "no.jinja").write_text("{{ raise_exception('no') }}")
    more = [each.format(home=home) for each in more]
    assert call(train.main, *given(home, rows, "data.row_tokens=64", f"plan={plan}", *more)) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert re.search(said, told), told


@pytest.mark.parametrize(
    ("more", "said"), [(["preview=-1"], "preview=-1: must be"), (["preview_out=x.jsonl"], "give preview=ROWS")]
)
def test_impossible_previews(home, capsys, more, said):
    assert call(train.main, *given(home, [row(*TURNS)], *more)) == 2
    assert said in capsys.readouterr().err


def test_a_preview_without_a_row_to_show_is_an_error(home, capsys):
    assert call(train.main, *given(home, [row(("user", "q"), ("critic", "a"))], "preview=3")) == 2
    assert "no row can be rendered: " in capsys.readouterr().err


@pytest.mark.parametrize("more", ["plan=true", "preview=1"])
def test_a_row_on_which_anything_fails_is_told_with_its_place(home, capsys, monkeypatch, more):
    """As in a training, which would leave it out."""

    def fails(*_):
        raise OverflowError("too long")

    monkeypatch.setattr(preview, "render_row", fails)
    assert call(train.main, *given(home, [row(*TURNS)], "data.row_tokens=64", more)) == 2
    assert "rows.jsonl:1: cannot be rendered: OverflowError: too long" in capsys.readouterr().err


def test_the_templates_file_and_its_variables(home, capsys):
    (home / "kind.jinja").write_text(FORGETFUL.replace("'a:'", "'a:' + kind"))
    more = (f"target.chat_template={home}/kind.jinja", "data.template_kwargs={kind: '!', other: 1}", "preview=1")
    assert call(train.main, *given(home, [row(*TURNS[:2])], *more)) == 2
    assert "the chat template's generation prompt ends in '!'" in capsys.readouterr().err
    (home / "kind.jinja").write_text(FORGETFUL.replace("{% for", "{{ kind }}{% for"))
    with pytest.warns(UserWarning, match=r"data\.template_kwargs\.other: the chat template reads no such variable"):
        assert call(train.main, *given(home, [row(*TURNS[:2])], *more)) == 0
    assert "!u:q;a:[a;</s>]" in capsys.readouterr().out


def test_a_json_file_with_a_template(home):
    (home / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 1 }}"}))
    assert (
        load_tokenizer(TargetConfig(str(home / "target"), chat_template=f"{home}/chat_template.json")).chat_template
        == "{{ 1 }}"
    )


def test_a_run_that_goes_on_another_day_reads_the_day_it_began(tmp_path, monkeypatch, capsys):
    """Bit for bit what it would have drawn; and the day is told once."""
    target = save_target(tmp_path / "target", DATED)
    path = write_jsonl(tmp_path / "rows.jsonl", chats(30))
    common = (f"target={target}", "target.dtype=float32", "data=messages", f"data.path={path}", "data.row_tokens=64",
              "draft.num_layers=1", "optim.tokens_per_step=64", "train.micro_batch_rows=1")  # fmt: skip
    monkeypatch.setattr(assembly, "today", lambda: "2026-07-31")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert call(train.main, *common, "train.steps=4", f"out={tmp_path / 'whole'}") == 0
        assert call(train.main, *common, "train.steps=2", f"out={tmp_path / 'parts'}") == 0
    said = "the chat template reads the clock: it gets 2026-07-31 throughout the run"
    assert sum(said in str(each.message) for each in told) == 2
    monkeypatch.setattr(assembly, "today", lambda: "2031-02-03")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert call(train.main, *common, "train.steps=4", f"out={tmp_path / 'parts'}") == 0
    losses = [
        [each["loss"] for each in read_jsonl(tmp_path / name / "metrics.jsonl") if "loss" in each]
        for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1] != []
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert call(train.main, *common, "train.steps=5", f"out={tmp_path / 'parts'}", "data.date=2031-02-03") == 2
    assert "data.date is 2031-02-03, but was 2026-07-31" in capsys.readouterr().err


def test_a_rows_documents_are_resumed_in_their_middle(tmp_path):
    """Rows of many documents in batches of a few tokens: wherever the stream is stopped, it goes on the same."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = FORGETFUL
    rows = [row(*[("user", c), ("assistant", c * (n % 3 + 1))] * 4) for n, c in enumerate("abcdefgh")]
    config = DataConfig(str(write_jsonl(tmp_path / "rows.jsonl", rows)), row_tokens=48, shuffle_window=4)
    stream = Stream(config, ChatRenderer(tokenizer), 1)
    states, batches = [], []
    for _ in range(12):
        states.append(stream.state_dict())
        batches.append(next(stream))
    assert stream.counts["divided"] == stream.counts["rows"] > 0
    assert stream.counts["documents"] == 4 * stream.counts["rows"]
    for start, state in enumerate(states):
        resumed = Stream(config, ChatRenderer(tokenizer), 1)
        resumed.load_state_dict(state)
        for batch in batches[start : start + 3]:
            other = next(resumed)
            assert other.tokens.tolist() == batch.tokens.tolist()
            assert other.lengths == batch.lengths


def test_another_template_is_other_data(tmp_path):
    path = str(write_jsonl(tmp_path / "rows.jsonl", [row(*TURNS)] * 30))
    tokenizer = tiny_tokenizer()
    state = Stream(DataConfig(path), ChatRenderer(tokenizer), 1).state_dict()
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(UserError, match="the chat template"):
        Stream(DataConfig(path), ChatRenderer(tokenizer), 1).load_state_dict(state)


def test_most_documents_without_an_answer_are_told_of(tmp_path):
    rows = [row(*TURNS[:2]), *[row(("user", "q"))] * 9] * 10
    config = DataConfig(str(write_jsonl(tmp_path / "rows.jsonl", rows)), row_tokens=16, shuffle_window=0)
    stream = Stream(config, ChatRenderer(tiny_tokenizer()), 1)
    with pytest.warns(UserWarning, match=r"in \d+ of \d+ documents the assistant says nothing") as told:
        [next(stream) for _ in range(3)]
    assert len(told) == 1
    assert stream.counts["mute"] > 0.8 * stream.counts["documents"] > 20


def test_a_pattern_that_matches_nothing_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "Q: q A: a"}] * 3)
    config = DataConfig(str(path), format="text", assistant_pattern="B: .*")
    with pytest.raises(UserError, match=r"data\.assistant_pattern matches nothing in its first 3 rows"):
        preview.check_data(config, ChatRenderer(tiny_tokenizer()))
    config.assistant_pattern = "A: (.*)"
    assert preview.check_data(config, ChatRenderer(tiny_tokenizer())) == []


@pytest.mark.parametrize(("generation", "stops"), [([2, 7], {2, 7}), (9, {9, 2}), (None, {5, 2})])
def test_training_and_engine_stop_at_the_same_tokens(tmp_path, generation, stops):
    """generation_config.json's, else config.json's, and the tokenizer's own."""
    model = tiny_model(eos_token_id=5)
    model.generation_config = GenerationConfig(eos_token_id=generation)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    if generation is None:
        (tmp_path / "generation_config.json").unlink()
    config = TargetConfig(str(tmp_path))
    target = load_target(config, "cpu")
    assert Requests(target).stop_ids == stops
    assert load_stop_ids(config, load_config(config), load_tokenizer(config)) == stops


def test_the_engine_asks_through_the_same_template(tmp_path, capsys):
    """Its file, its variables, contents as parts where it wants them."""
    parts = "{% for m in messages %}{% for p in m.content %}{{ p.text + kind }}{% endfor %}{% endfor %}"
    target = save_target(tmp_path / "target")
    (tmp_path / "parts.jinja").write_text(parts)
    config = TargetConfig(str(target), chat_template=f"{tmp_path}/parts.jinja", template_kwargs={"kind": "!"})
    requests = Requests(load_target(config, "cpu"))
    assert requests.target.tokenizer.decode(requests.tokens_of([{"role": "user", "content": "hi"}], "p")) == "hi!"
    given = ("prompt=hi", "max_tokens=2", f"target={target}", f"target.chat_template={tmp_path}/parts.jinja")
    assert call(generate.main, *given, "target.template_kwargs={kind: '!'}") == 0
    assert call(generate.main, *given) == 2
    assert "the chat template" in capsys.readouterr().err


def test_multi_turn_qwen3_rows_end_to_end(tmp_path, capsys, noisy):
    """The kind whose rows were all refused: preview, training, export, evaluation."""
    tokenizer = chat_templates.tokenizer_of("qwen3")
    tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    path = write_jsonl(tmp_path / "rows.jsonl", [row(*TURNS)] * 20)
    target, out, draft = (tmp_path / name for name in ("target", "out", "draft"))
    common = (f"target={target}", "target.dtype=float32", "data=messages", f"data.path={path}")
    assert call(train.main, *common, "preview=1") == 0
    assert "[<think>\n\n</think>\n\nb<|im_end|>]" in capsys.readouterr().out
    sizes = ("data.row_tokens=96", "optim.tokens_per_step=96", "train.micro_batch_rows=1", "train.steps=2")
    with pytest.warns(UserWarning, match="of its first 8 rows 8 are divided"):
        status = call(train.main, *common, *sizes, "draft.num_layers=1", f"out={out}")
    assert status == 0
    assert " divided into a document for each turn, " in capsys.readouterr().out
    assert call(export.main, f"checkpoint={out}", f"out={draft}") == 0
    asked = (
        f"target={target}",
        f"draft={draft}",
        f"questions={path}",
        "limit=2",
        "max_tokens=8",
        f"out={tmp_path}/eval",
    )
    assert call(mt_bench.main, *asked, "target.template_kwargs.enable_thinking=false") == 0
    assert json.loads((tmp_path / "eval" / "results.json").read_text())["tpc"] >= 1


def test_no_data_commands_the_terminal(tmp_path, capsys):
    """It is shown as it is written; the file has it as it is."""
    evil = row(("user", "\x1b[2Jq\u202e"), ("assistant", "a\x07"))
    out = tmp_path / "out.jsonl"
    rows = write_jsonl(tmp_path / "evil.jsonl", [row(("user", "x"), ("\x1b[1mcritic", "y")), evil])
    bundled = ("data=messages", f"data.path={rows}", "preview=1")  # whose tokenizer has all characters
    assert call(train.main, *bundled) == 0
    told = capsys.readouterr().out
    assert r"\x1b[2Jq\u202e" in told
    assert "refused: " in told
    assert told.startswith("The supervised text stands in [brackets].\n--- ")
    assert not set(told) & {"\x1b", "\u202e", "\x07"}
    assert call(train.main, *bundled, f"preview_out={out}", "color=always") == 0
    told = capsys.readouterr().out
    assert set(re.findall(r"\x1b\[\d*m", told)) == {"\x1b[1m", "\x1b[32m", "\x1b[0m"}
    assert read_jsonl(out)[0]["text"].isprintable() is False
    assert call(train.main, *bundled, "color=sometimes") == 2
    assert "error: color=sometimes: must be one of auto, always, never" in capsys.readouterr().err


def test_many_refused_rows_are_told_in_few_lines(home, capsys):
    rows = [row(("user", "x"), ("critic", "y"))] * 30 + [row(*TURNS)]
    assert call(train.main, *given(home, rows, "preview=1")) == 0
    told = capsys.readouterr().out.splitlines()
    assert len([line for line in told if line.startswith("refused: ")]) == preview.TOLD + 1
    assert told[-1] == f"refused: {30 - preview.TOLD} more"
    assert "30 refused" in "\n".join(told)


def test_ranks_that_find_other_files_are_refused(tmp_path):
    """A node with an older copy, say: it would render its share of the rows from that."""
    path, heldout = (
        write_jsonl(tmp_path / "rows.jsonl", [row(*TURNS)]),
        write_jsonl(tmp_path / "h.jsonl", [row(*TURNS)]),
    )
    config = DataConfig(path=str(path), heldout=str(heldout))

    class Ranks(World):
        """Rank 1 of three, whose data have changed since rank 0 looked."""

        def exchange(self, own: Any, side: str = "data") -> list[Any]:
            return [earlier if isinstance(own, dict) else own, own, own]

    earlier = {(each.field, each.path): each.source.identity() for each in preview._opened_sources(config)}
    world = Ranks(1, 3)
    preview.check_same_data(config, world)
    write_jsonl(tmp_path / "h.jsonl", [row(*TURNS)] * 2)
    preview.check_same_data(config, ALONE)
    with pytest.raises(CommonError, match=f"^data.heldout is {heldout}; rank 1 finds other files there than rank 0"):
        preview.check_same_data(config, world)
