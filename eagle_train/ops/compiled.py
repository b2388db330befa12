"""A model's forward by torch.compile, whole, with an attention that is called from within and stays as it is.

What lies between two attentions is fused, and nothing of a model's own Python runs any more. Which keys an attention
sees changes with every call; the graph does not know, so that it is compiled for numbers of rows and tokens alone.
Knows no models.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from eagle_train.errors import OptionError, one_line
from eagle_train.ops.rule import Attend, Rule
from eagle_train.ops.torch_private import compile_errors, with_own_graphs, with_own_sizes, with_static_floats

Forward = Callable[..., torch.Tensor]
"""forward(*tensors [B, T, ...], attend) -> [B, T, H]"""

_current_attend: ContextVar[Attend] = ContextVar("attend")

# `kept` stands for whatever an attention keeps, keys and values say: by it the compiler knows that calls have an order.
torch.library.define(
    "eagle_train::attention",
    "(Tensor(a!) kept, int layer, Tensor q, Tensor k, Tensor v, "
    "float scale, int? window, int? chunk, float? softcap, Tensor? sinks, int skip_first) -> Tensor",
)


@torch.library.impl("eagle_train::attention", "CompositeExplicitAutograd")
def _call_current_attend(
    kept: torch.Tensor, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rule: Any
) -> torch.Tensor:
    """What the current call of a `Compiled` was given attends: [B, Q, T, D], each token's heads side by side, as the
    product that follows reads them."""
    return _current_attend.get()(layer, q, k, v, Rule(*rule)).transpose(1, 2).contiguous().transpose(1, 2)


@torch.library.register_fake("eagle_train::attention")
def _attend_shape(
    kept: torch.Tensor, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rule: Any
) -> torch.Tensor:
    rows, heads, tokens, _ = q.shape
    return q.new_empty(rows, tokens, heads, v.shape[-1]).transpose(1, 2)


class Compiled:
    """`forward` by torch.compile; what it computes otherwise, to the last bits.

    It is compiled for one row and for several, and for one token and for several: four graphs at most, all sizes else
    are theirs. The model must stay as it is from then on.
    """

    def __init__(self, forward: Forward, device: torch.device | str):
        def graph(kept: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
            def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
                own = (rule.scale, rule.window, rule.chunk, rule.softcap, rule.sinks, rule.skip_first)
                return torch.ops.eagle_train.attention(kept, layer, q, k, v, *own)

            return forward(*tensors, attend)

        options: dict[str, Any] = {"guard_filter_fn": _keep_shape_guards}
        with compiling():
            self.graph = torch.compile(with_own_graphs(graph), dynamic=True, fullgraph=True, options=options)
        self.kept = torch.zeros(0, device=device)

    def __call__(self, *given: Any) -> torch.Tensor:
        """`forward` of tensors and `attend`, which may not keep what it is given but copies."""
        *tensors, attend = given
        before = _current_attend.set(attend)
        try:
            return self.graph(self.kept, *map(_as_made_new, tensors))
        finally:
            _current_attend.reset(before)

    @with_own_sizes
    @with_static_floats  # a model's own numbers stay
    def prepare(self, *tensors: torch.Tensor) -> None:
        """Compile for tensors of these sizes. Raises OptionError where that fails, for want of a compiler, say."""
        with compiling():
            own = (x.clone() for x in tensors)  # one tensor given twice would be compiled as such
            self(*own, lambda layer, q, k, v, rule: q.new_zeros(*q.shape[:-1], v.shape[-1]))


def _as_made_new(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, and with the strides of a new tensor: those of a dimension of one entry may be any, of the half of a
    row's states, say, and graphs are compiled for some."""
    x = x.contiguous()
    return x.flatten().view(x.shape) if 1 in x.shape else x


def try_compiler(device: torch.device) -> None:
    """Compile a small function for `device`. Raises OptionError where that fails."""
    with compiling():
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))


@contextmanager
def compiling() -> Iterator[None]:
    """Raises OptionError where torch.compile fails within."""
    try:
        yield
    except (compile_errors(), OSError) as error:  # OSError: the directory for what was compiled cannot be written
        raise OptionError(f"compile=True: torch.compile fails: {one_line(error)}") from error


def _keep_shape_guards(guards: list) -> list[bool]:
    """Which of a graph's guards are checked at every call: those of what differs between calls.

    The others, of the frozen model and its modules, take a tenth of a call's time.
    """
    return [
        guard.guard_type == "SHAPE_ENV"
        or (guard.guard_type == "TENSOR_MATCH" and not isinstance(guard.value, nn.Parameter))
        for guard in guards
    ]
