"""What an evaluation of one drafter asks: a file of questions or a suite, as they are or behind packed documents."""

from dataclasses import dataclass
from typing import Any, TypeVar

from eagle_train.errors import check, typed
from eagle_train.settings import build
from evals.bench.config import DrafterConfig, check_sizes
from evals.bench.contexts import packed
from evals.bench.questions import Question, read_questions
from evals.bench.requests import fits
from evals.bench.session import Session
from evals.bench.suites import Suite

C = TypeVar("C", bound="AskedConfig")
TOO_LONG = ("refuse", "leave_out")


@dataclass(kw_only=True)
class AskedConfig(DrafterConfig):
    """The keys of conf/commands/mt_bench.yaml that say what is asked. Raises UserError for values that cannot be."""

    questions: str | None  # type: ignore[assignment]
    suite: dict[str, Any]
    limit: int | None
    too_long: str
    context_lengths: list[int] | None
    documents: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chosen = build(Suite, self.suite, "suite")
        title = self.chosen.title
        one = (title is None) != (self.questions is None)
        check(one, f"questions={self.questions}: give a file of questions, or a suite; now suite is {typed(title)}")
        check(self.too_long in TOO_LONG, f"too_long={self.too_long}: must be {' or '.join(TOO_LONG)}")
        if self.context_lengths is not None:
            check_sizes("context_lengths", self.context_lengths)
        used = self.documents is None or self.context_lengths is not None
        check(used, f"documents={self.documents}: needs context_lengths, [512,1024] say")

    @property
    def asked(self) -> str:
        """The questions' place."""
        return self.chosen.place if self.questions is None else self.questions

    def about_questions(self) -> dict[str, Any]:
        """For results.json."""
        return {"asked": self.asked, "suite": None if self.chosen.title is None else self.chosen.about()}


def prepared(config: C) -> tuple[Session[C], int]:
    """The session with its questions: those of the suite or of a file; behind documents, where the config has
    `context_lengths`. And how many were left out as too long for the target's context. Raises UserError."""
    questions = [] if config.chosen.title is None else config.chosen.read(config.limit)
    session = Session(config)
    session.questions = questions or session.questions
    if config.context_lengths is not None:
        _check_lengths(session)
        session.questions = packed(session.requests, session.questions, _documents(config), config.context_lengths)
    if config.too_long == "refuse":
        return session, 0
    kept = [each for each in session.questions if fits(session.requests, each, config.max_tokens)]
    check(len(kept) > 0, f"max_tokens={config.max_tokens}: no question fits the context of {session.target.name}")
    left_out, session.questions = len(session.questions) - len(kept), kept
    return session, left_out


def _documents(config: AskedConfig) -> list[Question]:
    """What stands before the questions: another file, or all of their own, whatever `limit` takes."""
    if config.documents is not None:
        return read_questions(config.documents, key="documents")
    return config.chosen.read() if config.questions is None else read_questions(config.questions)


def _check_lengths(session: Session[Any]) -> None:
    """Raise UserError for contexts that leave no room for an answer."""
    most, room = max(session.config.context_lengths), session.config.max_tokens
    target = session.target
    said = f"context_lengths={most}: with max_tokens={room} beyond the {target.context} of {target.name}"
    check(most + room <= target.max_positions, said)
