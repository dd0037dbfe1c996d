"""Losses outside the model that are computed with its parameters, and with tensors of each rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zerofx
from tests.contract.loops import close, compiled, config, data, full, net, refused, same, sgd
from tests.ranks import run_ranks

Penalty = Callable[[Any, Tensor, Tensor], Tensor]


class Words(nn.Module):
    """Has a weight of each kind that losses are computed with; uneven on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 7)
        self.first = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.last = nn.Linear(13, 5)
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.before = [torch.randn_like(param) for param in self.parameters()]

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(x + self.words(tokens))))
        return self.last(hidden) * self.temperature


def _in_place(model: Any, x: Tensor, tokens: Tensor) -> Tensor:
    loss = x.sum() * 0
    for param in model.parameters():
        loss += 0.01 * param.abs().sum()
    return loss


def _started_plain(model: Any, x: Tensor, tokens: Tensor) -> Tensor:
    penalty = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for param in model.parameters():
        penalty = penalty + param.square().sum()
    return 0.3 * penalty


def _since_before(model: Any, x: Tensor, tokens: Tensor) -> Tensor:
    """Elastic weight consolidation."""
    pairs = zip(model.parameters(), model.before, strict=True)
    return torch.stack([(was.abs() * (param - was) ** 2).sum() for param, was in pairs]).sum()


def _orthogonal(model: Any, x: Tensor, tokens: Tensor) -> Tensor:
    weight = model.first.weight
    return (weight.t() @ weight - torch.eye(7, dtype=x.dtype)).square().sum()


def _twice(model: Any, x: Tensor, tokens: Tensor) -> Tensor:
    norm = model.last.weight.norm()
    return norm * x.mean() + norm.square() + x.square().mean() / norm + norm / (1 + x.exp().sum())


def _inner_step(model: Any, x: Tensor, tokens: Tensor) -> Tensor:
    """MAML's, with a batch that all ranks have: a gradient is the mean over ranks."""
    same = torch.linspace(-1, 1, 21, dtype=x.dtype).view(3, 7)
    weight = model.first.weight
    loss = (same @ weight.t()).tanh().square().sum()
    (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
    return F.linear(x, weight - 0.1 * grad).square().mean() + grad.norm()


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


WHOLE: dict[str, Callable[[Any], Tensor]] = {
    "whole": lambda model: model.first.weight,
    "whole of what is computed": lambda model: model.first.weight * 0.5,
    "whole of a norm": lambda model: model.first.weight.norm(),
    "whole of norms": lambda model: model.first.weight.norm(dim=0),
    "whole transposed": lambda model: model.first.weight.t(),
    "whole of rows": lambda model: model.first.weight[2:9],
    "whole in a line": lambda model: model.first.weight.view(-1),
    "whole of a product": lambda model: model.first.weight.t() @ model.first.weight,
}
PENALTIES: dict[str, Penalty] = {
    **{
        name: lambda model, x, tokens, part=part: (
            _whole(part(model)).square().sum() * x.exp()
        ).sum()
        for name, part in WHOLE.items()
    },
    "l2": lambda model, x, tokens: 0.1 * sum(p.pow(2).sum() for p in model.parameters()) + x.mean(),
    "l1 in place": _in_place,
    "started as a plain number": _started_plain,
    "norms": lambda model, x, tokens: torch.stack([p.norm() for p in model.parameters()]).sum(),
    "elastic": _since_before,
    "orthogonal": _orthogonal,
    "a number twice": _twice,
    "scaled by each rank": lambda model, x, tokens: (
        x.abs().mean() * model.first.weight.square().sum()
    ),
    "scaled by a loss": lambda model, x, tokens: x.mean().detach() * model.last.weight.abs().sum(),
    "temperature": lambda model, x, tokens: (x * model.temperature.exp()).logsumexp(0).sum(),
    "a scalar itself": lambda model, x, tokens: (x * model.temperature).square().sum(),
    "tied head": lambda model, x, tokens: F.cross_entropy(x @ model.words.weight.T, tokens),
    "linear": lambda model, x, tokens: (
        F.linear(x, model.first.weight, model.first.bias).tanh().sum()
    ),
    "layer norm": lambda model, x, tokens: (
        F.layer_norm(x @ model.first.weight.T, (13,), model.norm.weight, model.norm.bias)
        .tanh()
        .sum()
    ),
    "embedding": lambda model, x, tokens: (
        F.embedding(tokens, model.words.weight).mul(x).square().sum()
    ),
    "rows": lambda model, x, tokens: (model.words.weight[tokens] * x).sum(),
    "gathered": lambda model, x, tokens: (
        model.first.weight.gather(1, tokens[:, None] % 7).square().sum()
    ),
    "together": lambda model, x, tokens: torch.cat([x, model.words.weight]).square().sum(),
    "distances": lambda model, x, tokens: torch.cdist(x, model.words.weight).min(1).values.sum(),
    "cosine": lambda model, x, tokens: F.cosine_similarity(model.first.weight, x[:1]).sum(),
    "where": lambda model, x, tokens: (
        torch.where(model.first.weight > 0, model.first.weight, x[:1]).square().sum()
    ),
    "inner step": _inner_step,
    "batch norm": lambda model, x, tokens: (
        F.batch_norm(model.first.weight, x.new_zeros(7), x.new_ones(7), training=True).tanh().sum()
        * x.mean()
    ),
    "product": lambda model, x, tokens: (model.first.weight @ x[0]).square().sum(),
    "distance": lambda model, x, tokens: F.smooth_l1_loss(model.first.bias, x.view(-1)[:13]),
}


def _penalized(stage: int) -> None:
    torch.manual_seed(0)
    model = Words().double()
    model.before = [value.double() for value in model.before]
    ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    run, optimizers = compiled(model, stage), [sgd(model), sgd(ddp)]
    draw = torch.Generator().manual_seed(dist.get_rank())
    for name, penalty in PENALTIES.items():
        x = torch.randn(4, 7, generator=draw, dtype=torch.float64)
        tokens = torch.randint(9, (4,), generator=draw)
        losses = [
            call(x, tokens).square().mean() + penalty(trained, x, tokens) / 100
            for trained, call in ((model, run), (ddp.module, ddp))
        ]
        assert type(losses[0]) is Tensor, "a loss is a rank's own"
        close(losses[0].detach(), losses[1].detach(), f"loss of {name}", 1e-12)
        for loss in losses:
            loss.backward()
        for (at, mine), plain in zip(model.named_parameters(), ddp.parameters(), strict=True):
            close(full(mine.grad), plain.grad, f"gradient of {at} for {name}", 1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(("ranks", "stage"), [(2, 1), (4, 3)])
def test_losses_with_parameters(ranks: int, stage: int) -> None:
    run_ranks(ranks, _penalized, stage)


def _in_a_module_that_python_runs() -> None:
    class Penalized(type(net())):
        @torch.compiler.disable
        def penalty(self, loss: Tensor) -> Tensor:
            return loss.exp() * sum(param.square().sum() for param in self.parameters())

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss = super().forward(x, y)
            return loss + self.penalty(loss) / 100

    model = net(Penalized)
    ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    for trained, run in ((model, compiled(model, 3)), (ddp, ddp)):
        optimizer = sgd(trained)
        for number in range(3):
            generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
            x, y = torch.randn(4, 7, generator=generator), torch.randn(4, 5, generator=generator)
            run(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
    same(model, ddp)


def test_a_penalty_in_code_that_dynamo_leaves_to_python() -> None:
    run_ranks(2, _in_a_module_that_python_runs)


def _without_autograd() -> None:
    model = net()
    plain = copy.deepcopy(model)
    zerofx.shard(model, config(3))
    own = torch.tensor(2.0 + dist.get_rank())
    with torch.no_grad():
        for scaled in (lambda w: own * w.abs().sum(), lambda w: w.norm() / own):
            close(full(scaled(model.first.weight)), scaled(plain.first.weight), "number")
        ours, theirs = torch.zeros(()), torch.zeros(())
        for number, weights in ((ours, model.first.weight), (theirs, plain.first.weight)):
            number += weights.norm() ** 2
        assert type(ours) is Tensor
        close(ours, theirs, "a plain number that a norm was added to")


def test_numbers_of_each_rank_scale_whole_sums() -> None:
    run_ranks(2, _without_autograd)


def _refused() -> None:
    model = net()
    zerofx.shard(model, config(3))
    penalty = model.first.weight.square().sum()
    with refused("gradients are wanted", "penalty = penalty + loss"):
        penalty += torch.ones((), requires_grad=True).exp()


def test_a_loss_added_to_a_sharded_sum_in_place() -> None:
    run_ranks(2, _refused)


def _computed_before_sharding(stage: int) -> None:
    for penalty in (
        lambda model: sum(param.square().sum() for param in model.parameters()),
        lambda model: (model.first.weight.T @ model.first.weight - torch.eye(7)).norm(),
        lambda model: model(*data(1)),
    ):
        model = net()
        run, extra = compiled(model, stage), penalty(model)
        loss = run(*data(0)) + extra
        with refused("before zerofx sharded the model", "  - ", "zerofx.shard(model"):
            loss.backward()
        for param in model.parameters():
            param.grad = None
        seen = model(*data(1))  # what was computed so is not in the way of what follows
        del extra, loss
        (run(*data(0)) + penalty(model)).backward()
        assert seen.requires_grad and all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_penalty_that_is_computed_before_the_model_is_sharded(stage: int) -> None:
    run_ranks(2, _computed_before_sharding, stage)


def _memory_while_a_graph_lives() -> tuple[int, int]:
    model = net()
    seen, old = model(*data(1)), model.first.weight
    compiled(model, 3)(*data(0)).backward()
    with torch._C.DisableTorchFunctionSubclass():
        with_graph = old.numel()
        del seen
        return with_graph, old.numel()


def test_weights_of_before_go_with_what_was_computed_from_them() -> None:
    assert run_ranks(2, _memory_while_a_graph_lives) == [(7 * 13, 0)] * 2
