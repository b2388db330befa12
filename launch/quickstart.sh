#!/usr/bin/env bash
# Set-up and the main job on the bundled target: make chat data, train a draft, export it, measure what it is worth.
# Usage: [OUT=DIR] bash launch/quickstart.sh [overrides for eagle-train, e.g. train.steps=100]
# OUT: where all of it is written, outputs/quickstart unless told; an earlier quickstart there is replaced.
# Paths are relative to the repository's root, wherever this is called from.
. "$(dirname "$0")/setup.sh"
set_up
out="${OUT:-outputs/quickstart}"
for override in "$@"; do
    if [[ $override == out=* ]]; then
        echo "error: $override: give the directory as OUT=DIR before the command" >&2
        exit 2
    fi
done
own=(train draft report.md results.json acceptance.png answers.jsonl) # what a quickstart writes
shopt -s nullglob dotglob
for path in "$out"/*; do
    if [[ " ${own[*]} " != *" ${path##*/} "* ]]; then
        echo "error: OUT=$out: has ${path##*/}, which is no quickstart's result; name another directory" >&2
        exit 2
    fi
done
shopt -u nullglob dotglob
eagle-train experiment=quickstart "$@" --cfg job >/dev/null # a mistake must not cost what is there
rm -rf "${own[@]/#/$out/}"

echo "1/4  chat data from Python's standard library, in some 20 seconds"
[ -s outputs/stdlib_chat/heldout.jsonl ] || python data/stdlib_chat.py outputs/stdlib_chat
echo "2/4  training a draft"
# glibc keeps and reuses large blocks, in huge pages, instead of asking the kernel for each: 3 to 14 % faster.
export GLIBC_TUNABLES="glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=4294967296"
eagle-train experiment=quickstart out="$out/train" "$@"
echo "3/4  export"
eagle-export checkpoint="$out/train" layout=native out="$out/draft"
echo "4/4  tokens per call and latency on held-out prompts"
python -m evals.mt_bench draft="$out/draft" limit=48 max_tokens=96 threads=1 out="$out"
echo "report: $out/report.md    results: $out/results.json"
