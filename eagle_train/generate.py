"""eagle-generate: one prompt's answer, with the tokens that came from the draft marked, and its TPC.

Started by torchrun on several processes, these hold the target together (tensor parallel).
"""

import sys
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from eagle_train import distributed
from eagle_train.config import build, check, command, resolve_device
from eagle_train.inference import Engine, Output, SamplingParams
from eagle_train.inference.detokenizer import Detokenizer
from eagle_train.inference.graphs import check_graphs
from eagle_train.models.artifact import load_draft
from eagle_train.models.quantised import Quant, quantised
from eagle_train.models.target import TargetConfig, load_target

GREEN, RESET = "\033[32m", "\033[0m"
COLORS = ("auto", "always", "never")


@dataclass
class Numbers:
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int


@command("generate")
def main(config: DictConfig) -> None:
    distributed.run(lambda: job(config))


def job(config: DictConfig) -> int:
    """One rank's part; returns its exit status."""
    check(config.color in COLORS, f"color={config.color}: must be one of {', '.join(COLORS)}")
    for name in ("compile", "graphs"):
        check(isinstance(config[name], bool), f"{name}={config[name]}: must be true or false")
    check(bool(config.prompt), "prompt is empty: give prompt=TEXT")
    stop = OmegaConf.to_container(config.stop) if OmegaConf.is_config(config.stop) else config.stop
    numbers = build(Numbers, {k: config[k] for k in ("temperature", "top_p", "top_k", "max_tokens", "seed")}, "")
    grammar = {kind: value for kind, value in OmegaConf.to_container(config.grammar).items() if value is not None}
    stop = tuple(stop) if isinstance(stop, list) else stop
    params = SamplingParams(**vars(numbers), stop=stop, grammar=grammar or None)
    given, quant = build(TargetConfig, config.target, "target"), build(Quant, config.quant, "quant")
    path, device = config.draft.path, resolve_device(config.device)
    check_graphs(config.graphs, device)
    check(
        path is not None or quant.scheme == "none", f"quant.scheme={quant.scheme}: no draft to quantise; give draft=DIR"
    )
    world = distributed.start(device, share=None)
    target = load_target(given, device, "tensor" if world.size > 1 else "replicated", world)
    check(target.tokenizer is not None, f"target.path={given.path}: no tokenizer there, and the prompt is text")
    draft = None if path is None else quantised(load_draft(path, target.identity), quant)
    options = {"max_batch_size": 1, "compile": config.compile, "graphs": config.graphs}
    engine = Engine(target, draft, OmegaConf.to_container(config.tree), **options)
    prompt = [{"role": "user", "content": config.prompt}] if config.chat else config.prompt
    output = engine.generate([prompt], params)[0]
    if world.is_main:
        color = config.color == "always" or (config.color == "auto" and sys.stdout.isatty())
        print(marked(output, Detokenizer(engine.requests.texts, params.stop_strings), color))
        print(summary(output), file=sys.stderr)
    return 0


def marked(output: Output, text: Detokenizer, color: bool) -> str:
    """The answer with what the draft proposed and the target accepted in green, or in brackets. `text`: has read none
    of it."""
    before, after = (GREEN, RESET) if color else ("[", "]")

    def read(start: int, end: int) -> str:
        text.read(output.token_ids[start:end])
        return text.tell(last=end == len(output.token_ids))

    pieces, start = [read(0, 1)], 1
    for count in output.rounds:
        if accepted := read(start, start + count - 1):
            pieces.append(before + accepted + after)
        pieces.append(read(start + count - 1, start + count))
        start += count
    return "".join(pieces)


def summary(output: Output) -> str:
    stats = output.stats
    parts = [f"{len(output.token_ids)} tokens ({output.finish_reason})", f"TTFT {stats.ttft_s * 1e3:.1f} ms"]
    if stats.calls:
        parts += [f"TPC {stats.tpc:.2f}", f"TTIT {stats.ttit_s * 1e3:.2f} ms"]
    return ", ".join(parts)


if __name__ == "__main__":
    main()
