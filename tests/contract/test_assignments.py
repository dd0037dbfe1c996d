"""Point 3: weights that are assigned, tied, deleted, parametrized or initialised anew."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrizations, parametrize

import zerofx
from tests.contract.loops import (
    FAST,
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
from tests.ranks import run_ranks
from zerofx.errors import ShardingError
from zerofx.sharding.shard import session_of


class _Square(nn.Module):
    """Two weights of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(torch.tanh(self.emb(x)))[:, :5], y)


def _tied(stage: int) -> None:
    model, ddp_model = net(_Square), net(_Square)
    run = compiled(model, stage)
    run(*data(0))
    for one in (model, ddp_model):
        one.head.weight = one.emb.weight
    assert model.head.weight is model.emb.weight
    assert len(list(model.parameters())) == 1
    optimizer, ddp = sgd(model), twin(ddp_model)
    train(run, optimizer)
    train(ddp, sgd(ddp))
    same(model, ddp)
    with zerofx.unshard(model) as values:
        assert set(values) == {"emb.weight"}
    # Into a module that is not sharded at all.
    for one in (model, ddp.module):
        one.head = nn.Linear(7, 7, bias=False)
        one.head.weight = one.emb.weight
    trains_alike(run, model, ddp.module)


@pytest.mark.parametrize("stage", [1, 3])
def test_tying_after_sharding(stage: int) -> None:
    run_ranks(2, _tied, stage)


def _untied(stage: int) -> None:
    """The tied parameter is named after a place that another one takes."""
    model, plain = net(_Square), net(_Square)
    for each in (model, plain):
        each.head.weight = each.emb.weight
    run = compiled(model, stage)
    run(*data(0))
    for each in (model, plain):
        each.emb.weight = nn.Parameter(torch.full((7, 7), 0.1))
    trains_alike(run, model, plain)
    with zerofx.unshard(model) as values:
        assert set(values) == {"emb.weight", "head.weight"}
    with torch.no_grad():
        run(*data(2))
    for plain in (False, True):  # a `DTensor` becomes one of the model's at once
        model = net(_Square)
        model.again, model.head.weight = model.emb, model.emb.weight
        zerofx.shard(model, config(stage))
        new = model.emb.weight.detach().clone()
        model.head.weight = nn.Parameter(full(new) if plain else new)
        if plain:
            zerofx.shard(model, config(stage))
        session = session_of(model)
        assert session is not None
        names = [(state.spec.name, state.spec.tied) for state in session.states]
        assert names == [("emb.weight", ("again.weight",)), ("head.weight", ())]


@pytest.mark.parametrize("stage", [1, 3])
def test_untying_after_sharding(stage: int) -> None:
    run_ranks(2, _untied, stage)


def _dtensor_assigned(stage: int) -> None:
    model, ddp_model = net(), net()
    zerofx.shard(model, config(stage))
    for one in (model, ddp_model):
        doubled = nn.Parameter(one.first.weight.detach() * 2)
        one.first.weight = doubled
        assert one.first.weight is doubled
        one.last.bias = None
    trains_alike(compiled(model, stage), model, ddp_model)
    if stage == 3:
        whole = model.first.weight.detach().redistribute(placements=[Replicate()])
        model.first.weight = nn.Parameter(whole)
        train(compiled(model, stage), sgd(model), 1)
        with refused("Linear.weight", "placements", kind=ShardingError):
            model.first.weight = nn.Parameter(model.last.weight.detach().t())
    del model.first.weight
    assert "first.weight" not in model.state_dict() and not hasattr(model.first, "weight")
    model.first.weight = torch.zeros(13, 7)  # not a parameter
    with torch.no_grad():
        assert model.first(data(0)[0]).shape == (4, 13)


@pytest.mark.parametrize("stage", [0, 3])
def test_assigning_dtensors_and_deleting(stage: int) -> None:
    run_ranks(2, _dtensor_assigned, stage)


def _initialised(stage: int) -> None:
    model, ddp_model = net(), net()
    run = compiled(model, stage)
    run(*data(0))
    for one in (model, ddp_model):
        nn.init.constant_(one.first.weight, 0.1)
        nn.init.zeros_(one.first.bias)
        nn.init.ones_(one.last.weight)
    with torch.no_grad():
        close(run(*data(1)), ddp_model(*data(1)), "loss after nn.init")
    with zerofx.unshard(model) as values:
        torch.manual_seed(3)
        nn.init.kaiming_uniform_(values["first.weight"])
    torch.manual_seed(3)
    nn.init.kaiming_uniform_(ddp_model.first.weight)
    same(model, ddp_model)
    with torch.no_grad():
        close(run(*data(1)), ddp_model(*data(1)), "loss after zerofx.unshard")


@pytest.mark.parametrize("stage", [1, 3])
def test_initialising_after_sharding(stage: int) -> None:
    run_ranks(2, _initialised, stage)


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5 + torch.tanh(weight)


def _parametrized(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", _Symmetric())


_NORMS: list[Callable[[nn.Module], Any]] = [
    _parametrized,
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    torch.nn.utils.spectral_norm,
]


def _norm(index: int, stage: int, before: bool) -> None:
    apply = torch.nn.utils.weight_norm if index < 0 else _NORMS[index]
    model, ddp_model = net(), net()
    for one in (model, ddp_model):
        if one is model and not before:
            zerofx.shard(model, config(stage))
        torch.manual_seed(1)
        apply(one.first)
    run = compiled(model, stage)
    ddp = twin(ddp_model) if index >= 0 else None
    train(run, sgd(model))
    assert sharded(model)
    if ddp is None:  # old weight norm has no deepcopy
        ddp = nn.parallel.DistributedDataParallel(ddp_model)
    train(ddp, sgd(ddp))
    same(model, ddp)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("index", [-1, 0, 1, 2, 3])
def test_parametrized_before_sharding(index: int) -> None:
    for stage in (1, 3):
        run_ranks(2, _norm, index, stage, True)


@pytest.mark.parametrize("index", [-1, 0, 1, 2, 3])
def test_parametrized_after_sharding(index: int) -> None:
    for stage in (1, 3):
        run_ranks(2, _norm, index, stage, False)


def _remove(layer: Any) -> None:
    """Fold it in: torch's `leave_parametrized=True` has no `DTensor` in mind."""
    if len(list(layer.parametrizations["weight"].parameters())) > 1:
        parametrize.remove_parametrizations(layer, "weight")
        return
    with torch.no_grad():
        weight = layer.weight.clone()
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        layer.weight.copy_(weight)


def _plain_like(model: nn.Module) -> nn.Module:
    other = net()
    other.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    return other


def _removed(stage: int, index: int, before: bool) -> None:
    """A norm for a while, folded in later; a copy from in between goes on with it."""
    model, plain = net(), net()
    run = compiled(model, stage)

    def both(one: Any, call: Any, other: nn.Module, number: int) -> None:
        train(call, sgd(one), [number])
        train(ddp := twin(other), sgd(ddp), [number])
        other.load_state_dict(ddp.module.state_dict())
        assert sharded(one)
        same(one, other)

    if not before:
        both(model, run, plain, 0)
    for one in (model, plain):
        _NORMS[index](one.first)
    both(model, run, plain, 1)
    clone, plain_clone = copy.deepcopy(model), copy.deepcopy(plain)
    both(clone, compiled(clone, stage), plain_clone, 2)
    same(model, plain)
    for one in (model, plain):
        _remove(one.first)
        assert type(one.first).__name__ == "Linear" and isinstance(one.first, nn.Linear)
    both(model, run, plain, 3)
    _remove(clone.first)  # torch gives plain copies one class, so that it can remove from one
    both(clone, compiled(clone, stage), _plain_like(clone), 4)


@pytest.mark.parametrize(("stage", "before"), [(1, True), (3, False)])
@pytest.mark.parametrize("index", [0, 1])
def test_parametrizations_that_are_copied_and_removed(index: int, stage: int, before: bool) -> None:
    run_ranks(2, _removed, stage, index, before)


def _beside_another_library() -> None:
    """Its parameters on the mesh that the model has stay its own; copies of ours become ours."""
    mesh = init_device_mesh("cpu", (2,))
    model, teacher = net(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    zerofx.shard(model, config(3, mesh=mesh))
    parallelize_module(teacher, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    distribute_module(teacher[2], mesh)
    wanted = net(lambda: nn.Sequential(Net(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)))
    x = torch.ones(2, 8)
    close(teacher[:2](x), wanted[2](wanted[1](x)), "teacher")
    with zerofx.unshard(model) as values, zerofx.unshard(model.parameters()) as again:
        assert list(values) == list(again) == [name for name, _ in net().named_parameters()]
    fresh = nn.Linear(13, 5)
    fresh.weight = nn.Parameter(model.last.weight.detach().clone())
    fresh.bias = nn.Parameter(model.last.bias.detach().clone())
    model.last = fresh
    trains_alike(compiled(model, 3, options={**FAST, "mesh": mesh}), model, net())


def test_another_librarys_parameters_on_the_mesh() -> None:
    run_ranks(2, _beside_another_library)


def _a_copy_grows(stage: int) -> None:
    model = net()
    compiled(model, stage)(*data(0))
    grown, ddp_model = copy.deepcopy(model), net()
    run = torch.compile(grown, backend=f"zero{stage}", options=FAST)
    run(*data(0))
    for one in (grown, ddp_model):
        torch.manual_seed(5)
        one.last = nn.Sequential(nn.Linear(13, 5), nn.Linear(5, 5))
    trains_alike(run, grown, ddp_model)


def test_a_copy_gets_another_module() -> None:
    run_ranks(2, _a_copy_grows, 3)
