"""Whether texts, or chats, can be put to a target: told by its tokenizer and chat template, before a weight is read.

What commands give `load_target` as `reads`. Knows nothing of questions, weights or engines. DESIGN section 3.4.
"""

import warnings
from typing import Any

from eagle_train.corpus.template import SENTINELS, ChatTemplate
from eagle_train.corpus.tokens import misfit
from eagle_train.errors import UserError, check, foreign
from eagle_train.models.loading import TargetConfig

TEMPLATE = "give a chat template, target.chat_template=FILE"


def texts(config: TargetConfig, tokenizer: Any, vocabulary: int) -> None:
    """Raise UserError where no text can be put to a target of `vocabulary` tokens; warn where some cannot."""
    place = f"target.path={config.path}"
    check(
        tokenizer is not None,
        f"{place}: no tokenizer there, and the prompt is text; copy tokenizer.json and tokenizer_config.json from "
        "where the weights come from",
    )
    if note := misfit(tokenizer, vocabulary):
        warnings.warn(f"{place}: {note}", stacklevel=1)
    with foreign(f"{place}: its tokenizer cannot read a text"):
        check_known(tokenizer("")["input_ids"], tokenizer, vocabulary, place)


def chats(config: TargetConfig, tokenizer: Any, vocabulary: int) -> None:
    """Raise UserError where no user's turn can be put to a target of `vocabulary` tokens; else as `texts`."""
    texts(config, tokenizer, vocabulary)
    own = config.chat_template is None
    place = f"target.path={config.path}" if own else f"target.chat_template={config.chat_template}"
    check(
        tokenizer.chat_template is not None,
        f"{place}: no chat template there, and a question is a user's turn in a chat; {TEMPLATE}",
    )
    template = ChatTemplate(tokenizer, config.template_kwargs)
    questions = [{"role": "user", "content": content} for content in SENTINELS]
    try:
        text, other = (template.render([question], prompt=True) for question in questions)
    except UserError as error:
        raise UserError(f"{place}: {error}; {TEMPLATE}") from error
    check(text != other, f"{place}: the chat template leaves out what a user says; {TEMPLATE}")
    around = text.replace(SENTINELS[0], "")
    check_known(tokenizer(around, add_special_tokens=False)["input_ids"], tokenizer, vocabulary, place)


def check_known(tokens: list[int], tokenizer: Any, vocabulary: int, place: str) -> None:
    """Raise UserError for tokens, of any prompt, that the target has no embedding of."""
    for token in tokens:
        check(
            token < vocabulary,
            f"{place}: every prompt holds token {token} ({tokenizer.convert_ids_to_tokens(token)!r}), beyond the "
            f"{vocabulary} embeddings of the target; give it the tokenizer that it was trained with",
        )
