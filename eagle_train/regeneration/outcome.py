"""Finished dialogues: written to the log in order, counted, and reported at the end of a run."""

import logging

from eagle_train.corpus.columns import CUT
from eagle_train.errors import UserError
from eagle_train.regeneration.dialogue import Dialogue
from eagle_train.regeneration.options import ServerConfig
from eagle_train.regeneration.row_log import RowLog, line_of

_LOG = logging.getLogger(__name__)


class Outcome:
    """Writes finished dialogues and counts them.

    Rows that are left out are held back until a later row is answered, or the run ends: while a server is gone, the
    rows that it does not answer are not finished.
    """

    def __init__(self, log: RowLog, server: ServerConfig):
        self.log, self.server = log, server
        self.written = self.cut = self.retokenised = self.given_up = 0
        self.left_out: list[str] = []
        self.held: list[Dialogue] = []
        self.gone = self.refused = 0  # of those held

    def add(self, dialogue: Dialogue) -> None:
        """Raises UserError after `server.gone_after` rows in succession that were given up, and after as many that the
        server refused while none was ever answered."""
        line = None if dialogue.failed else _line(dialogue)
        if line is None:
            self._leave_out(dialogue)
            return
        self._flush()
        self.log.write(line)
        self.written += 1
        self.cut += CUT in dialogue.finish_reasons
        self.retokenised += dialogue.retokenised

    def close(self) -> None:
        """Print the counts. Raises UserError if there were rows and none was ever answered."""
        if self.left_out and self._is_unanswered:
            raise UserError(f"no row was answered, {len(self.left_out)} left out; the first: {self.left_out[0]}")
        self._flush()
        extra = {"given up, for the server did not answer": self.given_up}
        extra["answers with other tokens than the target wrote, for the same text"] = self.retokenised
        beside = "".join(f", {number} {what}" for what, number in extra.items() if number)
        cut = f"{self.cut} with an answer cut at max_tokens"
        print(f"{self.log.out}: {self.written} rows written, {cut}, {len(self.left_out)} left out{beside}")
        for reason in self.left_out[:1]:
            _LOG.info("the first left out: %s; all are in %s", reason, self.log.others)

    def _leave_out(self, dialogue: Dialogue) -> None:
        last = f"row {dialogue.number}: {dialogue.failed}"
        self.left_out.append(last)
        self.held.append(dialogue)
        self.given_up += dialogue.given_up
        self.gone += dialogue.given_up
        self.refused += dialogue.refused
        if self.gone >= self.server.gone_after:
            raise UserError(
                f"server.url={self.server.url}: {self.gone} rows in succession had no answer (server.gone_after); "
                f"{last}; the same command resumes here"
            )
        if self.refused >= self.server.gone_after and self._is_unanswered:
            raise UserError(
                f"server.url={self.server.url}: no row was answered, and {self.refused} were refused "
                f"(server.gone_after); {last}"
            )

    @property
    def _is_unanswered(self) -> bool:
        """Whether no row was ever answered, by an earlier run neither."""
        return not self.written and self.log.is_new

    def _flush(self) -> None:
        self.log.leave_out((each.number, each.failed or "") for each in self.held)
        self.held.clear()
        self.gone = self.refused = 0


def _line(dialogue: Dialogue) -> str | None:
    try:
        return line_of(dialogue.row)
    except UserError as error:
        dialogue.failed = str(error)
        return None
