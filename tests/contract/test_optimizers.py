"""What people do between backward and step: clip, group parameters, step inside backward."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

import zerofx
from tests.contract.loops import (
    FAST,
    close,
    compiled,
    config,
    data,
    full,
    net,
    same,
    train,
    twin,
)
from tests.ranks import run_ranks
from zerofx.frontend import step_guard


def _clipped(stage: int) -> None:
    model, ddp = net(), twin(net())
    run = compiled(model, stage)
    for norm_type, foreach in ((2.0, None), (math.inf, True), (1.0, True)):
        norms = []
        for forward, module in ((run, model), (ddp, ddp)):
            forward(*data(0)).backward()
            if foreach:  # the default on GPUs
                _make_whole(next(module.parameters()))
            params = list(module.parameters())
            norm = nn.utils.clip_grad_norm_(params, 0.01, norm_type=norm_type, foreach=foreach)
            norms.append(full(norm))
        close(*norms, f"norm {norm_type}")
        _same_gradients(model, ddp)
    for forward, module in ((run, model), (ddp, ddp)):
        forward(*data(0)).backward()
        nn.utils.clip_grad_value_(module.parameters(), 0.003)
    largest = max(full(param.grad).abs().max().item() for param in model.parameters())
    assert math.isclose(largest, 0.003, rel_tol=1e-6)
    _same_gradients(model, ddp)


def _make_whole(param: torch.Tensor) -> None:
    """A gradient that the loop makes itself."""
    assert param.grad is not None
    param.grad = full(param.grad)


def _same_gradients(model: nn.Module, ddp: Any) -> None:
    for name, param in model.named_parameters():
        close(full(param.grad), ddp.module.get_parameter(name).grad, name)
    model.zero_grad()
    ddp.zero_grad()


@pytest.mark.parametrize("stage", [1, 3])
def test_clipping_by_norm_and_by_value(stage: int) -> None:
    run_ranks(2, _clipped, stage)


def _clip_adaptively(module: nn.Module, factor: float) -> None:
    """Brock et al. 2021 (arXiv 2102.06171), with the operations that timm's function has."""

    def norm_of_units(x: torch.Tensor) -> torch.Tensor:
        return x.norm() if x.ndim < 2 else x.norm(2.0, dim=tuple(range(1, x.ndim)), keepdim=True)

    for param in module.parameters():
        assert param.grad is not None
        value, grad = param.detach(), param.grad.detach()
        most = norm_of_units(value).clamp_(min=1e-3).mul_(factor)
        norm = norm_of_units(grad)
        clipped = grad * (most / norm.clamp(min=1e-6))
        grad.copy_(torch.where(norm < most, grad, clipped))


def _adaptive(stage: int) -> None:
    model, ddp = net(), twin(net())
    for forward, module in ((compiled(model, stage), model), (ddp, ddp)):
        forward(*data(0)).backward()
        before = full(next(module.parameters()).grad).clone()
        _clip_adaptively(module, 0.01)
        assert not torch.equal(full(next(module.parameters()).grad), before)
    _same_gradients(model, ddp)


@pytest.mark.parametrize("stage", [1, 3])
def test_adaptive_clipping(stage: int) -> None:
    run_ranks(2, _adaptive, stage)


def _grouped(stage: int) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        decayed = [param for param in model.parameters() if param.ndim > 1]
        plain = [param for param in model.parameters() if param.ndim == 1]
        return [{"params": decayed, "weight_decay": 0.5}, {"params": plain, "lr": 0.002}]

    model, ddp = net(), twin(net())
    early = AdamW(groups(model), lr=0.05, eps=1e-3, weight_decay=0.0)
    train(compiled(model, stage), early, 3)
    train(ddp, AdamW(groups(ddp), lr=0.05, eps=1e-3, weight_decay=0.0), 3)
    same(model, ddp)
    assert [group["lr"] for group in early.param_groups] == [0.05, 0.002]


@pytest.mark.parametrize("stage", [1, 3])
def test_parameter_groups(stage: int) -> None:
    run_ranks(2, _grouped, stage)


WHOLE: dict[str, Callable[..., Optimizer]] = {
    "Adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "foreach": partial(torch.optim.Adafactor, lr=0.05, foreach=True),
    "transformers": transformers.Adafactor,
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.1, history_size=3, max_iter=3),
}
"""Optimizers that look at whole matrices, write through masks, or at whole vectors of a model."""


def _fitted(run: Any, optimizer: Optimizer, steps: range) -> None:
    for number in steps:

        @torch.enable_grad()
        def closure(number: int = number) -> Any:
            optimizer.zero_grad()
            loss = run(*data(number, dtype=torch.float64))
            loss.backward()
            return loss

        optimizer.step(closure)


def _looks_at_whole(stage: int, early: bool) -> None:
    for name, build in WHOLE.items():
        model, ddp = net().double(), twin(net().double())
        run = compiled(model, stage)
        if not early:
            with torch.no_grad():
                run(*data(0, dtype=torch.float64))
        optimizer, plain = build(model.parameters()), build(ddp.parameters())
        _fitted(run, optimizer, range(2))
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        saved.seek(0)
        resumed = build(model.parameters())
        resumed.load_state_dict(torch.load(saved))
        _fitted(run, resumed, range(2, 4))
        _fitted(ddp, plain, range(4))
        close(_vector(model), _vector(ddp), name, rtol=1e-12)


def _vector(module: nn.Module) -> torch.Tensor:
    return torch.cat([full(param).flatten() for param in module.parameters()])


@pytest.mark.parametrize(("stage", "early"), [(1, True), (3, False)])
def test_optimizers_that_look_at_whole_parameters(stage: int, early: bool) -> None:
    run_ranks(2, _looks_at_whole, stage, early)


def _inside_backward(stage: int) -> None:
    """Each parameter is updated, and its gradient freed, as soon as that is there."""
    for early in (True, False):
        model, ddp = net(), twin(net())
        run = compiled(model, stage)
        if not early:
            with torch.no_grad():
                run(*data(0))  # shards the model
        # As in torch's tutorial.
        optimizers = {param: SGD([param], lr=0.1, momentum=0.9) for param in model.parameters()}

        def step(param: torch.Tensor, optimizers: Any = optimizers) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        for number in range(3):
            run(*data(number)).backward()
        assert all(param.grad is None for param in model.parameters())
        train(ddp, SGD(ddp.parameters(), lr=0.1, momentum=0.9), 3)
        same(model, ddp)


@pytest.mark.parametrize(("stage", "num_ranks"), [(1, 2), (3, 2), (2, 4)])
def test_optimizer_in_backward(stage: int, num_ranks: int) -> None:
    run_ranks(num_ranks, _inside_backward, stage)


def _compiled_step(stage: int, **options: Any) -> None:
    model, ddp = net(), twin(net())
    early: Any = AdamW(model.parameters(), lr=0.05, eps=1e-3)
    early.step = torch.compile(early.step, backend="eager")
    torch._dynamo.reset()
    run: Any = torch.compile(model, backend=f"zero{stage}", options={**FAST, **options})
    got = train(run, early, 3)
    want = train(ddp, AdamW(ddp.parameters(), lr=0.05, eps=1e-3), 3)
    # Compiled, torch divides by bias corrections in another order.
    close(torch.tensor(got), torch.tensor(want), "losses", rtol=1e-2 if options else 1e-4)
    same(model, ddp, rtol=1e-1 if options else 1e-4)
    assert all(isinstance(state["exp_avg"], DTensor) for state in early.state.values())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_compiled_step(stage: int) -> None:
    """`torch.compile(optimizer.step)`: Dynamo hangs parameters on modules of its own."""
    run_ranks(2, _compiled_step, stage)


def test_a_compiled_step_sees_gradients_in_fp32() -> None:
    run_ranks(2, _compiled_step, 2, grad_dtype=torch.bfloat16)


def _cache_keys() -> list[tuple[tuple[int, ...], str]]:
    model: Any = net()
    zerofx.shard(model, config(3))
    params = [*model.parameters(), model.first.weight.detach()]
    return [(tuple(each.to_local().shape), each._stable_hash_for_caching()) for each in params]


@pytest.mark.skipif(
    not hasattr(DTensor, "_stable_hash_for_caching"), reason="torch has no such keys"
)
def test_ranks_with_other_rows_take_no_compiled_step_of_each_other() -> None:
    """By torch's key for `DTensor`s they would: AOTAutograd's cache serves all ranks."""
    one, other = run_ranks(2, _cache_keys)
    assert any(shape != theirs for (shape, _), (theirs, _) in zip(one, other, strict=True))
    for (shape, key), (theirs, another) in zip(one, other, strict=True):
        assert (key == another) is (shape == theirs)


def test_a_rate_on_a_gpu_is_not_read() -> None:
    """The host would wait for it; a tensor without memory cannot be read at all."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.0)
    for rate, applies in ((0.0, False), (torch.tensor(0.0), False), (torch.tensor(0.1), True)):
        optimizer.param_groups[0]["lr"] = rate
        assert step_guard._applies(optimizer) is applies
    optimizer.param_groups[0]["lr"] = torch.tensor(0.0, device="meta")
    assert step_guard._applies(optimizer)
