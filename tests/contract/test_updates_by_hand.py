"""Loops that update parameters themselves, swap weights, or put weights into a loss outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract.loops import STAGES, close, compiled, data, full, net, refused, same, twin
from tests.ranks import run_ranks
from zerofx.errors import UnsupportedError


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _assign(param: Tensor) -> None:
    param.data = param.data - 0.1 * _grad(param)


def _rows(param: Tensor) -> None:
    param.data[:] = param.data - 0.1 * _grad(param)


def _augmented(param: Tensor) -> None:
    param.data -= 0.1 * _grad(param)


UPDATES: list[Callable[[Tensor], Any]] = [
    lambda p: p.add_(_grad(p), alpha=-0.1),
    lambda p: p.data.add_(_grad(p), alpha=-0.1),
    lambda p: p.data.add_(_grad(p).data, alpha=-0.1),
    lambda p: p.data.copy_(p - 0.1 * _grad(p)),
    lambda p: p.data.lerp_(p.data - _grad(p), 0.1),
    lambda p: p.data.addcmul_(_grad(p), _grad(p), value=-0.5),
    lambda p: p.data.clamp_(-0.1, 0.1),
    lambda p: p.data.view(-1).sub_(0.1 * _grad(p).view(-1)),
    lambda p: torch.sub(p.data, 0.1 * _grad(p), out=p.data),
    lambda p: p.data.detach().mul_(0.9),
    lambda p: nn.init.constant_(p.data, 0.01),
    _assign,
    _rows,
    _augmented,
    lambda p: torch._foreach_add_([p], [_grad(p)], alpha=-0.1),
    lambda p: torch._foreach_add_([p.data], [_grad(p)], alpha=-0.1),
    lambda p: torch._foreach_mul_([p.data], 0.9),
    lambda p: torch._foreach_mul_([p.data], [0.9]),
    lambda p: torch._foreach_mul_([p], torch.tensor(0.9)),
    lambda p: torch._foreach_copy_([p.data], [0.9 * p.data]),
    lambda p: torch._foreach_addcdiv_([p], [_grad(p)], [_grad(p).abs() + 1], [-0.1]),
    lambda p: torch._foreach_maximum_([p], [0.5 * p]),
    lambda p: torch._foreach_mul_([p], [full(p)]),
]


def _by_hand(stage: int) -> None:
    model, ddp = net(), twin(net())
    run = compiled(model, stage)
    for number, update in enumerate(UPDATES):
        for trained, call in ((model, run), (ddp, ddp)):
            call(*data(number)).backward()
            with torch.no_grad():
                for param in trained.parameters():
                    update(param)
            trained.zero_grad()
        close(run(*data(99)).detach(), ddp(*data(99)).detach(), f"loss after update {number}", 1e-5)
    same(model, ddp, rtol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_every_write_is_seen_by_the_next_forward(stage: int) -> None:
    run_ranks(2, _by_hand, stage)


def _swapped(stage: int) -> None:
    """The usual class of averages: weights are put aside without a copy, and come back."""
    model, ddp = net(), twin(net())
    run = compiled(model, stage)
    for trained, call in ((model, run), (ddp.module, ddp)):
        call(*data(0)).backward()
        shadow = {name: 0.5 * param.data for name, param in trained.named_parameters()}
        backup: dict[str, Tensor] = {}
        for name, param in trained.named_parameters():
            backup[name] = param.data
            param.data = shadow[name]
        with torch.no_grad():
            trained.seen = call(*data(1))
        for name, param in trained.named_parameters():
            param.data = backup[name]
        trained.after = call(*data(1)).detach()
    close(model.seen, ddp.module.seen, "with averages")
    close(model.after, ddp.module.after, "with what was put aside")
    same(model, ddp)


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_put_aside(stage: int) -> None:
    run_ranks(2, _swapped, stage)


def _whole_in_a_loss(stage: int) -> None:
    """Each rank has its own data for a term outside the model."""
    model, ddp = net(), twin(net())
    run = compiled(model, stage)
    for number in range(2):
        x, y = data(number)
        run(x, y).detach()  # sharded from here on
        for trained, call in ((model, run), (ddp.module, ddp)):
            loss: Tensor = call(x, y)
            weight = trained.first.weight
            whole = weight.full_tensor() if trained is model else weight
            (loss + F.linear(x, whole).square().mean()).backward()
        if number == 0:
            kept = model.first.weight.full_tensor()
            before = kept.detach().clone()
        for trained in (model, ddp.module):
            with torch.no_grad():
                for param in trained.parameters():
                    param.sub_(0.1 * _average(param) if trained is not model else 0.1 * param.grad)
            trained.zero_grad()
    assert torch.equal(kept, before), "a value, whatever happens to the weight"
    same(model, ddp, rtol=1e-5)


def _average(param: Tensor) -> Tensor:
    """DDP has reduced a gradient before the term outside of it was added."""
    grad = _grad(param).clone()
    torch.distributed.all_reduce(grad)
    return grad / torch.distributed.get_world_size()


@pytest.mark.parametrize("stage", [0, 3])
def test_full_values_in_a_loss(stage: int) -> None:
    run_ranks(2, _whole_in_a_loss, stage)


def _overlapping(stage: int) -> None:
    for alias in ("parameter", "buffer"):
        model = net()
        if alias == "parameter":
            model.last.extra = nn.Parameter(model.first.weight.data)
        else:
            model.last.register_buffer("extra", model.first.weight.data[0])
        with refused("first.weight and last.extra", "clone()", kind=UnsupportedError):
            compiled(model, stage)(*data(0))


def test_parameters_in_the_memory_of_others_are_refused() -> None:
    run_ranks(2, _overlapping, 3)


class Fused(torch.autograd.Function):
    """Adds to the weight's gradient itself, as Megatron's fused accumulation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        weight.grad = grads[0].t() @ x
        return grads[0] @ weight, None


class Accumulating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 13), nn.Linear(13, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(Fused.apply(self.first(x), self.last.weight), y)


def _fused(stage: int) -> None:
    loss = compiled(net(Accumulating), stage)(*data(0))
    with refused("last.weight", "return it", kind=UnsupportedError):
        loss.backward()


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_that_a_backward_writes_are_refused(stage: int) -> None:
    run_ranks(2, _fused, stage)


class Half(nn.Module):
    def __init__(self) -> None:
        raise ValueError("before the constructor of nn.Module")


def _half_made() -> None:
    kept = Half.__new__(Half)
    compiled(net(), 3)(*data(0)).backward()
    del kept


def test_half_made_modules_do_no_harm() -> None:
    run_ranks(2, _half_made)
