"""Dialogues answered by the bundled engine. Knows nothing of files or servers."""

from collections.abc import Iterator
from itertools import islice

from eagle_train.artifacts.format import load_draft
from eagle_train.corpus.answer_parser import AnswerParser
from eagle_train.corpus.columns import CUT
from eagle_train.corpus.render import ChatRenderer
from eagle_train.distributed import ALONE, World
from eagle_train.errors import UserError, one_line
from eagle_train.hardware import resolve_device
from eagle_train.inference import Engine, Requests, SamplingParams
from eagle_train.inference.drafters import make_drafter
from eagle_train.inference.drafters.early import check_early
from eagle_train.inference.requests.readable import chats
from eagle_train.inference.requests.sequence import Output
from eagle_train.models.loading import load_target
from eagle_train.regeneration.dialogue import Dialogue
from eagle_train.regeneration.options import BATCHES_AHEAD, RegenerateConfig


def answer_by_engine(
    config: RegenerateConfig, dialogues: Iterator[Dialogue], world: World = ALONE
) -> Iterator[Dialogue]:
    """The dialogues in their order, answered or failed. A chunk of them is answered turn by turn, in one batch each.

    `world`: the ranks that hold the target together, each of which must be given the same dialogues."""
    placement, path = "tensor" if world.size > 1 else "replicated", config.draft.path
    check_early(config.spec, config.target, path)
    target = load_target(config.target, resolve_device(config.device), placement, world, reads=chats)
    draft = None if path is None else load_draft(path, target.identity)
    drafter = make_drafter(config.spec, target, draft)
    # All of a prompt in one chunk: TTFT does not matter here.
    engine = Engine(target, drafter, max_batch_size=config.batch_size, prefill_tokens=None)
    requests, data = Requests(target), config.data
    kwargs = data.template_kwargs
    renderer = ChatRenderer(target.tokenizer, stop_ids=requests.stop_ids, template_kwargs=kwargs, date=data.date)
    while chunk := list(islice(dialogues, BATCHES_AHEAD * config.batch_size)):
        asked = chunk
        while asked := [dialogue for dialogue in asked if dialogue.next_turn()]:
            _answer_turn(engine, requests, renderer, asked, config)
        yield from chunk


def _answer_turn(
    engine: Engine, requests: Requests, renderer: ChatRenderer, dialogues: list[Dialogue], config: RegenerateConfig
) -> None:
    tried = [(dialogue, _prompt_of(requests, renderer, dialogue)) for dialogue in dialogues]
    prompts = [(dialogue, *found) for dialogue, found in tried if found is not None]
    tokens = [parser.tokens(prompt) for _, parser, prompt in prompts]
    params = [config.params_for(dialogue.seed) for dialogue, _, _ in prompts]
    for (dialogue, parser, prompt), output in zip(prompts, engine.generate(tokens, params), strict=True):
        _add_output(parser, dialogue, prompt, output)


def _prompt_of(requests: Requests, renderer: ChatRenderer, dialogue: Dialogue) -> tuple[AnswerParser, str] | None:
    """The parser of the row's answers and the text that the target is given; None, and the dialogue has failed, if the
    engine refuses it."""
    try:
        parser = AnswerParser(renderer.with_variables(dialogue.variables))
        prompt = parser.prompt(dialogue.messages, dialogue.tools)
        requests.sequence(0, parser.tokens(prompt), SamplingParams())
    except UserError as error:
        dialogue.failed = one_line(error).replace("prompt 0", "its prompt")
    except Exception as error:  # a template is a program and may raise anything
        dialogue.failed = f"it cannot be rendered: {type(error).__name__}: {one_line(error)}"
    else:
        return parser, prompt
    return None


def _add_output(parser: AnswerParser, dialogue: Dialogue, prompt: str, output: Output) -> None:
    """Keep what the engine generated, in the fields that the template renders back to it."""
    if not dialogue.check_end(output.finish_reason):
        return
    written = parser.written(prompt, output.token_ids, output.finish_reason == CUT)
    try:
        message, same = parser.message(dialogue.messages, dialogue.tools, written)
    except UserError as error:
        dialogue.failed = str(error)
        return
    dialogue.retokenised += not same
    assert output.finish_reason is not None  # `generate` returns when all requests are finished
    dialogue.add_answer(message, "tool_calls" if message.get("tool_calls") else output.finish_reason)
