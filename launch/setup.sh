# A virtual environment in .venv with the tested versions; installs nothing twice.
# VENV and CONSTRAINTS: another directory for it, and another file of versions.
# Usage: bash launch/setup.sh [EXTRA]     EXTRA: a group of optional dependencies in pyproject.toml, e.g. test
# The other scripts source it, which puts them into the repository's root, and call set_up.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Threads that wait by spinning slow everybody on a machine whose cores are shared, by about 8 times here.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
# Each command would compile all that it imports anew, which takes longer than some of them.
unset PYTHONDONTWRITEBYTECODE

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3 python; do
    # An empty candidate is no command.
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: no Python from 3.11 to 3.13 with the venv module found; install one, or set PYTHON to it" >&2
  return 1
}

wanted() { # what a finished installation notes
  cat pyproject.toml "${CONSTRAINTS:-launch/constraints.txt}" | cksum
}

is_set_up() {
  local extra="${1:-}" venv="${VENV:-.venv}" stamps
  stamps=("$venv/.installed${extra:+-$extra}")
  [ -n "$extra" ] || stamps+=("$venv"/.installed-*) # which have more
  grep -qsxF "$(wanted)" "${stamps[@]}"
}

set_up() {
  local extra="${1:-}" venv="${VENV:-.venv}" constraints="${CONSTRAINTS:-launch/constraints.txt}" python
  if ! is_set_up "$extra"; then
    if [ ! -x "$venv/bin/python" ]; then
      python=$(find_python)
      echo "creating $venv with $("$python" --version)"
      "$python" -m venv "$venv"
    fi
    echo "installing eagle_train${extra:+ with its $extra dependencies} into $venv (some minutes the first time)"
    # Python compiles a module when it is first imported; of those installed, most never are.
    "$venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check -c "$constraints" -e ".${extra:+[$extra]}"
    wanted >"$venv/.installed${extra:+-$extra}"
  fi
  PATH="$(cd "$venv/bin" && pwd):$PATH"
  export PATH
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set_up "$@"
fi
