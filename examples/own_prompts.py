"""What a draft is worth on prompts of your own: a text file with one prompt a line.

python examples/own_prompts.py prompts.txt --target data/tiny_target --draft outputs/quickstart/draft

TPC is the number of tokens that each call of the target committed; plain decoding has 1. For published figures use
evals.mt_bench, which measures time as well.
"""

import argparse
from pathlib import Path

from eagle_train.inference import Engine, SamplingParams

parser = argparse.ArgumentParser(description="TPC of a draft on prompts of your own.")
parser.add_argument("prompts", type=Path, help="a text file, one prompt a line")
parser.add_argument("--target", default="data/tiny_target", help="a directory or hub id (%(default)s)")
parser.add_argument("--draft", default="outputs/quickstart/draft", help="what eagle-export wrote (%(default)s)")
parser.add_argument("--trees", nargs="+", default=["chain3", "d2_bf2"], help="to compare (%(default)s)")
parser.add_argument("--max-tokens", type=int, default=96, help="of an answer (%(default)s)")
args = parser.parse_args()

lines = [line for line in args.prompts.read_text("utf-8").splitlines() if line.strip()]
chats = [[{"role": "user", "content": line}] for line in lines]
params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
for tree in args.trees:
    outputs = Engine(args.target, args.draft, tree).generate(chats, params)
    # Sums before the division, so that a long answer counts as much as its tokens. The first token is the prefill's.
    tokens = sum(len(output.token_ids) - 1 for output in outputs)
    calls = sum(output.stats.calls for output in outputs)
    print(f"{tree}: TPC {tokens / max(calls, 1):.2f} ({len(outputs)} answers, {tokens} tokens, {calls} calls)")
