"""`model.to(…)` of a sharded model: parameters stay what they are, and keep their hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zerofx
from tests.contract.loops import (
    FAST,
    STAGES,
    close,
    compiled,
    data,
    full,
    net,
    refused,
    same,
    sgd,
    twin,
)
from tests.ranks import run_ranks
from zerofx.errors import ShardingError, UnsupportedError
from zerofx.sharding import materialise
from zerofx.sharding.shard import session_of


def _hooks(stage: int, grad_dtype: torch.dtype | None) -> None:
    model = net()
    options = {**FAST, "grad_dtype": grad_dtype}
    run = torch.compile(model, backend=f"zero{stage}", options=options)
    run(*data(0))
    called: list[str] = []
    for param in model.parameters():
        param.register_hook(lambda grad: called.append("hook"))
        param.register_post_accumulate_grad_hook(lambda param: called.append("post"))
    before = list(model.parameters())
    model.to("cpu").float()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: called.append("later"))
    run(*data(0)).backward()
    assert [id(param) for param in model.parameters()] == [*map(id, before)]
    for kind in ("hook", "post", "later"):
        assert called.count(kind) == len(before), kind


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("grad_dtype", [None, torch.bfloat16])
def test_parameters_keep_their_hooks(stage: int, grad_dtype: torch.dtype | None) -> None:
    run_ranks(2, _hooks, stage, grad_dtype)


def _moved_too_late() -> None:
    model = net()
    run = torch.compile(model, backend="zero3", options=FAST)
    run(*data(0)).backward()
    session = session_of(model)
    assert session is not None
    session.device = torch.device("cuda")  # as if it came from there
    model.double()
    for _ in range(2):
        with refused("sharded on cuda and moved to cpu", "before its first", kind=ShardingError):
            run(*data(0, dtype=torch.float64))
    model = net().to("meta")
    config = zerofx.ZeroConfig(mesh=init_device_mesh("cpu", (2,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(materialise, "default_device", lambda: torch.device("meta"))
        with refused("is on meta", "of type cpu", kind=UnsupportedError):
            zerofx.shard(model, config)


def test_a_move_to_another_type_of_device_is_refused() -> None:
    run_ranks(2, _moved_too_late)


def _held_back(stage: int) -> None:
    model, ddp = net(), twin(net())
    run, optimizer, wanted = compiled(model, stage), sgd(model), sgd(ddp)
    for step in range(3):
        model.to("cpu")
        with zerofx.no_sync(model):
            run(*data(step)).backward()
        run(*data(step + 5)).backward()
        for number in (step, step + 5):
            ddp(*data(number)).backward()
        for param, want in zip(model.parameters(), ddp.module.parameters(), strict=True):
            close(full(param.grad), want.grad, "gradient")
        for each in (optimizer, wanted):
            each.step()
            each.zero_grad()
    same(model, ddp)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_held_back(stage: int) -> None:
    run_ranks(2, _held_back, stage)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(7, 5), nn.Linear(5, 5)
        self.head.register_buffer("scale", torch.ones(()))

    def forward(self, x: Any, y: Any) -> Any:
        return (self.head(self.lstm(x)[0]) * self.head.scale - y).square().mean()


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 7, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Any, y: Any) -> Any:
        return (self.last(torch.tanh(self.first(x)))[:, :5] - y).square().mean()


def _converted(stage: int) -> None:
    """Values, gradients and what an optimizer knows go along to another dtype and back."""
    model, plain = net(_Recurrent), net(_Recurrent)
    run, optimizer, wanted = compiled(model, stage), sgd(model), sgd(plain)
    zerofx.trust(wanted)
    for step, dtype in enumerate((torch.float32, torch.float64, torch.float64, torch.float32)):
        for each in (model, plain):
            each.to(dtype)
        for each in (run, plain):
            each(*data(step, dtype=dtype)).backward()
        for param in plain.parameters():
            dist.all_reduce(param.grad)
            param.grad.div_(2)
        for update in (optimizer, wanted):
            for group in update.state.values():
                group["momentum_buffer"] = group["momentum_buffer"].to(dtype)
            update.step()
        model.to(torch.float64).to(dtype)  # with gradients
        for param, want in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(param, DTensor) and param.dtype is dtype
            close(full(param.grad), want.grad, "gradient")
        optimizer.zero_grad(set_to_none=False)
        wanted.zero_grad(set_to_none=False)
    same(model, plain)


@pytest.mark.parametrize("stage", [1, 3])
def test_another_dtype(stage: int) -> None:
    run_ranks(2, _converted, stage)


def _rested_in_bfloat16(stage: int) -> None:
    """What is computed in a dtype is so at rest in any other."""
    options = {**FAST, "param_dtype": torch.bfloat16}
    for model in (net(_Recurrent).bfloat16(), net(_Tied).bfloat16()):
        run = torch.compile(model, backend=f"zero{stage}", options=options)
        for dtype in (torch.bfloat16, torch.float32):
            model.to(dtype)
            run(*data(0, dtype=torch.bfloat16)).backward()
            assert all(param.dtype is param.grad.dtype is dtype for param in model.parameters())
            model.zero_grad()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_wider_dtype_at_rest(stage: int) -> None:
    run_ranks(2, _rested_in_bfloat16, stage)
