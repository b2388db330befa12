"""Checkpoints of a run. format.py has the files, verify.py the check before one is used, store.py a run's directory."""
