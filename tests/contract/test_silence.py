"""Point 2: nothing trains wrongly in silence, and DDP's contract is kept."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.contract.loops import (
    FAST,
    STAGES,
    Net,
    close,
    compiled,
    config,
    data,
    full,
    net,
    refused,
    same,
    sgd,
    sharded,
    train,
    trains_alike,
    twin,
)
from tests.oracle import Result, assert_same
from tests.oracle import train as train_zoo
from tests.ranks import run_ranks
from tests.scripts import run_script
from zerofx.errors import ShardingError, UnreducedGradientError


def _names_in_the_guard() -> None:
    model = net()
    torch._dynamo.reset()
    # Dynamo compiles no frame of a module of torch's own that is compiled in place.
    plain = nn.Sequential(nn.Linear(7, 5))
    plain.compile(backend="zero3", options=FAST)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(data(0)[0]).sum().backward()
    before = plain[0].weight.detach().clone()
    named = ("0.weight", "0.bias", "only this rank", "nn.Sequential", "torch.compile(model, …)")
    with refused(*named, kind=UnreducedGradientError):
        optimizer.step()
    assert torch.equal(plain[0].weight, before)
    optimizer.zero_grad()

    def closure() -> float:
        loss = plain(data(0)[0]).sum()
        loss.backward()
        return loss.item()

    with refused(*named, kind=UnreducedGradientError):
        optimizer.step(closure)
    assert torch.equal(plain[0].weight, before)
    run = compiled(plain, 3)
    optimizer.zero_grad()
    run(data(0)[0]).sum().backward()
    optimizer.step()
    assert sharded(plain)
    torch._dynamo.reset()
    model.first.compile(backend="zero3", options=FAST)
    with refused("first.weight", "last.bias", kind=UnreducedGradientError):
        train(model, sgd(model), 1)
    ddp = twin(net())
    train(ddp, sgd(ddp))


def test_the_step_guard_names_parameters_and_lets_ddp_pass() -> None:
    run_ranks(2, _names_in_the_guard)


_REFERENCE_FIRST = """
import torch
import torch.distributed as dist
import zerofx

dist.init_process_group("gloo")
reference, model = torch.nn.Linear(7, 5), torch.nn.Linear(7, 5)
optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)

def step(run, optimizer):
    run(torch.ones(2, 7)).sum().backward()
    optimizer.step()

step(reference, optimizer)
run = torch.compile(model, backend="zero3", options={"inner": "eager"})
step(run, torch.optim.SGD(model.parameters(), lr=0.1))
try:
    step(reference, optimizer)
except zerofx.ZeroFxError as error:
    assert error.remedy.startswith("models that zerofx does not train"), error
    print("refused")
dist.destroy_process_group()
"""


def test_a_model_to_compare_with_may_train_before_zerofx_does(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_REFERENCE_FIRST)
    assert run_script(script).split() == ["refused"] * 2


class _Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def _blocks_without_root() -> None:
    model = net()
    model.last = _Part()
    model.last.compile(backend="zero3", options=FAST)
    with refused("_Part", "Net", "zerofx.shard", kind=ShardingError):
        model(*data(0))
    assert not sharded(model)


def test_blocks_compiled_without_their_root() -> None:
    run_ranks(2, _blocks_without_root)


def _added(stage: int) -> None:
    model, ddp_model = net(), net()
    run = compiled(model, stage)
    run(*data(0)).backward()
    model.zero_grad()
    torch.manual_seed(torch.distributed.get_rank())  # rank 0 wins later, too
    model.last = nn.Sequential(nn.Linear(13, 13), nn.Linear(13, 5))
    torch.manual_seed(0)
    ddp_model.last = nn.Sequential(nn.Linear(13, 13), nn.Linear(13, 5))
    trains_alike(run, model, ddp_model)
    with zerofx.unshard(model) as values:
        assert set(values) == set(model.state_dict())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_module_added_later_is_sharded_by_the_next_forward(stage: int) -> None:
    run_ranks(2, _added, stage)


def _assigned(stage: int) -> None:
    model, ddp_model = net(), net()
    run = compiled(model, stage)
    run(*data(0))
    for one in (model, ddp_model):
        torch.manual_seed(5)
        one.first.weight = nn.Parameter(torch.randn(13, 7))
    optimizer = sgd(model)
    ddp = twin(ddp_model)
    train(run, optimizer)
    train(ddp, sgd(ddp))
    assert sharded(model)
    same(model, ddp)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_assigned_later_is_sharded_by_the_next_forward(stage: int) -> None:
    run_ranks(2, _assigned, stage)


def _assigned_in_eager() -> None:
    model = net()
    zerofx.shard(model, config(3))
    model.first.weight = nn.Parameter(torch.randn(13, 7))
    with refused("first.weight", kind=UnreducedGradientError):
        train(model, sgd(model), 1)


def test_a_parameter_assigned_later_in_eager_code_is_caught_at_the_step() -> None:
    run_ranks(2, _assigned_in_eager)


class _Agent(nn.Module):
    """What a loop of reinforcement learning trains: it calls methods, and never `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(7, 5), nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.ones(5))

    def act(self, seen: Tensor) -> Tensor:
        return self.actor(seen) * self.scale.exp()

    def value(self, seen: Tensor) -> Tensor:
        return self.critic(seen)


def _mean(grad: Tensor) -> Tensor:
    dist.all_reduce(grad := grad.clone())
    return grad / dist.get_world_size()


def _trained_by_methods(agent: Any, parameters: Any, trusted: bool = False) -> list[float]:
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    if trusted:
        zerofx.trust(optimizer)
    for step in range(3):
        seen = data(step)[0]
        loss = agent.act(seen).square().mean() + (agent.value(seen) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _by_methods() -> None:
    torch.manual_seed(0)
    model = _Agent()
    run = torch.compile(copy.deepcopy(model), backend="zero3", options=FAST)
    with refused("methods", "zerofx.shard", kind=UnreducedGradientError):
        _trained_by_methods(run, run.parameters())
    whole = copy.deepcopy(model)
    for param in whole.parameters():
        param.register_hook(_mean)
    want = _trained_by_methods(whole, whole.parameters(), trusted=True)
    eager, partly = copy.deepcopy(model), copy.deepcopy(model)
    for each in (eager, partly):
        zerofx.shard(each, config(3))
    act = torch.compile(partly.act, backend="zero3", options=FAST)
    for agent in (eager, SimpleNamespace(act=act, value=partly.value)):
        of = eager if agent is eager else partly
        got = _trained_by_methods(agent, of.parameters())
        close(torch.tensor(got), torch.tensor(want), "losses", rtol=1e-6)
        for ours, theirs in zip(of.parameters(), whole.parameters(), strict=True):
            close(full(ours), theirs, "parameters", rtol=1e-6)


def test_methods_that_are_not_forward() -> None:
    run_ranks(2, _by_methods)


class _Counting(Net):
    """Buffers that differ between ranks, seen by the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor
        self.flag: Tensor
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("flag", torch.rand(3) > 0.5)
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.norm(x), y) * self.scale.sum()


def _seeds(stage: int) -> None:
    rank = torch.distributed.get_rank()
    model, ddp = net(_Counting, seed=rank), twin(net(_Counting))
    run = compiled(model, stage)
    run(*data(0))
    ddp(*data(0))
    train(run, sgd(model))
    train(ddp, sgd(ddp))
    for name, value in ddp.module.named_parameters():
        assert torch.allclose(full(model.get_parameter(name)), value, atol=1e-6), name
    assert torch.equal(model.scale, ddp.module.scale) and torch.equal(model.flag, ddp.module.flag)


@pytest.mark.parametrize("stage", STAGES)
def test_rank_0_wins_parameters_and_buffers(stage: int) -> None:
    run_ranks(2, _seeds, stage)


def _both(name: str, stage: int, **kwargs: Any) -> list[Result]:
    options = {"inner": "eager"}
    return [
        train_zoo(name, "ddp", **kwargs),
        train_zoo(name, f"zero{stage}", options=options, **kwargs),
    ]


@pytest.mark.parametrize("stage", [1, 3])
def test_batch_norm_and_batches_of_different_sizes(stage: int) -> None:
    for name, kwargs in (("cnn", {"rank_seeds": True}), ("mlp", {"rows": [5, 2]})):
        results = run_ranks(2, _both, name, stage, steps=3, **kwargs)
        want, got = [ddp for ddp, _ in results], [ours for _, ours in results]
        assert_same(got, want, rtol=1e-6)
        assert_same(got, want, rtol=1e-6, keys=["buffers"])
