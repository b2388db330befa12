"""training/optimizer.py: the learning rate's schedule, what decays, and steps of both optimisers computed by hand."""

import itertools
from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from torch import nn

from eagle_train.errors import UserError
from eagle_train.training.backend import Torch
from eagle_train.training.muon import Muon, _by_gram, _directly
from eagle_train.training.optimizer import NAMES, OptimConfig, Optimizer


def model(seed: int = 0) -> nn.Sequential:
    """Two matrices, a bias and two norms."""
    torch.manual_seed(seed)
    linear = [nn.Linear(12, 8), nn.Linear(8, 8, bias=False)]
    return nn.Sequential(linear[0], nn.RMSNorm(8), linear[1], nn.RMSNorm(8))


def set_gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def course(total_steps: int, **config) -> list[float]:
    optim = OptimConfig(lr=1.0, **config)
    return [optim.lr_at(step, (step - 1) / total_steps) for step in range(1, total_steps + 1)]


def test_the_learning_rate_is_constant_by_default():
    assert course(5) == [1.0] * 5
    assert OptimConfig().lr_at(17, 16 / 48_000) == 2e-4


def test_the_learning_rate_climbs_and_falls():
    assert course(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert course(6, decay_share=4 / 6) == pytest.approx([1.0, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert course(8, warmup_steps=2, decay_share=0.5) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert course(4, warmup_steps=4, decay_share=1.0) == pytest.approx(
        [0.25, 0.5, 0.5, 0.25]
    )  # a short run gets the lesser of both


@pytest.mark.parametrize("name", NAMES)
def test_matrices_decay_and_norms_and_biases_do_not(name):
    trained = model()
    before = [parameter.detach().clone() for parameter in trained.parameters()]
    optimizer = Optimizer(trained, OptimConfig(name=name, weight_decay=0.5))
    for parameter in trained.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(lr=0.1)
    for parameter, old in zip(trained.parameters(), before, strict=True):
        kept = 1 - 0.1 * 0.5 if parameter.ndim == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), kept * old)


def adamw_by_hand(start: torch.Tensor, gradients: list[torch.Tensor], lr: float, decay: float) -> torch.Tensor:
    weight, mean, square = start.double(), 0.0, 0.0
    for step, gradient in enumerate(gradients, 1):
        mean = 0.9 * mean + 0.1 * gradient.double()
        square = 0.95 * square + 0.05 * gradient.double() ** 2
        update = (mean / (1 - 0.9**step)) / ((square / (1 - 0.95**step)).sqrt() + 1e-8)
        weight = weight * (1 - lr * decay) - lr * update
    return weight.float()


def run(trained: nn.Module, optimizer: Optimizer, seeds: range, lr: float) -> list[list[torch.Tensor]]:
    """Steps with random gradients of these seeds. Returns each parameter's gradients."""
    gradients = []
    for seed in seeds:
        set_gradients(trained, seed)
        gradients.append([parameter.grad for parameter in trained.parameters()])
        optimizer.step(lr)
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in trained.parameters())
    return [list(one) for one in zip(*gradients, strict=True)]


def test_adamw_is_the_papers():
    trained = model()
    before = [parameter.detach().clone() for parameter in trained.parameters()]
    gradients = run(trained, Optimizer(trained, OptimConfig()), range(5), lr=0.01)
    for parameter, start, own in zip(trained.parameters(), before, gradients, strict=True):
        expected = adamw_by_hand(start, own, lr=0.01, decay=0.1 if parameter.ndim == 2 else 0.0)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-6)


def test_muon_turns_matrices_by_steps_of_adamws_size():
    trained = model()
    before = [parameter.detach().clone() for parameter in trained.parameters()]
    run(trained, Optimizer(trained, OptimConfig(name="muon", weight_decay=0.0)), range(1), lr=0.01)
    for parameter, start in zip(trained.parameters(), before, strict=True):
        step = (parameter.detach() - start) / 0.01
        if parameter.ndim == 1:
            torch.testing.assert_close(step.abs(), torch.ones_like(step), rtol=1e-3, atol=1e-3)  # Adam's first
        else:
            assert 0.1 < step.square().mean().sqrt() < 0.3  # the root mean square of Adam's later steps
            values = torch.linalg.svdvals(step)
            assert values.max() < 2 * values.min()  # every direction by about as much


def test_muons_momentum_is_the_configs():
    """Without momentum a step depends on its own gradient alone; with much, on earlier ones too."""
    steps = {}
    for momentum, first in itertools.product((0.0, 0.9), (0, 1)):
        trained = model()
        optimizer = Optimizer(trained, OptimConfig(name="muon", weight_decay=0.0, momentum=momentum))
        run(trained, optimizer, range(first, first + 1), lr=1e-9)
        before = trained[0].weight.detach().clone()
        run(trained, optimizer, range(2, 3), lr=0.01)
        steps[momentum, first] = trained[0].weight.detach() - before
    torch.testing.assert_close(steps[0.0, 0], steps[0.0, 1], rtol=0, atol=1e-6)
    assert (steps[0.9, 0] - steps[0.9, 1]).norm() > 0.2 * steps[0.9, 0].norm()


def threads(monkeypatch, number: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: number)


def copied_from(state: dict[str, torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    """A function that fills tensors with those of `state`."""

    def read(tensors: dict[str, torch.Tensor]) -> None:
        assert tensors.keys() == state.keys()
        for name, tensor in tensors.items():
            tensor.detach().copy_(state[name])

    return read


@pytest.mark.parametrize("name", NAMES)
def test_state_goes_on_exactly_on_as_many_cores_and_on_fewer(name, monkeypatch):
    config, results = OptimConfig(name=name), []
    for cores in (2, 2, 1):
        threads(monkeypatch, 2)
        trained = model()
        whole = Torch(trained, trained, config, ranks=1)
        run(trained, whole.optimizer, range(3), lr=0.01)
        threads(monkeypatch, cores)
        other = model(seed=1)
        resumed = Torch(other, other, config, ranks=1)
        assert len(resumed.optimizer.parts) == (1 if name == "adamw" else 1 + cores)
        draft, optimizer = whole.state()
        resumed.restore(copied_from({**draft, **optimizer}))
        for both in ((trained, whole.optimizer), (other, resumed.optimizer)):
            run(*both, range(3, 6), lr=0.02)
        results += [*trained.parameters(), *other.parameters()]
    for parameter, first in zip(results, cycle(results[:5])):
        assert torch.equal(parameter, first)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "sgd"),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("max_grad_norm", 0.0),
        ("tokens_per_step", 0),
        ("weight_decay", -0.1),
        ("warmup_steps", -1),
        ("decay_share", -0.1),
        ("decay_share", 1.5),
        ("betas", (0.9, 1.0)),
        ("betas", (0.9,)),
        ("momentum", 1.0),
    ],
)
def test_impossible_values_are_refused(field, value):
    with pytest.raises(UserError, match=rf"^optim\.{field}=.* must be"):
        OptimConfig(**{field: value})


@pytest.mark.parametrize("shape", [(8, 8), (6, 24), (24, 6), (7, 15), (1, 5)])
def test_the_small_iteration_is_the_plain_one(shape):
    """By the Gram matrix in fp32, against the plain iteration in float64; also for nearly rank-deficient matrices."""
    torch.manual_seed(0)
    for scale in (torch.ones(shape[0], 1), torch.logspace(0, -3, shape[0]).unsqueeze(1)):
        matrix = torch.randn(shape) * scale
        wide = matrix.T if shape[0] > shape[1] else matrix
        expected = _directly((wide / wide.norm()).double())
        found = _by_gram(wide / wide.norm())
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
def test_a_step_of_muon_is_torchs(rule):
    """torch's computes in bf16."""
    ours, theirs = model(), model()
    optimizers = [
        made([each for each in module.parameters() if each.ndim == 2], lr=0.01, adjust_lr_fn=rule)
        for made, module in ((Muon, ours), (torch.optim.Muon, theirs))
    ]
    for seed in range(3):
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_gradients(module, seed)
            optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-4)
