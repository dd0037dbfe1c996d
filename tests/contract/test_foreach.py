"""What torch's optimizers do on GPUs, as far as CPUs can show it: `foreach`, `capturable`."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zerofx
from tests.contract.loops import (
    close,
    compiled,
    config,
    data,
    full,
    net,
    same,
    sharded,
    train,
    twin,
)
from tests.ranks import run_ranks

OPTIMIZERS = ("Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


def _as_on_a_gpu(name: str, supported: str) -> Any:
    module = sys.modules[getattr(torch.optim, name).__mro__[0].__module__]
    if name == "AdamW":
        module = sys.modules["torch.optim.adam"]
    return patch.object(module, supported, lambda *_, **__: ["cpu"])


def _train_anew(model: nn.Module, run: Any, ours: Any, theirs: Any, what: str) -> None:
    """Train from the first weights, which one compiled model gets again for each optimizer."""
    ddp = twin(net())
    if sharded(model):
        with zerofx.unshard(model) as values, torch.no_grad():
            for name, value in ddp.module.named_parameters():
                values[name].copy_(value)
    got, want = train(run, ours, 3), train(ddp, theirs(ddp.parameters()), 3)
    close(torch.tensor(got), torch.tensor(want), f"losses with {what}", rtol=1e-5)
    same(model, ddp, rtol=1e-4)


def _captured(stage: int, foreach: bool) -> None:
    model, early = net(), dict[str, Any]()
    run = compiled(model, stage)
    for name in OPTIMIZERS:
        with _as_on_a_gpu(name, "_get_capturable_supported_devices"):
            build = getattr(torch.optim, name)
            early[name] = build(model.parameters(), lr=0.01, foreach=foreach, capturable=True)
    for name, optimizer in early.items():
        plain = functools.partial(getattr(torch.optim, name), lr=0.01, foreach=False)
        with _as_on_a_gpu(name, "_get_capturable_supported_devices"):
            _train_anew(model, run, optimizer, plain, name)
        for param in model.parameters():
            assert isinstance(optimizer.state[param]["step"], torch.Tensor)


@pytest.mark.parametrize(("stage", "foreach"), [(1, True), (3, False)])
def test_capturable(stage: int, foreach: bool) -> None:
    """The arithmetic that a CUDA graph of a step would hold: its counters are tensors."""
    run_ranks(2, _captured, stage, foreach)


def _by_default(stage: int) -> list[str]:
    called: list[str] = []
    model = net()
    run = compiled(model, stage)
    loss = run(*data(0))
    loss.backward()
    adam, clip = sys.modules["torch.optim.adam"], torch.nn.utils
    with contextlib.ExitStack() as stack:
        for where in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            name = f"{where}._get_foreach_kernels_supported_devices"
            stack.enter_context(patch(name, lambda: ["cpu"]))
        for owner, name in (
            (torch, "_foreach_norm"),
            (adam, "_single_tensor_adam"),
            (adam, "_multi_tensor_adam"),
        ):
            counted = _counted(getattr(owner, name), name, called)
            stack.enter_context(patch.object(owner, name, counted))
        clip.clip_grad_norm_(model.parameters(), 0.1)
        torch.optim.AdamW(model.parameters()).step()
    return called


def _counted(function: Any, name: str, called: list[str]) -> Any:
    def count(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return function(*args, **kwargs)

    return count


@pytest.mark.parametrize("stage", [1, 3])
def test_foreach_is_the_default_on_gpus(stage: int) -> None:
    """As for a plain `DTensor`: one by one, a step would launch kernels for each parameter."""
    assert run_ranks(2, _by_default, stage) == [["_foreach_norm", "_multi_tensor_adam"]] * 2


def _copied(stage: int) -> None:
    model, other = net(), net(seed=1)
    for each in (model, other):
        compiled(each, stage)(*data(0))
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), list(other.parameters()))
    wanted = compiled(other, stage)(*data(1))
    assert torch.equal(compiled(model, stage)(*data(1)), wanted), "the next forward sees it"
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(full(mine), full(theirs))


@pytest.mark.parametrize("stage", [1, 3])
def test_foreach_copies(stage: int) -> None:
    run_ranks(2, _copied, stage)


FUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-3, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": torch.tensor(0.01), "eps": 1e-3}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


def _fused(stage: int, early: bool) -> None:
    model = net()
    run = compiled(model, stage)

    def built() -> list[Any]:
        return [build(model.parameters(), fused=True, **how) for build, how in FUSED.values()]

    if not early:
        with torch.no_grad():
            run(*data(0))
    for (name, (build, how)), optimizer in zip(FUSED.items(), built(), strict=True):
        plain = functools.partial(build, foreach=False, **how)
        _train_anew(model, run, optimizer, plain, name)


@pytest.mark.parametrize(("stage", "early"), [(0, True), (1, False), (2, True), (3, False)])
def test_fused(stage: int, early: bool) -> None:
    run_ranks(2, _fused, stage, early)


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 2), nn.Flatten(), nn.Linear(54, 3))


def _in_other_orders(stage: int) -> None:
    """Kernels go through memory from end to end, and rows need not lie as their gradients."""
    model, plain = net(_convolution), net(_convolution)
    zerofx.shard(model, config(stage))
    fused = torch.optim.SGD(model.parameters(), 0.1, 0.9, fused=True)
    other = torch.optim.SGD(plain.parameters(), 0.1, 0.9, foreach=False)
    zerofx.trust(other)
    for step in range(3):
        if step == 1:  # momentum lies in the old order by then
            model.to(memory_format=torch.channels_last)
        draw = torch.Generator().manual_seed(step)
        model(torch.randn(4, 3, 4, 4, generator=draw)).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            noise = torch.randn(ours.shape, generator=draw)
            theirs.grad = full(ours.grad) + noise
            ours.grad = theirs.grad.clone() if step == 2 else ours.grad + noise
        for optimizer in (fused, other):
            optimizer.step()
            optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            close(full(ours), theirs.detach(), f"step {step}")


@pytest.mark.parametrize("stage", [1, 3])
def test_fused_in_other_orders_of_memory(stage: int) -> None:
    run_ranks(2, _in_other_orders, stage)


def _saved_apart(stage: int) -> None:
    """GPU kernels count writes of the tensors that they are given; autograd must not hear of it."""

    def as_on_a_gpu(written: list[torch.Tensor], number: float) -> None:
        torch._foreach_add_(written, number)
        torch.autograd.graph.increment_version(written)

    model = net()
    compiled(model, stage)(*data(0))
    params = list(model.parameters())
    locals_ = [param._local_tensor for param in params]
    before = [local._version for local in locals_], [param._version for param in params]
    wanted = [local + 1 for local in locals_]
    add = torch.ops.aten._foreach_add_.Scalar
    with torch.no_grad():
        DTensor._op_dispatcher._custom_op_handlers[add](as_on_a_gpu, (params, 1.0), {})
    assert [local._version for local in locals_] == before[0]
    assert [param._version for param in params] == [count + 1 for count in before[1]]
    assert all(map(torch.equal, locals_, wanted))


def test_counters_of_local_tensors_stay() -> None:
    run_ranks(2, _saved_apart, 3)
