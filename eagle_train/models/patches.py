"""All surgery on a loaded model: its modules' classes are changed for ours, which compute the same in less time.

`use_fast_modules` is what every target has, in training and decoding alike; `Target` calls it, and compares the model's
logits before and after (models/probe.py). `optimize_for_decoding` is what an engine adds, to its target and to its
draft, which then stay as they are. Either returns an `Undo`. `round_to_fp8` is for a target that is only trained
against: it changes results a little, and is not undone. `use_stages` is for a drafter that runs some of the target's
layers. Knows nothing of engines, caches or training.

Classes are changed where a module lies, because what is around a module of transformers (tied weights, hooks, names of
checkpoints) would not survive another module in its place. Llama 4's experts have their class from the start, see
`_register_experts`; what `round_to_fp8` rounds has no weight any more that others could share, and is replaced.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama4 import modeling_llama4

from eagle_train.models.experts import RoutedExperts, RoutedMoe
from eagle_train.models.forward import decoder_of
from eagle_train.models.stages import StagedLayer, Stages
from eagle_train.ops import grouped
from eagle_train.ops.joint_linear import JointLinear, JointProduct
from eagle_train.ops.linear import FrozenFp8Linear, Linear, QuantisedLinear, fp16_copy_of, keep_fp16_copy
from eagle_train.ops.norm import FastNorm, rms_norm
from eagle_train.ops.torch_private import has_hooks, tensor_version


@dataclass
class Undo:
    """Takes changes back when it is called, the last one first. Copied together with a model, it is the copy's:
    `copy.deepcopy((model, undo))`."""

    classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)  # those that modules had
    routed: list[RoutedMoe] = field(default_factory=list)
    joined: list[JointLinear] = field(default_factory=list)
    copied: list[torch.Tensor] = field(default_factory=list)  # weights that are kept in fp16 besides

    def swap(self, module: nn.Module, new: type[nn.Module]) -> None:
        """Change a module's class."""
        self.classes.append((module, type(module)))
        module.__class__ = new

    def forget(self, modules: Collection[nn.Module]) -> None:
        """Leave these as they are, and keep them alive no longer."""
        gone = {id(module) for module in modules}
        self.classes = [(module, own) for module, own in self.classes if id(module) not in gone]

    def __call__(self) -> None:
        for module, own in reversed(self.classes):
            module.__class__ = own
        for module in self.routed:
            module.routed = False
        for part in self.joined:
            del part.joint
        for weight in self.copied:
            del weight.fp16_copy  # type: ignore[attr-defined]
        self.classes, self.routed, self.joined, self.copied = [], [], [], []


def use_fast_modules(model: nn.Module) -> Undo:
    """Let a model's plain linear modules, norms and Llama 4 experts be ours: fewer operations, the same results.

    Left as they are: modules of a quantisation's or parallelism's own classes, and norms that compute something else
    than `rms_norm` or lie elsewhere than on a CPU in fp32.
    """
    undo = Undo()
    for module in model.modules():
        own: Any = type(module)
        if own is nn.Linear and type(module.weight) is nn.Parameter:
            undo.swap(module, Linear)
        elif _is_plain_norm(module):
            undo.swap(module, _with_fast_norm(own))
        elif isinstance(module, RoutedMoe) and not module.routed:
            # Others have no grouped product in torch, or are a quantisation's.
            module.routed = isinstance(module.experts, RoutedExperts) and model.dtype in grouped.DTYPES
            undo.routed += [module] if module.routed else []
    return undo


def shared_inputs(model: nn.Module, forward: Callable[[], object]) -> list[list[Linear]]:
    """The linear modules that `forward` of the model gives the same tensor, one directly after the other, in the order
    of their calls; two or more of one parent each.

    Left out are modules with hooks, without weights on their device, and those that are called more than once. A tensor
    that was changed in between is another one.
    """
    calls: list[tuple[Linear, torch.Tensor, int]] = []

    def note(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        calls.append((module, given[0], tensor_version(given[0])))

    plain = [(name, module) for name, module in model.named_modules() if _may_be_joined(module)]
    parents = {module: name.rpartition(".")[0] for name, module in plain}
    hooks = [module.register_forward_pre_hook(note) for _, module in plain]
    with torch.inference_mode(False), torch.no_grad():  # in inference mode tensors do not count their changes
        forward()
    for hook in hooks:
        hook.remove()
    groups: list[list[tuple[Linear, torch.Tensor, int]]] = []
    for call in calls:
        before = groups[-1][-1] if groups else None
        follows = before is not None and call[1] is before[1] and call[2] == before[2]
        if before is not None and follows and parents[call[0]] == parents[before[0]]:
            groups[-1].append(call)
        else:
            groups.append([call])
    times = Counter(module for module, _, _ in calls)
    found = [[module for module, _, _ in group] for group in groups]
    return [
        group
        for group in found
        if len(group) > 1
        and all(times[module] == 1 for module in group)
        and len({(module.weight.dtype, module.weight.device, module.bias is None) for module in group}) == 1
    ]


def join_products(groups: Iterable[Sequence[Linear]], undo: Undo) -> None:
    """Let each of these groups, of `shared_inputs`, be one product."""
    for modules in groups:
        joint = JointProduct(modules)
        for place, module in enumerate(modules):
            undo.swap(module, JointLinear)
            assert isinstance(module, JointLinear)
            module.joint, module.place = joint, place
            undo.joined.append(module)


def _may_be_joined(module: nn.Module) -> bool:
    if type(module) is not Linear or type(module.weight) is not nn.Parameter or module.weight.is_meta:
        return False
    return not (_has_hooks(module) or module.weight.requires_grad or module.weight.is_inference())


def _has_hooks(module: nn.Module) -> bool:
    """Whether anything is done beside its forward: by torch's hooks or Accelerate's, which replace its forward."""
    return has_hooks(module) or "forward" in vars(module)


def optimize_for_decoding(
    model: nn.Module, dtype: torch.dtype, weights: Iterable[torch.Tensor] = (), drop_hooks: bool = False
) -> Undo:
    """Let a frozen model's products be the fastest of its device; it stays as it is, and there, until this is undone.

    `dtype`: of the activations that it will be given. `weights` [N, K]: more that `ops.linear.linear` multiplies with,
    the LM head's, say. On a CPU in fp32 weights are kept in fp16 besides where no result changes (`keep_fp16_copy`).
    Modules without others in them are called without looking for hooks, unless they have some: that takes as long as a
    small operation. `drop_hooks`: so are all modules inside the model; not for models that Accelerate or tensor
    parallelism hooked.

    Quantised modules take their device's layout, which is not undone.
    """
    undo = Undo()
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            if not module.has_kernel:
                module.use_kernel(dtype)
        elif isinstance(module, JointLinear) and module.joint is not None:
            _copy_in_fp16(module.joint.weight, undo)
        elif isinstance(module, Linear):
            _copy_in_fp16(module.weight, undo)
        is_leaf = next(module.children(), None) is None and not _has_hooks(module)
        called: Any = type(module).__call__
        if (drop_hooks or is_leaf) and module is not model and called is not type(module).forward:
            own: Any = type(module)
            undo.swap(module, _without_hooks(own))
    for weight in weights:
        _copy_in_fp16(weight, undo)
    return undo


def use_stages(layers: Sequence[nn.Module]) -> Stages:
    """Let a model's layers, in their order, be run in parts. Forwards of all layers stay what they are, and so do the
    layers: it is not undone, and a second call returns what the first one did."""
    first = layers[0]
    if isinstance(first, StagedLayer):
        return first.stages
    stages = Stages()
    for number, module in enumerate(layers):
        own: Any = type(module)
        module.__class__ = _in_stages(own)
        assert isinstance(module, StagedLayer)
        module.stages, module.number = stages, number
    return stages


ROUTERS = {"router", "gate", "gating", "shared_expert_gate"}  # small, and a rounding may choose another expert


def rounded_to_fp8(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The modules that `round_to_fp8` replaces, by their names in the model's decoder: plain linear ones of its layers,
    with multiples of 16 inputs and outputs, which FP8 products ask for. Also of a model without memory for its weights.

    Left out are routers, experts that lie in one tensor, embeddings and the LM head.
    """
    found = {}
    for name, module in decoder_of(model).named_modules():
        parts = name.split(".")
        if type(module) in (nn.Linear, Linear) and type(module.weight) is nn.Parameter and ROUTERS.isdisjoint(parts):
            outputs, inputs = module.weight.shape
            fits = outputs % FrozenFp8Linear.outputs == 0 and inputs % FrozenFp8Linear.inputs == 0
            if fits and any(part.isdigit() for part in parts):
                found[name] = module
    return found


@torch.no_grad()
def round_to_fp8(model: PreTrainedModel, undo: Undo) -> int:
    """Let a frozen model's layers multiply in FP8, weights and activations, for as long as it lives; returns how many
    modules do. The weights that they had are freed, one module after the other.

    `undo`: of what was done to the model before; it leaves these modules alone from then on.
    """
    decoder, found = decoder_of(model), rounded_to_fp8(model)
    undo.forget(found.values())
    count = len(found)
    while found:
        name, module = found.popitem()
        made = FrozenFp8Linear.of(module.weight, module.bias).eval()
        made.use_kernel(model.dtype)
        decoder.set_submodule(name, made)
    return count


def _copy_in_fp16(weight: torch.Tensor, undo: Undo) -> None:
    if fp16_copy_of(weight) is None:
        keep_fp16_copy(weight)
        undo.copied += [] if fp16_copy_of(weight) is None else [weight]


@torch.no_grad()
def _is_plain_norm(module: Any) -> bool:
    """Whether a module is a root-mean-square norm on a CPU in fp32: by what it computes, as families name theirs as
    they like."""
    weight = getattr(module, "weight", None)
    if isinstance(module, FastNorm) or not hasattr(module, "variance_epsilon") or type(weight) is not nn.Parameter:
        return False
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.ndim != 1:  # Cohere: one for each head
        return False
    if len(signature(module.forward).parameters) != 1:  # it takes a gate beside x
        return False
    x = torch.linspace(-1, 2, weight.numel())
    return torch.allclose(module(x), rms_norm(x, weight, module.variance_epsilon), rtol=1e-5, atol=1e-6)


@lru_cache
def _with_fast_norm(own: Any) -> type[nn.Module]:
    """A norm's class with our forward, and all else that it has."""
    return type(own.__name__, (FastNorm, own), {})


@lru_cache
def _in_stages(own: Any) -> type[nn.Module]:
    """A layer's class that does as its stages say."""
    return type(own.__name__, (StagedLayer, own), {})


@lru_cache
def _without_hooks(own: Any) -> type[nn.Module]:
    """A class whose call is its forward."""
    return type(own.__name__, (own,), {"__call__": own.forward})


def _register_experts() -> None:
    """Let transformers build Llama 4's experts of our classes, which do as theirs until `use_fast_modules`.

    Before a model is built and not after: what tensor parallelism and offload then put around a module's `forward`
    calls ours.
    """
    module: Any = modeling_llama4
    module.Llama4TextMoe, module.Llama4TextExperts = RoutedMoe, RoutedExperts


_register_experts()
