"""Operations that a library brings along, on what the loop hands them: sharded tensors.

torch has no rule for how rows go through them, and says so without saying what to do.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import zerofx
from tests.contract.loops import close, compiled, config, full, net, refused, same, train, twin
from tests.ranks import run_ranks


@torch.library.custom_op("zx_foreign::soft_threshold", mutates_args=())
def soft_threshold(value: Tensor, least: float) -> Tensor:
    """Looks at the whole: what is small beside the largest becomes zero."""
    return torch.where(value.abs() > least * value.abs().max(), value, torch.zeros_like(value))


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(output)


soft_threshold.register_autograd(
    lambda ctx, grad: (grad * (ctx.saved_tensors[0] != 0), None), setup_context=_keep
)


@torch.library.custom_op("zx_foreign::shrink", mutates_args=("value",))
def shrink(value: Tensor, scale: Tensor) -> None:
    value.mul_(scale / value.norm())


@torch.library.custom_op("zx_foreign::momentum_step", mutates_args=("value", "sums"))
def momentum_step(value: Tensor, grad: Tensor, sums: Tensor, lr: float) -> None:
    sums.mul_(0.9).add_(grad)
    value.sub_(lr * sums)


class Momentum(Optimizer):
    """As those of bitsandbytes: its step is one operation, which writes to several tensors."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                sums = state.setdefault("sums", torch.zeros(param.shape, dtype=param.dtype))
                momentum_step(param, param.grad, sums, group["lr"])


def _looks() -> None:
    """What writes nothing, or to its first operand, is given whole tensors."""
    plain = net()
    model = copy.deepcopy(plain)
    zerofx.shard(model, config(3))
    for made in (model, plain):
        loss = soft_threshold(made.first.weight, 0.5).square().sum()
        loss.backward()
    close(full(model.first.weight.grad), plain.first.weight.grad, "gradient")
    with torch.no_grad():
        ours, theirs = model.last.weight, plain.last.weight
        close(full(soft_threshold(ours, 0.5)), soft_threshold(theirs, 0.5), "a value")
        shrink(ours, torch.tensor([3.0]))
        shrink(theirs, torch.tensor([3.0]))
    close(full(ours), theirs, "what is written")


def _steps() -> None:
    """What writes to several is refused, with a remedy that works."""
    model = net()
    run = compiled(model, 3)
    with refused("zx_foreign.momentum_step", "zerofx.OwnerOptimizer", "value.to_local()"):
        train(run, Momentum(model.parameters()), 1)
    model, ddp = net(), twin(net())
    train(compiled(model, 3), zerofx.OwnerOptimizer(model.parameters(), Momentum))
    train(ddp, Momentum(ddp.parameters()))
    same(model, ddp)


def test_operations_on_whole_tensors() -> None:
    run_ranks(2, _looks)


def test_steps_of_other_libraries() -> None:
    run_ranks(2, _steps)
