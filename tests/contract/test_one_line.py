"""Point 1: every way to compile a model shards and trains it as DDP does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.contract.loops import (
    FAST,
    STAGES,
    Net,
    compiled,
    config,
    data,
    net,
    refused,
    same,
    sgd,
    sharded,
    still_plain,
    train,
    twin,
)
from tests.ranks import run_ranks
from zerofx.errors import ShardingError, UnsupportedError
from zerofx.frontend.backend import zero3


def _trains(stage: int, optimizer_first: bool, **kwargs: Any) -> None:
    model, ddp = net(), twin(net())
    early = sgd(model) if optimizer_first else None
    run = compiled(model, stage, **kwargs)
    losses = train(run, early or sgd(model))
    assert losses == train(ddp, sgd(ddp))
    assert sharded(model)
    same(model, ddp)


def _every_stage(**kwargs: Any) -> None:
    for stage in STAGES:
        # Built before at stages 1 and 3, after at 0 and 2, and both ways without options.
        _trains(stage, optimizer_first=stage in (1, 3), **kwargs)
    if not kwargs:
        _trains(1, optimizer_first=False)
        _trains(3, optimizer_first=False)


@pytest.mark.parametrize("world_size", [1, 2])
def test_torch_compile(world_size: int) -> None:
    run_ranks(world_size, _every_stage)


@pytest.mark.parametrize("kwargs", [{"fullgraph": True}, {"dynamic": True}], ids=str)
def test_options_of_torch_compile(kwargs: dict[str, Any]) -> None:
    run_ranks(2, _every_stage, **kwargs)


def _method() -> None:
    for stage in STAGES:
        torch._dynamo.reset()
        model, ddp = net(), twin(net())
        optimizer = sgd(model)
        model.compile(backend=f"zero{stage}", options=FAST)
        train(model, optimizer)
        train(ddp, sgd(ddp))
        assert sharded(model)
        same(model, ddp)


def test_the_method_of_a_module() -> None:
    run_ranks(2, _method)


def _mode() -> None:
    model, ddp = net(lambda: _Wide()), twin(net(lambda: _Wide()))
    run = torch.compile(model, backend="zero3", mode="max-autotune-no-cudagraphs")
    train(run, sgd(model))
    train(ddp, sgd(ddp))
    assert sharded(model)
    same(model, ddp, rtol=1e-5)


class _Wide(Net):
    """Large enough to be sharded by default."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 100), nn.Linear(100, 5)


def test_a_mode() -> None:
    run_ranks(2, _mode, timeout=220)


def _refused_modes() -> None:
    with refused("knows no mode='fastest'", kind=UnsupportedError):
        torch.compile(net(), backend="zero3", mode="fastest")(*data(0))
    for mode in ("reduce-overhead", "max-autotune"):
        model = net()
        with refused(mode, "CUDA graphs", "max-autotune-no-cudagraphs", kind=UnsupportedError):
            torch.compile(model, backend="zero3", mode=mode)(*data(0))
        still_plain(model)
    model = net()
    recording = torch._inductor.config.patch("triton.cudagraphs", True)
    with recording, refused("config.triton.cudagraphs", "CUDA graphs", kind=UnsupportedError):
        torch.compile(model, backend="zero3")(*data(0))
    still_plain(model)


def test_modes_with_cuda_graphs_are_refused() -> None:
    run_ranks(2, _refused_modes)


def _options_given_twice(folder: str) -> None:
    model = net()
    zerofx.shard(model, config(3, dump=folder))
    with refused("hang_timeout=77 comes too late", kind=UnsupportedError):
        late = {**FAST, "hang_timeout": 77.0}
        torch.compile(model, backend="zero3", options=late)(*data(0))
    torch.compile(model, backend="zero3", options=FAST)(*data(0))


def test_what_holds_from_sharding_on_is_not_lost_when_compiling(tmp_path: Path) -> None:
    run_ranks(2, _options_given_twice, str(tmp_path))
    assert list(tmp_path.iterdir()), "nothing was dumped"


def _named() -> None:
    """What torch 2.15 makes of `torch.compile(…, name="main")`."""
    model = net()
    with refused("name='main'", "leave it out", kind=UnsupportedError):
        torch.compile(model, backend=lambda *graph: zero3(*graph, name="main"))(*data(0))
    still_plain(model)


def test_keywords_of_newer_torch_are_refused() -> None:
    run_ranks(2, _named)


def _function(stage: int) -> None:
    model, ddp = net(), twin(net())
    optimizer = sgd(model)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return 2 * model(x, y)

    with refused("no module on the call stack owns", "zerofx.shard", kind=ShardingError):
        compiled(loss, stage)(*data(0))
    still_plain(model)
    zerofx.shard(model, config(stage))
    train(compiled(loss, stage, fullgraph=True), optimizer)
    train(lambda x, y: 2 * ddp(x, y), sgd(ddp))
    same(model, ddp)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_compiled_function_that_calls_a_module(stage: int) -> None:
    run_ranks(2, _function, stage)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(7, 7), nn.LayerNorm(7)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class _Blocks(nn.Module):
    """More equal blocks than Dynamo recompiles one code object."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(12))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y)


def _per_block(stage: int) -> int:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, ddp = net(_Blocks), twin(net(_Blocks))
    zerofx.shard(model, config(stage))
    for block in model.blocks:
        block.compile(backend=f"zero{stage}", options=FAST, fullgraph=True)
    train(model, sgd(model))
    train(ddp, sgd(ddp))
    same(model, ddp)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("stage", [0, 3])
def test_many_blocks_compiled_one_by_one_share_programs(stage: int) -> None:
    # The first block's input needs no gradient.
    assert run_ranks(2, _per_block, stage) == [2, 2]


class _Wrapper(nn.Module):
    """Owns the same parameters as the compiled model inside it, and runs eagerly."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 2 * self.inner(x, y)


def _wrapped() -> None:
    model, ddp = net(), twin(net())
    outer = _Wrapper(compiled(model, 3))
    train(outer, sgd(outer))
    train(lambda x, y: 2 * ddp(x, y), sgd(ddp))
    assert sharded(model)
    same(model, ddp)


def test_a_compiled_model_inside_an_eager_wrapper() -> None:
    run_ranks(2, _wrapped)


class _Trainer:
    def __init__(self, model: nn.Module, other: nn.Module) -> None:
        self.other, self.model = other, model
        self.run = compiled(model, 3)

    def step(self, number: int) -> None:
        other, model = self.other, self.model  # two modules in scope
        assert other is not model
        train(self.run, sgd(model), [number])


_globals: dict[str, Any] = {}


class _Task(nn.Module):
    """What timm trains: a model, beside what only looks at it."""

    def __init__(self, model: nn.Module, run: Any, beside: nn.Module) -> None:
        super().__init__()
        self.trained, self.beside, self.model = run, beside, model

    def forward(self, *args: Tensor) -> Tensor:
        return self.trained(*args)


def _beside(stage: int) -> None:
    for frozen in (True, False):
        model, ddp = net(), twin(net())
        task = _Task(model, compiled(model, stage), net().requires_grad_(not frozen))
        optimizer, wanted = sgd(model), sgd(ddp)
        for run, steps in ((task, optimizer), (ddp, wanted)):
            train(run, steps)
        same(model, ddp)
        assert sharded(model) and not sharded(task.beside)
    wider = _Task(other := net(), compiled(other, stage), net())
    for build in (lambda _: None, sgd):
        optimizer = build(wider)
        with refused("_Task, which owns more", "zerofx.shard", kind=ShardingError):
            wider(*data(0))


@pytest.mark.parametrize("stage", [1, 3])
def test_models_beside_the_compiled_one_that_do_not_train(stage: int) -> None:
    run_ranks(2, _beside, stage)


def _global_step(x: Tensor, y: Tensor) -> Tensor:
    return _globals["run"](x, y)


def _scopes() -> None:
    other, model, ddp = net(seed=1), net(), twin(net())
    _Trainer(model, other).step(0)
    train(ddp, sgd(ddp), [0])
    same(model, ddp)
    model, ddp = net(), twin(net())
    _globals["run"] = compiled(model, 3)
    train(_global_step, sgd(model))
    train(ddp, sgd(ddp))
    same(model, ddp)
    still_plain(other)


def test_the_root_is_found_whatever_is_in_scope() -> None:
    run_ranks(2, _scopes)
