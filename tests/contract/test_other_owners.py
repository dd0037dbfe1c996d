"""Optimizers and tensors that zerofx has little to do with, and values that were only looked at."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.contract.loops import adamw, compiled, config, data, full, net, same, train, twin
from tests.ranks import run_ranks
from zerofx.errors import ConfigError, UnreducedGradientError, UnsupportedError


def _resumed(stage: int) -> None:
    """An optimizer state that one process saved, loaded after sharding."""
    model, ddp = net(), twin(net())
    theirs = adamw(ddp)
    train(ddp, theirs, 2)
    saved = copy.deepcopy(theirs.state_dict())
    run, ours = compiled(model, stage), adamw(model)
    run(*data(0))
    model.load_state_dict(ddp.module.state_dict())
    ours.load_state_dict(saved)
    train(ddp, theirs, 2)
    train(run, ours, 2)
    same(model, ddp, rtol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_optimizer_states_of_one_process(stage: int) -> None:
    run_ranks(2, _resumed, stage)


def _looked_at(stage: int) -> None:
    model, ddp = net(), twin(net())
    run = compiled(model, stage)
    for number in range(2):
        loss, wanted = run(*data(number)), ddp(*data(number))
        with zerofx.unshard(model) as values:
            assert {name: value.shape for name, value in values.items()} == {
                name: param.shape for name, param in model.named_parameters()
            }
        loss.backward()
        wanted.backward()
        for ours, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None
            torch.testing.assert_close(full(ours.grad), theirs.grad)
    with zerofx.unshard(model) as values:
        values["first.weight"][-1].mul_(2)  # in the rows of rank 1 alone: those of rank 0 stay
    last = full(model.first.weight)[-1]
    torch.testing.assert_close(last, 2 * ddp.module.first.weight[-1])
    with zerofx.unshard(model) as values, torch.no_grad():
        values["first.bias"].fill_(3)
        model.last.weight.fill_(2)  # as in DeepSpeed's `GatheredParameters`
    assert (full(model.first.bias) == 3).all() and (full(model.last.weight) == 2).all()
    assert run(*data(0)).isfinite()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_unshard_to_look(stage: int) -> None:
    run_ranks(2, _looked_at, stage)


def _beside(stage: int, foreach: bool) -> None:
    """A temperature and an image before the parameters, with a state of one process."""
    losses: list[list[Tensor]] = []
    saved: dict[str, Any] = {}
    for sharded in (False, True):
        model = net()
        run = compiled(model, stage) if sharded else model
        own = [torch.zeros(1, requires_grad=True), torch.ones(4, 7, requires_grad=True)]
        if sharded:
            run(*data(0))
        optimizer = torch.optim.AdamW([*own, *model.parameters()], lr=0.1, foreach=foreach)
        zerofx.trust(optimizer)
        losses.append([])
        for number in range(4):
            x, y = data(0)  # the same on all ranks, as means of one process are
            dist.broadcast(x, 0), dist.broadcast(y, 0)
            loss = run(x, y) * own[0].exp() + run(own[1], y[:4]).square()
            losses[-1].append(loss.detach())
            loss.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if sharded and number == 0:
                optimizer.load_state_dict(saved)
            elif number == 0:
                saved = copy.deepcopy(optimizer.state_dict())
    for ours, theirs in zip(losses[1], losses[0], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_tensors_beside_parameters(stage: int, foreach: bool) -> None:
    run_ranks(2, _beside, stage, foreach)


def _own_things() -> list[str]:
    """A temperature beside the model, and a probe that each rank has for itself."""
    model, alpha = net(), torch.zeros(1, requires_grad=True)
    run, optimizer = compiled(model, 3), torch.optim.SGD([alpha], lr=0.1)
    (run(*data(0)) * alpha.exp()).sum().backward()
    optimizer.step()
    assert alpha.item() != 0
    probe = nn.Linear(7, 1)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    probe(data(0)[0]).sum().backward()
    said = []
    for _ in range(2):
        try:
            optimizer.step()
        except UnreducedGradientError as error:
            said.append(str(error))
        zerofx.trust(optimizer)
    with pytest.raises(ConfigError, match="Linear is not a torch"):
        zerofx.trust(probe)  # pyright: ignore[reportArgumentType]
    return said


def test_tensors_and_models_of_a_rank_itself() -> None:
    for said in run_ranks(2, _own_things):
        assert len(said) == 1 and "zerofx.trust(optimizer)" in said[0]


class Views(nn.Module):
    """Two parameters in one piece of memory."""

    def __init__(self, one: Tensor, other: Tensor) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(one), nn.Parameter(other)


def _shared(how: str) -> Any:
    whole = torch.randn(8, 6)
    views = {
        "transposed": (whole, whole.t()),
        "columns that meet": (whole[:, :4], whole[:, 3:]),
        "columns": (whole[:, :3], whole[:, 3:]),
        "rows": (whole[:4], whole[4:]),
    }
    try:
        zerofx.shard(Views(*views[how]), config(3))
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["transposed", "columns that meet", "columns", "rows"])
def test_parameters_in_the_same_memory(how: str) -> None:
    for said in run_ranks(2, _shared, how):
        assert ("one and other" in said) == (how not in ("columns", "rows")), said


class Momentum(nn.Module):
    """MoCo's second encoder, as its authors update it in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(7, 7)
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    @torch.no_grad()
    def _follow(self) -> None:
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self._follow()
            key = self.key(x)
        return (self.query(x) - key).square().mean()


def _follows(stage: int) -> None:
    model = net(Momentum)
    with torch.no_grad():
        model.key.weight.add_(0.1)
    ddp = twin(model)
    run = compiled(model, stage)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), 3)
    train(run, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    same(model, ddp, rtol=1e-6)
    plain = torch.zeros(model.key.weight.shape)
    with torch.no_grad():  # Dynamo must not have lost the way of such sums
        assert torch.equal(plain + model.key.weight, full(model.key.weight))


@pytest.mark.parametrize("stage", [1, 3])
def test_data_assigned_in_forward(stage: int) -> None:
    run_ranks(2, _follows, stage)


class Keys(nn.Module):
    """Keeps views of a weight as plain attributes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 7)
        view = self.embed.weight.detach().t()
        self.keys: Any = {"attribute": view, "list": [view], "dict": {"k": view}}[how]
        self.how = how

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        view = self.keys if self.how == "attribute" else self.keys[0 if self.how == "list" else "k"]
        return (self.embed(x) @ view - x).square().mean()


def _viewed(how: str) -> list[str]:
    said = []
    for run in (
        compiled(net(lambda: Keys(how)), 3),
        zerofx.shard(net(lambda: Keys(how)), config(1)),
    ):
        model = getattr(run, "_orig_mod", run)
        try:
            run(*data(0))
        except Exception as error:  # Dynamo may wrap it
            said.append(str(error))
        copy.deepcopy(model)
        pickle.loads(pickle.dumps(model))
        with torch.no_grad():
            fresh = full(model.embed.weight).t().clone()
        model.keys = {"attribute": fresh, "list": [fresh], "dict": {"k": fresh}}[how]
        run(*data(0)).backward()
    return said


@pytest.mark.parametrize("how", ["attribute", "list", "dict"])
def test_views_kept_as_attributes(how: str) -> None:
    for said in run_ranks(2, _viewed, how):
        assert len(said) == 2
        assert all("keys, a view of embed.weight" in each for each in said), said


def _spectral(stage: int) -> None:
    """Old-style normalisation leaves such an attribute, and writes it before it is read."""
    model = nn.utils.spectral_norm(nn.Linear(7, 7))
    run = compiled(model, stage)
    for number in range(2):
        run(data(number)[0]).sum().backward()
    assert model.weight_orig.grad is not None


@pytest.mark.parametrize("stage", [1, 3])
def test_attributes_that_are_written_first(stage: int) -> None:
    run_ranks(2, _spectral, stage)


def _together() -> list[str]:
    said = []
    scripted = nn.Sequential(nn.Linear(7, 7), torch.jit.script(nn.Linear(7, 7)))
    actor, critic = nn.Sequential(nn.Linear(7, 7)), nn.Sequential(nn.Linear(7, 7))
    critic[0].weight = actor[0].weight
    zerofx.shard(actor, config(3))
    for model in (scripted, critic):
        with pytest.raises(Exception) as raised:
            compiled(model, 3)(data(0)[0])
        said.append(str(raised.value))
    return said


def test_scripted_modules_and_shared_weights() -> None:
    for scripted, shared in run_ranks(2, _together):
        assert "Linear is a ScriptModule" in scripted
        assert "belong to another model" in shared and "zerofx.shard(nn.ModuleList" in shared
