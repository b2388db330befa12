"""A drafter of every kind, each made in one place for any target. Who adds one here adds all proofs of
test_every_drafter.py and test_lossless.py.

The targets' layers change little and what comes next hangs mostly on the last token: so the first layers draft well,
answers repeat themselves, and drafters of all kinds are right at times and wrong at others.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from eagle_train.drafts import Draft
from eagle_train.inference import Drafter, DraftModel, Eagle, Engine, LayerSkip, dynamic
from eagle_train.inference.decode.named_trees import AutoTree
from eagle_train.inference.drafters.drafter import TreePlan
from eagle_train.inference.drafters.lookahead import Lookahead, LookaheadOptions
from eagle_train.inference.drafters.ngram import Ngram
from eagle_train.inference.drafters.retrieval import Retrieval
from eagle_train.inference.drafters.suffix import Suffix
from eagle_train.inference.drafters.trained import drafter_of
from eagle_train.inference.lookup.datastore import Datastore
from eagle_train.inference.lookup.ngrams import NgramOptions
from eagle_train.inference.lookup.suffixes import SuffixOptions
from eagle_train.models.target import Target
from examples.own_drafter import LastPlace
from tests.support.datastores import write_datastore
from tests.support.inside import inside
from tests.support.prompt_lookup import PromptLookup
from tests.support.tiny import (
    continued,
    random_tokens,
    tiny_model,
    tiny_tokenizer,
    trained_draft,
    trained_eagle3,
    trained_medusa,
    trained_mtp,
    trained_peagle,
)

FAMILIES = ["llama", "gemma2", "gpt_oss", "llama4", "qwen3_moe"]
LENGTH = 20
DRAFTS: dict[int, tuple[Target, Draft]] = {}  # trained once for each target, which is kept, and so its id
OF_KINDS: dict[tuple[str, int, str], tuple[Target, Draft]] = {}
WHOLE: dict[int, Target] = {}  # by the id of a target that ranks divide: the same, whole, which drafts are made from
PROMPTS = random_tokens(5, 17, 9, 1, 33, 17, seed=1)
PROMPTS[5] = PROMPTS[4][:16] + PROMPTS[5][:3]  # begins like another


@dataclass(frozen=True)
class Kind:
    """A way to draft. `make`: for a target and texts like those that it will write; `tree` and `options`: the engine's.

    `draws`: its drafts may also be drawn from its own distribution. `remembers`: what it drafts for a request depends
    on what was decoded before. `is_moody`: the engine finds drafts cheap for a while and dear for a while.
    """

    make: Callable[[Target, list[list[int]]], Drafter]
    tree: Any = "d3_bf2"
    draws: bool = False
    remembers: bool = False
    is_moody: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def engine(self, target: Target, texts: list[list[int]], **options: Any) -> Engine:
        """With a new drafter. `options`: as of `Engine`."""
        engine = Engine(target, self.make(target, texts), self.tree, **{"max_batch_size": 3} | self.options | options)
        if self.is_moody:
            adaptive = inside(engine).adaptive
            adaptive._costs = moody(adaptive.plain)
            adaptive.opens = lambda drafter, most, rows: True  # drafts are to come and go within requests
        return engine


def moody(plain: TreePlan) -> SimpleNamespace:
    """Costs of rounds in place of measured ones, so that each run is the same: drafts are cheap, and then dear, in
    turns of a few rounds."""
    asked = count()

    def seconds(plan: TreePlan, rows: int, in_part: bool = False) -> float:
        if plan is plain:
            next(asked)
            return 1.0
        return (0.3 if next(asked) // 16 % 2 else 3.0) * (1 + 0.1 * plan.tree.max_depth)

    return SimpleNamespace(seconds=seconds, observe=lambda *_: None, unsettle=lambda: None, doubt=lambda *_: 0.1)


def eagle(target: Target, texts: list[list[int]], alignment: str = "accepted") -> Eagle:
    return Eagle(draft_for(target), target, alignment)


def draft_for(target: Target) -> Draft:
    """A new copy of one that is right at times."""
    if id(target) not in DRAFTS:
        DRAFTS[id(target)] = target, trained_draft(in_fp32(target), steps=24)
    return copy.deepcopy(DRAFTS[id(target)][1])


def patient(drafter: LastPlace) -> LastPlace:
    """With time for its drafts while other tests take the machine's: a late draft is a fault, which others test."""
    drafter.timeout_s = 60.0
    return drafter


def in_fp32(target: Target) -> Target:
    """The same, whole, in fp32, as it was before an engine had it, which may have changed its modules."""
    model = whole(target).model
    fresh = type(model)(copy.deepcopy(model.config)).float()
    fresh.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    return Target(fresh)


def of_kind(made: Callable[..., Draft], target: Target, alignment: str = "accepted", **kind: Any) -> Eagle:
    """The same with a draft of another kind."""
    key = (made.__name__, id(target), str(kind))
    if key not in OF_KINDS:
        steps = 40 if made in (trained_medusa, trained_peagle) else 24  # of which it takes more to be right at all
        OF_KINDS[key] = target, made(in_fp32(target), steps, **kind)
    return drafter_of(copy.deepcopy(OF_KINDS[key][1]), target, alignment)


def eagle3(target: Target, alignment: str = "accepted", **kind: Any) -> Eagle:
    """That reads the states of the target's first layers."""
    layers = [each for each in (1, 2) if each < target.config.num_hidden_layers]
    return of_kind(trained_eagle3, target, alignment, layers=layers, **kind)


def eagle3_of_some_tokens(target: Target) -> Eagle:
    some = list(range(1, target.identity.vocab_size))
    return eagle3(target, "last", num_layers=2, norm_output=True, vocab_size=len(some), vocabulary=some)


def peagle(target: Target) -> Eagle:
    """Of some of the tokens, with mask slots for the deeper levels."""
    some = list(range(1, target.identity.vocab_size))
    return of_kind(trained_peagle, target, vocab_size=len(some), vocabulary=some)


@cache
def target_of(family: str) -> Target:
    """Nobody may change it."""
    model = tiny_model(family)
    with torch.no_grad():
        for layer in model.model.layers:
            for name, weight in layer.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    weight.mul_(0.2)
    return Target(model, tiny_tokenizer(), name=f"tiny-{family}")


@cache
def answers(family: str) -> list[list[int]]:
    """What transformers goes on with after PROMPTS, and a little more than LENGTH of it."""
    return [continued(target_of(family), prompt, LENGTH + 10) for prompt in PROMPTS]


def texts_of(family: str) -> list[list[int]]:
    """Prompts with their answers."""
    return [prompt + answer for prompt, answer in zip(PROMPTS, answers(family), strict=True)]


def whole(target: Target) -> Target:
    return WHOLE.get(id(target), target)


def close_to(target: Target, noise: float = 0.02, seed: int = 1) -> Target:
    """A copy of a target that is a little wrong, so that its drafts are accepted at times."""
    model, generator = copy.deepcopy(target.model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return Target(model, target.tokenizer, name="near")


def retrieval(target: Target, texts: list[list[int]]) -> Retrieval:
    """Half of its documents are the texts, and half only begin like them."""
    size, folder = target.identity.vocab_size, TemporaryDirectory()
    wrong = [text[:-9] + [token % size for token in range(9)] for text in texts]
    drafter = Retrieval(Datastore.open(write_datastore(Path(folder.name) / "store", [*wrong, *texts], vocabulary=size)))
    drafter.least_match, drafter.folder = 1, folder  # which is there as long as the drafter is
    return drafter


KINDS = {
    "eagle": Kind(eagle, draws=True),
    "eagle, last": Kind(lambda target, texts: eagle(target, texts, "last"), "chain3", draws=True, remembers=True),
    "eagle3": Kind(lambda target, _: eagle3(target), draws=True),
    "eagle3, last": Kind(lambda target, _: eagle3_of_some_tokens(target), "chain3", draws=True, remembers=True),
    "medusa": Kind(lambda target, _: of_kind(trained_medusa, target), draws=True),
    "mtp": Kind(lambda target, _: of_kind(trained_mtp, target), draws=True),
    "mtp, chained": Kind(lambda target, _: of_kind(trained_mtp, target, modules=2), draws=True),
    "peagle": Kind(lambda target, _: peagle(target), draws=True),
    "draft_model": Kind(lambda target, _: DraftModel(close_to(whole(target)), target), "n8", draws=True),
    "layer_skip": Kind(lambda target, _: LayerSkip(target, target.config.num_hidden_layers - 1), draws=True),
    "ngram": Kind(lambda *_: Ngram(NgramOptions(3, 3, is_public_pool=True, pool_tokens=500)), remembers=True),
    "suffix": Kind(lambda *_: Suffix(SuffixOptions(max_spec_offset=1.0, pool_tokens=500)), remembers=True),
    "lookahead": Kind(lambda *_: Lookahead(LookaheadOptions(4, 4, 3))),
    "retrieval": Kind(retrieval, "d2_bf2"),
    "tree=dynamic": Kind(eagle, dynamic(6, 3, 2)),
    "tree=auto": Kind(eagle, AutoTree((1, 3)), draws=True, remembers=True, is_moody=True),
    "engine.gate": Kind(eagle, draws=True, remembers=True, is_moody=True, options={"gate": True}),
    "own, of texts": Kind(lambda *_: patient(LastPlace(1)), "chain3"),
    "own, on the device": Kind(lambda *_: PromptLookup()),
}

DRAWN = ("multinomial", "multinomial_without_replacement")
# Both ways for those that grow their trees each by other code.
GROWING = ("eagle", "medusa", "peagle", "draft_model", "layer_skip")


def drawing(kinds: Iterable[str]) -> list[tuple[str, str]]:
    """Of these kinds those that draw, each with the ways in which it does so that are its own."""
    return [(kind, mode) for kind in kinds if KINDS[kind].draws for mode in (DRAWN if kind in GROWING else DRAWN[1:])]


# Those that can be drafters of one engine: its tree is theirs too.
TOGETHER = [name for name, kind in KINDS.items() if not kind.is_moody and kind.tree != KINDS["tree=dynamic"].tree]


def with_several(target: Target, texts: list[list[int]], names: Iterable[str] = TOGETHER, **options: Any) -> Engine:
    """An engine with these drafters, of TOGETHER, by name."""
    drafters = {name: KINDS[name].make(target, texts) for name in names}
    return Engine(target, drafters, "d3_bf2", **{"max_batch_size": 9} | options)
