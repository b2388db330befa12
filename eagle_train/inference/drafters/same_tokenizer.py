"""Whether two models read the same tokens: by vocabulary, by special tokens, and by what texts are split into.

A token that only one of them knows ends the comparison in one line. Knows nothing of models or weights.
"""

from typing import Any

from eagle_train.errors import check, shown

# Digits, white space, code, several scripts, joined characters, and what tokenizers normalise or do not know.
_TEXTS = (
    "The quick brown fox doesn't jump over 1,234,567.89 lazy dogs.",
    "def f(x):\n    return {'a': [x ** 2, None]}  # \t tab\r\n\n\n",
    " leading, trailing  and   many    spaces   ",
    "Größe, naïve, ﬁne, Ａ, e\u0301, İ",
    "你好，世界。こんにちは 안녕하세요 Привет مرحبا",
    "👩‍👩‍👧 🇩🇪 \u200b \ufeff",
)


def check_same_tokenizer(own: Any, target: Any, place: str) -> None:
    """Raise UserError, which begins with `place` and says what differs first, unless two tokenizers of transformers
    give the same ids to the same texts."""
    begin = f"{place}: another tokenizer than the target's"
    ids, wanted = own.get_vocab(), target.get_vocab()
    if ids != wanted:
        check(False, f"{begin}: {_first_other(ids, wanted)}")
    special, other = _special_tokens(own), _special_tokens(target)
    differs = sorted(special.items() ^ other.items(), key=lambda pair: pair[1])
    if differs:
        token, number = differs[0]
        which = "is special here alone" if token in special else "is special in the target's alone"
        check(False, f"{begin}: token {number}, {shown(token)}, {which}")
    for text in (*_TEXTS, *(f"a{token}b" for token in special)):
        here, there = (each(text, add_special_tokens=False)["input_ids"] for each in (own, target))
        check(here == there, f"{begin}: {shown(text)} is {shown(here)} here and {shown(there)} in the target's")


def known_tokens(tokenizer: Any) -> int:
    """One more than the greatest id that a tokenizer knows; a model's ids from there on are padding."""
    return max(tokenizer.get_vocab().values()) + 1


def _first_other(ids: dict[str, int], wanted: dict[str, int]) -> str:
    """Where two vocabularies first differ, by id."""
    here, there = ({number: token for token, number in each.items()} for each in (ids, wanted))
    number = min(number for number in here.keys() | there.keys() if here.get(number) != there.get(number))
    token, other = (shown(each[number]) if number in each else "unknown" for each in (here, there))
    return f"token {number} is {token} here and {other} in the target's"


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """By their text, the ids of tokens that are read as a whole and left out of texts that people see."""
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: number for number, token in added if token.special}
