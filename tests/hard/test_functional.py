"""`torch.func` in forward: values in the place of parameters, derivatives, parameters as values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from tests.hard.pair import Pair, draw
from tests.ranks import run_ranks


def _net(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6))


def _layer() -> nn.Module:
    """Uneven on two ranks, with few operators, since derivatives of each are many."""
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh())


class Substituted(nn.Module):
    """Runs a part of itself with values computed from its parameters."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.net = _net(6)
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

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net = _layer()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
            return F.mse_loss(functional_call(self.net, values, (x,))[:, :6], x)

        values = _values(self.net) if self.how == "maml" else dict(self.net.named_parameters())
        slopes = grad(loss)(values, x)
        return loss({name: value - 0.1 * slopes[name] for name, value in values.items()}, x)


class PerSample(nn.Module):
    """Gradients of each sample by the parameters, as differential privacy looks at them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _layer()

    def forward(self, x: Tensor) -> Tensor:
        values = dict(self.net.named_parameters())

        def slopes(row: Tensor) -> dict[str, Tensor]:
            return grad(lambda v: functional_call(self.net, v, (row,)).square().sum())(values)

        return self.net(x).sum() + sum(each.square().mean() for each in vmap(slopes)(x).values())


class Anchored(nn.Module):
    """Parameters beside other tensors: a penalty for leaving where they came from, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net(7)
        self.anchors = [torch.ones(param.shape) for param in self.net.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        pairs = list(zip(self.net.parameters(), self.anchors, strict=True))
        distance = sum((2.0 * param - anchor).square().sum() for param, anchor in pairs)
        noisy = x @ (next(self.parameters()) + x.mean()).t()
        return self.net(x).square().sum() + 0.1 * distance + noisy.sum()


class Flattened(nn.Module):
    """Parameters as vectors: torch has no rule where ranks have unequal numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net(7)

    def forward(self, x: Tensor) -> Tensor:
        weight = next(self.net.parameters())
        flat = nn.utils.parameters_to_vector(self.net.parameters())
        torch._dynamo.graph_break()
        largest = torch.cat([param.view(-1) for param in self.net.parameters()]).abs().topk(3)[0]
        middle = weight.unflatten(0, (1, -1)).flatten(1)[..., 2:9]
        return self.net(x).square().sum() + flat.square().mean() + largest.sum() + middle.sum()


OF_PARAMETERS: dict[str, type[nn.Module]] = {
    "anchored": Anchored,
    "flattened": Flattened,
    "by name, per sample": PerSample,
}


def _gradients(net: nn.Module, x: Tensor) -> Tensor:
    return vmap(grad(lambda row: net(row).sum()))(x)


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "jacrev": lambda net, x: jacrev(net)(x),
    "jvp": lambda net, x: jvp(net, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda net, x: vmap(net)(x),
    "vmap of grad": _gradients,
    "hessian": lambda net, x: hessian(lambda row: net(row).square().sum())(x[0]),
}


class Sensitive(nn.Module):
    """A physicist's loss: of derivatives of a network by its inputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = _layer()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return TRANSFORMS[self.kind](self.net, x).square().sum() + self.net(x).sum()


def _derived(kind: str, stage: int) -> None:
    if kind in OF_PARAMETERS:
        model = OF_PARAMETERS[kind]()
    else:
        model = Learner(kind) if kind.startswith("maml") else Sensitive(kind)
    pair = Pair(model, stage, lr=0.01, rtol=1e-5)
    # Sizes that change are symbols to Dynamo.
    rows = (4, 3, 5) if "by name" in kind else (4, 4)
    pair.train(lambda run, number: run(draw(rows[number], 6, seed=number)), len(rows))


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        *(
            ("maml", 1),
            ("maml", 3),
            ("maml by name", 3),
            ("by name, per sample", 3),
            ("anchored", 1),
            ("jacrev", 0),
        ),
        *(("flattened", 1), ("flattened", 3)),
        *((kind, 3) for kind in TRANSFORMS),
    ],
)
def test_derivatives_inside_a_forward(kind: str, stage: int) -> None:
    run_ranks(2, _derived, kind, stage)


def _a_model_beside_values_of_transforms() -> None:
    """They live on, as those do that Dynamo has traced, and have no memory."""
    kept: list[Tensor] = []
    vmap(lambda row: (kept.append(row), row.sum())[1])(torch.ones(3, 2))
    grad(lambda row: (kept.append(row), row.sum())[1])(torch.ones(3))
    pair = Pair(_net(6), 3, rtol=1e-6)
    pair.train(lambda run, number: run(draw(4, 6, seed=number)).sum())
    assert len(kept) == 2


def test_values_that_outlive_a_transform() -> None:
    run_ranks(2, _a_model_beside_values_of_transforms)


def _started_again() -> None:
    pair = Pair(Anchored(), 3, lr=0.01, rtol=1e-5)
    for number in range(2):
        pair.train(lambda run, number: run(draw(4, 6, seed=number)), [number])
        torch.compiler.reset()


def test_what_dynamo_forgot_is_compiled_as_before() -> None:
    run_ranks(2, _started_again)
