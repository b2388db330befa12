"""Guided decoding: what a grammar lets follow a sequence, and each node of the tree below it. Paper section 3.4.

xgrammar compiles the grammars and reads tokens, which it can take back: so trees are walked, and what is rejected
leaves no trace. Knows tokenizers and trees; nothing of models, probabilities or requests.

Shapes: A active rows, N tree nodes, V vocabulary, W 32-bit words that hold a bit for each of its tokens.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from eagle_train.errors import SURROGATE, UserError, check, one_line, shown
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.grammar.ebnf import literal
from eagle_train.inference.grammar.expressions import as_ebnf, check_length, kept_ebnf
from eagle_train.inference.grammar.json_schema import check_schema, read_schema, schema_text
from eagle_train.inference.grammar.json_text import WHITESPACE, write_schema

KINDS = ("json_schema", "regex", "choice", "ebnf")
CACHE_BYTES = 512 << 20  # of compiled grammars, for requests that ask for the same
CACHED_TEXTS = 128  # grammars whose EBNF is kept, so that a service that asks for the same writes and checks it once
MOST_WHITESPACE = 1000
PLACE = re.compile(r"^\[[\d:]+\] \S+: ")  # where in xgrammar's sources an error was found


def check_grammar(grammar: Any) -> None:
    """Raise UserError unless `grammar` maps one of KINDS to what that kind is written in.

    Beside json_schema, `whitespace` may say how many characters may stand between two tokens of JSON, or "any".
    """
    known = isinstance(grammar, Mapping) and set(grammar) <= {*KINDS, "whitespace"}
    if not (known and sum(kind in grammar for kind in KINDS) == 1):
        raise UserError(f"grammar={shown(grammar)}: must be a mapping with one of the keys {', '.join(KINDS)}")
    kind = kind_of(grammar)
    if wanted := _wanted(kind, grammar[kind]):
        raise UserError(f"grammar.{kind}={shown(grammar[kind])}: {wanted}")
    if "whitespace" in grammar:
        _check_whitespace(grammar["whitespace"], kind)


def _wanted(kind: str, value: Any) -> str | None:
    """What would be right where a grammar's value is none."""
    if kind == "choice":
        return None if is_choice(value) else "must be a list of texts, at least one"
    if kind == "json_schema":
        if not isinstance(value, Mapping | bool | str):
            return "must be a schema, as a mapping or as JSON"
    elif not isinstance(value, str):
        return "must be a text"
    return "is empty; leave it out where an answer may be anything" if value == "" else None


def _check_whitespace(whitespace: Any, kind: str) -> None:
    said = f"grammar.whitespace={shown(whitespace)}"
    count = isinstance(whitespace, int) and not isinstance(whitespace, bool) and 0 <= whitespace <= MOST_WHITESPACE
    right = count or whitespace == "any"
    check(right, f"{said}: must be a whole number from 0 to {MOST_WHITESPACE}, or any")
    check(kind == "json_schema", f"{said}: is for json_schema only, not for {kind}")


def kind_of(grammar: Mapping[str, Any]) -> str:
    return next(kind for kind in KINDS if kind in grammar)


def is_choice(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(text, str) for text in value)


class Guide:
    """Grammars over a target's tokens. An answer ends with a stop token, exactly where its grammar may end."""

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Iterable[int], device: torch.device | str):
        """`vocab_size`: the LM head's. Raises UserError where there is no tokenizer, stop token or xgrammar."""
        check(tokenizer is not None, "grammar: needs a tokenizer, and the target has none")
        named = sorted(stop_ids)
        check(bool(named), "grammar: needs a stop token, and the target's configs have no eos_token_id")
        stop_ids = [token for token in named if 0 <= token < vocab_size]
        check(bool(stop_ids), f"grammar: needs a stop token; eos_token_id {named} is none of {vocab_size} tokens")
        check(find_spec("xgrammar") is not None, "grammar: needs xgrammar; pip install 'eagle-train[guided]'")
        import xgrammar

        self.matcher_of, self.vocab_size = xgrammar.GrammarMatcher, vocab_size
        texts = texts_of(tokenizer, vocab_size, stop_ids)
        self.unsaid = {token for token, text in enumerate(texts) if not text}.difference(stop_ids)
        info = xgrammar.TokenizerInfo(texts, vocab_size=vocab_size, stop_token_ids=stop_ids)
        self.compiler = xgrammar.GrammarCompiler(
            info, max_threads=torch.get_num_threads(), cache_limit_bytes=CACHE_BYTES
        )
        is_stop = torch.zeros(vocab_size, dtype=torch.bool)
        is_stop[stop_ids] = True
        self.stop, self.others = pack(is_stop).to(device), pack(~is_stop).to(device)

    def matcher(self, grammar: Mapping[str, Any], longest: bool = False) -> "Matcher":
        """The beginning of a grammar, see `check_grammar`. Raises UserError for one that makes no sense.

        `longest`: the answer may end only where the grammar lets nothing else follow.
        """
        kind = kind_of(grammar)
        value = grammar[kind]
        try:
            state = self.matcher_of(self.compiled(grammar))
        except Exception as error:  # xgrammar knows nothing more special
            raise UserError(f"grammar.{kind}={shown(value)}: {reason(error)}") from error
        bits = torch.zeros(1, len(self.stop), dtype=torch.int32)
        state.fill_next_token_bitmask(bits)
        possible = bool(unpack(bits, self.vocab_size).any())
        possible &= kind != "json_schema" or not state.is_completed()  # no JSON is empty: what it asks for was lost
        check(possible, f"grammar.{kind}={shown(value)}: the target has no tokens with which to answer so")
        return Matcher(state, longest, self.unsaid)

    def compiled(self, grammar: Mapping[str, Any]) -> Any:
        """xgrammar's CompiledGrammar."""
        return self.compiler.compile_grammar(ebnf_of(grammar))


def ebnf_of(grammar: Mapping[str, Any]) -> str:
    """A grammar, see `check_grammar`, as EBNF whose first rule is `root`.

    Raises UserError for one that cannot be kept, and RecursionError for one that is too deep.
    """
    kind = kind_of(grammar)
    value = grammar[kind]
    if kind == "choice":
        return _ebnf_of_choice(tuple(value))
    whitespace = grammar.get("whitespace", WHITESPACE)
    text = value if isinstance(value, str) else schema_text(value)
    return _ebnf_of_text(kind, text, None if whitespace == "any" else whitespace)


@lru_cache(CACHED_TEXTS)
def _ebnf_of_text(kind: str, text: str, whitespace: int | None) -> str:
    text = text.removeprefix("\ufeff")  # which some editors write before a file's text
    if kind == "regex":
        return as_ebnf(text)
    if kind == "ebnf":
        return kept_ebnf(text)
    schema = read_schema(text)
    check_schema(schema)
    return write_schema(schema, whitespace)


@lru_cache(CACHED_TEXTS)
def _ebnf_of_choice(texts: tuple[str, ...]) -> str:
    check_length("".join(texts))
    check(not any(map(SURROGATE.search, texts)), "surrogates not allowed: half of a pair is no character")
    return "root ::= " + " | ".join(map(literal, texts))


def reason(error: Exception) -> str:
    """What is wrong with a grammar, in a line."""
    if isinstance(error, RecursionError):
        return "is deeper than can be read, or within itself"
    if isinstance(error, UnicodeDecodeError):  # xgrammar cuts its message within a character
        error = ValueError(error.object.decode("utf-8", "replace"))
    return PLACE.sub("", one_line(error))[:200] or "xgrammar cannot read it"


def texts_of(tokenizer: Any, vocab_size: int, stop_ids: list[int]) -> list[bytes]:
    """What each token adds to a text; nothing for special tokens, which a text does not show, and for padding."""
    from xgrammar import TokenizerInfo

    info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stop_ids)
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(token for token, content in added if content.special)}
    return [b"" if token in special else bytes(text) for token, text in enumerate(info.decoded_vocab)]


def pack(flags: torch.Tensor) -> torch.Tensor:
    """bool [V] as bits, int32 [W]."""
    padded = torch.nn.functional.pad(flags, (0, -len(flags) % 32)).view(-1, 32)
    return (padded.long() << torch.arange(32)).sum(-1).to(torch.int32)


def unpack(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int32 [..., W] as bool [..., V]."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    return (bits.unsqueeze(-1) >> places).bitwise_and_(1).flatten(-2)[..., :vocab_size].bool()


class Matcher:
    """Where a sequence stands in its grammar: all its tokens were read, and within a round `ahead` others."""

    def __init__(self, state: Any, longest: bool, unsaid: set[int]):
        """`unsaid`: tokens without text, which a draft may propose; of each, xgrammar writes a line to stderr."""
        self.state, self.longest, self.unsaid = state, longest, unsaid
        self.ahead = 0

    def accept(self, token: int) -> bool:
        """Read a token. False for one that the grammar forbids, which is not read."""
        return token not in self.unsaid and self.state.accept_token(token)


class Walk:
    """A matcher on its way through a tree's nodes."""

    def __init__(self, matcher: Matcher, parents: tuple[int, ...]):
        self.matcher, self.parents, self.path = matcher, parents, [0]
        self.back(matcher.ahead)  # a round that failed may have left it on its way

    def back(self, steps: int) -> None:
        if steps > 0:
            self.matcher.state.rollback(steps)
            self.matcher.ahead -= steps

    def go(self, node: int, tokens: list[int]) -> bool:
        """Have read the tokens [N] of exactly the nodes down to `node`. False where the grammar forbids one of them."""
        missing = []
        while node not in self.path:
            missing.append(node)
            node = self.parents[node]
        self.back(len(self.path) - 1 - self.path.index(node))
        del self.path[self.path.index(node) + 1 :]
        for node in reversed(missing):
            if self.matcher.state.is_terminated() or not self.matcher.accept(tokens[node]):
                return False
            self.matcher.ahead += 1
            self.path.append(node)
        return True


class Guidance:
    """What the grammars let follow the nodes of a round's trees, asked for as the trees grow.

    `matchers` [A], None for a row without a grammar, in which everything is allowed.
    """

    def __init__(self, guide: Guide, tree: Tree, matchers: list[Matcher | None]):
        self.guide, self.known = guide, set[int]()
        guided = [(row, matcher) for row, matcher in enumerate(matchers) if matcher is not None]
        self.rows = [row for row, _ in guided]
        self.walks = [Walk(matcher, tree.parents) for _, matcher in guided]
        self.tokens = [[0] * tree.num_nodes for _ in guided]
        self.bits = torch.full((len(matchers), tree.num_nodes, len(guide.stop)), -1, dtype=torch.int32)
        longest = [matcher is not None and matcher.longest for matcher in matchers]
        ends = torch.tensor(longest, device=guide.stop.device)[:, None, None]
        self.text = torch.where(ends, guide.others, guide.others | guide.stop)  # [A, 1, W]

    def read(self, tokens: torch.Tensor) -> None:
        """The trees' tokens [A, N], as far as they are drafted."""
        self.tokens = tokens[self.rows].tolist()

    def allowed(self, nodes: list[int]) -> torch.Tensor:
        """bool [A, nodes, V]: what may follow each. Below a token that is forbidden itself, everything.

        Where a grammar lets nothing follow but the end, or nothing at all, the stop tokens may.
        """
        for node in nodes:
            if node not in self.known:
                for row, walk, tokens in zip(self.rows, self.walks, self.tokens, strict=True):
                    if walk.go(node, tokens) and not walk.matcher.state.is_terminated():
                        walk.matcher.state.fill_next_token_bitmask(self.bits[row], node)
        self.known.update(nodes)
        bits = self.bits[:, nodes].to(self.text.device)
        going_on = (bits & self.guide.others).any(-1, keepdim=True)
        return unpack(torch.where(going_on, bits & self.text, self.guide.stop), self.guide.vocab_size)

    def rewind(self) -> None:
        """The matchers stand at the roots again."""
        for walk in self.walks:
            walk.go(0, [])

    def restart(self) -> None:
        """As new: no token of the trees is known."""
        self.rewind()
        self.known.clear()
        self.bits.fill_(-1)
