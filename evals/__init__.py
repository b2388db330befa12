"""Evaluations: a published number each. They may import everything; nothing imports them."""

import os
import signal
import sys

# OpenMP's threads spin while they wait. On cores shared with anything else that makes every step about 8 times slower
# (DESIGN section 5). The runtime reads this once, when torch loads it, so it must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# As in eagle_train/commands.py: an interrupted import has nothing to tell or to tidy up. `cli.command` takes it back.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # python -m evals.NAME
    signal.signal(signal.SIGINT, signal.SIG_DFL)
