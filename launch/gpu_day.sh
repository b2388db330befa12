#!/usr/bin/env bash
# What only a machine with a GPU can show: ceilings, GPU tests, kernels, the loss, a training step beside its plan,
# latency beside the copy bound, profiles, a training run, and with its draft: grammars, all drafters and all kinds of
# drafts beside one another.
# Each part is a command with a budget in seconds and writes its result to OUT, JSON for the most part; when one fails,
# or writes none, the next one runs. The end says which failed, and which goals were reached. The Python is PYTHON, with
# torch and transformers there; WHEELS: a directory of wheels of what else is missing, which go to a directory of their
# own.
# Usage: [OUT=DIR] [WHEELS=DIR] [PYTHON=python3] bash launch/gpu_day.sh [PART ...]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}" TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
OUT="${OUT:-outputs/gpu_day}" PYTHON="${PYTHON:-python3}" SHAPES="${SHAPES:-llama3_1_8b}"
DYNAMIC=eagle_train.inference.decode.row_trees.dynamic
PARTS=(ceilings tests kernels loss step fp8 eager plain contexts drafts compiled batches quantised run grammar drafters
  kinds)
TESTING=(-q --numprocesses 6 --dist worksteal --tb=short)
failed=()
mkdir -p "$OUT"

install_wheels() {
  local site
  site=$(mktemp -d)
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$1"/*.whl
  export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
}

# part NAME SECONDS RESULT COMMAND...: runs it, says how long it took, keeps what it printed. It fails too where it has
# not written the file RESULT.
part() {
  local name=$1 budget=$2 result=$3 started=$SECONDS status=0
  shift 3
  touch "$OUT/.started"
  echo "== $name (at most $budget s): $*"
  timeout --kill-after=10 "$budget" "$@" 2>&1 | tee "$OUT/$name.log" | tail -n "${LINES_SHOWN:-25}" || status=$?
  if [ "$status" -eq 0 ] && { [ ! -e "$result" ] || [ "$result" -ot "$OUT/.started" ]; }; then
    status="0, but it wrote no $result"
  fi
  echo "== $name: $((SECONDS - started)) s, status $status"
  [ "$status" = 0 ] || failed+=("$name")
}

copy_rate() { # what the part `ceilings` measured, as evals.latency takes it for the copy bound
  [ ! -s "$OUT/ceilings.json" ] ||
    awk -F '[:,]' '/"copy_gb_per_s"/ { print "cluster.memory_tb_s=" $2 / 1000 }' "$OUT/ceilings.json"
}

latency() { # latency NAME SECONDS [OVERRIDE ...]: against plain decoding and transformers, on random weights
  local name=$1 budget=$2 rate
  shift 2
  mapfile -t rate < <(copy_rate)
  set -- "${rate[@]}" "$@"
  part "$name" "$budget" "$OUT/$name/results.json" "$PYTHON" -m evals.latency "shapes=$SHAPES" device=cuda \
    "acceptance=[0.8,0.65,0.55,0.45,0.35]" max_tokens=96 repeats=3 "out=$OUT/$name" "$@"
}

step() { # step NAME SECONDS [OVERRIDE ...]: of training, the shapes of Llama 3.1 8B, micro-batches of 8,192 tokens
  local name=$1 budget=$2
  shift 2
  part "$name" "$budget" "$OUT/$name.json" "$PYTHON" -m evals.train_throughput device=cuda vocab=128256 \
    hidden=4096 intermediate=14336 heads=32 kv_heads=8 layers=32 row_tokens=2048 micro_batch_rows=4 \
    tokens_per_step=16384 rounds=2 steps=3 naive=false tflops=989 "out=$OUT/$name.json" "$@"
}

run_part() {
  case $1 in
    ceilings)
      part ceilings 90 "$OUT/ceilings.json" "$PYTHON" -m evals.ceilings "shapes=$SHAPES" device=cuda \
        "out=$OUT/ceilings.json"
      ;;
    tests) # of the files that hold such tests: others import packages that a machine may lack
      mapfile -t files < <(grep --recursive --files-with-matches --include='test_*.py' 'pytest\.mark\.gpu' tests)
      part tests 420 "$OUT/tests.xml" "$PYTHON" -m pytest -m gpu "${TESTING[@]}" --junitxml "$OUT/tests.xml" \
        "${files[@]}"
      ;;
    kernels) # the tests that run in Triton's interpreter where there is no GPU
      mapfile -t files < <(grep --recursive --files-with-matches --include='*.py' 'DEVICE = "cuda" if' tests)
      part kernels 300 "$OUT/kernels.xml" "$PYTHON" -m pytest "${TESTING[@]}" --junitxml "$OUT/kernels.xml" \
        -k "not hopper" "${files[@]}"
      ;;
    loss) # a micro-batch of Llama 3.1 8B's training: the kernel and its plain twin
      part loss 90 "$OUT/loss.json" "$PYTHON" -m evals.loss_times device=cuda "out=$OUT/loss.json"
      ;;
    step) step step 200 ;;
    fp8) step fp8 240 target_quant=fp8 ;;
    eager) latency eager 150 context_lengths=[1024] engine.graphs=false ;;
    plain) latency plain 260 "context_lengths=[1024,4096]" profile=true ;;
    contexts) latency contexts 360 "context_lengths=[2048,8192]" ;;
    drafts) latency drafts 200 "trees=[chain3,d3_bf2,chain5]" context_lengths=[2048] ;;
    compiled) latency compiled 300 context_lengths=[1024] engine.compile=true ;;
    batches) # without transformers, whose cache has no room beside ours in 80 GB
      latency batches 300 "batch_sizes=[8,64]" context_lengths=[2048] transformers=false
      ;;
    quantised) latency quantised 240 "quants=[none,int4,fp8]" context_lengths=[1024] ;;
    run) # the bundled target, trained for minutes
      part data 60 outputs/stdlib_chat/train.jsonl "$PYTHON" data/stdlib_chat.py outputs/stdlib_chat
      part run 240 "$OUT/run/profile.json" "$PYTHON" -c 'from eagle_train.commands import train; train()' \
        experiment=quickstart device=cuda train.minutes=2 profile=true "out=$OUT/run"
      part export 60 "$OUT/draft/config.json" "$PYTHON" -c 'from eagle_train.commands import export; export()' \
        "checkpoint=$OUT/run" layout=native "out=$OUT/draft"
      part answers 120 "$OUT/answers/results.json" "$PYTHON" -m evals.mt_bench "draft=$OUT/draft" device=cuda limit=48 \
        max_tokens=96 "out=$OUT/answers"
      ;;
    grammar) # of the part `run`: its draft
      part grammar 120 "$OUT/grammar/results.json" "$PYTHON" -m evals.switches "draft=$OUT/draft" device=cuda \
        'switches=[guided_speculation]' "out=$OUT/grammar"
      ;;
    drafters) # likewise; trees that differ by row among them
      part drafters 420 "$OUT/drafters/results.json" "$PYTHON" -m evals.compare device=cuda 'batch_sizes=[1,8]' \
        repeats=6 max_tokens=64 \
        "drafters={eagle: {draft: $OUT/draft}, auto: {drafter: eagle, draft: $OUT/draft, tree: auto}, dynamic: {drafter: \
        eagle, draft: $OUT/draft, tree: {_target_: $DYNAMIC, nodes: 24, depth: 5, top_k: 4}}, ngram: {}, suffix: {}, \
        lookahead: {}}" "out=$OUT/drafters"
      ;;
    kinds)
      part kinds 480 "$OUT/kinds/results.json" "$PYTHON" -m evals.experiments study=kinds 'study.steps=[200]' \
        'study.equal=[time]' 'seeds=[0]' \
        rounds=6 timed_steps=8 batch_size=64 timed_questions=0 device=cuda "out=$OUT/kinds"
      ;;
    *)
      echo "error: $1: must be one of ${PARTS[*]}" >&2
      exit 2
      ;;
  esac
}

if [ -n "${WHEELS:-}" ]; then install_wheels "$WHEELS"; fi
"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "no GPU is visible"' || exit 1
[ $# -gt 0 ] || set -- "${PARTS[@]}"
for one in "$@"; do run_part "$one"; done
part goals 60 "$OUT/goals.json" "$PYTHON" -m evals.gpu_goals "results=$OUT" "out=$OUT/goals.json"
echo "failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
