"""A prefill process of disaggregated serving without the process: its server is in this one."""

from collections import deque
from functools import cache
from threading import Event

import torch

from eagle_train.drafts import Draft
from eagle_train.inference import PrefillServer
from eagle_train.inference.parallel.kv_pieces import FAILED, TOKENS
from eagle_train.inference.parallel.lines import Header, as_bytes, from_bytes
from tests.support.tiny import shared_target, trained_draft


@cache
def a_draft(first_token: str = "self_fusion") -> Draft:
    return trained_draft(shared_target("gemma2"), steps=60, first_token=first_token)


class LocalPrefill:
    """A line to a prefill process that is none: what is sent goes to its server, once it is `open`. What the server
    sends comes part by part, changed by `changed`; before the part of number `fails_at` its prefill fails, before that
    of number `breaks_at` the connection is gone, and that of number `waits_at` comes once it may `go_on`."""

    def __init__(self, other: int = 1, draft: Draft | None = None, server: PrefillServer | None = None, **options):
        self.other = other
        self.server = server or PrefillServer(shared_target("gemma2"), draft or a_draft(), **options)
        self.open, self.parts, self.closed = Event(), deque(), False
        self.fails_at = self.breaks_at = self.waits_at = None
        self.received, self.go_on = 0, Event()

    def send(self, message, timeout):
        self.request = from_bytes(as_bytes(message))
        self.received, self.asked = 0, True

    def close(self):
        self.closed = True

    def changed(self, header, body):
        """What comes instead."""
        return header, body

    def put(self, what, body=None):
        if what != FAILED and len(self.parts) == self.fails_at:
            raise RuntimeError("out of memory")
        body = torch.empty(0) if body is None else body.clone()
        self.parts.append(self.changed(Header(self.request["number"], what, len(body)), body))

    def answer(self):
        """What `PrefillServer.serve` does for a request."""
        try:
            self.put(TOKENS, as_bytes(self.server.prefill(self.request, self.put)))
        except RuntimeError:
            for sequence in self.server._parts.scheduler.unfinished:
                sequence.finish_reason = "failed"
            self.server._parts.scheduler.leave()
            self.put(FAILED)

    def recv_header(self, timeout):
        assert self.open.wait(60)
        if self.asked:
            self.asked = False
            self.answer()
        if self.received == self.breaks_at:
            raise RuntimeError("Connection closed by peer")
        if self.received == self.waits_at:
            assert self.go_on.wait(60)
        self.received += 1
        header, self.body = self.parts.popleft()
        return header

    def recv_tensor(self, tensor, timeout):
        return tensor.copy_(self.body)
