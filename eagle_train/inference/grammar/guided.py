"""Guided decoding: which tokens a grammar allows after a sequence, and after each node of a draft tree.

xgrammar compiles the grammars. Its matchers accept tokens and can roll them back, so a tree is walked node by node, and
rejected nodes leave no trace. Paper section 3.4. Knows tokenizers and trees; nothing of models, probabilities or
requests.

Shapes: A active rows, N tree nodes, V vocabulary, W 32-bit words of a bitmask over it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol, cast

import torch

from eagle_train.errors import SURROGATE, UserError, check, one_line, shown
from eagle_train.inference.decode.row_trees import AnyTree, OpenTree, RowTrees
from eagle_train.inference.decode.tree import Tree, chain
from eagle_train.inference.grammar.ebnf import literal
from eagle_train.inference.grammar.expressions import as_ebnf, check_length, kept_ebnf
from eagle_train.inference.grammar.json_schema import check_schema, read_schema, schema_text
from eagle_train.inference.grammar.json_text import WHITESPACE, write_schema
from eagle_train.ops.transfer import HostCopy, host_to_device, to_device

_KINDS = ("json_schema", "regex", "choice", "ebnf")
_CACHE_BYTES = 512 << 20  # of compiled grammars, which xgrammar caches
_CACHED_TEXTS = 128  # grammars whose checked EBNF is cached
_MOST_WHITESPACE = 1000
_PLACE = re.compile(r"^\[[\d:]+\] \S+: ")  # a place in xgrammar's sources, with which its messages begin


def check_grammar(grammar: Any) -> None:
    """Raise UserError unless `grammar` is a mapping as `SamplingParams` describes it. Its value is not compiled."""
    known = isinstance(grammar, Mapping) and set(grammar) <= {*_KINDS, "whitespace"}
    if not (known and sum(kind in grammar for kind in _KINDS) == 1):
        raise UserError(f"grammar={shown(grammar)}: must be a mapping with one of the keys {', '.join(_KINDS)}")
    kind = _kind_of(grammar)
    if wanted := _wanted(kind, grammar[kind]):
        raise UserError(f"grammar.{kind}={shown(grammar[kind])}: {wanted}")
    if "whitespace" in grammar:
        _check_whitespace(grammar["whitespace"], kind)


def _wanted(kind: str, value: Any) -> str | None:
    """What a grammar's value must be, where `value` is not that; else None."""
    if kind == "choice":
        return None if _is_choice(value) else "must be a list of texts, at least one"
    if kind == "json_schema":
        if not isinstance(value, Mapping | bool | str):
            return "must be a schema, as a mapping or as JSON"
    elif not isinstance(value, str):
        return "must be a text"
    return "is empty; leave it out where an answer may be anything" if value == "" else None


def _check_whitespace(whitespace: Any, kind: str) -> None:
    said = f"grammar.whitespace={shown(whitespace)}"
    count = isinstance(whitespace, int) and not isinstance(whitespace, bool) and 0 <= whitespace <= _MOST_WHITESPACE
    right = count or whitespace == "any"
    check(right, f"{said}: must be a whole number from 0 to {_MOST_WHITESPACE}, or any")
    check(kind == "json_schema", f"{said}: is for json_schema only, not for {kind}")


def _kind_of(grammar: Mapping[str, Any]) -> str:
    return next(kind for kind in _KINDS if kind in grammar)


def _is_choice(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(text, str) for text in value)


class NodeMasks(Protocol):
    """What a drafter asks while it grows trees: which tokens the rows' grammars allow."""

    def set_tokens(self, tokens: torch.Tensor) -> None:
        """Give the trees' tokens int64 [A, nodes drafted so far]."""

    def set_nodes(self, tokens: torch.Tensor, parents: torch.Tensor) -> None:
        """The same of trees that differ by row, with the nodes' parents int64 [A, nodes drafted so far]. Nodes that
        were given before are the first of these."""

    def allowed(self, nodes: list[int]) -> torch.Tensor:
        """bool [A, len(nodes), V]: the tokens allowed after each node."""


class StopMasks(NamedTuple):
    """Bitmasks int32 [W] on the device, of the stop tokens and of all others."""

    stop: torch.Tensor
    others: torch.Tensor
    vocab_size: int

    @classmethod
    def of(cls, stop_ids: Iterable[int], vocab_size: int, device: torch.device | str) -> "StopMasks":
        is_stop = torch.zeros(vocab_size, dtype=torch.bool)
        is_stop[list(stop_ids)] = True
        return cls(_as_bitmask(is_stop).to(device), _as_bitmask(~is_stop).to(device), vocab_size)

    def allowed(self, bits: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Grammars' masks int32 [A, n, W] as bool [A, n, V]. `text` [A, 1, W]: the tokens that a mask with other than
        stop tokens keeps. Where the grammar allows nothing but the end, or nothing at all, the stop tokens are."""
        going_on = (bits & self.others).any(-1, keepdim=True)
        return _as_flags(torch.where(going_on, bits & text, self.stop), self.vocab_size)


class Guide:
    """Compiles grammars over a target's tokens. A stop token ends an answer, and only where the grammar may end."""

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Iterable[int], device: torch.device | str):
        """`vocab_size`: the LM head's; `device`: of the masks. Raises UserError where there is no tokenizer, stop token
        or xgrammar."""
        check(tokenizer is not None, "grammar: needs a tokenizer, and the target has none")
        named = sorted(stop_ids)
        check(bool(named), "grammar: needs a stop token, and the target's configs have no eos_token_id")
        stop_ids = [token for token in named if 0 <= token < vocab_size]
        check(bool(stop_ids), f"grammar: needs a stop token; eos_token_id {named} is none of {vocab_size} tokens")
        check(find_spec("xgrammar") is not None, "grammar: needs xgrammar; pip install 'eagle-train[guided]'")
        import xgrammar

        self.matcher_of, self.vocab_size = xgrammar.GrammarMatcher, vocab_size
        texts = _texts_of(tokenizer, vocab_size, stop_ids)
        self.textless = {token for token, text in enumerate(texts) if not text}.difference(stop_ids)
        info = xgrammar.TokenizerInfo(texts, vocab_size=vocab_size, stop_token_ids=stop_ids)
        self.compiler = xgrammar.GrammarCompiler(
            info, max_threads=torch.get_num_threads(), cache_limit_bytes=_CACHE_BYTES
        )
        self.masks = StopMasks.of(stop_ids, vocab_size, device)

    def matcher(self, grammar: Mapping[str, Any], longest: bool = False) -> "Matcher":
        """The initial state of a grammar that `check_grammar` accepts. Raises UserError for one that is invalid, or for
        which the target has no tokens.

        `longest`: the answer may end only where the grammar allows nothing else.
        """
        kind = _kind_of(grammar)
        value = grammar[kind]
        try:
            state = self.matcher_of(self.compiled(grammar))
        except Exception as error:  # xgrammar raises several kinds
            raise UserError(f"grammar.{kind}={shown(value)}: {_reason(error)}") from error
        bits = torch.zeros(1, len(self.masks.stop), dtype=torch.int32, device="cpu")
        state.fill_next_token_bitmask(bits)
        possible = bool(_as_flags(bits, self.vocab_size).any())
        possible &= kind != "json_schema" or not state.is_completed()  # no JSON is empty: its content was lost
        check(possible, f"grammar.{kind}={shown(value)}: the target has no tokens with which to answer so")
        return Matcher(state, longest, self.textless)

    def compiled(self, grammar: Mapping[str, Any]) -> Any:
        """xgrammar's CompiledGrammar."""
        return self.compiler.compile_grammar(ebnf_of(grammar))


def ebnf_of(grammar: Mapping[str, Any]) -> str:
    """A grammar that `check_grammar` accepts as EBNF with a rule `root`.

    Raises UserError for one that cannot be guaranteed, and RecursionError for one that is nested too deeply.
    """
    kind = _kind_of(grammar)
    value = grammar[kind]
    if kind == "choice":
        return _ebnf_of_choice(tuple(value))
    whitespace = grammar.get("whitespace", WHITESPACE)
    text = value if isinstance(value, str) else schema_text(value)
    return _ebnf_of_text(kind, text, None if whitespace == "any" else whitespace)


@lru_cache(_CACHED_TEXTS)
def _ebnf_of_text(kind: str, text: str, whitespace: int | None) -> str:
    text = text.removeprefix("\ufeff")  # a byte order mark
    if kind == "regex":
        return as_ebnf(text)
    if kind == "ebnf":
        return kept_ebnf(text)
    schema = read_schema(text)
    check_schema(schema)
    return write_schema(schema, whitespace)


@lru_cache(_CACHED_TEXTS)
def _ebnf_of_choice(texts: tuple[str, ...]) -> str:
    check_length("".join(texts))
    check(not any(map(SURROGATE.search, texts)), "surrogates not allowed: half of a pair is no character")
    return "root ::= " + " | ".join(map(literal, texts))


def _reason(error: Exception) -> str:
    """An error of xgrammar as one line."""
    if isinstance(error, RecursionError):
        return "is deeper than can be read, or within itself"
    if isinstance(error, UnicodeDecodeError):  # xgrammar cuts its message within a character
        error = ValueError(error.object.decode("utf-8", "replace"))
    return _PLACE.sub("", one_line(error))[:200] or "xgrammar cannot read it"


def _texts_of(tokenizer: Any, vocab_size: int, stop_ids: list[int]) -> list[bytes]:
    """The bytes of each token, empty for special tokens, which have no text, and for padding of the vocabulary."""
    from xgrammar import TokenizerInfo

    info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stop_ids)
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(token for token, content in added if content.special)}
    return [b"" if token in special else bytes(text) for token, text in enumerate(info.decoded_vocab)]


def _as_bitmask(flags: torch.Tensor) -> torch.Tensor:
    """Flags bool [V] as a bitmask int32 [W]."""
    padded = torch.nn.functional.pad(flags, (0, -len(flags) % 32)).view(-1, 32)
    return (padded.long() << torch.arange(32)).sum(-1).to(torch.int32)


def _as_flags(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """A bitmask int32 [..., W] as flags bool [..., V]."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    return (bits.unsqueeze(-1) >> places).bitwise_and_(1).flatten(-2)[..., :vocab_size].bool()


class Matcher:
    """The state of a sequence's grammar after its tokens, and during a round after `ahead` tokens of its tree."""

    def __init__(self, state: Any, longest: bool, textless: set[int]):
        """`longest`: see `Guide.matcher`. `textless`: tokens without text, which a draft may propose. xgrammar does not
        get them, as it would write a line to stderr for each."""
        self.state, self.longest, self.textless = state, longest, textless
        self.ahead = 0

    def accept(self, token: int) -> bool:
        """Advance by a token. Returns False, and does not advance, where the grammar forbids it."""
        return token not in self.textless and self.state.accept_token(token)


class _Walk:
    """Moves a matcher between the nodes of a tree."""

    def __init__(self, matcher: Matcher, parents: Sequence[int]):
        self.matcher, self.parents = matcher, parents
        self.restart()

    def restart(self) -> None:
        """Move to the root, wherever the matcher is: another walk, or a round that raised, may have left it below."""
        self.path = [0]
        self._roll_back(self.matcher.ahead)

    def _roll_back(self, steps: int) -> None:
        if steps > 0:
            self.matcher.state.rollback(steps)
            self.matcher.ahead -= steps

    def go(self, node: int, tokens: list[int]) -> bool:
        """Move to the state after the tokens on the path to `node`. `tokens`: of all N nodes. Stops and returns False
        where the grammar forbids one of them."""
        missing = []
        while node not in self.path:
            missing.append(node)
            node = self.parents[node]
        self._roll_back(len(self.path) - 1 - self.path.index(node))
        del self.path[self.path.index(node) + 1 :]
        for node in reversed(missing):
            if self.matcher.state.is_terminated() or not self.matcher.accept(tokens[node]):
                return False
            self.matcher.ahead += 1
            self.path.append(node)
        return True


class Guidance:
    """Which tokens the rows' grammars allow after the nodes of a round's trees. Can be asked while the trees grow."""

    def __init__(self, guide: Guide, tree: Tree | OpenTree, matchers: list[Matcher | None]):
        """`matchers`: of the A rows; None for a row without a grammar, where everything is allowed. Of an `OpenTree`
        the root alone is known until `set_trees`."""
        self._plan, tree = tree, tree if isinstance(tree, Tree) else chain(0)
        self.guide, self.known, self.tree = guide, set[int](), cast(AnyTree, tree)
        self.matchers = matchers
        self.parents: HostCopy | None = None  # int64 [A, N], of trees that differ by row, until the host has them
        guided = [(row, matcher) for row, matcher in enumerate(matchers) if matcher is not None]
        self.rows = [row for row, _ in guided]
        self.walks = [_Walk(matcher, tree.parents) for _, matcher in guided]
        self.tokens = HostCopy(torch.zeros(len(matchers), tree.num_nodes, dtype=torch.long))
        # int32 [A, N, W], on the CPU: the grammars' masks; all ones where a row has no grammar
        shape = (len(matchers), tree.num_nodes, len(guide.masks.stop))
        self.bits = torch.full(shape, -1, dtype=torch.int32, device="cpu")
        longest = [matcher is not None and matcher.longest for matcher in matchers]
        masks, ends = guide.masks, to_device(longest, guide.masks.stop.device)[:, None, None]
        # [A, 1, W]: the tokens that a mask with other than stop tokens keeps; with `longest` no stop token
        self.text = torch.where(ends, masks.others, masks.others | masks.stop)

    def of(self, order: Sequence[int], tree: Tree | OpenTree | None = None) -> "Guidance | None":
        """The same of some rows, at their roots; None where none of them has a grammar. `tree`: None: the same.

        The matchers are the same too: when the result was asked, this one is to be asked after `reset` alone."""
        matchers = [self.matchers[row] for row in order]
        return Guidance(self.guide, tree or self._plan, matchers) if any(matchers) else None

    def set_tokens(self, tokens: torch.Tensor) -> None:
        """Give the trees' tokens int64 [A, nodes drafted so far]. Their copy to the host begins here, so that the
        device can be given further work before `allowed` waits for it."""
        self.tokens = HostCopy(tokens)

    def set_nodes(self, tokens: torch.Tensor, parents: torch.Tensor) -> None:
        """As `set_tokens`, of trees that differ by row and still grow: with the nodes' parents, int64 like the tokens.
        Nodes that were given before are the first of these."""
        self.set_tokens(tokens)
        self.parents = HostCopy(parents)
        missing = tokens.shape[1] - self.bits.shape[1]
        if missing > 0:
            self.bits = torch.cat((self.bits, self.bits.new_full((len(self.bits), missing, self.bits.shape[2]), -1)), 1)

    def set_trees(self, tokens: torch.Tensor, tree: AnyTree) -> None:
        """As `set_tokens`, of trees that may be others than the plan's."""
        self.set_tokens(tokens)
        if tree is self.tree:
            return
        self.reset()
        self.tree, self.bits = tree, self.bits[:, :1].repeat(1, tree.num_nodes, 1)
        if isinstance(tree, RowTrees):
            self.parents = HostCopy(tree.parents)
        else:
            self._use([tree.parents] * len(self.bits))

    def _use(self, parents: Sequence[Sequence[int]]) -> None:
        """Walk trees with these parents, by row."""
        for row, walk in zip(self.rows, self.walks, strict=True):
            walk.parents = parents[row]

    def allowed(self, nodes: list[int]) -> torch.Tensor:
        """bool [A, len(nodes), V]: the tokens allowed after each node. After a node that is itself forbidden, all are.

        Where the grammar allows nothing but the end, or nothing at all, the stop tokens are allowed.
        """
        return self.guide.masks.allowed(self.bits_after(nodes), self.text)

    def bits_after(self, nodes: list[int]) -> torch.Tensor:
        """int32 [A, len(nodes), W], on the device: the grammars' masks after each node. The host waits for the tokens
        alone, not for what the device was told since."""
        if not self.known.issuperset(nodes):
            self._walk([node for node in nodes if node not in self.known])
        return host_to_device(self.bits[:, nodes], self.text.device)

    def _walk(self, nodes: list[int]) -> None:
        """Ask the grammars for these nodes' masks."""
        if self.parents is not None:
            self._use(self.parents.wait().tolist())
            self.parents = None
        tokens = self.tokens.wait().tolist()
        for node in nodes:
            for row, walk in zip(self.rows, self.walks, strict=True):
                if walk.go(node, tokens[row]) and not walk.matcher.state.is_terminated():
                    walk.matcher.state.fill_next_token_bitmask(self.bits[row], node)
        self.known.update(nodes)

    def rewind(self) -> None:
        """Move the matchers back to the roots, as they must be when the round ends."""
        for walk in self.walks:
            walk.restart()

    def reset(self) -> None:
        """Forget the trees' tokens, for others of the same round."""
        self.rewind()
        self.known.clear()
        self.bits.fill_(-1)
