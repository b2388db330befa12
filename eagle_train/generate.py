"""eagle-generate: one prompt's answer as it comes, with the tokens that came from the draft marked, and its TPC.

Started by torchrun on several processes, these hold the target together (tensor parallel).
"""

import logging
import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from eagle_train import distributed
from eagle_train.artifacts.format import load_draft
from eagle_train.cli import command
from eagle_train.errors import check, within
from eagle_train.hardware import resolve_device
from eagle_train.inference import Engine, EngineConfig, Output, SamplingParams, TokenLogprobs
from eagle_train.inference.decode.dispatcher import Dispatcher
from eagle_train.inference.decode.graphs import check_graphs
from eagle_train.inference.drafters import drafter_spec, make_drafter
from eagle_train.inference.drafters.early import check_early
from eagle_train.inference.options import DraftOptions
from eagle_train.inference.requests.detokenizer import Texts
from eagle_train.inference.requests.marked_text import MarkedText
from eagle_train.inference.requests.readable import chats, texts
from eagle_train.inference.requests.requests import detokenizer_of
from eagle_train.inference.requests.sampling_keys import KEYS as SHARED
from eagle_train.inference.requests.sampling_keys import SamplingKeys
from eagle_train.inference.requests.sequence import OVERFLOW
from eagle_train.models.draft_quantisation import Quant, quantise_draft
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Target
from eagle_train.settings import build
from eagle_train.terminal import COLORS, wants_color

_LOG = logging.getLogger("eagle_train.generate")  # `__name__` is another one where the module is run


@dataclass(kw_only=True)
class Keys(SamplingKeys):
    """Those that say how answers are sampled, but for `stop` and `grammar`, which have several forms."""

    max_tokens: int
    seed: int | None
    n: int
    logprobs: int | None
    include_stop: bool
    relaxed_topk: int
    relaxed_delta: float
    relaxed_thinking: bool


@command("generate")
def main(config: DictConfig) -> None:
    distributed.run(lambda: job(config))


@within("engine")
def job(config: DictConfig) -> int:
    """One rank's part; returns its exit status."""
    check(config.color in COLORS, f"color={config.color}: must be one of {', '.join(COLORS)}")
    check(bool(config.prompt), "prompt is empty: give prompt=TEXT")
    stop = OmegaConf.to_container(config.stop) if OmegaConf.is_config(config.stop) else config.stop
    keys = build(Keys, {each.name: config[each.name] for each in fields(Keys)}, "")
    grammars: Any = OmegaConf.to_container(config.grammar)
    grammar = {kind: value for kind, value in grammars.items() if value is not None}
    stop = tuple(stop) if isinstance(stop, list) else stop
    params = keys.sampling_params(**_own(keys), stop=stop, grammar=grammar or None)
    given, quant = build(TargetConfig, config.target, "target"), build(Quant, config.quant, "quant")
    options, device = build(DraftOptions, config.draft, "draft"), resolve_device(config.device)
    engine_config, spec = build(EngineConfig, config.engine, "engine"), drafter_spec(config.drafter)
    options.check_read_by(spec)
    check_graphs(engine_config.graphs, device)
    tree = OmegaConf.to_container(config.tree)
    Dispatcher(tree)  # what is no tree is told before the target is loaded
    path = options.path
    check(
        path is not None or quant.scheme == "none", f"quant.scheme={quant.scheme}: no draft to quantise; give draft=DIR"
    )
    check_early(spec, given, path)
    world = distributed.start(device, shard_size=None)
    placement = "tensor" if world.size > 1 else "replicated"
    target = load_target(given, device, placement, world, reads=chats if config.chat else texts)
    draft = None if path is None else quantise_draft(load_draft(path, target.identity), quant)
    drafter = make_drafter(spec, target, draft)
    if drafter is None and _gives_tree() and world.is_main:
        _LOG.warning("no draft=, so decoding is plain and tree= is unused")
    engine = Engine(target, drafter, tree, engine_config)
    prompt = [{"role": "user", "content": config.prompt}] if config.chat else config.prompt
    for number in range(params.n):
        one = replace(params.with_seed_after(number), n=1)
        ended = _answer(engine, target, prompt, one, config.color, world.is_main)
        check(ended != "overflow", f"target {target.name}: {OVERFLOW}")
    return 0


def _own(keys: Keys) -> dict[str, Any]:
    """The keys that other commands do not share."""
    return {name: value for name, value in vars(keys).items() if name not in SHARED}


def _answer(engine: Engine, target: Target, prompt: Any, params: SamplingParams, color: str, shows: bool) -> str | None:
    """Print an answer as it comes if it `shows`, and what became of it. Returns its `finish_reason`."""
    request, text = engine.add(prompt, params), detokenizer_of(Texts(target.tokenizer), params)
    marked = MarkedText(text, wants_color(color, sys.stdout), on_terminal=sys.stdout.isatty())
    while not request.finish_reason:
        if engine.step() and shows:
            print(marked.new_text(request), end="", flush=True)
    if shows:
        output = engine.output(request)
        print(*("", *map(partial(_line, target.tokenizer), output.logprobs or [])), sep="\n", flush=True)
        _LOG.info("%s", summary(output))
    return request.finish_reason


def _line(tokenizer: Any, found: TokenLogprobs) -> str:
    """A token's log-probability, and the most likely tokens with theirs."""
    shown = [(found.token_id, found.logprob), *found.top]
    token, *top = (f"{tokenizer.decode([each])!r} {logprob:.4f}" for each, logprob in shown)
    return "  ".join([token, *([f"({', '.join(top)})"] if top else [])])


def _gives_tree() -> bool:
    """Whether the command line has `tree=`: its default is no wish."""
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return any(override.startswith(("tree=", "tree.")) for override in given)


def summary(output: Output) -> str:
    stats, tpc, ttit = output.stats, output.stats.tpc, output.stats.ttit_s
    parts = [f"{len(output.token_ids)} tokens ({output.finish_reason})", f"TTFT {stats.ttft_s * 1e3:.1f} ms"]
    if tpc is not None and ttit is not None:
        parts += [f"TPC {tpc:.2f}", f"TTIT {ttit * 1e3:.2f} ms"]
    return ", ".join([*parts, *(["LOSSY: relaxed acceptance"] if output.is_lossy else [])])


if __name__ == "__main__":
    main()
