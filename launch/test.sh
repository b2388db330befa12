#!/usr/bin/env bash
# Set-up and tests, on a machine with Python and nothing else: lint, format, types, the site, then the test suite.
# Usage: bash launch/test.sh [pytest's arguments], e.g. tests/inference/decode/test_tree.py, or -n 0 for one process
. "$(dirname "$0")/setup.sh"
set_up test
ruff check .
ruff format --check .
mypy
shellcheck .ci/run examples/*.sh launch/*.sh launch/slurm/*
NO_MKDOCS_2_WARNING=1 mkdocs build --strict # a broken link or a page without a place is an error
# A process for each core, four at most: what one of them waits for, another does not. What the tests of a file share
# (trained drafts, runs of several ranks) is made in one process; files come in their order, the last ones are short.
pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
