"""Dialogues answered by an OpenAI-compatible server. Knows nothing of files or of our engine."""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3 import BaseHTTPResponse
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError, ReadTimeoutError
from urllib3.util import Retry

from eagle_train.corpus.columns import CUT
from eagle_train.corpus.conversations import REASONING_FIELDS, Message
from eagle_train.corpus.reasoning import cut_tag
from eagle_train.errors import UserError, check
from eagle_train.inference.requests.sampling_keys import changed
from eagle_train.regeneration.dialogue import Dialogue
from eagle_train.regeneration.options import BATCHES_AHEAD, RegenerateConfig, ServerConfig

_LOG = logging.getLogger(__name__)
_MOST_PAUSE_S = 60  # between two tries of a request
_LEAVING_S = 1.0  # for which a run that ends early waits for its requests in flight
_BUSY = (408, 409, 425, 429, *range(500, 600))  # statuses worth another try
_REFUSED = (400, 413, 422)  # the server accepts no such conversation: one that is too long, say
_CUT = "its answer was cut at max_tokens={} before it had any text"


def answer_by_server(config: RegenerateConfig, dialogues: Iterator[Dialogue]) -> Iterator[Dialogue]:
    """The dialogues in their order, answered or failed; `batch_size` requests are in flight at a time."""
    is_over = Event()
    session = _connection(config.server, config.batch_size, is_over)

    def answer(dialogue: Dialogue) -> Dialogue:
        while not is_over.is_set() and dialogue.next_turn():
            _request(session, config, dialogue)
        return dialogue

    asked = SimpleQueue[tuple[Dialogue, Future[Dialogue]] | None]()
    # No executor: Python waits for its threads before it exits, and so for all requests in flight.
    workers = [Thread(target=_work, args=(asked, answer), daemon=True) for _ in range(config.batch_size)]
    for worker in workers:
        worker.start()
    waiting = deque[Future[Dialogue]]()
    try:
        for dialogue in dialogues:
            waiting.append(Future())
            asked.put((dialogue, waiting[-1]))
            if len(waiting) == BATCHES_AHEAD * config.batch_size:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        is_over.set()
        for _ in workers:
            asked.put(None)
        end = monotonic() + _LEAVING_S
        for worker in workers:
            worker.join(max(0, end - monotonic()))
        session.close()


def _work(asked: SimpleQueue, answer: Callable[[Dialogue], Dialogue]) -> None:
    """Answer dialogues of the queue until None comes. What an answer raises is raised by its future."""
    while (task := asked.get()) is not None:
        dialogue, future = task
        try:
            future.set_result(answer(dialogue))
        except BaseException as error:
            future.set_exception(error)


class Tries(Retry):
    """Pauses for as long as the server asks for, but a minute at most, and raises ConnectionError once `is_over`."""

    is_over = Event()  # of the run; never set unless it is given

    def new(self, **changes: Any) -> "Tries":
        tries = super().new(**changes)
        tries.is_over = self.is_over
        return tries

    def sleep(self, response: BaseHTTPResponse | None = None) -> None:
        asked = None if response is None else self.get_retry_after(response)
        if asked is not None and asked > _MOST_PAUSE_S:
            _LOG.info("the server asks to be left alone for %d s; it is asked again in %d s", asked, _MOST_PAUSE_S)
        pause = min(asked or self.get_backoff_time(), _MOST_PAUSE_S)
        if self.is_over.wait(pause):
            raise requests.ConnectionError("the run is over")


def _connection(server: ServerConfig, pool_size: int, is_over: Event) -> requests.Session:
    """A session that repeats requests, with growing pauses, where the server was busy or could not be reached."""
    retry = Tries(
        server.retries,
        status_forcelist=_BUSY,
        allowed_methods=None,
        backoff_factor=1,
        backoff_max=_MOST_PAUSE_S,
        raise_on_status=False,
    )
    retry.is_over = is_over
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=pool_size, max_retries=retry))
    if key := os.environ.get("OPENAI_API_KEY", "").strip():  # a header with a line break is refused, and quoted
        session.headers["Authorization"] = f"Bearer {key}"
    return session


def _request(session: requests.Session, config: RegenerateConfig, dialogue: Dialogue) -> None:
    """Add one answer by the server, or why there is none.

    Raises UserError for a status that any row would get (a wrong key or model).
    """
    server = config.server
    assert server.url is not None
    url = server.url.rstrip("/") + "/chat/completions"
    try:
        response = session.post(url, json=_body_of(config, dialogue), timeout=server.timeout_s)
    except requests.RequestException as error:
        dialogue.failed, dialogue.given_up = f"no answer in {server.retries + 1} tries: {_why(error, server)}", True
        return
    status = f"{response.status_code}: {' '.join(response.text.split())[:300]}"
    if response.status_code in _BUSY:
        dialogue.failed, dialogue.given_up = f"no answer in {server.retries + 1} tries: the server says {status}", True
    elif response.status_code in _REFUSED:
        dialogue.failed, dialogue.refused = f"the server says {status}", True
    else:
        check(response.ok, f"server.url={server.url}: {status}; the same command resumes here")
        _add_response(config, dialogue, response)


def _body_of(config: RegenerateConfig, dialogue: Dialogue) -> dict[str, Any]:
    params = config.params_for(dialogue.seed)
    body = {
        "model": config.model,
        "messages": dialogue.sent,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,
    }
    body |= changed(vars(params), "temperature", "top_p")  # a server may not know the others
    if variables := (config.data.template_kwargs or {}) | dict(dialogue.variables):
        body["chat_template_kwargs"] = variables
    return body | ({"tools": dialogue.tools} if dialogue.tools else {})


def _why(error: requests.RequestException, server: ServerConfig) -> str:
    """Why a server did not answer, in terms of the settings."""
    reason = getattr(error.args[0] if error.args else None, "reason", None) or error
    if isinstance(reason, ReadTimeoutError | requests.Timeout):
        return f"it takes longer than server.timeout_s={server.timeout_s:g}"
    if isinstance(reason, NewConnectionError | ConnectTimeoutError):
        return f"it cannot be reached at server.url={server.url}"
    return f"the connection broke ({type(reason).__name__})"


def _add_response(config: RegenerateConfig, dialogue: Dialogue, response: requests.Response) -> None:
    """Keep the server's answer in its fields. Raises UserError for a response that is no chat completion."""
    try:
        choice = response.json()["choices"][0]
        message, finish_reason = _message_of(choice["message"], dialogue), choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(f"server.url={config.server.url}: {response.url} gave no chat completion") from error
    if not dialogue.check_end(finish_reason):
        return
    is_empty = not message["content"] and "tool_calls" not in message
    if finish_reason == CUT and (is_empty or cut_tag(message) is not None):
        dialogue.failed = _CUT.format(config.max_tokens)
        return
    dialogue.add_answer(message, finish_reason)


def _message_of(message: dict[str, Any], dialogue: Dialogue) -> Message:
    """A server's message with a row's fields. Raises TypeError or ValueError for one of another form."""
    content, calls = message.get("content"), message.get("tool_calls")
    names = [name for name in REASONING_FIELDS if message.get(name)]  # servers differ in the field's name
    texts = [content, *(message[name] for name in names)]
    if not all(isinstance(text, str | None) for text in texts) or not isinstance(calls, list | None):
        raise TypeError
    dialogue.reasoning = names[0] if names else dialogue.reasoning
    reasoning = {REASONING_FIELDS[0]: message[names[0]]} if names else {}
    if not calls:
        return {"role": "assistant", "content": content or "", **reasoning}
    calls = [{key: call[key] for key in ("id", "type", "function") if call.get(key) is not None} for call in calls]
    return {"role": "assistant", "content": content, **reasoning, "tool_calls": calls}
