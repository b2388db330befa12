"""eagle-regenerate: answers by the engine and by a server, runs that are stopped, and users' mistakes."""

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
from urllib3 import HTTPResponse

from eagle_train import distributed, regenerate
from eagle_train.corpus.conversations import conversation_of
from eagle_train.corpus.render import ChatRenderer
from eagle_train.corpus.source import DataConfig, check_prompts
from eagle_train.errors import UserError
from eagle_train.inference import Engine, SamplingParams
from eagle_train.models import loading
from eagle_train.regeneration import by_server
from eagle_train.regeneration import run as whole_run
from eagle_train.regeneration.dialogue import Dialogue
from eagle_train.regeneration.options import ServerConfig
from eagle_train.regeneration.outcome import Outcome
from eagle_train.regeneration.row_log import RowLog
from tests.support import chat_templates
from tests.support.command_line import TEMPLATE, call, chats, disk_for, read_jsonl, save_target, write_jsonl


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A directory with a target and 40 conversations."""
    root = tmp_path_factory.mktemp("regenerate")
    save_target(root / "target")
    write_jsonl(root / "chats.jsonl", [*chats(39), {"messages": [{"role": "user", "content": "last"}]}])
    return root


def run(made: Path, out: Path, *overrides: str) -> int:
    given = (f"target={made / 'target'}", "data=messages", f"data.path={made / 'chats.jsonl'}", f"out={out}")
    return call(regenerate.main, *given, "max_tokens=6", "batch_size=2", *overrides)


@pytest.fixture(scope="module")
def answers(made) -> Path:
    """All rows, answered by the engine in one go."""
    assert run(made, made / "answers.jsonl") == 0
    return made / "answers.jsonl"


def test_each_turn_is_answered_after_the_targets_own_answers(made, tmp_path):
    engine = Engine(str(made / "target"))
    stop = engine.target.tokenizer.eos_token_id
    assert run(made, tmp_path / "answers.jsonl", "min_tokens=4", f"logit_bias={{{stop}: 100}}") == 0
    params = SamplingParams(max_tokens=6, min_tokens=4, logit_bias={stop: 100})
    rows = read_jsonl(tmp_path / "answers.jsonl")
    asked = read_jsonl(made / "chats.jsonl")
    assert [row["row"] for row in rows] == list(range(1, 41))
    assert any(len(row["messages"]) == 4 for row in rows)
    for row, given in zip(rows, asked, strict=True):
        users = [message for message in given["messages"] if message["role"] == "user"]
        assert row["messages"][::2] == users
        for place in range(1, len(row["messages"]), 2):
            output = engine.generate([row["messages"][:place]], params)[0]
            text = engine.target.tokenizer.decode(output.token_ids, skip_special_tokens=False)
            assert row["messages"][place] == {"role": "assistant", "content": text.removesuffix("</s>")}
            assert row["finish_reasons"][place // 2] == output.finish_reason == "stop"


def test_an_answer_that_was_cut_ends_the_dialogue(made, answers):
    """Nobody asks on in the middle of an answer."""
    asked, rows = read_jsonl(made / "chats.jsonl"), read_jsonl(answers)
    assert any(len(given["messages"]) == 4 for given in asked)
    for row, given in zip(rows, asked, strict=True):
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert (row["messages"][0], row["finish_reasons"]) == (given["messages"][0], ["length"])


def test_a_drafter_makes_fewer_calls_for_the_same_answers(made, tmp_path, answers, monkeypatch):
    outputs, generate = [], Engine.generate

    def watched(*given):
        outputs.extend(found := generate(*given))
        return found

    monkeypatch.setattr(Engine, "generate", watched)
    assert run(made, tmp_path / "out.jsonl", "drafter=ngram") == 0
    assert (tmp_path / "out.jsonl").read_bytes() == answers.read_bytes()
    assert sum(each.stats.tokens for each in outputs) > sum(each.stats.calls for each in outputs)


def test_a_target_without_a_chat_template_is_refused_before_its_weights(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loading, "placed", lambda *_: pytest.fail("its weights are read"))
    target = Path(shutil.copytree(made / "target", tmp_path / "target"))
    (target / "chat_template.jinja").unlink()
    assert run(made, tmp_path / "answers.jsonl", f"target={target}") == 2
    assert f"error: target.path={target}: no chat template there" in capsys.readouterr().err


def test_a_bad_first_row_is_refused_before_a_weight_is_read_or_left_out(made, tmp_path, capsys, monkeypatch):
    path, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    path.write_text("no JSON\n" + (made / "chats.jsonl").read_text().splitlines()[0] + "\n")
    assert run(made, out, f"data.path={path}", "data.malformed=skip") == 0
    assert [row["row"] for row in read_jsonl(out)] == [2]
    monkeypatch.setattr(loading, "placed", lambda *_: pytest.fail("its weights are read"))
    assert run(made, tmp_path / "none.jsonl", f"data.path={path}") == 2
    assert f"error: {path}:1: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stopped_run_goes_on_with_the_row_it_was_at(made, tmp_path, capsys, temperature):
    sampling = f"temperature={temperature}"
    assert run(made, tmp_path / "whole.jsonl", sampling) == 0
    whole = (tmp_path / "whole.jsonl").read_text()
    assert run(made, tmp_path / "part.jsonl", sampling, "limit=7") == 0
    with (tmp_path / "part.jsonl").open("a") as file:
        file.write(whole.splitlines()[7][:20])  # torn by a kill
    capsys.readouterr()
    assert run(made, tmp_path / "part.jsonl", sampling) == 0
    assert "resumes after row 7" in capsys.readouterr().err
    assert (tmp_path / "part.jsonl").read_text() == whole
    assert run(made, tmp_path / "part.jsonl", sampling) == 0  # nothing is left to do
    assert (tmp_path / "part.jsonl").read_text() == whole


def test_prompt_and_response_become_messages_that_a_training_reads(made, tmp_path, answers):
    rows = [{"question": row["messages"][0]["content"], "answer": "x"} for row in read_jsonl(answers)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    shape = ("data=gsm8k", f"data.path={tmp_path / 'rows.jsonl'}")
    assert run(made, tmp_path / "out.jsonl", *shape) == 0
    first = [row["messages"][:2] for row in read_jsonl(answers)]
    assert [row["messages"] for row in read_jsonl(tmp_path / "out.jsonl")] == first


def test_what_the_target_cannot_be_asked_is_left_out_and_counted(made, tmp_path, capsys):
    rows = [
        {"messages": [{"role": "user", "content": "x" * 200}]},  # the context holds 128
        {"messages": [{"role": "assistant", "content": "hello"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]},
        {"messages": [{"role": "user", "content": "abc"}]},
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    assert run(made, tmp_path / "out.jsonl", f"data.path={tmp_path / 'rows.jsonl'}") == 0
    assert [row["row"] for row in read_jsonl(tmp_path / "out.jsonl")] == [4]
    printed = capsys.readouterr()
    assert "1 rows written" in printed.out
    assert "3 left out" in printed.out
    assert "row 1: its prompt has 205 tokens" in printed.err


@contextmanager
def server(answer: Callable[[dict, int], tuple[int, dict | str]]) -> Iterator[str]:
    """A server whose `answer` makes (status, body) of a request's body and number; gives its URL."""
    lock, count = threading.Lock(), [0]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                count[0] += 1
                number = count[0]
            status, told = answer({"path": self.path, "key": self.headers.get("Authorization"), **body}, number)
            text = (told if isinstance(told, str) else json.dumps(told)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}/v1"
        running.shutdown()
        thread.join()


def completion(text: str, reason: str | None = "stop") -> dict:
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}


def test_a_server_gives_the_engines_answers_though_it_is_busy_now_and_then(made, tmp_path, answers, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret\r\n")
    monkeypatch.setattr(by_server.Tries, "sleep", lambda *_: None)
    known = {}
    for row in read_jsonl(answers):
        for place in range(1, len(row["messages"]), 2):
            told = completion(row["messages"][place]["content"], row["finish_reasons"][place // 2])
            known[json.dumps(row["messages"][:place])] = told
    asked = []

    def answer(body: dict, number: int) -> tuple[int, dict | str]:
        asked.append(body)
        return (503, "busy") if number % 3 == 0 else (200, known[json.dumps(body["messages"])])

    with server(answer) as url:
        assert run(made, tmp_path / "out.jsonl", f"server.url={url}", "server.model=a", "temperature=0.5") == 0
    told = [row["messages"] for row in read_jsonl(tmp_path / "out.jsonl")]
    assert told == [row["messages"] for row in read_jsonl(answers)]
    assert {body["path"] for body in asked} == {"/v1/chat/completions"}
    assert {body["key"] for body in asked} == {"Bearer secret"}
    assert {(body["model"], body["max_tokens"], body["temperature"]) for body in asked} == {("a", 6, 0.5)}
    assert len({body["seed"] for body in asked}) == sum(len(messages) for messages in told) // 2
    assert not any("top_k" in body for body in asked)


def test_the_engine_and_a_server_are_asked_with_every_key_of_sampling(made, tmp_path, capsys, monkeypatch):
    values = {"top_k": 5, "min_p": 0.1, "logit_bias": {"5": 2.0}, "repetition_penalty": 1.2, "presence_penalty": 0.5}
    values |= {"frequency_penalty": -0.5, "min_tokens": 3}
    given = ["limit=2", "temperature=0.5", *(f"{name}={value}".replace("'", "") for name, value in values.items())]
    params, asked, generate = [], [], Engine.generate

    def watched(engine, prompts, each):
        params.extend(each)
        return generate(engine, prompts, each)

    def answer(body: dict, number: int) -> tuple[int, dict | str]:
        asked.append(body)
        return 200, completion("x")

    monkeypatch.setattr(Engine, "generate", watched)
    assert run(made, tmp_path / "ours.jsonl", *given) == 0
    assert all(vars(each).items() >= {**values, "logit_bias": {5: 2.0}}.items() for each in params)
    with server(answer) as url:
        assert run(made, tmp_path / "theirs.jsonl", f"server.url={url}", *given) == 0
        assert asked
        assert all(body.items() >= values.items() for body in asked)
    assert run(made, tmp_path / "ours.jsonl", *given) == 0
    assert run(made, tmp_path / "ours.jsonl", *given, "min_p=0.2") == 2  # no run goes on with other answers
    assert "was made with min_p=0.1, not 0.2" in capsys.readouterr().err
    assert run(made, tmp_path / "ours.jsonl", *(each for each in given if "min_p" not in each)) == 2
    assert "was made with min_p=0.1, not 0.0" in capsys.readouterr().err


def test_a_server_that_refuses_one_row_goes_on_and_one_that_is_gone_ends_the_run(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(by_server.Tries, "sleep", lambda *_: None)

    def answer(body: dict, number: int) -> tuple[int, dict | str]:
        if body["messages"][-1]["content"] == "last":
            return 400, "too\nlong"
        return 200, completion("x")

    with server(answer) as url:
        assert run(made, tmp_path / "out.jsonl", f"server.url={url}", "server.retries=1") == 0
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 39
    assert "row 40: the server says 400: too long" in capsys.readouterr().err

    def dying(body: dict, number: int) -> tuple[int, dict | str]:
        return (200, completion("x")) if number < 9 else (500, "gone")

    with server(dying) as url:
        # One at a time: else rows that were answered may come behind rows that were not.
        given = [f"server.url={url}", "server.retries=1", "server.gone_after=9", "batch_size=1"]
        assert run(made, tmp_path / "dying.jsonl", *given) == 2
    (told,) = capsys.readouterr().err.splitlines()[-1:]
    assert f"server.url={url}: 9 rows in succession had no answer (server.gone_after); row " in told
    assert told.endswith("no answer in 2 tries: the server says 500: gone; the same command resumes here")
    half = len(read_jsonl(tmp_path / "dying.jsonl"))
    assert 0 < half < 40
    assert not (tmp_path / "dying.jsonl.left_out").exists()  # for the rows' part nothing is known
    with server(answer) as url:
        assert run(made, tmp_path / "dying.jsonl", f"server.url={url}", "server.retries=1", "batch_size=1") == 0
    assert [row["row"] for row in read_jsonl(tmp_path / "dying.jsonl")] == list(range(1, 40))


def answer_all_but(rows: dict[str, tuple[int, str]], asked: list) -> Callable:
    def answer(body: dict, number: int) -> tuple[int, dict | str]:
        content = body["messages"][0]["content"]
        asked.append(content)
        return rows.get(content, (200, completion("x")))

    return answer


def test_a_row_that_a_server_never_answers_is_given_up_and_told(made, tmp_path, capsys, monkeypatch):
    """It is tried `server.retries` times more, and asked again only if one wants it."""
    monkeypatch.setattr(by_server.Tries, "sleep", lambda *_: None)
    path = write_jsonl(
        tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": f"q{i}"}]} for i in range(1, 9)]
    )
    given = (f"data.path={path}", "server.retries=3")
    out, asked = tmp_path / "out.jsonl", []
    with server(answer_all_but({"q3": (500, "bug"), "q8": (503, "busy")}, asked)) as url:
        assert run(made, out, f"server.url={url}", *given) == 0
        printed = capsys.readouterr()
        assert (
            "6 rows written, 0 with an answer cut at max_tokens, 2 left out, 2 given up, for the server" in printed.out
        )
        assert "row 3: no answer in 4 tries: the server says 500: bug" in printed.err
        assert asked.count("q3") == asked.count("q8") == 4
        assert [row["row"] for row in read_jsonl(out)] == [1, 2, 4, 5, 6, 7]
        assert [row["row"] for row in read_jsonl(tmp_path / "out.jsonl.left_out")] == [3, 8]
        asked.clear()
        assert run(made, out, f"server.url={url}", *given) == 0
        assert asked == []
    with server(answer_all_but({"q8": (500, "bug")}, asked)) as url:
        assert run(made, out, f"server.url={url}", "retry_left_out=true", *given) == 0
    assert set(asked) == {"q3", "q8"}
    rows = read_jsonl(out)
    assert [row["row"] for row in rows] == [1, 2, 4, 5, 6, 7, 3]
    assert rows[-1]["messages"][0]["content"] == "q3"
    asked.clear()
    with server(answer_all_but({}, asked)) as url:
        assert run(made, out, f"server.url={url}", "retry_left_out=true", *given) == 0
    assert asked == ["q8"]


def test_where_no_row_is_answered_the_run_fails_and_leaves_nothing(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(by_server.Tries, "sleep", lambda *_: None)
    for status, told in ((500, "no answer in 2 tries: the server says 500: no"), (400, "the server says 400: no")):
        with server(lambda *_, status=status: (status, "no")) as url:
            assert (
                run(made, tmp_path / "out.jsonl", f"server.url={url}", "server.retries=1", "server.gone_after=99") == 2
            )
        assert f"error: no row was answered, 40 left out; the first: row 1: {told}" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answered", [0, 4])
def test_a_server_that_refuses_every_row_is_not_asked_for_all(made, tmp_path, capsys, answered):
    """While it answered none, not even in an earlier run."""
    asked, given = [], ("server.gone_after=9", "batch_size=1")

    def answer(body: dict, number: int) -> tuple[int, dict | str]:
        asked.append(number)
        return (200, completion("x")) if number <= answered else (400, "no")

    with server(answer) as url:
        if answered:
            assert run(made, tmp_path / "out.jsonl", f"server.url={url}", "limit=2", *given) == 0
        assert run(made, tmp_path / "out.jsonl", f"server.url={url}", *given) == (0 if answered else 2)
        told = (
            f"error: server.url={url}: no row was answered, and 9 were refused (server.gone_after); row 9: the server"
        )
    assert (told in capsys.readouterr().err) == (not answered)
    assert (len(asked) < 30) == (not answered)
    assert (tmp_path / "out.jsonl").exists() == bool(answered)


def test_rows_that_are_left_out_in_succession_are_read_once(tmp_path):
    """Not all of them again for each."""
    asked = []

    class Left(Dialogue):
        given_up = property(lambda self: asked.append(self.number) or False, lambda self, _: None)

    outcome = Outcome(RowLog(tmp_path / "out.jsonl", {}), ServerConfig("http://x", None, 0, 1.0, 20))
    for number in range(200):
        outcome.add(Left(number, [], "it has none"))
    assert len(asked) <= 3 * 200


def test_a_server_that_takes_too_long_or_is_not_there_is_told_in_our_words(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(by_server.Tries, "sleep", lambda *_: None)
    waiting = threading.Event()

    def slow(body: dict, number: int) -> tuple[int, dict | str]:
        if body["messages"][0]["content"] == "slow":
            waiting.wait(20)
        return 200, completion("x")

    rows = [{"messages": [{"role": "user", "content": content}]} for content in ("a", "slow", "b")]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with server(slow) as url:
        given = (f"server.url={url}", f"data.path={path}", "server.retries=1", "server.timeout_s=0.5")
        assert run(made, tmp_path / "out.jsonl", *given) == 0
        waiting.set()
    assert [row["row"] for row in read_jsonl(tmp_path / "out.jsonl")] == [1, 3]
    told = "row 2: no answer in 2 tries: it takes longer than server.timeout_s=0.5"
    assert told in (tmp_path / "out.jsonl.left_out").read_text() or told in capsys.readouterr().err
    assert run(made, tmp_path / "other.jsonl", f"server.url={url}", "server.retries=0") == 2
    assert f"it cannot be reached at server.url={url}; the same command resumes" in capsys.readouterr().err


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_model_ends_the_run_at_once(made, tmp_path, capsys, status):
    asked = []
    with server(lambda body, number: (asked.append(0) or status, "no")) as url:
        assert run(made, tmp_path / "out.jsonl", f"server.url={url}") == 2
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith(f"error: server.url={url}: {status}: no; the same command")
    )
    assert len(asked) <= 18  # what was sent ahead of the first answer


def test_a_run_ends_though_a_server_holds_its_requests(made, tmp_path, capsys):
    """One that refuses the key for the first row, and answers no other for half a minute."""
    held = threading.Event()

    def answer(body: dict, number: int) -> tuple[int, dict | str]:
        if body["messages"][-1]["content"] != "first":
            held.wait(30)
        return 401, "no"

    rows = [{"messages": [{"role": "user", "content": content}]} for content in ("first", "b", "c", "d")]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with server(answer) as url:
        began = time.monotonic()
        assert run(made, tmp_path / "out.jsonl", f"server.url={url}", f"data.path={path}") == 2
        took = time.monotonic() - began
        held.set()
    assert took < 10
    assert f"error: server.url={url}: 401: no" in capsys.readouterr().err


def test_a_run_ends_though_a_request_pauses():
    """Its pause is the server's, at most a minute, which is told."""
    is_over = threading.Event()
    tries = by_server.Tries(5, backoff_factor=1)
    tries.is_over = is_over
    threading.Timer(0.2, is_over.set).start()
    began = time.monotonic()
    with pytest.raises(requests.ConnectionError):
        tries.new(total=4).sleep(HTTPResponse(status=429, headers={"Retry-After": "3600"}))
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(("asked", "pause"), [("3600", 60), ("7", 7), (None, 0)])
def test_a_servers_pause_is_a_minute_at_most(caplog, asked, pause):
    waited = []
    tries = by_server.Tries(5, backoff_factor=1)
    tries.is_over = SimpleNamespace(wait=waited.append)
    with caplog.at_level("INFO"):
        tries.increment("POST", "/").sleep(HTTPResponse(status=429, headers={"Retry-After": asked} if asked else {}))
    assert waited == [pause]
    told = "the server asks to be left alone for 3600 s; it is asked again in 60 s"
    assert caplog.messages == ([told] if asked == "3600" else [])


CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": None}}}]


def test_calls_reasoning_and_null_contents_are_kept_and_tools_are_sent(made, tmp_path):
    """After a call comes its result, which nobody has: the conversation ends with it."""
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant", "user")]
    beside = {"tools": TOOLS, "chat_template_kwargs": {"tone": "dry"}}
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns, **beside}])
    asked = []

    def answer(body: dict, number: int) -> tuple[int, dict | str]:
        asked.append(body)
        message = {"role": "assistant", "content": "x", "reasoning": "so", "refusal": None}
        if number == 2:
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{**CALLS[0], "index": 0}],
                "reasoning": None,
            }
        return 200, {"choices": [{"message": message, "finish_reason": "tool_calls" if number == 2 else "stop"}]}

    with server(answer) as url:
        usual = "data.template_kwargs={tone: warm, size: 1}"
        assert run(made, tmp_path / "out.jsonl", f"server.url={url}", f"data.path={path}", usual) == 0
    (row,) = read_jsonl(tmp_path / "out.jsonl")
    assert row == {
        "row": 1,
        "messages": [
            turns[0],
            {"role": "assistant", "content": "x", "reasoning_content": "so"},
            turns[2],
            {"role": "assistant", "content": None, "tool_calls": CALLS},
        ],
        **beside,
        "finish_reasons": ["stop", "tool_calls"],
    }
    assert [body["tools"] for body in asked] == [TOOLS] * 2
    assert [body["chat_template_kwargs"] for body in asked] == [{"tone": "dry", "size": 1}] * 2
    # by the name that the server has for it
    assert asked[1]["messages"] == [turns[0], {"role": "assistant", "content": "x", "reasoning": "so"}, turns[2]]


SERVED = {"name": "get", "arguments": '{"x": 1}'}
# What a model wrote, and how servers give it: the reasoning with its lines' ends or without, calls as JSON with an id.
WRITTEN = [
    ("qwen3", "<think>\nr1\n</think>\n\na1<|im_end|>", {"reasoning": "\nr1\n", "content": "\n\na1"}),
    ("qwen3", "<think>\nr1\n</think>\n\na1<|im_end|>", {"reasoning_content": "r1", "content": "a1"}),
    (
        "qwen3",
        '<think>\nr1\n</think>\n\n<tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
        {"reasoning": "r1", "content": "\n\n", "tool_calls": [SERVED]},
    ),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>r1<|end|><|start|>assistant<|channel|>final<|message|>a1<|return|>",
        {"reasoning": "r1", "content": "a1"},
    ),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>r1<|end|><|start|>assistant to=functions.get<|channel|>commentary json"
        '<|message|>{"x": 1}<|call|>',
        {"reasoning": "r1", "content": None, "tool_calls": [SERVED]},
    ),
    ("glm45", "\n<think>r1</think>\na1<|user|>", {"reasoning_content": "r1", "content": "\na1"}),
    (
        "glm45",
        "\n<think></think>\nc1\n<tool_call>get\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
        "<|observation|>",
        {"content": "c1", "tool_calls": [SERVED]},
    ),
    ("deepseek_r1", "r1\n</think>\n\na1<|end_of_sentence|>", {"reasoning_content": "r1\n", "content": "\n\na1"}),
    ("gemma4", '<|tool_call>call:get{"x": 1}<tool_call|><|tool_response>', {"content": "", "tool_calls": [SERVED]}),
]


def test_what_a_servers_model_wrote_is_learnt_token_for_token(made, tmp_path):
    rows = [
        {"messages": [chat_templates.user(str(number))], "tools": chat_templates.TOOLS}
        for number in range(len(WRITTEN))
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)

    def answer(body: dict, _: int) -> tuple[int, dict | str]:
        fields = dict(WRITTEN[int(body["messages"][0]["content"])][2])
        calls = [{"id": "c1", "type": "function", "index": 0, "function": f} for f in fields.pop("tool_calls", [])]
        message = {"role": "assistant", **fields, **({"tool_calls": calls} if calls else {})}
        return 200, {"choices": [{"message": message, "finish_reason": "stop"}]}

    with server(answer) as url:
        assert run(made, tmp_path / "out.jsonl", f"server.url={url}", f"data.path={path}") == 0
    for (name, text, _), row in zip(WRITTEN, read_jsonl(tmp_path / "out.jsonl"), strict=True):
        tokenizer = chat_templates.tokenizer_of(name, merges=60)
        renderer = ChatRenderer(tokenizer, stop_ids=chat_templates.stop_ids(name, tokenizer))
        tools = row["tools"] if name != "deepseek_r1" else None  # whose template has no place for them
        (document,) = renderer(conversation_of({**row, "tools": tools}, "messages", {}))
        learnt = document.tokens[document.produced].tolist()
        assert learnt == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("reason", ["abort", "content_filter", "error", None, ["stop"]])
def test_an_answer_of_a_server_that_broke_off_is_left_out(made, tmp_path, capsys, reason):
    ends = {"last": reason, "first": "function_call", "a": "eos_token"}

    def answer(body: dict, number: int) -> tuple[int, dict | str]:
        return 200, completion("x", ends.get(body["messages"][-1]["content"], "stop"))

    rows = [{"messages": [{"role": "user", "content": content}]} for content in ("first", "a", "last")]
    given = f"data.path={write_jsonl(tmp_path / 'rows.jsonl', rows)}"
    with server(answer) as url:
        assert run(made, tmp_path / "out.jsonl", f"server.url={url}", given) == 0
    assert [row["row"] for row in read_jsonl(tmp_path / "out.jsonl")] == [1, 2]
    assert f"row 3: its answer broke off (finish_reason: {reason or 'none'})" in capsys.readouterr().err


def test_an_answer_of_the_engine_that_broke_off_is_left_out(made, tmp_path, capsys, monkeypatch):
    """As where the target's hidden states are not finite."""
    generate = Engine.generate

    def failing(*given):
        first, *others = generate(*given)
        return [replace(first, finish_reason="overflow"), *others]

    monkeypatch.setattr(Engine, "generate", failing)
    assert run(made, tmp_path / "out.jsonl", "limit=3") == 0
    assert [row["row"] for row in read_jsonl(tmp_path / "out.jsonl")] == [2, 3]
    assert "row 1: its answer broke off (finish_reason: overflow)" in capsys.readouterr().err


@pytest.mark.parametrize("cut", [{"content": None, "reasoning_content": "so and"}, {"content": "<think>\nso and"}])
def test_an_answer_that_was_cut_before_it_had_any_text_is_left_out(made, tmp_path, capsys, cut):
    def answer(body: dict, number: int) -> tuple[int, dict | str]:
        fields = cut if body["messages"][-1]["content"] == "last" else {"content": "x"}
        message = {"role": "assistant", **fields}
        return 200, {"choices": [{"message": message, "finish_reason": "length"}]}

    with server(answer) as url:
        assert run(made, tmp_path / "out.jsonl", f"server.url={url}") == 0
    printed = capsys.readouterr()
    assert "39 rows written, 39 with an answer cut at max_tokens, 1 left out" in printed.out
    assert "row 40: its answer was cut at max_tokens=6 before it had any text" in printed.err


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ('{"role": "user", "content": "x", "n": NaN}', "it holds a number that JSON does not have"),
        ('{"role": "user", "content": "\\ud800"}', "it holds half of a surrogate pair"),
    ],
)
def test_what_is_written_is_json(made, tmp_path, capsys, message, told):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"messages": [{message}]}}\n{{"messages": [{{"role": "user", "content": "a"}}]}}\n')
    given = (f"data.path={path}", "data.malformed=skip")

    def answer(body: dict, number: int) -> tuple[int, dict | str]:
        return 200, completion("b\u2028\n")

    with server(answer) as url:
        assert run(made, tmp_path / "out.jsonl", f"server.url={url}", *given) == 0
    assert f"row 1: {path}:1: {told}" in capsys.readouterr().err
    (line,) = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["messages"][1]["content"] == "b\u2028\n"
    with server(lambda *_: (200, completion("\ud800"))) as url:
        assert run(made, tmp_path / "half.jsonl", f"server.url={url}", *given) == 2
    assert "no row was answered, 2 left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, "no such model"),
        (200, {"object": "list"}),
        (200, "<html>"),
        (200, {"choices": [{}]}),
        (200, {"choices": [{"message": None}]}),
    ],
)
def test_what_is_no_chat_completion_is_said_in_a_line(made, tmp_path, capsys, status, body):
    with server(lambda *_: (status, body)) as url:
        assert run(made, tmp_path / "out.jsonl", f"server.url={url}") == 2
    printed = capsys.readouterr().err.splitlines()
    assert printed[-1].startswith(f"error: server.url={url}")
    assert ("404: no such model; the same command resumes" in printed[-1]) == (status == 404)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_what_the_target_thought_is_kept_by_either_name(made, tmp_path, name):
    told = {"role": "assistant", "content": "x", name: "so"}
    with server(lambda *_: (200, {"choices": [{"message": told, "finish_reason": "stop"}]})) as url:
        assert run(made, tmp_path / "out.jsonl", f"server.url={url}", "limit=1") == 0
    (row,) = read_jsonl(tmp_path / "out.jsonl")
    assert row["messages"][1] == {"role": "assistant", "content": "x", "reasoning_content": "so"}


def test_the_engine_renders_with_a_rows_own_variables(made, tmp_path, capsys):
    asked = {"messages": [{"role": "user", "content": "q"}], "chat_template_kwargs": {"tools": 1}}
    path = write_jsonl(tmp_path / "rows.jsonl", [asked])
    assert run(made, tmp_path / "out.jsonl", f"data.path={path}") == 2
    assert "row 1: chat_template_kwargs.tools: is set for each rendering" in capsys.readouterr().err


def test_what_the_template_does_not_render_back_is_left_out_by_the_engine(made, tmp_path, capsys):
    """One that renders another text than the target wrote, beside one that does."""
    save_target(tmp_path / "target", TEMPLATE.replace("m['content'] + ';'", "m['content'] | upper + ';'"))
    assert run(made, tmp_path / "out.jsonl", f"target={tmp_path / 'target'}") == 2
    told = capsys.readouterr().err
    assert "no row was answered, 40 left out; the first: row 1: the answer was cut within" in told
    assert "the chat template does not render the answer back: " in told
    assert not (tmp_path / "out.jsonl").exists()


def test_a_stale_note_is_nobodys_run(made, tmp_path, answers):
    """OUT was taken away: its rows are made anew, with other settings perhaps."""
    out = tmp_path / "out.jsonl"
    assert run(made, out, "limit=2") == 0
    (tmp_path / "out.jsonl.left_out").write_text('{"row": 39, "reason": "x"}\n')
    out.unlink()
    assert run(made, out, "limit=2", "max_tokens=5") == 0
    assert [row["row"] for row in read_jsonl(out)] == [1, 2]
    assert not (tmp_path / "out.jsonl.left_out").exists()


def test_notes_take_nobodys_file(made, tmp_path):
    """Rows may be read from a .json of the answers' name."""
    rows = (made / "chats.jsonl").read_text()
    (tmp_path / "rows.json").write_text(rows)
    assert run(made, tmp_path / "rows.jsonl", f"data.path={tmp_path}/rows.json", "limit=2") == 0
    assert (tmp_path / "rows.json").read_text() == rows
    assert len(read_jsonl(tmp_path / "rows.jsonl")) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["limit=0"], "limit=0: must be at least 1"),
        (["server.gone_after=0"], "server.gone_after=0: must be at least 1"),
        (["batch_size=0"], "batch_size=0"),
        (["data=text", "data.path=x.jsonl"], "data.format=text: it has no prompts"),
        (["data.path=null", "data.mix={a: {path: b.jsonl}}"], "data.mix: one data set is read at a time"),
        (["server.url=localhost:8000"], "must begin with http"),
        (["server.url=http://x", "data.date=2026-07-31"], "data.date=2026-07-31: a server renders its prompts itself"),
        (
            ["server.url=http://x", "target.chat_template=x.jinja"],
            "target.chat_template=x.jinja: a server renders its prompts itself",
        ),
        (
            ["target.template_kwargs={enable_thinking: false}"],
            "target.template_kwargs={'enable_thinking': False}: is for commands that read no data; give data.",
        ),
        (["server.url=http://x", "drafter=ngram"], "drafter=ngram: a server has its own"),
        (["drafter=ngram", "draft.alignment=last"], "draft.alignment=last: this drafter does not read it"),
        (["server.url=http://x", "draft=x"], "draft.path=x: a server has its own"),
        (["server.timeout_s=0"], "server.timeout_s=0"),
        (["out=x.json"], "out=x.json: must end in .jsonl"),
        (["data.path=nowhere.jsonl"], "there is no such file"),
        (["target=nowhere/at/all"], "no such directory"),
    ],
)
def test_mistakes_are_one_line(made, tmp_path, capsys, overrides, message):
    assert run(made, tmp_path / "out.jsonl", *overrides) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


READ = {"path", "format", "columns", "roles", "name", "split", "revision", "template_kwargs", "date", "malformed"}
REFUSED_BY_FORMAT = {"assistant_pattern", "mix"}
UNREAD = {
    "heldout": "held.jsonl",
    "heldout_revision": "main",
    "supervise": "last",
    "row_tokens": 64,
    "long_documents": "drop",
    "shuffle_window": 0,
    "seed": 1,
    "workers": 1,
    "prefetch": 1,
    "weight": 2.0,
}


def test_each_key_of_the_data_is_read_or_refused():
    assert {field.name for field in fields(DataConfig)} == READ | REFUSED_BY_FORMAT | set(UNREAD)
    check_prompts(DataConfig("x.jsonl"))
    for key, value in UNREAD.items():
        with pytest.raises(UserError, match=re.escape(f"data.{key}={value}: is not read here; leave it out")):
            check_prompts(DataConfig("x.jsonl", **{key: value}))


def test_data_with_settings_for_training_are_asked_too(made, tmp_path, capsys):
    """What data=stdlib brings for training is not the user's."""
    assert run(made, tmp_path / "out.jsonl", "data=stdlib", "data.path=nowhere.jsonl") == 2
    assert "data.path is nowhere.jsonl; there is no such file" in capsys.readouterr().err


def test_a_bad_row_is_named_and_the_rows_before_it_are_kept(made, tmp_path, capsys):
    rows = read_jsonl(made / "chats.jsonl")[:20]
    path = write_jsonl(tmp_path / "rows.jsonl", [*rows, {"messages": []}, rows[0]])
    assert run(made, tmp_path / "out.jsonl", f"data.path={path}") == 2
    told = f"{path}:21: the row has no turns"
    assert told in (error := capsys.readouterr().err)
    assert error.endswith("; data.malformed=skip leaves such rows out\n")
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 16
    assert run(made, tmp_path / "out.jsonl", f"data.path={path}", "data.malformed=skip") == 0
    assert [row["row"] for row in read_jsonl(tmp_path / "out.jsonl")] == [*range(1, 21), 22]
    assert f"row 21: {told}" in capsys.readouterr().err


def test_another_runs_file_is_not_gone_on_with(made, tmp_path, answers, capsys):
    before = answers.read_bytes()
    assert run(made, answers, "temperature=0.5") == 2
    assert "was made with temperature=0.0, not 0.5" in capsys.readouterr().err
    assert answers.read_bytes() == before
    (tmp_path / "other.jsonl").write_text("mine\n")
    assert run(made, tmp_path / "other.jsonl") == 2
    assert "exists without other.jsonl.settings.json" in capsys.readouterr().err
    assert (tmp_path / "other.jsonl").read_text() == "mine\n"


def test_a_run_that_goes_on_another_day_renders_the_day_it_began(made, tmp_path, capsys, monkeypatch):
    """Not its own, nor another that is given."""
    target = Path(shutil.copytree(made / "target", tmp_path / "target"))
    dated = "{{ strftime_now('%d') + '|' }}" + TEMPLATE
    (target / "chat_template.jinja").write_text(dated)
    whole, parts, later = (tmp_path / f"{name}.jsonl" for name in ("whole", "parts", "later"))
    monkeypatch.setattr(whole_run, "today", lambda: "2026-07-31")
    assert run(made, whole, f"target={target}", "limit=4") == 0
    assert run(made, parts, f"target={target}", "limit=2") == 0
    monkeypatch.setattr(whole_run, "today", lambda: "2031-02-03")
    assert run(made, later, f"target={target}", "limit=4") == 0
    assert later.read_text() != whole.read_text()
    assert run(made, parts, f"target={target}", "limit=4") == 0
    assert parts.read_text() == whole.read_text()
    assert run(made, parts, f"target={target}", "limit=4", "data.date=2026-07-31") == 0
    capsys.readouterr()
    assert run(made, parts, f"target={target}", "limit=4", "data.date=2031-02-03") == 2
    assert "was made with data.date=2026-07-31, not 2031-02-03" in capsys.readouterr().err


def test_all_ranks_render_with_the_first_ones_date(made, tmp_path, monkeypatch):
    """This one is the second, on whose node it is tomorrow."""
    # By the first: the lock, what was answered before, the data's commits, and what it finds.
    told = iter([None, {}, {}, "2026-07-31", RowLog(tmp_path / "out.jsonl", {})])
    second = SimpleNamespace(is_main=False, size=2, by_main=lambda work: next(told))
    monkeypatch.setattr(whole_run, "today", lambda: "2026-08-01")
    dates = []
    monkeypatch.setattr(whole_run, "answer_by_engine", lambda config, *_: dates.append(config.data.date) or iter(()))
    monkeypatch.setattr(distributed, "start", lambda *_, **__: second)
    assert run(made, tmp_path / "out.jsonl") == 0
    assert dates == ["2026-07-31"]


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(made, tmp_path, answers, capsys):
    with disk_for(3000):
        assert run(made, tmp_path / "answers.jsonl") == 2
    assert "cannot be written" in capsys.readouterr().err
    assert run(made, tmp_path / "answers.jsonl") == 0
    assert (tmp_path / "answers.jsonl").read_text() == answers.read_text()
