"""An examination from start to end: what is read, asked and measured, and which check follows from which.

What the files show comes first, then whether the draft is served as it was trained, then its conventions, and what it
has learnt last: each is asked of a draft in which nothing before was found.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle_train.diagnosis.causes import Finding, NotChecked, in_order
from eagle_train.diagnosis.compare import compared
from eagle_train.diagnosis.conventions import gained, least_gain
from eagle_train.diagnosis.fed_variants import wanted_layers
from eagle_train.diagnosis.learning import Learnt, context, drift, off_policy, repeated, undertrained
from eagle_train.diagnosis.measure import Measured, difference, interval, measured, served_tpc, too_few
from eagle_train.diagnosis.options import DoctorConfig
from eagle_train.diagnosis.overflow import overflow
from eagle_train.diagnosis.reading import Reading, plain, read_draft
from eagle_train.diagnosis.replay import answers, differing, is_rounding, rounds
from eagle_train.diagnosis.served_by_vllm import IN_VLLM, in_vllm
from eagle_train.diagnosis.template import other_templates
from eagle_train.diagnosis.texts import Part, Text, read_by_target, read_questions
from eagle_train.diagnosis.tracing import parting
from eagle_train.distributed import ALONE, World
from eagle_train.drafts import Draft
from eagle_train.errors import UserError, check
from eagle_train.hardware import resolve_device
from eagle_train.inference import Output, Requests
from eagle_train.inference.requests.readable import chats
from eagle_train.models.loading import load_target
from eagle_train.models.target import Target
from eagle_train.training.trained_draft import draft_directory


@dataclass
class Diagnosis:
    """What was found, the most serious first; what could not be checked; figures for results.json; and how a check
    failed that does not end the others."""

    findings: list[Finding]
    not_checked: list[NotChecked]
    figures: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None

    @property
    def is_healthy(self) -> bool:
        return not self.findings and self.failed is None

    def add(self, learnt: Learnt) -> None:
        self.findings += learnt.findings
        self.not_checked += learnt.not_checked
        self.figures |= learnt.figures


def examine(config: DoctorConfig, world: World = ALONE) -> Diagnosis:
    """The diagnosis of the draft in `config.draft.path`. `world`: the ranks that hold the target together; all examine,
    and find the same. Raises UserError."""
    path = draft_directory(config.path, "draft")
    source = None if config.trained is None else draft_directory(config.trained, "trained")
    device = resolve_device(config.device)
    placement = "tensor" if world.size > 1 else "replicated"
    target = load_target(config.target, device, placement, world, reads=chats)
    target.template_kwargs = {**(target.template_kwargs or {}), **(config.data.template_kwargs or {})}
    reading = read_draft(path, config.path, target)
    given = None if source is None else _trained(source, reading, target)
    trained = reading.trained if given is None else given.served
    about = {"target_source": target.identity.fingerprint}
    found = Diagnosis(list(reading.findings), list(reading.not_checked), about)
    served = reading.served or trained
    if served is None:
        found.not_checked.append(NotChecked("all that runs the draft", f"it cannot be loaded: {reading.unread}"))
    else:
        trained = None if trained is None else plain(trained).to(device)
        made_from = reading if given is None and reading.is_run else given
        is_ours = made_from is not None and "steps" in made_from.training
        training = reading.training | (given.training if given is not None else {})
        Examination(config, world, target, served.to(device).eval(), trained, reading, training, is_ours).run(found)
    found.findings = in_order(found.findings)
    return found


def _trained(source: Path, reading: Reading, target: Target) -> Reading:
    """The draft that the examined one was made from. Raises UserError for another one, as far as both say it."""
    name = str(source)
    found = read_draft(source, name, target, "trained")
    if found.served is None:
        raise UserError(f"trained={name}: cannot be read: {found.findings[0].measured}")
    if found.about is not None and reading.about is not None:
        own, made_from = found.about.source, reading.about.source
        check(own == made_from, f"trained={name}: is the draft {own}, and draft was made from {made_from}; give that")
    return found


class Examination:
    """A draft that can run, and the target's answers to the questions. `training`: how it was trained, as far as the
    draft or `trained` says. `is_ours`: whether the draft is a run of eagle-train, or `trained` is of one."""

    def __init__(
        self,
        config: DoctorConfig,
        world: World,
        target: Target,
        draft: Draft,
        trained: Draft | None,
        reading: Reading,
        training: dict[str, Any],
        is_ours: bool,
    ):
        self.config, self.world, self.target, self.served = config, world, target, draft
        self.reading, self.training, self.is_ours = reading, training, is_ours
        self.draft, self.trained = plain(draft), trained
        self.requests = Requests(target)
        self.questions = read_questions(config.data, config.limit, self.requests, config.max_tokens)
        layers = wanted_layers(self.draft, target.config.num_hidden_layers)
        own = self.draft.config.target_layers if trained is None else trained.config.target_layers
        self.layers = tuple(sorted({*layers, *own, *self.draft.config.target_layers}))
        self.depth = min(config.depth, self.draft.config.levels or config.depth)
        self.outputs, self.own = self.answered([question.prompt for question in self.questions])
        self.base = self.measured(self.own)

    def answered(self, prompts: Sequence[list[int]]) -> tuple[dict[int, Output], list[Part]]:
        """The target's answers by their questions' numbers, and what it computed on them. Raises UserError where fewer
        than two have a second token."""
        config = self.config
        found = answers(self.target, self.served, prompts, config.depth, config.max_tokens, config.batch_size)
        outputs = {number: output for number, output in enumerate(found) if len(output.token_ids) > 1}
        check(len(outputs) >= 2, "fewer than two answers have a second token, so nothing was drafted; give other data")
        texts = [Text(number, prompts[number], output.token_ids) for number, output in outputs.items()]
        return outputs, read_by_target(self.target, texts, self.layers)

    def measured(self, parts: Sequence[Part]) -> Measured:
        return measured(self.target, self.draft, parts, self.depth)

    def run(self, found: Diagnosis) -> None:
        found.figures |= self.figures()
        self.as_trained(found)
        self.as_served(found)
        self.in_vllm(found)
        self.conventions(found)
        found.add(overflow(self.target, self.draft, self.own[0], self.config.serving_dtype))
        self.learnt(found)

    def figures(self) -> dict[str, Any]:
        """What the draft is worth, as served and in the training graph."""
        seed = self.config.seed
        taken, served = interval(self.base.taken, self.base.owner, seed), served_tpc(self.outputs, seed)
        return {
            "prompts": len(self.outputs),
            "tokens": len(self.base.taken),
            "tpc": None if served is None else served.mean,
            "tpc_interval": None if served is None else served.bounds,
            "after_every_token": 1 + taken.mean,
            "after_every_token_interval": None if taken.bounds is None else [1 + each for each in taken.bounds],
            "longest_context": max(len(text.tokens) for part in self.own for text in part.texts),
            "acceptance_per_depth": self.base.per_depth(self.depth),
        }

    def as_trained(self, found: Diagnosis) -> None:
        """The draft as it is served against the draft as it was trained, where both are known."""
        if self.trained is None:
            reason = "there is one draft alone; give trained=DIR, the run or the native draft that it was made from"
            found.not_checked.append(NotChecked("the files against what was trained", reason))
            return
        best = measured(self.target, self.trained, self.own, self.depth)
        lost = max(0.0, best.tokens - self.base.tokens)
        parted = compared(self.target, self.trained, self.served, self.own[0])
        found.findings += [replace(each, costs=lost) for each in parted]
        found.figures["after_every_token_as_trained"] = 1 + best.tokens
        if not parted and (other := self.other_first_token(best)) is not None:
            found.findings.append(other)

    def other_first_token(self, best: Measured) -> Finding | None:
        """What it costs that the first token has a slot in training alone, or in serving alone, where that is more than
        chance. `best`: the draft as it was trained."""
        assert self.trained is not None, "it is compared"
        trained, served = self.trained.config.first_token, self.draft.config.first_token
        if trained == served or too_few(best.prompts) is not None:
            return None
        other = measured(self.target, self.trained.attending(first_token=served), self.own, self.depth)
        lost = difference(best, other, self.config.seed)
        if lost.low <= 0 or lost.mean <= least_gain(other):
            return None
        said = (
            f"It was trained with first_token={trained}, and is served with {served}, by which {other.tokens:.2f} "
            f"tokens of a chain are accepted in place of {best.tokens:.2f} (99 % interval of the loss: "
            f"{lost.low:.2f} to {lost.high:.2f})."
        )
        return Finding("first_token", said, lost.mean)

    def as_served(self, found: Diagnosis) -> None:
        """Our engine against the training graph."""
        every = rounds(self.target, self.draft, self.own, self.outputs, self.depth)
        wrong = differing(every)
        found.figures |= {"rounds": len(every), "rounds_that_differ": len(wrong)}
        if is_rounding(len(wrong), len(every), self.target.dtype):
            return
        first = wrong[0]
        said = (
            f"In {len(wrong)} of {len(every)} rounds the engine has other drafts accepted than the training graph: in "
            f"prompt {first.number + 1}, after token {first.position}, {first.served} in place of {first.trained}."
        )
        text = next(text for part in self.own for text in part.texts if text.number == first.number)
        (part,) = read_by_target(self.target, [text], self.layers)
        found.findings.append(parting(self.target, self.draft, part, text, said))

    def in_vllm(self, found: Diagnosis) -> None:
        """The same prompts in vLLM, of which those count that both engines answered with drafts."""
        asked = [question for number, question in enumerate(self.questions) if number in self.outputs]
        about, draft, outputs = self.reading.about, self.draft.config, list(self.outputs.values())
        try:
            found.add(in_vllm(self.config, about, draft, self.requests, asked, outputs, self.depth, self.world))
        except UserError as error:  # vLLM's own failure; no other check needs it
            found.failed = str(error)
            found.not_checked.append(NotChecked(IN_VLLM, found.failed))

    def conventions(self, found: Diagnosis) -> None:
        """Of a draft in which something was found before, a gain confirms that, or follows from it. A draft that is, or
        agrees with, its run of eagle-train has the conventions of its training: a gain is for want of training then.
        On texts that repeat themselves a gain tells nothing by itself."""
        config = self.config
        finding, rows = gained(self.target, self.draft, self.own, self.base, self.depth, config.seed)
        found.figures["changes"] = rows
        known = {each.cause for each in found.findings}
        if not known and self.is_ours:
            return
        if (few := too_few(self.base.prompts)) is not None:
            found.not_checked.append(NotChecked("conventions", few))
            return
        if finding is None or (known and finding.cause not in known):
            return
        reason = None if known else repeated(self.own)
        if reason is None:
            found.findings.append(finding)
        else:
            found.not_checked.append(NotChecked("conventions", reason))

    def learnt(self, found: Diagnosis) -> None:
        target, draft, base, seed = self.target, self.draft, self.base, self.config.seed
        if found.findings:
            names = "template, off-policy data, long contexts, training"
            found.not_checked.append(NotChecked(names, "first repair what was found; run this again then"))
            return
        if (few := too_few(base.prompts)) is not None:
            names = "template, off-policy data, long contexts, a chain's second token"
            found.not_checked.append(NotChecked(names, few))
        else:
            found.add(self.templates())
            found.add(self.off_policy())
            found.add(context(target, draft, self.own, base, self.depth, seed))
            found.add(drift(base, self.depth, seed))
        if not found.findings:
            found.add(undertrained(base, self.own, not draft.config.at_once, self.training, seed))

    def off_policy(self) -> Learnt:
        """The file's answers to the same questions."""
        most = self.config.max_tokens  # as long as the target's own
        given = [
            Text(number, each.prompt, each.given[:most]) for number, each in enumerate(self.questions) if each.given
        ]
        parts = read_by_target(self.target, given, self.layers)
        refused = next((each.refused for each in self.questions if each.refused is not None), None)
        return off_policy(self.target, self.draft, self.base, parts, self.depth, self.config.seed, refused)

    def templates(self) -> Learnt:
        """Other renderings of the same questions."""

        def examine(prompts: Sequence[list[int]]) -> Measured:
            return self.measured(self.answered(prompts)[1])

        return other_templates(self.requests, self.questions, self.base, self.training, examine, self.config.seed)
