"""Progress on stderr: lines in a pipe, a bar on a terminal."""

import io
import logging
import math
import sys

from eagle_train.progress import progress
from eagle_train.training.metrics import summary


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_pipe_gets_a_plain_line_every_few_seconds(monkeypatch, capsys):
    clock = iter([100.0] + [100.0 + 2 * step for step in range(1, 11)])
    monkeypatch.setattr("eagle_train.progress.time.monotonic", lambda: next(clock))
    bar = progress(20, "step", initial=10)
    for step in range(11, 21):
        bar.update(step, summary(2.34567, 6100.4))
    bar.close()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "\r" not in printed.err
    assert [line.split(",")[0] for line in printed.err.splitlines()] == [f"step {n}/20" for n in (11, 14, 17, 20)]
    assert printed.err.splitlines()[1] == "step 14/20, 00:08, 00:12 left, loss 2.3457, 6,100 tokens/s"


def test_a_terminal_gets_a_bar(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    bar = progress(20, "step", initial=10)
    bar.bar.mininterval = 0
    bar.update(11, summary(math.nan, 6100))
    bar.update(15, summary(2.3, 6100))
    bar.close()
    assert screen.getvalue().count("\r") > 2
    assert "step  75%|" in screen.getvalue()
    assert "15/20" in screen.getvalue()
    assert "left, loss 2.3000, 6,100 tokens/s]" in screen.getvalue()


def test_a_total_that_is_not_known_is_left_out(capsys):
    bar = progress(None, "row")
    bar.update(3)
    bar.update(4)  # within the same seconds
    bar.close()
    assert capsys.readouterr().err == "row 3, 00:00\n"


def test_a_note_and_a_warning_are_a_line_each(capsys):
    log = logging.getLogger("eagle_train.training.metrics")
    log.info("recorded offline in %s", "wandb")
    log.warning("checkpoint passed over")
    log.debug("not shown")
    assert capsys.readouterr().err == "recorded offline in wandb\nwarning: checkpoint passed over\n"


def test_a_library_logs_nothing_below_warnings_by_itself(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger("eagle_train"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("eagle_train"), "level", logging.NOTSET)
    bar = progress(1, "step")
    bar.update(1)
    assert capsys.readouterr().err == ""
