"""vLLM on token ids: run by vLLM's own interpreter, for vllm.py. Imports nothing of eagle_train.

The job is a JSON file: `llm` are `LLM`'s keyword arguments, `sampling` those of `SamplingParams`, `prompts` lists of
token ids, `answer` the JSON file for the result, which is whole or not there.

    PYTHON eagle_train/diagnosis/vllm_job.py JOB.json
"""

import json
import os
import sys

from vllm import LLM, SamplingParams

PREFIX = "vllm:spec_decode_num_"
COUNTERS = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")


def main(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    llm = LLM(**job["llm"])
    prompts = [{"prompt_token_ids": tokens} for tokens in job["prompts"]]
    outputs = llm.generate(prompts, SamplingParams(**job["sampling"]), use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    found = {name: metrics[PREFIX + name] for name in COUNTERS}
    answer = {name: metric.values if name.endswith("per_pos") else metric.value for name, metric in found.items()}
    answer["token_ids"] = [list(output.outputs[0].token_ids) for output in outputs]
    partial = job["answer"] + ".partial"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os.replace(partial, job["answer"])


if __name__ == "__main__":
    main(sys.argv[1])
