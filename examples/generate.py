"""Answers prompts with a draft, and says what each answer cost.

python examples/generate.py --target data/tiny_target --draft outputs/quickstart/draft 'What is `len`?' 'And `str`?'
"""

import argparse

from eagle_train.inference import Engine, SamplingParams

parser = argparse.ArgumentParser(description="Answer prompts with a draft.")
parser.add_argument("prompts", nargs="+", help="each is a user's message")
parser.add_argument("--target", default="data/tiny_target", help="a directory or hub id (%(default)s)")
parser.add_argument("--draft", default="outputs/quickstart/draft", help="what eagle-export wrote (%(default)s)")
parser.add_argument("--max-tokens", type=int, default=64, help="of an answer (%(default)s)")
args = parser.parse_args()

engine = Engine(args.target, args.draft, tree="chain3")
chats = [[{"role": "user", "content": prompt}] for prompt in args.prompts]
params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
for prompt, output in zip(args.prompts, engine.generate(chats, params), strict=True):
    stats = output.stats
    print(f"> {prompt}\n{output.text}")
    print(f"({len(output.token_ids)} tokens in {stats.calls} calls of the target, TTFT {1e3 * stats.ttft_s:.0f} ms)\n")
