"""Grammars compiled for a target that has a token for each byte, and the texts that they accept."""

from functools import cache

import pytest

from eagle_train.inference.grammar.guided import check_grammar, ebnf_of

xgrammar = pytest.importorskip("xgrammar", reason="the extra `guided` was not installed")

STOP = 256  # the end, behind the 256 bytes


@cache
def compiler() -> xgrammar.GrammarCompiler:
    """Of a target with a token for each byte."""
    texts = [bytes([byte]) for byte in range(256)] + [b""]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(texts, vocab_size=257, stop_token_ids=[STOP]), max_threads=1)


def compiled(grammar: dict) -> xgrammar.CompiledGrammar:
    check_grammar(grammar)
    return compiler().compile_grammar(ebnf_of(grammar))


def accepts(grammar: dict, text: str) -> bool:
    state = xgrammar.GrammarMatcher(compiled(grammar))
    return all(state.accept_token(byte) for byte in text.encode()) and state.is_completed()
