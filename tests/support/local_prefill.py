"""A prefill process of disaggregated serving without the process: its server is in this one."""

import json
from functools import cache
from threading import Event

from eagle_train.drafts import Draft
from eagle_train.inference import PrefillServer
from eagle_train.inference.parallel.disaggregated import _as_json
from tests.support.tiny import shared_target, trained_draft


@cache
def a_draft(first_token: str = "self_fusion") -> Draft:
    return trained_draft(shared_target("gemma2"), steps=60, first_token=first_token)


class LocalPrefill:
    """A line to a prefill process that is none: what is sent goes to its server, once it is `open`."""

    def __init__(self, other: int = 1, draft: Draft | None = None, **options):
        self.other, self.server = other, PrefillServer(shared_target("gemma2"), draft or a_draft(), **options)
        self.open, self.changed = Event(), {}

    def send(self, message, timeout):
        self.request = json.loads(_as_json(message))

    def recv(self, timeout):
        assert self.open.wait(60)
        tokens, self.payload = self.server.prefill(self.request)
        return {"number": self.request["number"], "tokens": tokens} | self.changed

    def recv_tensor(self, tensor, timeout):
        return tensor.copy_(self.payload)
