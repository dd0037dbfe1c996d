"""`torch.func` in forward: values in the place of parameters, and derivatives by them."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.utils.checkpoint import checkpoint

from tests.hard.pair import Pair, draw
from tests.ranks import run_ranks


class Substituted(nn.Module):
    """Runs a part of itself with values computed from its parameters."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        own = dict(self.net.named_parameters())
        values = {name: 1.5 * p if "0" in name else p for name, p in own.items()}

        def call(x: Tensor) -> Tensor:
            return functional_call(self.net, values, (x,))

        return (checkpoint(call, x, use_reentrant=False) if self.checkpointed else call(x)).sum()


def _substituted(stage: int, checkpointed: bool) -> None:
    pair = Pair(Substituted(checkpointed), stage, rtol=1e-6)
    pair.train(lambda run, number: run(draw(4, 6, seed=number)))


@pytest.mark.parametrize(
    ("stage", "checkpointed"), [(0, False), (1, True), (2, False), (3, False), (3, True)]
)
def test_values_in_the_place_of_parameters(stage: int, checkpointed: bool) -> None:
    run_ranks(2, _substituted, stage, checkpointed)


def _values(net: nn.Module) -> dict[str, Tensor]:
    """As docs/loops.md has it: read as attributes, before the transform."""
    return {
        f"{place}.{name}".lstrip("."): getattr(module, name)
        for place, module in net.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }


class Learner(nn.Module):
    """MAML: a step of gradient descent inside of the forward, and the loss after it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
            return F.mse_loss(functional_call(self.net, values, (x,)), x)

        values = _values(self.net)
        slopes = grad(loss)(values, x)
        return loss({name: value - 0.1 * slopes[name] for name, value in values.items()}, x)


class Sensitive(nn.Module):
    """The norm of a Jacobian by the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        values = _values(self.net)
        return jacrev(lambda x: functional_call(self.net, values, (x,)))(x).square().sum()


def _derived(kind: str, stage: int) -> None:
    model = Learner() if kind == "maml" else Sensitive()
    Pair(model, stage, rtol=1e-5).train(lambda run, number: run(draw(4, 6, seed=number)), 2)


@pytest.mark.parametrize(("kind", "stage"), [("maml", 1), ("maml", 3), ("jacobian", 3)])
def test_derivatives_inside_a_forward(kind: str, stage: int) -> None:
    run_ranks(2, _derived, kind, stage)
