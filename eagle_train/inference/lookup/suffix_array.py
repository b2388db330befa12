"""The suffixes of tokens in their order, by numpy alone.

A lookup compares ORDER tokens at most, so suffixes are ordered by as many: ranks by one token give ranks by two, these
give ranks by four, and so on. The time depends on the number of tokens alone, not on what repeats.

No library does it. The one with current wheels (pydivsufsort) sorts bytes: it writes each token as two or four of them
and drops the suffixes that begin within a token. It takes about 0.2 microseconds a token where this takes about 0.5.
Reading and tokenising takes several, so the difference does not pay for a compiled dependency.
"""

import numpy as np

ORDER = 32  # tokens by which suffixes are ordered: the longest match that can be found
SEPARATOR = 0xFFFFFFFF  # behind each document; above all tokens, also as bytes
TOKEN_LIMIT = (1 << 31) - 2  # tokens are below it: two ranks and a bit for "none" fit into 64 bits
MOST_TOKENS = TOKEN_LIMIT  # that can be sorted together
SORT_BYTES = 48  # of memory that sorting takes for each token


def sorted_suffixes(tokens: np.ndarray) -> np.ndarray:
    """Where the suffixes of `tokens` begin, in the order of their first ORDER tokens; equal ones by position.

    tokens uint32 [n]: below TOKEN_LIMIT, or SEPARATOR, with which they end. Returns uint32 [m]: suffixes that begin
    with a separator are left out. Takes SORT_BYTES of memory a token.
    """
    assert 0 < tokens.size <= MOST_TOKENS
    assert tokens[-1] == SEPARATOR
    ranks = tokens.astype(np.int64)
    ranks[tokens == SEPARATOR] = TOKEN_LIMIT
    span, distinct = 1, 0
    while span < ORDER and distinct < tokens.size:
        ranks, distinct = _doubled(ranks, span)
        span *= 2
    ranks <<= 32
    ranks |= np.arange(tokens.size)
    ranks.sort()
    ranks &= 0xFFFFFFFF
    places = ranks.astype(np.uint32)
    return places[tokens[places] != SEPARATOR]


def _doubled(ranks: np.ndarray, span: int) -> tuple[np.ndarray, int]:
    """Ranks by 2 * span tokens from ranks by `span`, int64 [n], from 0; and how many there are."""
    keys = ranks + 1  # 0 is what lies beyond the end
    keys <<= 32
    keys[:-span] |= ranks[span:] + 1
    order = np.argsort(keys)
    keys = keys[order]
    rises = keys[1:] != keys[:-1]
    del keys
    ranks = np.empty_like(ranks)
    ranks[order[0]] = 0
    ranks[order[1:]] = np.cumsum(rises)
    return ranks, int(rises.sum()) + 1
