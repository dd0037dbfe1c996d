"""Point 3: what was taken from the model before it was sharded acts on the sharded parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.contract.loops import (
    FAST,
    STAGES,
    adamw,
    close,
    compiled,
    data,
    full,
    net,
    refused,
    same,
    sgd,
    train,
    twin,
)
from tests.ranks import run_ranks
from zerofx.errors import StaleHandleError


def _lists(stage: int) -> None:
    model, ddp = net(), twin(net())
    optimizer, wanted = sgd(model), sgd(ddp)
    listed, named = list(model.parameters()), dict(model.named_parameters())
    keyed, held = {param: name for name, param in named.items()}, set(listed)
    pairs, groups = list(model.named_parameters()), [(param, 0.5) for param in listed]
    ordered, fixed = OrderedDict(model.named_parameters()), tuple(model.parameters())
    run = compiled(model, stage)
    for number in range(2):
        run(*data(number)).backward()
        ddp(*data(number)).backward()
        got = nn.utils.clip_grad_norm_(listed, 0.1)
        want = nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        close(full(got), want, "norm")
        for one in (optimizer, wanted):
            one.step()
            one.zero_grad()
    same(model, ddp)
    for name, param in model.named_parameters():
        assert named[name] is param and keyed[param] == name and param in held
        assert ordered[name] is param
    assert pairs == list(named.items()) and groups == [(param, 0.5) for param in listed]
    assert list(keyed.values()) == list(named)
    for use in (
        lambda: fixed[0].grad,
        lambda: fixed[0] + 1,
        lambda: nn.utils.clip_grad_norm_(fixed, 1.0),
        lambda: fixed[0].requires_grad_(False),
        lambda: model.first.weight.copy_(fixed[0]),
    ):
        with refused("first.weight", "before zerofx sharded", kind=StaleHandleError):
            use()
    assert "first.weight" in repr(fixed[0])


def test_collections_follow_and_tuples_are_stale() -> None:
    for stage in (1, 3):
        run_ranks(2, _lists, stage)


def _shown(stage: int) -> None:
    """An average that takes what it averages from a `state_dict` of before (BigGAN)."""
    ddp = twin(net())
    models = [net(), ddp.module]
    averages = [copy.deepcopy(model) for model in models]
    sources = [model.state_dict() for model in models]
    listed = [[param.data for param in model.parameters()] for model in models]
    kept = copy.deepcopy(sources[0])
    runs = [compiled(models[0], stage), ddp]
    for source, average, model, run in zip(sources, averages, models, runs, strict=True):
        optimizer = sgd(model)
        for number in range(2):
            run(*data(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, value in average.state_dict().items():
                value.copy_(value * 0.5 + source[name] * 0.5)
    same(*averages)
    listed[0][0].mul_(2)
    listed[1][0].mul_(2)
    same(*models)
    for name, param in net().named_parameters():
        assert torch.equal(kept[name], param)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_shows_parameters_follows(stage: int) -> None:
    run_ranks(2, _shown, stage)


def _views() -> None:
    """They would keep the first values, which the same program of plain tensors does not."""
    model, flat = net(), torch.randn(120)
    model.first.weight = weight = nn.Parameter(flat[:91].view(13, 7))
    model.last.register_buffer("scale", beside := flat[91:95])
    model.last.weight = nn.Parameter(torch.randn(5, 15)[:, :13])
    gap = torch.as_strided(model.last.weight.data, (5, 2), (15, 1), 13)
    variable, turned, row = weight.data, weight.t(), weight.detach()[0]
    several, mixed = (weight.data, weight.data), {"step": 0, "weight": weight.data}
    other, apart = weight.data.clone(), (beside.clone(), gap.clone())
    compiled(model, 3)(*data(0))
    assert torch.equal(model.last.scale, apart[0]) and torch.equal(gap, apart[1])
    for view in (variable, turned, row, several[1], mixed["weight"], flat):
        with refused("a view of first.weight", "before zerofx sharded", kind=StaleHandleError):
            print(view.sum())
    assert torch.equal(full(model.first.weight), other)


def test_other_views_of_before_raise() -> None:
    run_ranks(2, _views)


def _groups(model: nn.Module) -> Any:
    inner: Any = model.module if hasattr(model, "module") else model
    optimizer = torch.optim.SGD(inner.first.parameters(), lr=0.1)
    optimizer.add_param_group({"params": list(inner.last.parameters()), "lr": 0.01})
    return optimizer


def _warm(stage: int) -> None:
    """Adam state from before, gradients that `zero_grad` must clear, groups, a closure."""
    model, ddp = net(), twin(net())
    optimizer, wanted = adamw(model), adamw(ddp)
    warm = copy.deepcopy(model)  # one plain step, by hand: the guard refuses unreduced ones
    for one, by in ((model, optimizer), (ddp, wanted)):
        for (_, param), number in zip(one.named_parameters(), range(9), strict=False):
            torch.manual_seed(number)
            by.state[param] = {
                "step": torch.tensor(3.0),
                "exp_avg": torch.randn_like(param),
                "exp_avg_sq": torch.rand_like(param),
            }
            param.grad = torch.ones_like(param)
    run = compiled(model, stage)
    for step_model, by in ((run, optimizer), (ddp, wanted)):
        loss = step_model(*data(0))
        by.zero_grad()  # gradients from before sharding
        loss.backward()
        by.step()
        by.zero_grad()
    same(model, ddp)
    state = optimizer.state[model.first.weight]
    assert isinstance(state["exp_avg"], DTensor) and not isinstance(state["step"], DTensor)
    assert len(optimizer.state) == len(list(warm.parameters()))


def _closure_and_groups(stage: int) -> None:
    model, ddp = net(), twin(net())
    optimizer, wanted = _groups(model), _groups(ddp)
    run = compiled(model, stage)
    for one, by in ((run, optimizer), (ddp, wanted)):

        def closure(one: Any = one, by: Any = by) -> Tensor:
            by.zero_grad()
            loss = one(*data(0))
            loss.backward()
            return loss

        assert isinstance(by.step(closure), Tensor)
        by.step(closure)
    same(model, ddp)


def _last_backward_in_a_closure(stage: int) -> None:
    """As trainers do that hand `training_step` to the optimizer."""
    model, ddp = net(), twin(net())
    optimizer, wanted = sgd(model), sgd(ddp)
    run = torch.compile(model, backend=f"zero{stage}", options={**FAST, "accumulate": 2})
    for one, by in ((run, optimizer), (ddp, wanted)):

        def closure(one: Any = one) -> Tensor:
            loss = one(*data(1)) / 2
            loss.backward()
            return loss

        (one(*data(0)) / 2).backward()
        by.step(closure)
    same(model, ddp)


def _old_gradient(stage: int) -> None:
    model, ddp = net(), twin(net())
    for param in (*model.parameters(), *ddp.parameters()):
        param.grad = torch.ones_like(param)
    optimizer = sgd(model)
    train(compiled(model, stage), optimizer, 1)
    train(ddp, sgd(ddp), 1)
    same(model, ddp)


@pytest.mark.parametrize(
    "job", [_warm, _closure_and_groups, _last_backward_in_a_closure, _old_gradient]
)
def test_optimizers_built_before(job: Any) -> None:
    for stage in STAGES:
        run_ranks(2, job, stage)


def _scaler(stage: int) -> None:
    model, ddp = net(), twin(net())
    optimizer, wanted = sgd(model), sgd(ddp)
    run = compiled(model, stage)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    for number in range(4):
        norms: list[Tensor] = []
        for one, by, scaler in ((run, optimizer, scalers[0]), (ddp, wanted, scalers[1])):
            x, y = data(number)
            if number == 1 and torch.distributed.get_rank() == 1:
                x = x * float("inf")  # on one rank only: all must skip the step
            scaler.scale(one(x, y)).backward()
            scaler.unscale_(by)
            norms.append(full(nn.utils.clip_grad_norm_(by.param_groups[0]["params"], 0.5)))
            scaler.step(by)
            scaler.update()
            by.zero_grad()
        if number != 1:
            close(norms[0], norms[1], "norm")
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert (scalers[0].get_scale() < 64) == (number in (1, 2)), "rank 1's overflow counts"
    same(model, ddp)


def test_grad_scaler_with_an_optimizer_built_before() -> None:
    for stage in STAGES:
        run_ranks(2, _scaler, stage)


def _hooks(stage: int) -> None:
    model = net()
    weight, seen = model.first.weight, list[str]()
    weight.my_tag = "mine"
    doubled = weight.register_hook(lambda grad: grad * 2)
    weight.register_post_accumulate_grad_hook(lambda param: seen.append("accumulated"))
    removed = model.first.bias.register_hook(lambda grad: grad * 0)
    del weight
    plain = twin(net())
    run = compiled(model, stage)
    run(*data(0)).backward()
    plain(*data(0)).backward()
    removed.remove()
    grads = {name: full(param.grad) for name, param in model.named_parameters()}
    close(grads["first.weight"], 2 * plain.module.first.weight.grad, "a hook doubles")
    assert not grads["first.bias"].any() and seen == ["accumulated"]
    assert model.first.weight.my_tag == "mine"
    model.zero_grad()
    doubled.remove()
    run(*data(0)).backward()
    for name, param in model.named_parameters():
        close(full(param.grad), plain.module.get_parameter(name).grad, name)
    assert seen == ["accumulated"] * 2


def test_hooks_and_attributes_of_parameters() -> None:
    for stage in STAGES:
        run_ranks(2, _hooks, stage)
