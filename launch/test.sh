#!/usr/bin/env bash
# Set-up and tests, on a machine with Python and nothing else: lint, format, then the test suite.
# Usage: bash launch/test.sh [pytest's arguments]
. "$(dirname "$0")/setup.sh"
set_up test
ruff check .
ruff format --check .
shellcheck .ci/run launch/*.sh launch/slurm/*
pytest "$@"
