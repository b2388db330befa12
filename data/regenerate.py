"""The target's own answers to the prompts of a data set, as training data: a draft guesses what its target writes.

Every assistant message is written anew, after the answers already given; the other messages stay. The bundled engine
answers, or any OpenAI-compatible server. Rows are written in the data's order as they are done, so a run that was
stopped goes on behind its last row. Knows nothing of training.

    python data/regenerate.py target=DIR data=messages data.path=FILE.jsonl out=ANSWERS.jsonl temperature=0.7
    python data/regenerate.py server.url=http://HOST:8000/v1 server.model=NAME data=sharegpt data.path=FILE.jsonl
"""

import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import requests
from omegaconf import DictConfig
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from eagle_train.config import (
    UserError,
    build,
    check,
    command,
    json_text,
    one_line,
    provenance,
    resolve_device,
    write_json,
)
from eagle_train.corpus.chat import Message, to_messages
from eagle_train.corpus.source import CAN_SKIP, DataConfig, PlacedRow, behind_place, open_source, parse
from eagle_train.inference import Engine, SamplingParams
from eagle_train.models.loading import TargetConfig
from eagle_train.progress import progress

BATCHES = 8  # that the engine answers, or a server is sent, ahead of the row that is written next
TURN_SEEDS = 1 << 20  # far enough apart that no two requests share a seed
BUSY = (408, 409, 425, 429, 500, 502, 503, 504)  # statuses worth another try
REFUSED = (400, 413, 422)  # what a server says to a conversation it will not take: one too long, say


@dataclass
class Artifact:
    """`path`: a directory that eagle-export wrote, or None."""

    path: str | None


@dataclass
class ServerConfig:
    """An OpenAI-compatible server, see conf/regenerate.yaml. Raises UserError for values that cannot be."""

    url: str | None
    model: str | None
    retries: int
    timeout_s: float

    def __post_init__(self) -> None:
        known = self.url is None or self.url.startswith(("http://", "https://"))
        check(known, f"server.url={self.url}: must begin with http:// or https://")
        check(self.retries >= 0, f"server.retries={self.retries}: must be 0 or more")
        check(self.timeout_s > 0, f"server.timeout_s={self.timeout_s}: must be above 0")


@dataclass
class Config:
    """conf/regenerate.yaml, which says what each key is. Raises UserError for values that cannot be."""

    target: TargetConfig
    data: DataConfig
    out: str
    limit: int | None
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    batch_size: int
    device: str
    draft: Artifact
    server: ServerConfig

    def __post_init__(self) -> None:
        check(not self.data.mix, "data.mix: the answers of one data set at a time; give data.path")
        check(self.data.format != "text", "data.format=text: it has no prompts; give conversations")
        check(self.limit is None or self.limit >= 1, f"limit={self.limit}: must be at least 1, or null")
        check(self.batch_size >= 1, f"batch_size={self.batch_size}: must be at least 1")
        on_server = self.server.url is not None
        check(not (on_server and self.draft.path), f"draft.path={self.draft.path}: a server has its own; leave it out")
        self.params = SamplingParams(self.temperature, self.top_p, self.top_k, self.max_tokens, self.seed)


@dataclass
class Conversation:
    """A row on its way. `turns`: the messages before each answer. `failed`: why it is left out, if it is."""

    row: int
    turns: list[list[Message]]
    failed: str | None = None
    messages: list[Message] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)

    def ask(self) -> bool:
        """Go on to the next turn; False if there is none, or no use in it."""
        turn = len(self.finish_reasons)
        if self.failed is not None or turn == len(self.turns):
            return False
        self.messages += self.turns[turn]
        return True

    def take(self, answer: Message, finish_reason: str) -> None:
        self.messages.append(answer)
        self.finish_reasons.append(finish_reason)

    def params(self, params: SamplingParams) -> SamplingParams:
        """`params` with the turn's own seed, which follows from the row, so that it is the same after a resume."""
        return replace(params, seed=params.seed + self.row + len(self.finish_reasons) * TURN_SEEDS)

    @property
    def line(self) -> str:
        row = {"row": self.row, "messages": self.messages, "finish_reasons": self.finish_reasons}
        return json_text(row, ensure_ascii=False) + "\n"


@command("regenerate")
def main(values: DictConfig) -> None:
    config = build(Config, values, "")
    source = open_source(config.data)
    out = Path(config.out)
    check(out.suffix == ".jsonl", f"out={out}: must end in .jsonl")
    asked = settings(config, source.identity())
    done = rows_done(out, asked)
    last = None if config.limit is None else max(done, config.limit)
    rows = enumerate(islice(source.rows(), done, last), done + 1)
    conversations = (conversation(number, placed, config.data) for number, placed in rows)
    answered = from_server(config, conversations) if config.server.url else from_engine(config, conversations)
    bar = progress(last, "row", done)
    written, cut, left_out = 0, 0, []
    for told in answered:
        if told.failed is None:
            if not out.exists():
                write_json(notes_of(out), {"settings": asked, "provenance": provenance()})
            append(out, told.line)
            written += 1
            cut += "length" in told.finish_reasons
        else:
            left_out.append(f"row {told.row}: {told.failed}")
        bar.update(told.row, f"{len(left_out)} left out")
    bar.close()
    print(f"{out}: {written} rows written, {cut} with an answer cut at max_tokens, {len(left_out)} left out")
    for reason in left_out[:1]:
        print(f"the first left out: {reason}", file=sys.stderr)


def conversation(number: int, placed: PlacedRow, data: DataConfig) -> Conversation:
    """A row as the messages before each of its answers. One of another format is left out where `data.malformed` says
    so; else raises UserError, with its place."""
    try:
        messages = to_messages(parse(*placed), data.format, data.columns)
    except UserError as error:
        told = behind_place(placed[0], error)
        if data.malformed == "skip":
            return Conversation(number, [], told)
        raise UserError(f"{told}; {CAN_SKIP}") from error
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            turns[-1].append(message)
        elif turns[-1]:
            turns.append([])
    turns = [turn for turn in turns if turn]
    failed = None if turns else "it has no message but the assistant's"
    if any(message["role"] == "tool" for message in messages):
        failed = "it has a tool's results, which a new answer may not have asked for"
    return Conversation(number, turns, failed)


def from_engine(config: Config, conversations: Iterator[Conversation]) -> Iterator[Conversation]:
    """The conversations, answered by the bundled engine: the first turns together, then the second ones."""
    room = {"max_batch_size": config.batch_size, "prefill_tokens": None}  # nobody waits for a first token
    engine = Engine(config.target, config.draft.path, device=resolve_device(config.device), **room)
    tokenizer = engine.target.tokenizer
    found = tokenizer is not None and tokenizer.chat_template is not None
    check(found, f"target.path={config.target.path}: no chat template there, and a prompt is a user's turn in a chat")
    while chunk := list(islice(conversations, BATCHES * config.batch_size)):
        asked = chunk
        while asked := [told for told in asked if told.ask()]:
            for told in asked:
                told.failed = refusal(engine, told.messages)
            asked = [told for told in asked if told.failed is None]
            params = [told.params(config.params) for told in asked]
            outputs = engine.generate([told.messages for told in asked], params)
            for told, output in zip(asked, outputs, strict=True):
                told.take({"role": "assistant", "content": output.text}, output.finish_reason)
        yield from chunk


def refusal(engine: Engine, messages: list[Message]) -> str | None:
    """Why the target cannot be asked this, None if it can."""
    try:
        engine.requests.sequence(0, messages, SamplingParams())
    except UserError as error:
        return one_line(error).replace("prompt 0", "its prompt")
    return None


def from_server(config: Config, conversations: Iterator[Conversation]) -> Iterator[Conversation]:
    """The conversations, answered by a server that is sent `batch_size` requests at a time."""
    session = connection(config.server, config.batch_size)
    pool = ThreadPoolExecutor(config.batch_size)

    def answered(told: Conversation) -> Conversation:
        while told.ask():
            request(session, config, told)
        return told

    waiting = deque()
    try:
        for told in conversations:
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


def request(session: requests.Session, config: Config, told: Conversation) -> None:
    """One answer by the server. Raises UserError where it gives none."""
    server, params = config.server, told.params(config.params)
    body = {
        "model": server.model or config.target.path,
        "messages": told.messages,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,
    }
    if params.top_k:
        body["top_k"] = params.top_k
    url = server.url.rstrip("/") + "/chat/completions"
    try:
        response = session.post(url, json=body, timeout=server.timeout_s)
        if response.status_code in REFUSED:
            told.failed = f"the server says {response.status_code}: {' '.join(response.text.split())[:300]}"
            return
        if not response.ok:
            said = " ".join(response.text.split())[:300]
            raise UserError(
                f"server.url={server.url}: {response.status_code}: {said}; the same command goes on from here"
            )
        choice = response.json()["choices"][0]
        message = choice["message"]
        reasoning = message.get("reasoning_content") or message.get("reasoning")  # vLLM's older name and its newer one
        answer = {"content": message.get("content"), "reasoning_content": reasoning}
        answer = {key: value for key, value in answer.items() if value}
    except requests.RequestException as error:
        raise UserError(f"server.url={server.url}: {one_line(error)}; the same command goes on from here") from error
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(f"server.url={server.url}: {url} gave no chat completion") from error
    told.take({"role": "assistant", "content": "", **answer}, str(choice.get("finish_reason")))


def settings(config: Config, identity: str) -> dict[str, Any]:
    """What the answers depend on: a run goes on with the file of another only if these are the same."""
    data = config.data
    shape = {"path": data.path, "name": data.name, "split": data.split, "format": data.format, "columns": data.columns}
    target = (config.server.model if config.server.url else None) or config.target.path
    return {"target": target, **{f"data.{key}": value for key, value in shape.items()}, "data": identity} | {
        key: getattr(config.params, key) for key in ("max_tokens", "temperature", "top_p", "top_k", "seed")
    }


def notes_of(out: Path) -> Path:
    """Where it is told what the answers in `out` were made with."""
    return out.with_name(f"{out.name}.settings.json")


def rows_done(out: Path, asked: dict[str, Any]) -> int:
    """How many rows an earlier run has done. Raises UserError if it asked for them in another way."""
    if not out.exists():
        return 0
    notes = notes_of(out)
    check(notes.exists(), f"out={out}: is there, but not {notes.name}, which a run writes; give another file")
    earlier = json.loads(notes.read_text("utf-8"))["settings"]
    for key, value in asked.items():
        known = earlier.get(key)
        check(known == value, f"out={out}: was made with {key}={known}, not {value}; give another file")
    done = end = 0
    with out.open("rb+") as lines:
        for line in lines:
            if line.endswith(b"\n"):  # the last one may be torn by a kill
                done, end = json.loads(line)["row"], end + len(line)
        lines.truncate(end)
    print(f"{out}: goes on after row {done}", file=sys.stderr)
    return done


def append(out: Path, line: str) -> None:
    try:
        with out.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise UserError(f"out={out}: cannot be written: {one_line(error)}; the same command goes on") from error


if __name__ == "__main__":
    main()
