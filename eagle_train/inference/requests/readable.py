"""Checks that a target can be prompted with texts, or with chats, by its tokenizer and chat template alone.

Commands pass them to `load_target` as `reads`, so that a mistake is reported before a weight is read. Knows nothing of
questions, weights or engines. DESIGN section 3.4.
"""

import warnings
from typing import Any

from eagle_train.corpus.template import SENTINELS, ChatTemplate
from eagle_train.corpus.tokens import misfit
from eagle_train.errors import UserError, check, foreign
from eagle_train.models.loading import TargetConfig

_TEMPLATE = "give a chat template, target.chat_template=FILE"


def texts(config: TargetConfig, tokenizer: Any, vocabulary: int) -> None:
    """Raise UserError where a target of `vocabulary` tokens cannot be given texts; warn where some texts fail."""
    place = f"target.path={config.path}"
    check(
        tokenizer is not None,
        f"{place}: no tokenizer there, and the prompt is text; copy tokenizer.json and tokenizer_config.json from "
        "where the weights come from",
    )
    if note := misfit(tokenizer, vocabulary):
        warnings.warn(f"{place}: {note}", stacklevel=1)
    with foreign(f"{place}: its tokenizer cannot read a text"):
        _check_known(tokenizer("")["input_ids"], tokenizer, vocabulary, place)


def chats(config: TargetConfig, tokenizer: Any, vocabulary: int) -> None:
    """Raise UserError where a target of `vocabulary` tokens cannot be given a user's turn; otherwise as `texts`."""
    texts(config, tokenizer, vocabulary)
    own = config.chat_template is None
    place = f"target.path={config.path}" if own else f"target.chat_template={config.chat_template}"
    check(
        tokenizer.chat_template is not None,
        f"{place}: no chat template there, and a question is a user's turn in a chat; {_TEMPLATE}",
    )
    template = ChatTemplate(tokenizer, config.template_kwargs)
    questions = [{"role": "user", "content": content} for content in SENTINELS]
    try:
        text, other = (template.render([question], prompt=True) for question in questions)
    except UserError as error:
        raise UserError(f"{place}: {error}; {_TEMPLATE}") from error
    check(text != other, f"{place}: the chat template leaves out what a user says; {_TEMPLATE}")
    around = text.replace(SENTINELS[0], "")
    _check_known(tokenizer(around, add_special_tokens=False)["input_ids"], tokenizer, vocabulary, place)


def _check_known(tokens: list[int], tokenizer: Any, vocabulary: int, place: str) -> None:
    """Raise UserError where one of these tokens, which are in every prompt, has no embedding."""
    for token in tokens:
        check(
            token < vocabulary,
            f"{place}: every prompt holds token {token} ({tokenizer.convert_ids_to_tokens(token)!r}), beyond the "
            f"{vocabulary} embeddings of the target; give it the tokenizer that it was trained with",
        )
