"""What a step needs of the frozen target: a batch on its device, its hidden states, its precision. DESIGN section 3.4.

Shapes: B rows, T tokens of a packed row, H hidden, R slots of them that are learnt from.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from eagle_train.corpus.stream import TENSORS, Batch
from eagle_train.distributed import World
from eagle_train.drafts import TargetStates
from eagle_train.errors import OptionError, UserError
from eagle_train.models.cached_target import CachedTarget
from eagle_train.models.target import Target, TargetEnds
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.grouped import stacks_kept
from eagle_train.profiling import stage

# The hooks that keep layers' outputs are the model's own: of the look-ahead's thread and the trainer's, which measures
# on held-out rows meanwhile, one runs the target at a time.
_CAPTURE = threading.Lock()


@dataclass(frozen=True, eq=False)
class Placed(Batch):
    """A batch whose tensors are on a device, and what the host read of them before.

    `slots`: for each pass of the draft (unroll.py) the places, int64 [R] on the device, of the supervised slots in the
    flat rows [B * T]; R, a shape, is known to the host without waiting for the device. `host`: the same batch there.
    """

    slots: tuple[torch.Tensor, ...]
    host: Batch


def to_device(batch: Batch, device: torch.device, first_slot: int = 0, passes: int = 1) -> Placed:
    """A batch of the host on `device`. `first_slot`: the draft's first slot in a document (`DraftConfig.first_slot`);
    in pass k, counted from 0, no chain is as deep before slot first_slot + k.
    """
    send = _pinning(device)
    tensors = {name: send(getattr(batch, name)) for name in TENSORS}
    learnt = (batch.supervised & (batch.positions >= first_slot + depth) for depth in range(passes))
    slots = tuple(send(each.flatten().nonzero().squeeze(1)) for each in learnt)
    return Placed(lengths=batch.lengths, slots=slots, host=batch, **tensors)


def _pinning(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """What copies a tensor of the host to `device`, to a GPU while that computes."""
    if device.type != "cuda":
        return lambda tensor: tensor.to(device)
    return lambda tensor: tensor.pin_memory().to(device, non_blocking=True)


def target_states(
    target: TargetEnds, batch: Placed, layers: tuple[int, ...] = (), compiled: bool = False
) -> TargetStates:
    """The target's hidden states after its final norm, and the outputs of these `layers`, [B, T, H] each in its dtype;
    each document attends to itself.

    `compiled`: by torch.compile, of a target that is whole on this rank. Those of a `CachedTarget` are read from disk,
    and may have a `fault`; see `unread`.
    """
    with stage("target"):
        if isinstance(target, CachedTarget):
            of_host = batch.host.tokens, batch.host.supervised, batch.lengths
            hidden, outputs, fault = target.stored_states(*of_host, layers)
            return TargetStates(hidden, dict(zip(layers, outputs, strict=True)), fault)
        assert isinstance(target, Target)
        if compiled:
            given = batch.tokens, batch.positions, packed_attention(batch.lengths)
            return TargetStates.split(target.compiled(layers)(*given), layers)
        with _CAPTURE if layers else nullcontext():
            return TargetStates.split(target.own_states(batch.tokens, batch.positions, batch.lengths, layers), layers)


def unread(target: TargetEnds, fault: UserError | None, world: World) -> str | None:
    """Why the run cannot go on, where any rank has the `fault` of a `TargetStates`; the same on all ranks. None where
    all states were read. All ranks call it at the same point.
    """
    if not isinstance(target, CachedTarget) or not world.vote(fault is not None)():
        return None
    told = world.exchange(None if fault is None else str(fault), side="votes")
    return next(each for each in told if each is not None)


def can_compile(target: Target, rows: int, tokens: int, wanted: bool | None, layers: tuple[int, ...] = ()) -> bool:
    """Whether the target's forward of [rows, tokens], with these layers' outputs, is compiled now. See `succeeds`."""

    def attempt() -> None:
        zeros = torch.zeros(rows, tokens, dtype=torch.long, device=target.device)
        target.compiled(layers).prepare(zeros, zeros)

    return succeeds(attempt, target.device, wanted)


def succeeds(attempt: Callable[[], None], device: torch.device, wanted: bool | None) -> bool:
    """Whether an attempt to compile is made, and does not fail: as `wanted`, or, if that is None, on a GPU.

    Where torch.compile fails None warns and goes on without; True raises OptionError.
    """
    if not wanted and (wanted is not None or device.type != "cuda"):
        return False
    try:
        attempt()
    except OptionError as error:
        if wanted:
            raise
        warnings.warn(f"{error}; the run goes on without", stacklevel=2)
        return False
    return True


@contextmanager
def casts_kept(device: torch.device) -> Iterator[None]:
    """Meanwhile `autocast` casts each fp32 weight once, however often it is entered; weights must stay as they are.

    torch forgets the casts where the outermost region ends: this is one, in which nothing is cast. A cast keeps its
    place in the graph of gradients, which add up in fp32 as if each micro-batch had cast for itself. Compiled layers
    cast in their own code, and on a GPU layers that run again in the backward pass let torch forget.
    """
    with torch.autocast(device.type, enabled=False), stacks_kept():
        yield


def autocast(target: TargetEnds) -> torch.autocast:
    """The draft's weights are fp32; under this it computes in the target's dtype."""
    low = target.dtype != torch.float32
    return torch.autocast(target.device.type, dtype=target.dtype if low else None, enabled=low)
