"""The target's own answers to the prompts of a data set, as training data: a draft guesses what its target writes.

Every assistant message is written anew, after the answers already given; the other messages stay. The bundled engine
answers, or any OpenAI-compatible server. An answer is kept in fields (content, reasoning_content, tool_calls) that the
target's chat template renders back to what it wrote; one that cannot be is left out. A call of a tool ends a
conversation, for nobody has its result. Knows nothing of training.

    eagle-regenerate target=DIR data=messages data.path=FILE.jsonl out=ANSWERS.jsonl temperature=0.7
    eagle-regenerate server.url=http://HOST:8000/v1 server.model=NAME data=sharegpt data.path=FILE.jsonl

Rows are written in the data's order as they are done, so a run that was stopped goes on behind its last row. Rows that
are left out, those that a server did not answer among them, are named in OUT.left_out, and not asked again by the same
command; with retry_left_out=true they are, and what is then answered is added at the end of OUT.
"""

import os
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import requests
from omegaconf import DictConfig
from requests.adapters import HTTPAdapter
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError, ReadTimeoutError
from urllib3.util import Retry

from eagle_train.cli import command
from eagle_train.corpus.answers import AnswerReader
from eagle_train.corpus.chat import REASONING, Message
from eagle_train.corpus.dialogues import Dialogue, dialogue_of
from eagle_train.corpus.render import ChatRenderer
from eagle_train.corpus.row_log import RowLog, line_of
from eagle_train.corpus.source import DataConfig, open_source
from eagle_train.errors import UserError, check, one_line
from eagle_train.hardware import resolve_device
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.options import DraftOptions
from eagle_train.inference.requests.readable import chats
from eagle_train.inference.requests.sequence import Output
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.progress import progress
from eagle_train.settings import build

BATCHES = 8  # that the engine answers, or a server is sent, ahead of the row that is written next
BUSY = (408, 409, 425, 429, *range(500, 600))  # statuses worth another try
REFUSED = (400, 413, 422)  # what a server says to a conversation it will not take: one too long, say
CUT = "its answer was cut at max_tokens={} before it had any text"


@dataclass
class ServerConfig:
    """An OpenAI-compatible server, see conf/commands/regenerate.yaml. Raises UserError for values that cannot be."""

    url: str | None
    model: str | None
    retries: int
    timeout_s: float
    gone_after: int

    def __post_init__(self) -> None:
        known = self.url is None or self.url.startswith(("http://", "https://"))
        check(known, f"server.url={self.url}: must begin with http:// or https://")
        check(self.retries >= 0, f"server.retries={self.retries}: must be 0 or more")
        check(self.timeout_s > 0, f"server.timeout_s={self.timeout_s}: must be above 0")
        check(self.gone_after >= 1, f"server.gone_after={self.gone_after}: must be at least 1")


@dataclass
class Config:
    """conf/commands/regenerate.yaml, which says what each key is. Raises UserError for values that cannot be."""

    target: TargetConfig
    data: DataConfig
    out: str
    retry_left_out: bool
    limit: int | None
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    batch_size: int
    device: str
    draft: DraftOptions
    server: ServerConfig

    def __post_init__(self) -> None:
        check(not self.data.mix, "data.mix: the answers of one data set at a time; give data.path")
        check(self.data.format != "text", "data.format=text: it has no prompts; give conversations")
        check(self.limit is None or self.limit >= 1, f"limit={self.limit}: must be at least 1, or null")
        check(self.batch_size >= 1, f"batch_size={self.batch_size}: must be at least 1")
        check(self.out.endswith(".jsonl"), f"out={self.out}: must end in .jsonl")
        on_server = self.server.url is not None
        check(not (on_server and self.draft.path), f"draft.path={self.draft.path}: a server has its own; leave it out")
        self.params = SamplingParams(self.temperature, self.top_p, self.top_k, self.max_tokens, self.seed)


class Results:
    """Writes the conversations as they are done, and counts what became of them.

    Rows that are left out wait for the next one that is answered, or for the run's end, until they are noted: while a
    server is gone, no row is done.
    """

    def __init__(self, log: RowLog, server: ServerConfig):
        self.log, self.server = log, server
        self.written = self.cut = self.retold = self.given_up = 0
        self.left_out: list[str] = []
        self.waiting: list[Dialogue] = []

    def take(self, told: Dialogue) -> None:
        """Raises UserError where `server.gone_after` rows in succession were given up."""
        line = None if told.failed else self.line(told)
        if line is None:
            self.leave_out(told)
            return
        self.note()
        self.log.write(line)
        self.written += 1
        self.cut += "length" in told.finish_reasons
        self.retold += told.retold

    def line(self, told: Dialogue) -> str | None:
        try:
            return line_of(told.row)
        except UserError as error:
            told.failed = str(error)
            return None

    def leave_out(self, told: Dialogue) -> None:
        self.left_out.append(f"row {told.number}: {told.failed}")
        self.waiting.append(told)
        self.given_up += told.given_up
        gone = [each for each in self.waiting if each.given_up]
        if len(gone) >= self.server.gone_after:
            raise UserError(
                f"server.url={self.server.url}: {len(gone)} rows in succession had no answer (server.gone_after); "
                f"row {told.number}: {told.failed}; the same command goes on from here"
            )

    def note(self) -> None:
        self.log.leave_out((each.number, each.failed) for each in self.waiting)
        self.waiting.clear()

    def close(self) -> None:
        """Say what became of the rows. Raises UserError where there were some and none was ever answered."""
        if self.left_out and not self.written and self.log.is_new:
            raise UserError(f"no row was answered, {len(self.left_out)} left out; the first: {self.left_out[0]}")
        self.note()
        extra = {"given up, for the server did not answer": self.given_up}
        extra["answers with other tokens than the target wrote, for the same text"] = self.retold
        beside = "".join(f", {number} {what}" for what, number in extra.items() if number)
        cut = f"{self.cut} with an answer cut at max_tokens"
        print(f"{self.log.out}: {self.written} rows written, {cut}, {len(self.left_out)} left out{beside}")
        for reason in self.left_out[:1]:
            print(f"the first left out: {reason}; all are in {self.log.others}", file=sys.stderr)


@command("regenerate")
def main(values: DictConfig) -> None:
    config = build(Config, values, "")
    source = open_source(config.data)
    log = RowLog(Path(config.out), settings(config, source.identity()))
    last = None if config.limit is None else max(log.done, config.limit)
    again = log.left_out if config.retry_left_out else frozenset()
    first = min([log.done, *(number - 1 for number in again)])
    rows = enumerate(islice(source.rows(first), None if last is None else last - first), first + 1)
    rows = ((number, placed) for number, placed in rows if number > log.done or number in again)
    dialogues = (dialogue_of(number, placed, config.data) for number, placed in rows)
    answered = from_server(config, dialogues) if config.server.url else from_engine(config, dialogues)
    results, bar = Results(log, config.server), progress(last, "row", first)
    for told in answered:
        results.take(told)
        bar.update(told.number, f"{len(results.left_out)} left out")
    bar.close()
    results.close()


def params_of(told: Dialogue, config: Config) -> SamplingParams:
    """The settings with the turn's own seed, so that it is the same after a resume."""
    return replace(config.params, seed=config.params.seed + told.seed)


def from_engine(config: Config, dialogues: Iterator[Dialogue]) -> Iterator[Dialogue]:
    """The conversations, answered by the bundled engine: the first turns together, then the second ones."""
    room = {"max_batch_size": config.batch_size, "prefill_tokens": None}  # nobody waits for a first token
    target = load_target(config.target, resolve_device(config.device), reads=chats)
    engine, tokenizer = Engine(target, config.draft.path, **room), target.tokenizer
    stop_ids, data = engine.requests.stop_ids, config.data
    renderer = ChatRenderer(tokenizer, stop_ids=stop_ids, template_kwargs=data.template_kwargs, date=data.date)
    reader = AnswerReader(renderer)
    while chunk := list(islice(dialogues, BATCHES * config.batch_size)):
        asked = chunk
        while asked := [told for told in asked if told.ask()]:
            prompts = [prompt_of(engine, reader, told) for told in asked]
            prompts = [prompt for prompt in prompts if prompt is not None]
            asked = [told for told in asked if told.failed is None]
            tokens, params = map(reader.tokens, prompts), [params_of(told, config) for told in asked]
            for told, prompt, output in zip(asked, prompts, engine.generate(list(tokens), params), strict=True):
                take_output(reader, told, prompt, output)
        yield from chunk


def prompt_of(engine: Engine, reader: AnswerReader, told: Dialogue) -> str | None:
    """The text that the target is given, None (and the conversation has failed) if it cannot be asked this."""
    try:
        prompt = reader.prompt(told.messages, told.tools)
        engine.requests.sequence(0, reader.tokens(prompt), SamplingParams())
    except UserError as error:
        told.failed = one_line(error).replace("prompt 0", "its prompt")
    except Exception as error:  # a template is a program, and fails as it likes
        told.failed = f"it cannot be rendered: {type(error).__name__}: {one_line(error)}"
    else:
        return prompt
    return None


def take_output(reader: AnswerReader, told: Dialogue, prompt: str, output: Output) -> None:
    """Keep what the engine generated, in the fields that the template renders back to it."""
    written = reader.written(prompt, output.token_ids, output.finish_reason == "length")
    try:
        message, same = reader.message(told.messages, told.tools, written)
    except UserError as error:
        told.failed = str(error)
        return
    told.retold += not same
    told.take(message, "tool_calls" if message.get("tool_calls") else output.finish_reason)


def from_server(config: Config, dialogues: Iterator[Dialogue]) -> Iterator[Dialogue]:
    """The conversations, answered by a server that is sent `batch_size` requests at a time."""
    session = connection(config.server, config.batch_size)
    pool = ThreadPoolExecutor(config.batch_size)

    def answered(told: Dialogue) -> Dialogue:
        while told.ask():
            request(session, config, told)
        return told

    waiting = deque()
    try:
        for told in dialogues:
            waiting.append(pool.submit(answered, told))
            if len(waiting) == BATCHES * config.batch_size:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def connection(server: ServerConfig, at_once: int) -> requests.Session:
    """Requests that are sent again, after a growing while, where the server was busy or could not be reached."""
    retry = Retry(
        server.retries,
        status_forcelist=BUSY,
        allowed_methods=None,
        backoff_factor=1,
        backoff_max=60,
        raise_on_status=False,
    )
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=at_once, max_retries=retry))
    if key := os.environ.get("OPENAI_API_KEY", "").strip():  # a header with a line's end is refused and quoted
        session.headers["Authorization"] = f"Bearer {key}"
    return session


def request(session: requests.Session, config: Config, told: Dialogue) -> None:
    """One answer by the server, or why there is none. Raises UserError where the server would answer no row."""
    server, url = config.server, config.server.url.rstrip("/") + "/chat/completions"
    try:
        response = session.post(url, json=body_of(config, told), timeout=server.timeout_s)
    except requests.RequestException as error:
        told.failed, told.given_up = f"no answer in {server.retries + 1} tries: {why(error, server)}", True
        return
    said = f"{response.status_code}: {' '.join(response.text.split())[:300]}"
    if response.status_code in BUSY:
        told.failed, told.given_up = f"no answer in {server.retries + 1} tries: the server says {said}", True
    elif response.status_code in REFUSED:
        told.failed = f"the server says {said}"
    else:
        check(response.ok, f"server.url={server.url}: {said}; the same command goes on from here")
        take_response(config, told, response)


def body_of(config: Config, told: Dialogue) -> dict[str, Any]:
    params = params_of(told, config)
    body = {
        "model": config.server.model or config.target.path,
        "messages": told.sent,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,
    }
    if params.top_k:
        body["top_k"] = params.top_k
    if config.data.template_kwargs:
        body["chat_template_kwargs"] = config.data.template_kwargs
    return body | ({"tools": told.tools} if told.tools else {})


def why(error: requests.RequestException, server: ServerConfig) -> str:
    """What kept a server from answering, without the client's own words for it."""
    reason = getattr(error.args[0] if error.args else None, "reason", None) or error
    if isinstance(reason, ReadTimeoutError | requests.Timeout):
        return f"it takes longer than server.timeout_s={server.timeout_s:g}"
    if isinstance(reason, NewConnectionError | ConnectTimeoutError):
        return f"it cannot be reached at server.url={server.url}"
    return f"the connection broke ({type(reason).__name__})"


def take_response(config: Config, told: Dialogue, response: requests.Response) -> None:
    """Keep what the server answered, in its fields. Raises UserError for what is no chat completion."""
    try:
        choice = response.json()["choices"][0]
        message, finish_reason = fields_of(choice["message"], told), str(choice.get("finish_reason"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(f"server.url={config.server.url}: {response.url} gave no chat completion") from error
    if finish_reason == "length" and not message["content"] and "tool_calls" not in message:
        told.failed = CUT.format(config.max_tokens)
        return
    told.take(message, finish_reason)


def fields_of(message: dict[str, Any], told: Dialogue) -> Message:
    """A server's message as a row has it. Raises TypeError or ValueError for what is none."""
    content, calls = message.get("content"), message.get("tool_calls")
    names = [name for name in REASONING if message.get(name)]  # vLLM's older name, its newer one, others'
    texts = [content, *(message[name] for name in names)]
    if not all(isinstance(text, str | None) for text in texts) or not isinstance(calls, list | None):
        raise TypeError
    told.reasoning = names[0] if names else told.reasoning
    reasoning = {REASONING[0]: message[names[0]]} if names else {}
    if not calls:
        return {"role": "assistant", "content": content or "", **reasoning}
    calls = [{key: call[key] for key in ("id", "type", "function") if call.get(key) is not None} for call in calls]
    return {"role": "assistant", "content": content, **reasoning, "tool_calls": calls}


def settings(config: Config, identity: str) -> dict[str, Any]:
    """What the answers depend on: a run goes on with the file of another only if these are the same."""
    data, target = config.data, config.target
    read = {key: getattr(data, key) for key in ("path", "name", "split", "format", "columns", "roles")}
    asked = {"target": (config.server.model if config.server.url else None) or target.path}
    asked |= {"target.chat_template": target.chat_template, "data.template_kwargs": data.template_kwargs}
    params = {key: getattr(config.params, key) for key in ("max_tokens", "temperature", "top_p", "top_k", "seed")}
    return asked | {f"data.{key}": value for key, value in read.items()} | {"data": identity} | params


if __name__ == "__main__":
    main()
