"""The target, the draft and the questions of an evaluation, and what its results say of them.

Knows nothing of what is measured. DESIGN section 3.10.
"""

import copy
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch

from eagle_train import distributed
from eagle_train.artifacts.format import Artifact, check_sizes, load_draft, read_artifact
from eagle_train.corpus.source import tell_bundled
from eagle_train.distributed import World
from eagle_train.drafts import Draft
from eagle_train.errors import UserError
from eagle_train.hardware import resolve_device
from eagle_train.inference import Drafter, Eagle, Engine, RemotePrefill, Requests, SimulatedAcceptance
from eagle_train.inference.decode.graphs import check_graphs
from eagle_train.inference.drafters import is_eagle, make_drafter
from eagle_train.inference.drafters.early import check_early
from eagle_train.inference.drafters.trained import drafter_of
from eagle_train.inference.requests.readable import chats
from eagle_train.models.draft_quantisation import Quant, quantise_draft
from eagle_train.models.loading import load_target
from eagle_train.models.target import Target
from eagle_train.results import prepared, redact, write_text
from evals.bench.config import BenchConfig
from evals.bench.evaluation import origin
from evals.bench.questions import Question, read_questions
from evals.bench.report import Found, write_report
from evals.bench.requests import room_for

C = TypeVar("C", bound=BenchConfig)


class Session(Generic[C]):
    """What an evaluation works with. Models are loaded when they are first used; evaluations may set others.

    `questions`: `limit` of them where the config has one, none where it names no file. `out`: the directory for
    results, which the first rank of `world` alone writes.
    """

    def __init__(self, config: C, world: World | None = None):
        """Sets the number of threads, and checks all that can be wrong before a weight is loaded. `world`: the ranks
        that hold the target together; None: those of the job that the environment names. Raises UserError."""
        self.config, self.device = config, resolve_device(config.device)
        self.world = distributed.start(self.device, shard_size=None) if world is None else world
        check_graphs(config.options.graphs, self.device)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        path = config.draft.path
        self._artifact = None if path is None else read_artifact(path)
        if (spec := getattr(config, "spec", None)) is not None:
            check_early(spec, config.target, path)
        elif self._artifact is not None:
            check_sizes(self._artifact.target, config.target, f"draft={path}")
        self.questions: list[Question] = []
        if config.questions is not None:
            self.questions = read_questions(config.questions, getattr(config, "limit", None))
            if self.world.is_main:
                tell_bundled(config.questions, config.target.path)
        self.out = self.world.by_main(lambda: prepared(config.out))

    @cached_property
    def target(self) -> Target:
        """The target, which every rank holds a part of where there are several."""
        placement = "tensor" if self.world.size > 1 else "replicated"
        reads = chats if self.questions else None
        return load_target(self.config.target, self.device, placement, self.world, reads=reads)

    @cached_property
    def draft(self) -> Draft:
        """The draft as it was exported. Drafters get copies, as an engine rounds its own."""
        assert self.config.draft.path is not None  # else the evaluation sets a draft, or has none
        return load_draft(self.config.draft.path, self.target.identity)

    @property
    def artifact(self) -> Artifact:
        """What the draft's directory says of it; for evaluations whose config asks for one."""
        assert self._artifact is not None
        return self._artifact

    @cached_property
    def requests(self) -> Requests:
        """How prompts become tokens, and what ends an answer."""
        return Requests(self.target)

    def drafter(self, quant: Quant | None = None, alignment: str | None = None, draft: Draft | None = None) -> Eagle:
        """The draft, or another one, quantised. `alignment`: None for the config's."""
        draft = quantise_draft(copy.deepcopy(self.draft if draft is None else draft), quant or Quant())
        return drafter_of(draft, self.target, alignment or self.config.draft.alignment)

    def chosen_drafter(self, quant: Quant | None = None) -> Drafter:
        """The drafter of a DrafterConfig; with the draft, quantised, where there is one. Raises UserError."""
        spec: Mapping[str, Any] = self.config.spec  # type: ignore[attr-defined]
        if is_eagle(spec):
            return self.drafter(quant)
        draft = None if self.config.draft.path is None else quantise_draft(copy.deepcopy(self.draft), quant or Quant())
        return made_drafter(spec, self.target, draft)

    def engine(
        self,
        drafter: Drafter | None = None,
        tree: Any = "chain3",
        *,
        longest: int,
        prefill: RemotePrefill | None = None,
        acceptance: SimulatedAcceptance | None = None,
        **options: Any,
    ) -> Engine:
        """As `Engine`, with the config's options, some of them replaced. `longest`: the most tokens of a prompt and its
        answer; without `kv_tokens` there is room for a full batch of these."""
        config = replace(self.config.options, **options)
        if config.kv_tokens is None:
            config = replace(config, kv_tokens=room_for(config.max_batch_size, longest, tree, drafter))
        return Engine(self.target, drafter, tree, config, prefill=prefill, acceptance=acceptance)

    def write(self, name: str, text: str) -> None:
        """A file in `out`, whole or not there; by the first rank."""
        if self.world.is_main:
            write_text(self.out / name, text)

    def remove(self, name: str) -> None:
        """Take a file of a former run out of `out`; by the first rank."""
        if self.world.is_main:
            (self.out / name).unlink(missing_ok=True)

    def report(self, found: Found, report: str) -> None:
        """results.json and report.md in `out`; by the first rank."""
        if self.world.is_main:
            write_report(self.out, found, report)

    def say(self, *lines: str) -> None:
        """Print lines; the first rank does."""
        if self.world.is_main:
            print(*lines, sep="\n")

    def about(self) -> dict[str, Any]:
        """What every results.json says: the models, the config without secrets, where it was measured, and whether
        answers with drafts may be others than the target's own."""
        params = getattr(self.config, "params", None)
        return {
            "draft_source": None if self._artifact is None else self._artifact.source,
            "target": self.target.name,
            "target_source": self.target.identity.fingerprint,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "device": self.target.device.type,
            "ranks": self.world.size,
            "lossy": params is not None and params.is_lossy,
            "config": redact(asdict(self.config)),
            **origin(),
        }


def made_drafter(spec: Mapping[str, Any], target: Target, draft: Draft | None) -> Drafter:
    """As `make_drafter`; raises UserError where that is plain decoding."""
    drafter = make_drafter(spec, target, draft)
    if drafter is None:
        raise UserError(f"drafter {spec['_target_']}: drafts nothing, so there is nothing to measure")
    return drafter
