"""Grammars' masks in a recorded stage: computed at each replay, for the rows that there are."""

import torch

from eagle_train.inference.decode.tree import chain
from eagle_train.inference.grammar.guided import Guidance, Guide, StopMasks
from eagle_train.inference.grammar.recorded import RecordedMasks
from tests.support.graph_recorder import Recorder
from tests.support.tiny import tiny_tokenizer

SIZE, STOP, NODES = 96, [2], [0, 2]


def guidance_of(guide: Guide, grammars: list[str | None], longest: bool) -> Guidance:
    matchers = [None if text is None else guide.matcher({"regex": text}, longest) for text in grammars]
    return Guidance(guide, chain(2), matchers)


def test_masks_are_those_of_the_round_that_is_replayed():
    tokenizer, record = tiny_tokenizer(), Recorder()
    guide, tokens = Guide(tokenizer, SIZE, STOP, "cpu"), torch.zeros(3, 3, dtype=torch.long)
    masks = RecordedMasks(StopMasks.of(STOP, SIZE, "cpu"), 3, record)

    def work() -> torch.Tensor:
        masks.set_tokens(tokens)
        return masks.allowed(NODES)

    allowed, replay = record(work)
    for grammars, drafted in ((["ab*", None, "x+"], ["?ab", "?xy", "?xx"]), (["b+c"], ["?bb"]), (["ab?"], ["?ab"])):
        for longest in (False, True):
            given, alike = (guidance_of(guide, grammars, longest) for _ in range(2))
            rows = torch.tensor([[tokenizer.convert_tokens_to_ids(each) for each in text] for text in drafted])
            tokens[: len(rows)] = rows
            masks.use(given)
            replay()
            alike.set_tokens(rows)
            assert torch.equal(allowed[: len(rows)], alike.allowed(NODES))
            given.rewind()
