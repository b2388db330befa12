#!/usr/bin/env bash
# The test suite with the lowest versions that pyproject.toml allows, in a virtual environment of its own.
# Usage: bash launch/test_lowest.sh [pytest's arguments], e.g. -m 'not slow and not ranks'
# pip takes the build of torch that its index has, which may be one for CUDA, of several GB. TORCH=VERSION takes another
# version than the lowest, where that cannot be had.
. "$(dirname "$0")/setup.sh"
export VENV=.venv-lowest CONSTRAINTS=.venv-lowest-constraints.txt
sed "s/^torch==.*/torch==${TORCH:-$(sed -n 's/^torch==//p' launch/constraints_lowest.txt)}/" launch/constraints_lowest.txt >"$CONSTRAINTS"
set_up test
pytest --numprocesses logical --maxprocesses 4 --dist worksteal "$@"
