#!/usr/bin/env bash
# Trains a small draft for the bundled target, exports it and lets it answer: the whole way, in about a minute.
# Usage: bash examples/train.sh [overrides for eagle-train, e.g. train.steps=100]
# OUT: where all of it is written, outputs/example unless it is set
# Needs the package: bash launch/setup.sh && source .venv/bin/activate
set -euo pipefail
out="${OUT:-outputs/example}"

# The target's own answers, which the repository has; your own data: data=messages data.path=FILE.jsonl.
eagle-train data=messages data.path=data/tiny_target/answers.jsonl.gz data.row_tokens=512 out="$out/train" \
  draft.num_layers=1 draft.first_token=skip optim.name=muon optim.lr=6e-3 optim.tokens_per_step=1024 \
  train.micro_batch_rows=2 train.steps=50 "$@"
eagle-export checkpoint="$out/train" layout=native out="$out/draft"
eagle-generate draft="$out/draft" max_tokens=64 prompt="Write the Python function \`join(a, *p)\` of the module \`posixpath\`."
